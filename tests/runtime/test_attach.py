"""A page computed after loaded ones, compared with the stored page: which one is left out, what is
a difference, and how all ranks come to know. Pools are SGLang's; there is no server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attach_lab import KEYS, PAGE, PAGES, ROW, Scene, pools
from device_pools import LAYOUTS, latent_pools, slots

from sgl_kvtier.policy.messages import Mode, StepPlan
from sgl_kvtier.runtime.proof import attach
from sgl_kvtier.runtime.proof.attach import distance, judge, unrelated
from sgl_kvtier.runtime.proof.record import FIRST_ATTACHES, State
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.scheduler.tick import RestoreTick
from sgl_kvtier.runtime.step.polls import DIFFERS, LANDED
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.types import Span, Tier


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.attach.close()


PAIRS = [
    *((f"keys and values, {layout}", lambda way=layout: pools("cpu", way)) for layout in LAYOUTS),
    *(
        (f"latents, {layout}", lambda way=layout: latent_pools("cpu", way))
        for layout in ("page_first", "page_first_direct")
    ),
    ("fp8, page_first", lambda: pools("cpu", "page_first", dtype=torch.float8_e4m3fn)),
    ("float32, page_first", lambda: pools("cpu", "page_first", dtype=torch.float32)),
]
each_pool = pytest.mark.parametrize(
    "made", [make for _, make in PAIRS], ids=[name for name, _ in PAIRS]
)


# --- what is compared ---------------------------------------------------------------------------------


@each_pool
def test_a_page_that_was_computed_as_it_is_stored_is_equal(made: Any) -> None:
    scene = Scene(made())
    scene.attached()
    scene.finish()
    assert not scene.settle()
    assert scene.proof.attaches == {"equal": 1} and scene.proof.difference is None
    scene.attach.close()


@each_pool
def test_a_page_that_was_computed_from_something_else_differs(made: Any) -> None:
    scene = Scene(made())
    scene.attached()
    wrong = slots(ROW[-1:], PAGE)
    scene.layer()[wrong] = scene.layer()[slots(ROW[:1], PAGE)]
    scene.finish()
    assert scene.settle()
    assert scene.proof.attaches == {"differs": 1}
    found = scene.proof.difference
    assert found is not None and found.check == "attach"
    assert f"page {PAGES - 1} of a prompt, computed after {PAGES - 2} loaded pages" in found.what
    assert "in layer 1" in found.what
    scene.attach.close()


def test_the_row_says_which_slots_are_compared(scene: Scene) -> None:
    """A request whose row names another's slots is found, whatever lies in the slots of its own."""
    scene.attached()
    scene.finish(row=2)
    assert scene.settle() and scene.proof.attaches == {"differs": 1}


def test_the_places_of_loaded_pages_in_the_row_are_looked_at_too(scene: Scene) -> None:
    """Attention cannot tell: the last page is computed right from the same pages in any order."""
    row = scene.tree.req_to_token_pool.req_to_token[1]
    loaded = row[PAGE : (PAGES - 1) * PAGE].clone()
    for number, shifted in enumerate([loaded.roll(PAGE), loaded.roll(-PAGE), loaded.flip(0)]):
        row[PAGE : (PAGES - 1) * PAGE] = shifted
        scene.attached(f"{number}")
        scene.finish(f"{number}")
        assert scene.settle() and scene.proof.attaches == {"differs": number + 1}
    found = scene.proof.difference
    assert found is not None
    assert found.what == "page 4 of a prompt, a loaded one, is another page in the row"


def test_one_loaded_page_is_enough(scene: Scene) -> None:
    r = scene.restoration()
    scene.attach.leave_out(r, 0)
    scene.run("r", 0, (PAGES - 2) * PAGE)
    scene.attach.attached(r, Span(PAGES - 2, PAGES - 1))
    scene.attach.closed(r, "met")
    scene.layer()[slots([ROW[-2]], PAGE)] *= 2
    scene.finish()
    assert scene.settle() and scene.proof.attaches == {"differs": 1}


def test_host_pages_are_compared_where_the_store_was_not_asked(scene: Scene) -> None:
    scene.attached(host_pages=PAGES)
    assert scene.pinned == [8]
    scene.finish()
    assert not scene.settle()
    assert scene.proof.attaches == {"equal": 1} and scene.store.reads == 0
    assert scene.pinned == []
    again = scene.attached("other", host_pages=PAGES)
    scene.layer()[slots(ROW[-1:], PAGE)] *= 2
    scene.finish(again.rid)
    assert scene.settle() and scene.proof.attaches == {"equal": 1, "differs": 1}


def test_what_is_written_into_the_slots_after_the_forward_was_launched_does_not_count(
    scene: Scene,
) -> None:
    scene.store.go_on.clear()
    scene.attached()
    scene.finish()
    scene.layer()[slots(ROW[-1:], PAGE)] = 0  # the request has ended, the slots are another's
    scene.store.go_on.set()
    assert not scene.settle() and scene.proof.attaches == {"equal": 1}


def test_a_page_that_the_store_has_no_longer_is_skipped(scene: Scene) -> None:
    scene.attached()
    del scene.store.pages[KEYS[-1]]
    scene.finish()
    assert not scene.settle() and scene.proof.attaches == {"skipped": 1}


def test_a_page_before_that_is_not_the_stored_one_is_a_difference_too(scene: Scene) -> None:
    """Pages stored with another order of bytes: every page that is loaded would be wrong."""
    scene.store.pages[KEYS[0]] = scene.store.pages[KEYS[3]]
    scene.attached()
    scene.finish()
    assert scene.settle()
    found = scene.proof.difference
    assert found is not None and "page 0 of a prompt, computed before loaded ones" in found.what


def test_rows_that_cannot_be_copied_are_skipped_and_nothing_is_raised(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.attached()
    monkeypatch.setattr(attach, "rows_of", lambda device, slots: 1 / 0)
    scene.finish()
    assert not scene.settle() and scene.proof.attaches == {"skipped": 1}


# --- bounds ---------------------------------------------------------------------------------------------


def by_layer(*distances: float) -> torch.Tensor:
    return torch.tensor(distances)


def test_the_bound_is_four_times_the_noise_of_the_layer_and_at_least_the_floor() -> None:
    noise = by_layer(0.0, 0.01, 0.02)
    assert judge(by_layer(0.03, 0.04, 0.08), noise, torch.bfloat16) is None
    found = judge(by_layer(0.0, 0.03, 0.081), noise, torch.bfloat16)
    assert found is not None and "in layer 2" in found and "0.02" in found
    assert judge(by_layer(0.0301, 0.0, 0.0), noise, torch.bfloat16) is not None


def test_without_a_page_computed_before_the_floor_is_the_noise() -> None:
    assert judge(by_layer(0.119), None, torch.bfloat16) is None
    assert judge(by_layer(0.121), None, torch.bfloat16) is not None
    assert judge(by_layer(0.01), None, torch.float32) is None
    assert judge(by_layer(0.017), None, torch.float32) is not None


def test_the_floor_grows_with_the_layers_that_round_before() -> None:
    deep = torch.full((32,), 0.0)
    deep[31] = 0.059
    assert judge(deep, torch.zeros(32), torch.bfloat16) is None
    deep[31] = 0.061
    assert judge(deep, torch.zeros(32), torch.bfloat16) is not None
    deep[31], deep[7] = 0.0, 0.031
    assert judge(deep, torch.zeros(32), torch.bfloat16) is not None


def test_what_is_no_number_is_a_difference() -> None:
    nothing = float("nan")
    assert judge(by_layer(0.0, nothing), by_layer(0.0, 0.0), torch.bfloat16) is not None
    assert judge(by_layer(0.0, float("inf")), None, torch.bfloat16) is not None
    assert unrelated(by_layer(0.0, nothing)) is not None
    zeros = torch.zeros(2, 1, 1, 4, dtype=torch.uint8)
    numbers = torch.tensor([1.0, 2.0]).view(torch.uint8).reshape(2, 1, 1, 4)
    assert distance(zeros, zeros, torch.float32).tolist() == [0.0, 0.0]
    assert distance(numbers, zeros, torch.float32).tolist() == [float("inf")] * 2
    assert distance(numbers, numbers * 0 + 255, torch.float32).isnan().all()


def test_the_distance_of_a_layer_is_relative_to_what_is_stored() -> None:
    stored = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    computed = torch.tensor([[3.0, 4.5], [3.0, 4.0]])
    pieces = [x.view(torch.uint8).reshape(2, 1, 1, 8) for x in (computed, stored)]
    assert distance(*pieces, torch.float32).tolist() == pytest.approx([0.1, 0.0])


def test_too_much_noise_gives_no_verdict(scene: Scene) -> None:
    """First pages differ by a fifth: four times that would let a wrong page pass."""
    scene.layer()[slots(ROW[:1], PAGE)] *= 1.2
    scene.layer()[slots(ROW[-1:], PAGE)] *= 1.3
    scene.attached()
    scene.finish()
    assert not scene.settle() and scene.proof.attaches == {"skipped": 1}


def test_noise_within_the_bound_is_equal(scene: Scene) -> None:
    scene.layer()[slots(ROW[:1], PAGE)] *= 1.02
    scene.layer()[slots(ROW[-1:], PAGE)] *= 1.06
    scene.attached()
    scene.finish()
    assert not scene.settle() and scene.proof.attaches == {"equal": 1}


def test_another_request_of_the_same_id_is_not_taken_for_it(scene: Scene) -> None:
    scene.attached()
    own, scene.reqs["r"] = scene.reqs["r"], SimpleNamespace(rid="r")
    scene.finish(row=2)
    assert not scene.attach.polls() and scene.proof.attaches == {}
    scene.reqs["r"] = own
    scene.finish()
    assert not scene.settle() and scene.proof.attaches == {"equal": 1}


# --- which restorations -------------------------------------------------------------------------------


def test_the_last_page_is_left_out_of_what_is_offered(scene: Scene) -> None:
    r = scene.restoration(host_pages=2)
    scene.attach.leave_out(r, 0)
    assert (r.pages, r.keys) == (PAGES - 1, KEYS[2:-1])
    assert r.sources == ((Span(0, 2), Tier.HOST), (Span(2, PAGES - 1), Tier.STORAGE))
    assert r.keys_of(Span(2, 4)) == [KEYS[3], KEYS[2]]
    whole = scene.restoration("whole", host_pages=PAGES)
    scene.attach.leave_out(whole, 0)
    assert (whole.pages, whole.keys) == (PAGES - 1, ())
    assert whole.sources == ((Span(0, PAGES - 1), Tier.HOST),)


def test_a_restoration_that_would_be_too_short_stays_whole(scene: Scene) -> None:
    for least, pages in ((5 * PAGE, 5), (5 * PAGE + 1, 6)):
        r = scene.restoration(f"{least}")
        scene.attach.leave_out(r, least)
        assert r.pages == pages
    alone = scene.restoration("alone")
    alone.sources = ((Span(0, 3), Tier.STORAGE), (Span(5, 6), Tier.STORAGE))
    scene.attach.leave_out(alone, 0)
    assert alone.pages == PAGES  # else it would end with pages that are nowhere
    one = Restoration("one", None, PAGE + 1, 0, 1, ((Span(0, 1), Tier.HOST),), (), slots([1], PAGE))
    scene.attach.leave_out(one, 0)
    assert one.pages == 1


def left_out(scene: Scene, count: int) -> list[int]:
    """The numbers of those restorations, of so many, that were looked at."""
    found = []
    for number in range(count):
        r = scene.restoration(f"{number}")
        scene.attach.leave_out(r, 0)
        if r.pages < PAGES:
            found.append(number)
        scene.attach.forget(r.rid)
    return found


def test_first_all_are_looked_at_and_then_one_in_so_many() -> None:
    scene = Scene(every=10)
    assert left_out(scene, 5) == [0, 1, 2, 3, 4]
    scene.proof.attaches["equal"] = FIRST_ATTACHES
    assert left_out(scene, 20) == [4, 14]
    scene.attach.close()


@pytest.mark.parametrize(
    ("state", "result", "count"),
    [(State.PROVEN, "equal", 0), (State.PROVING, "skipped", 4 * FIRST_ATTACHES)],
    ids=["proven by an earlier server", "never comparable"],
)
def test_fewer_are_looked_at_where_more_would_show_nothing(
    state: State, result: str, count: int
) -> None:
    scene = Scene(every=10)
    scene.proof.state, scene.proof.attaches[result] = state, count
    assert left_out(scene, 20) == [9, 19]
    scene.attach.close()


def test_so_many_at_a_time(scene: Scene) -> None:
    looked_at = []
    for number in range(8):
        r = scene.restoration(f"{number}")
        scene.attach.leave_out(r, 0)
        looked_at.append(r.pages < PAGES)
    assert looked_at == [True] * 4 + [False] * 4


@pytest.mark.parametrize("how", ["aborted", "gave room", "flushed"])
def test_one_that_did_not_meet_is_not_compared(scene: Scene, how: str) -> None:
    r = scene.restoration(host_pages=PAGES)
    scene.attach.leave_out(r, 0)
    scene.attach.attached(r, Span(0, 2))
    scene.attach.closed(r, how)
    scene.finish()
    assert scene.attach.polls() == [] and scene.pinned == [] and not scene.proof.attaches


def test_one_that_was_computed_whole_is_not_compared(scene: Scene) -> None:
    r = scene.restoration()
    scene.attach.leave_out(r, 0)
    scene.attach.closed(r, "met")
    scene.finish()
    assert scene.attach.polls() == []


def test_a_request_that_ends_before_its_last_page_leaves_nothing_behind(scene: Scene) -> None:
    scene.attached(host_pages=PAGES)
    scene.attach.forget("r")
    assert scene.pinned == []
    scene.finish()
    assert scene.attach.polls() == []


def test_one_that_ends_right_after_the_launch_is_compared(scene: Scene) -> None:
    scene.attached()
    scene.finish()
    scene.attach.forget("r")
    assert not scene.settle() and scene.proof.attaches == {"equal": 1}


def test_a_chunk_that_ends_before_the_page_does_is_not_yet_the_one(scene: Scene) -> None:
    scene.attached()
    scene.run("r", (PAGES - 1) * PAGE, PAGES * PAGE - 1)
    assert scene.attach.polls() == []
    scene.run("r", PAGES * PAGE - 1, PAGES * PAGE + 1)
    assert not scene.settle() and scene.proof.attaches == {"equal": 1}


def test_emptied_pools_skip_what_is_compared_with_host_pages(scene: Scene) -> None:
    """The host page may be another's as soon as it is let go."""
    scene.attached(host_pages=PAGES)
    gate, views = threading.Event(), attach.parts_of

    def late(*which: Any) -> Any:
        assert gate.wait(60)
        return views(*which)

    attach.parts_of, kept = late, attach.parts_of  # type: ignore[attr-defined]
    try:
        scene.finish()
        scene.attach.reset()
        assert scene.pinned == []
        scene.host.kv_buffer.zero_()
        gate.set()
        assert not scene.settle()
    finally:
        attach.parts_of = kept  # type: ignore[attr-defined]
    assert scene.proof.attaches == {"skipped": 1}


# --- all ranks ------------------------------------------------------------------------------------------


class Rank(Scene):
    """One rank's tick. Its planner does nothing; its reductions are handed on by the test."""

    def __init__(self, number: int, reduce: Callable[[int, torch.Tensor], None]) -> None:
        super().__init__(
            tree={
                "_all_reduce": lambda data, op: reduce(number, data),
                "tp_world_size": 2,
                "pp_size": 1,
                "evict_host": None,
            }
        )
        mover = SimpleNamespace(close=lambda: None)
        self.engine = RestoreEngine(self.context, mover, 0, lambda offer: None)  # type: ignore[arg-type]
        self.engine.proof, self.engine.attach = self.proof, self.attach
        planner = SimpleNamespace(observe=lambda fact: None, step=lambda view: StepPlan())
        turns, views = (
            SimpleNamespace(look=lambda scheduler: None),
            SimpleNamespace(of=lambda scheduler, now: None),
        )
        agreement = Agreement(self.tree, 2, first=number == 0)  # type: ignore[arg-type]
        self.tick = RestoreTick(self.engine, planner, agreement, turns, views)  # type: ignore[arg-type]
        self.other = self.restoration("other")
        self.other.mode = Mode.BOTH
        self.engine.begin(self.other)

    def step(self) -> None:
        self.tick.report_facts()


def test_a_difference_on_one_rank_refutes_on_both_in_the_same_step() -> None:
    barrier, given = threading.Barrier(2), dict[int, list[int]]()

    def reduce(number: int, data: torch.Tensor) -> None:
        given[number] = data.tolist()
        barrier.wait(60)
        data.copy_(torch.tensor([min(pair) for pair in zip(given[0], given[1], strict=True)]))
        barrier.wait(60)

    ranks = Rank(0, reduce), Rank(1, reduce)
    ranks[1].layer()[slots(ROW[-1:], PAGE)] = 0
    for rank in ranks:
        rank.attached()
        rank.finish()
        assert rank.engine.busy and len(rank.engine.polls()) == 1
    until = time.monotonic() + 60
    while not all(rank.attach.polls()[0].local[0] for rank in ranks):
        assert time.monotonic() < until
        time.sleep(0.001)
    assert ranks[1].attach.polls()[0].local[0] == DIFFERS
    ranks[0].attach.polls()[0].local[0] = 0  # as if it were slower
    both_step(ranks)
    assert [rank.proof.state for rank in ranks] == [State.PROVING] * 2
    ranks[0].attach.polls()[0].mark(0, LANDED, 1.0)
    both_step(ranks)
    for rank in ranks:
        assert rank.proof.state is State.REFUTED and not rank.engine.is_on
        assert rank.proof.attaches == {"differs": 1}
        assert rank.other.closed and rank.engine.counters.ended == {"differs": 1}
    rank.attach.close()


def both_step(ranks: tuple[Rank, Rank]) -> None:
    failed: list[BaseException] = []

    def step(rank: Rank) -> None:
        try:
            rank.step()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=step, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed


def test_a_request_is_offered_without_its_last_page_and_the_planner_hears_of_no_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plain_request import PLAIN

    from sgl_kvtier.policy.messages import RestoreOffered
    from sgl_kvtier.runtime.restore import offers as offers_module
    from sgl_kvtier.runtime.restore.counters import RestoreCounters
    from sgl_kvtier.runtime.restore.offers import Offers

    begun: list[Restoration] = []
    asked: list[RestoreOffered] = []
    offers = Offers(scene.context, begun.append, [], RestoreCounters(), 5 * PAGE, asked.append)
    offers.shorten = scene.attach.leave_out
    scene.tree.lock = lambda node: None
    monkeypatch.setattr(offers_module, "find", lambda context, req, stored: scene.restoration())
    req = SimpleNamespace(rid="r", last_node=0, best_match_node=8, **PLAIN)
    assert offers._offer(req, None)
    [fact] = scene.context.facts
    assert isinstance(fact, RestoreOffered) and fact.pages == begun[0].pages == PAGES - 1
    # Whether it is left to SGLang was decided by all that SGLang would load.
    assert asked[0].pages == PAGES


# --- where it is on, and how it is called ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "at_once", "every", "guarded"),
    [
        ("auto", False, attach.EVERY, True),
        ("auto", True, None, False),
        ("all", False, 1, True),
        ("all", True, 1, False),
        ("off", False, None, False),
        ("off", True, None, False),
    ],
)
def test_what_is_looked_at_follows_from_the_setting_and_the_device(
    scene: Scene, asked: str, at_once: bool, every: int | None, guarded: bool
) -> None:
    from sgl_kvtier.config import PolicyConfig
    from sgl_kvtier.runtime.scheduler.setup import _watch

    engine = RestoreEngine(scene.context, None, 0, lambda offer: None)  # type: ignore[arg-type]
    _watch(engine, scene.controller, PolicyConfig(proof=asked), at_once)
    made = engine.attach
    assert (None if made is None else made._every) == every
    assert engine.proof.looks_at_attaches is (every is not None)
    assert (engine.offers.shorten is not None) is (every is not None)
    assert (engine.guard is not None) is guarded
    if made is not None:
        made.close()


def test_pools_whose_pages_cannot_be_compared_leave_every_restoration_whole(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    from sgl_kvtier.config import PolicyConfig
    from sgl_kvtier.runtime.scheduler.setup import _watch

    engine = RestoreEngine(scene.context, None, 0, lambda offer: None)  # type: ignore[arg-type]
    scene.host.layout = "layer_first"
    _watch(engine, scene.controller, PolicyConfig(proof="all"), True)
    assert engine.attach is None and not engine.proof.looks_at_attaches
    assert "host pages of layout layer_first" in caplog.text


def test_rows_are_looked_up_before_a_forward_and_copied_after_its_launch() -> None:
    from sgl_kvtier.runtime.scheduler.hooks import time_batch, time_result

    calls: list[str] = []

    def noted(name: str, result: Any = None) -> Callable[..., Any]:
        return lambda *args, **named: calls.append(name) or result  # type: ignore[func-returns-value]

    engine = SimpleNamespace(
        attach=SimpleNamespace(launching=noted("rows", []), launched=noted("copied")),
        guard=SimpleNamespace(launching=noted("guard"), processed=noted("gap")),
        layers=None,
        result_processed=noted("results"),
    )
    clock = SimpleNamespace(launch=noted("clock"), launched=noted("timed"), processed=noted("end"))
    parts = SimpleNamespace(engine=engine, tick=SimpleNamespace(clock=clock))
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(kvtier=parts), device="cpu")
    for extend in (True, False):
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda on=extend: on), global_num_tokens=None
        )
        time_batch(noted("forward"), scheduler, batch)
        time_result(None, scheduler, batch)
    prefill = ["guard", "clock", "rows", "forward", "copied", "timed", "end", "gap", "results"]
    assert calls == [*prefill, "guard", "forward", "end", "gap", "results"]
