"""What follows from a page that differs: on all ranks in the same step restoring and looking ahead
end, the pages are computed, and nothing is turned on again.
"""

from __future__ import annotations

import json
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_fakes import PAGE, end, engine_with, load, settle
from test_lookahead_ranks import Ahead

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import PagesLost, RequestFinished, StepPlan
from sgl_kvtier.runtime.proof import memory, record
from sgl_kvtier.runtime.proof.memory import NAME, Shown, find, keep, read
from sgl_kvtier.runtime.proof.record import Difference, Proof, State
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.scheduler.notes import RestoreNotes
from sgl_kvtier.runtime.scheduler.tick import RestoreTick
from sgl_kvtier.runtime.step.polls import DIFFERS, LANDED, LOST, OPEN
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Span

CORRUPT = LOST[ReadOutcome.CORRUPT]


class Least:
    """Reductions by MIN over ranks that are threads here."""

    def __init__(self, ranks: int) -> None:
        self._given: list[torch.Tensor] = []
        self._least: torch.Tensor | None = None
        self._all_gave = threading.Barrier(ranks, self._reduce, timeout=20)
        self._all_took = threading.Barrier(ranks, timeout=20)

    def _reduce(self) -> None:
        assert len({len(data) for data in self._given}) == 1, "ranks that came apart would hang"
        self._least = torch.stack(self._given).amin(0)
        self._given = []

    def all_reduce(self, data: torch.Tensor, _op: Any) -> None:
        self._given.append(data)
        self._all_gave.wait()
        assert self._least is not None
        data.copy_(self._least)
        self._all_took.wait()


class Rank:
    """One rank's engine and tick, with one restoration of eight pages that is being loaded."""

    def __init__(self, number: int, ranks: int, least: Least | None, ahead: bool) -> None:
        self.engine, self.r, _ = engine_with()
        context = self.engine.context
        context.alone = ranks == 1
        tree = context.tree
        tree._all_reduce = least.all_reduce if least is not None else None
        tree._all_reduce_attn_groups = lambda data, op: None
        self.told: list[Any] = []
        planner = SimpleNamespace(observe=self.told.append, step=lambda view: StepPlan())
        self.agreement = Agreement(tree, ranks, first=number == 0)
        turns = SimpleNamespace(look=lambda scheduler: None)
        views = SimpleNamespace(of=lambda scheduler, now: None)
        self.ahead = Ahead() if ahead else None
        self.tick = RestoreTick(
            self.engine, planner, self.agreement, turns, views, self.ahead
        )  # fmt: skip
        self.tick._unblock = lambda scheduler, tried: None
        self.load = load(self.engine, Span(0, 8))
        self.load.due = math.inf  # the ticks have the real clock

    def mark(self, **pages: int) -> None:
        """All pages have landed here, but for those given by number."""
        for page in range(8):
            self.load.poll.mark(page, pages.get(f"page{page}", LANDED), 1.0)

    @property
    def is_off(self) -> bool:
        looks = self.tick.ahead is not None
        on = self.engine.offers.is_on or self.engine.restorations
        return self.engine.proof.state is State.REFUTED and not on and not looks

    def lost(self) -> dict[str, list[Span]]:
        found: dict[str, list[Span]] = {}
        for fact in self.told:
            if isinstance(fact, PagesLost):
                found.setdefault(fact.reason, []).append(fact.span)
        return found


def step(*ranks: Rank) -> None:
    """One tick of all ranks."""
    if ranks[0].tick.shares_reduction:
        asked = [rank.tick.reduction_input() for rank in ranks]
        agreed = [min(values) for values in zip(*asked, strict=True)]
        for rank in ranks:
            rank.tick.take_result(agreed)
    failed: list[BaseException] = []

    def run(rank: Rank) -> None:
        try:
            rank.tick.run(SimpleNamespace())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed
    assert not any(rank.engine.counters.planner_failures for rank in ranks)


def ranks_of(count: int, ahead: bool) -> list[Rank]:
    least = Least(count) if count > 1 else None
    return [Rank(number, count, least, ahead) for number in range(count)]


@pytest.mark.parametrize("ahead", [True, False], ids=["looks ahead", "restores only"])
@pytest.mark.parametrize("finder", [0, 1])
def test_a_difference_on_one_rank_ends_restoring_on_both_in_the_same_step(finder, ahead):
    ranks = ranks_of(2, ahead)
    for rank in ranks:
        rank.load.poll.mark(7, LANDED, 1.0)
    step(*ranks)
    assert not any(rank.is_off for rank in ranks)
    ranks[finder].mark(page3=DIFFERS)
    step(*ranks)  # the other has not ended these pages: they are open on both
    assert not any(rank.is_off for rank in ranks)
    ranks[1 - finder].mark(page3=CORRUPT, page5=CORRUPT)
    step(*ranks)
    for rank in ranks:
        assert rank.is_off
        assert rank.lost() == {"differs": [Span(3, 4)], "corrupt": [Span(5, 6)]}
        assert [f.rid for f in rank.told if isinstance(f, RequestFinished)] == ["r"]
    assert ranks[0].told == ranks[1].told
    for _ in range(2):
        step(*ranks)
    for rank in ranks:
        rank.engine.context.slots.free()
        assert not rank.engine.holds_memory and not rank.engine.busy
        free = rank.engine.context.tree.token_to_kv_pool_allocator.available_size()
        assert free == 64 * PAGE
        if rank.ahead is not None:
            assert rank.ahead.given_up


@pytest.mark.parametrize("ahead", [True, False], ids=["looks ahead", "restores only"])
def test_a_difference_that_no_load_brought_ends_restoring_of_a_rank_alone_in_the_next_step(ahead):
    (rank,) = ranks_of(1, ahead)
    step(rank)
    assert not rank.is_off
    rank.engine.proof.differs(Difference("second look", "overwritten"))
    step(rank)
    assert rank.is_off and rank.load.cancelled


def test_without_a_difference_nothing_ends():
    ranks = ranks_of(2, ahead=True)
    for rank in ranks:
        rank.mark(page2=CORRUPT)
    step(*ranks)
    for rank in ranks:
        assert rank.engine.offers.is_on and rank.tick.ahead is not None
        assert rank.engine.proof.state is State.PROVING and rank.engine.restorations


def test_ranks_become_proven_in_the_same_step(monkeypatch):
    monkeypatch.setattr(record, "FIRST_LOADS", 1)
    ranks = ranks_of(2, ahead=False)
    monkeypatch.setattr(record, "FIRST_BYTES", 7 * ranks[0].engine.context.page_bytes)
    told: list[State] = []
    for rank in ranks:
        rank.engine.proof = Proof(looks=True)
        rank.engine.proof.note_pages("equal", 1)
        rank.engine.proof.changed = lambda proof: told.append(proof.state)
    ranks[0].mark()
    step(*ranks)
    assert {rank.engine.proof.state for rank in ranks} == {State.PROVING}
    ranks[1].mark(page0=CORRUPT)
    step(*ranks)
    assert told == [State.PROVEN] * 2
    step(*ranks)
    assert told == [State.PROVEN] * 2


def test_pages_that_differ_are_the_fronts_and_their_slots_are_freed():
    engine, r, _ = engine_with()
    one = load(engine, Span(4, 8))
    end(one, LANDED, DIFFERS, LANDED, OPEN)
    facts = settle(engine, 0.5)
    assert [f.span for f in facts if isinstance(f, PagesLost)] == [Span(5, 6)]
    assert not r.owner and r.closed and one.cancelled
    assert engine.counters.ended == {"differs": 1} and engine.counters.lost_pages["differs"] == 1
    one.poll.mark(3, LANDED, 0.6)
    settle(engine, 0.6)
    engine.context.slots.free()
    assert not engine.holds_memory


def test_the_settings_of_a_refuted_server_do_not_open_it_again():
    engine, _, _ = engine_with()
    planner = SimpleNamespace(
        observe=lambda fact: None, close=lambda: None, break_even_bytes_per_s=None
    )
    notes = RestoreNotes(PolicyConfig(), engine, planner, SimpleNamespace(reductions=0), None)
    assert "proof" not in {name for name, _, _ in notes.samples()}
    engine.refute()
    for restore in ("off", "both"):
        notes.configure(PolicyConfig(restore=restore))
        assert not engine.offers.is_on
    assert ("proof", {}, 0) in list(notes.samples())


# What is remembered of a proof between two starts, and when a server counts as proven.


HERE = {"device": "NVIDIA H100", "driver": "580.95.05", "way": "staged"}
OTHER = {**HERE, "driver": "590.1"}


def test_what_was_kept_is_found_under_its_own_conditions_alone(tmp_path):
    path = tmp_path / NAME
    assert find(path, HERE) is None and find(None, HERE) is None
    keep(path, Shown(HERE, "proven", pages=9, nbytes=900))
    keep(path, Shown(OTHER, "refuted", what="page 3, layer 1"))
    found, other = find(path, HERE), find(path, OTHER)
    assert found is not None and other is not None
    assert (found.verdict, found.pages, found.nbytes) == (State.PROVEN, 9, 900)
    assert (other.verdict, other.what) == (State.REFUTED, "page 3, layer 1")
    assert found.written > 1e9
    assert find(path, {**HERE, "torch": "9"}) is None
    assert [one.name for one in tmp_path.iterdir()] == [NAME]


def test_a_later_entry_takes_the_place_of_the_earlier_one(tmp_path):
    path = tmp_path / NAME
    keep(path, Shown(HERE, "proven", pages=9))
    keep(path, Shown(HERE, "refuted"))
    assert [shown.state for shown in read(path)] == ["refuted"]


def test_the_oldest_of_too_many_is_dropped(tmp_path):
    path = tmp_path / NAME
    for number in range(memory._MOST_ENTRIES + 3):
        keep(path, Shown({"driver": str(number)}, "proven"))
    assert [shown.conditions["driver"] for shown in read(path)] == [
        str(number) for number in range(memory._MOST_ENTRIES + 2, 2, -1)
    ]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:40],
        lambda text: text.replace("restore-proof/1", "restore-proof/9"),
        lambda text: text.replace('"proven"', '"shown"'),
        lambda text: text.replace('"pages": 9', '"pages": -9'),
        lambda text: text.replace('"pages": 9', '"pages": true'),
        lambda text: text.replace('"staged"', "7"),
        lambda text: text.replace('"conditions"', '"under"'),
        lambda text: "[]",
        lambda text: '{"schema": "kvtier.restore-proof/1", "shown": 3}',
        lambda text: "[" * 100_000,
    ],
)
def test_a_damaged_file_is_no_memory_and_is_written_anew(tmp_path, damage):
    path = tmp_path / NAME
    keep(path, Shown(HERE, "proven", pages=9))
    path.write_text(damage(path.read_text()))
    assert read(path) == ()
    keep(path, Shown(HERE, "proven", pages=1))
    assert json.loads(path.read_text())["shown"][0]["pages"] == 1


def test_a_sound_entry_is_read_beside_a_damaged_one(tmp_path):
    path = tmp_path / NAME
    keep(path, Shown(HERE, "proven"))
    keep(path, Shown(OTHER, "refuted"))
    path.write_text(path.read_text().replace('"refuted"', '"unknown"'))
    assert [shown.state for shown in read(path)] == ["proven"]


def proof_after(loads: int, nbytes: int) -> Proof:
    """A proof that has looked at the pages of these loads, and found all of them equal."""
    proof = Proof(looks=True)
    for _ in range(loads):
        proof.note_load(nbytes // loads)
        proof.note_pages("equal", 1, nbytes // loads)
    return proof


GIB = 1 << 30


@pytest.mark.parametrize(
    ("loads", "nbytes", "state"),
    [
        (16, 8 * GIB, State.PROVEN),
        (16, 7 * GIB, State.PROVING),
        (15, 15 * GIB, State.PROVING),
        (1000, 8000, State.PROVING),
    ],
)
def test_as_many_loads_and_as_many_bytes_have_to_be_right(loads, nbytes, state):
    proof = proof_after(loads, nbytes)
    proof.note_load(0)  # nothing of it landed
    proof.conclude()
    assert proof.state is state


@pytest.mark.parametrize(
    ("found", "enough"),
    [("equal", record.FIRST_ATTACHES), ("skipped", 4 * record.FIRST_ATTACHES)],
    ids=["right", "cannot be compared, which does not keep a server proving for ever"],
)
def test_attaches_have_to_be_right_as_well_where_they_are_looked_at(found, enough):
    proof = proof_after(16, 16 * GIB)
    proof.looks_at_attaches = True
    for count, state in ((enough - 1, State.PROVING), (enough, State.PROVEN)):
        proof.attaches[found] = count
        proof.conclude()
        assert proof.state is state


def test_nothing_is_proven_after_a_difference_and_a_refuted_server_stays_so():
    proof = proof_after(16, 16 * GIB)
    told: list[State] = []
    proof.changed = lambda proof: told.append(proof.state)
    proof.differs(Difference("page", "layer 3"))
    proof.conclude()
    assert proof.state is State.PROVING
    for _ in range(2):
        proof.refute()
        proof.conclude()
    assert (proof.state, told) == (State.REFUTED, [State.REFUTED])


@pytest.mark.parametrize(
    ("looks", "equal", "skipped"), [(True, 0, 16), (True, 15, 1), (False, 0, 0)]
)
def test_pages_that_are_not_compared_prove_nothing(looks, equal, skipped):
    proof = Proof(looks=looks)
    proof.changed = lambda proof: pytest.fail("it would be kept for the next server")
    for _ in range(16):
        proof.note_load(GIB)
    if looks:
        proof.note_pages("equal", equal, equal * GIB)
        proof.note_pages("skipped", skipped)
    proof.conclude()
    assert proof.state is State.PROVING
    assert bool(list(proof.samples())) is looks


@pytest.mark.parametrize(
    "other",
    [
        {"attention_backend": "fa3"},
        {"decode_attention_backend": "triton"},
        {"disable_overlap_schedule": True},
    ],
)
def test_other_kernels_or_scheduling_begin_with_no_proof(tmp_path, monkeypatch, other):
    args = {
        "attention_backend": "flashinfer",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "disable_overlap_schedule": False,
    }
    controller = SimpleNamespace(device="cpu")
    kept = memory.conditions(controller, "page", "way", SimpleNamespace(**args))
    keep(tmp_path / NAME, Shown(kept, "proven", 16, GIB))
    again = memory.conditions(controller, "page", "way", SimpleNamespace(**args))
    assert find(tmp_path / NAME, again) is not None
    now = memory.conditions(controller, "page", "way", SimpleNamespace(**{**args, **other}))
    assert find(tmp_path / NAME, now) is None
