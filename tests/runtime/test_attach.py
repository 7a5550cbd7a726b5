"""A page computed after loaded ones, compared with the stored one, over SGLang's pools."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attach_lab import KEYS, PAGE, PAGES, ROW, Scene, pools
from device_pools import LAYOUTS, latent_pools, slots
from plain_request import PLAIN
from ticks import idle_tick

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import Mode, RestoreOffered
from sgl_kvtier.runtime.proof import attach
from sgl_kvtier.runtime.proof.attach import distance, judge, unrelated
from sgl_kvtier.runtime.proof.record import FIRST_ATTACHES, State
from sgl_kvtier.runtime.restore import offers as offers_module
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.restore.offers import Offers
from sgl_kvtier.runtime.scheduler.hooks import time_batch, time_result
from sgl_kvtier.runtime.scheduler.setup import _watch
from sgl_kvtier.runtime.step.polls import DIFFERS, LANDED
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.types import Span, Tier

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.attach.close()


@pytest.fixture
def one_in_ten() -> Iterator[Scene]:
    made = Scene(every=10)
    yield made
    made.attach.close()


def compared(scene: Scene) -> str:
    """The result of the comparison in flight. A difference, and nothing else, is told to the tick."""
    before = Counter(scene.proof.attaches)
    told = scene.settle()
    found = [*(Counter(scene.proof.attaches) - before).elements()]
    assert len(found) == 1, f"one was to be compared: {found}"
    assert told is (found == ["differs"])
    return found[0]


def result(scene: Scene, rid: str = "r", host_pages: int = 0, row: int = 1) -> str:
    """The same, of a request whose loaded pages are attached and whose last page is computed."""
    scene.attached(rid, host_pages)
    scene.finish(rid, row)
    return compared(scene)


def difference(scene: Scene) -> str:
    """What the first difference was."""
    assert scene.proof.difference is not None and scene.proof.difference.check == "attach"
    return scene.proof.difference.what


# --- what is compared ---------------------------------------------------------------------------------

PAIRS = {
    **{f"keys and values, {way}": lambda way=way: pools("cpu", way) for way in LAYOUTS},
    "latents, page_first": lambda: latent_pools("cpu", "page_first"),
    "latents, page_first_direct": lambda: latent_pools("cpu", "page_first_direct"),
    "fp8, page_first": lambda: pools("cpu", "page_first", dtype=torch.float8_e4m3fn),
    "float32, page_first": lambda: pools("cpu", "page_first", dtype=torch.float32),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_page_computed_as_it_is_stored_is_equal_and_another_one_differs(name):
    scene = Scene(PAIRS[name]())
    assert result(scene, "right") == "equal" and scene.proof.difference is None
    scene.layer()[slots(ROW[-1:], PAGE)] = scene.layer()[slots(ROW[:1], PAGE)]
    assert result(scene, "wrong") == "differs"
    what = difference(scene)
    assert f"page {PAGES - 1} of a prompt, computed after {PAGES - 2} loaded pages" in what
    assert "in layer 1" in what
    scene.attach.close()


def test_the_row_says_which_slots_are_compared(scene):
    """A request whose row names another's slots is found, whatever lies in the slots of its own."""
    assert result(scene, row=2) == "differs"


def test_the_places_of_loaded_pages_in_the_row_are_looked_at_too(scene):
    """Attention cannot tell: the last page is computed right from the same pages in any order."""
    row = scene.tree.req_to_token_pool.req_to_token[1]
    loaded = row[PAGE : (PAGES - 1) * PAGE].clone()
    for rid, shifted in enumerate([loaded.roll(PAGE), loaded.roll(-PAGE), loaded.flip(0)]):
        row[PAGE : (PAGES - 1) * PAGE] = shifted
        assert result(scene, f"{rid}") == "differs"
    assert difference(scene) == "page 4 of a prompt, a loaded one, is another page in the row"


def test_one_loaded_page_is_enough(scene):
    r = scene.restoration()
    scene.attach.leave_out(r, 0)
    scene.run("r", 0, (PAGES - 2) * PAGE)
    scene.attach.attached(r, Span(PAGES - 2, PAGES - 1))
    scene.attach.closed(r, "met")
    scene.layer()[slots([ROW[-2]], PAGE)] *= 2
    scene.finish()
    assert compared(scene) == "differs"


def test_host_pages_are_compared_where_the_store_was_not_asked(scene):
    scene.attached(host_pages=PAGES)
    assert scene.pinned == [8]
    scene.finish()
    assert compared(scene) == "equal" and scene.store.reads == 0
    assert scene.pinned == []
    scene.layer()[slots(ROW[-1:], PAGE)] *= 2
    assert result(scene, "other", host_pages=PAGES) == "differs"


def test_what_is_written_into_the_slots_after_the_forward_was_launched_does_not_count(scene):
    scene.store.go_on.clear()
    scene.attached()
    scene.finish()
    scene.layer()[slots(ROW[-1:], PAGE)] = 0  # the request has ended, the slots are another's
    scene.store.go_on.set()
    assert compared(scene) == "equal"


def test_a_page_that_the_store_has_no_longer_is_skipped(scene):
    del scene.store.pages[KEYS[-1]]
    assert result(scene) == "skipped"


def test_a_page_before_that_is_not_the_stored_one_is_a_difference_too(scene):
    """Pages stored with another order of bytes: every page that is loaded would be wrong."""
    scene.store.pages[KEYS[0]] = scene.store.pages[KEYS[3]]
    assert result(scene) == "differs"
    assert "page 0 of a prompt, computed before loaded ones" in difference(scene)


def test_rows_that_cannot_be_copied_are_skipped_and_nothing_is_raised(scene, monkeypatch):
    monkeypatch.setattr(attach, "rows_of", lambda device, slots: 1 / 0)
    assert result(scene) == "skipped"


# --- bounds ---------------------------------------------------------------------------------------------

NOISE = [0.0, 0.01, 0.02]
SHALLOW, DEEP = [0.0] * 7, [0.0] * 31


@pytest.mark.parametrize(
    ("distances", "noise", "dtype", "differs"),
    [
        pytest.param([0.03, 0.04, 0.08], NOISE, BF16, False, id="four times the noise"),
        pytest.param([0.0, 0.03, 0.081], NOISE, BF16, True, id="more than four times"),
        pytest.param([0.0301, 0.0, 0.0], NOISE, BF16, True, id="above the floor"),
        pytest.param([0.119], None, BF16, False, id="no noise yet: four floors"),
        pytest.param([0.121], None, BF16, True, id="no noise yet: more than four floors"),
        pytest.param([0.01], None, FP32, False, id="float32: four floors"),
        pytest.param([0.017], None, FP32, True, id="float32: more than four floors"),
        pytest.param([*DEEP, 0.059], [0.0] * 32, BF16, False, id="after 31 layers that round"),
        pytest.param([*DEEP, 0.061], [0.0] * 32, BF16, True, id="more than 31 layers round"),
        pytest.param([*SHALLOW, 0.031], [0.0] * 8, BF16, True, id="more than 7 layers round"),
        pytest.param([0.0, float("nan")], [0.0] * 2, BF16, True, id="no number"),
        pytest.param([0.0, float("inf")], None, BF16, True, id="infinite"),
    ],
)
def test_a_layer_differs_beyond_four_times_its_noise_and_a_floor(distances, noise, dtype, differs):
    noises = None if noise is None else torch.tensor(noise)
    assert (judge(torch.tensor(distances), noises, dtype) is not None) is differs


def test_what_differs_is_said_with_the_layer_and_its_noise():
    found = judge(torch.tensor([0.0, 0.03, 0.081]), torch.tensor(NOISE), BF16)
    assert found is not None and "in layer 2" in found and "0.02" in found


def as_bytes(*layers: list[float]) -> torch.Tensor:
    """Rows of layers of one token and head."""
    return torch.tensor(layers).view(torch.uint8).reshape(len(layers), 1, 1, -1)


def test_the_distance_of_a_layer_is_relative_to_what_is_stored():
    stored = as_bytes([3.0, 4.0], [3.0, 4.0])
    computed = as_bytes([3.0, 4.5], [3.0, 4.0])
    assert distance(computed, stored, FP32).tolist() == pytest.approx([0.1, 0.0])
    zeros = stored * 0
    assert distance(zeros, zeros, FP32).tolist() == [0.0, 0.0]
    assert distance(stored, zeros, FP32).tolist() == [float("inf")] * 2
    assert distance(stored, zeros + 255, FP32).isnan().all()
    assert unrelated(torch.tensor([0.0, float("nan")])) is not None


@pytest.mark.parametrize(
    ("first", "last", "wanted"),
    [
        pytest.param(1.02, 1.06, "equal", id="within the bound"),
        pytest.param(1.2, 1.3, "skipped", id="four times that would let a wrong page pass"),
    ],
)
def test_noise_of_the_page_before_bounds_the_last_one(scene, first, last, wanted):
    scene.layer()[slots(ROW[:1], PAGE)] *= first
    scene.layer()[slots(ROW[-1:], PAGE)] *= last
    assert result(scene) == wanted


def test_another_request_of_the_same_id_is_not_taken_for_it(scene: Scene) -> None:
    scene.attached()
    own, scene.reqs["r"] = scene.reqs["r"], SimpleNamespace(rid="r")
    scene.finish(row=2)
    assert not scene.attach.polls() and scene.proof.attaches == {}
    scene.reqs["r"] = own
    scene.finish()
    assert not scene.settle() and scene.proof.attaches == {"equal": 1}


# --- which restorations -------------------------------------------------------------------------------


def test_the_last_page_is_left_out_of_what_is_offered(scene):
    r = scene.restoration(host_pages=2)
    scene.attach.leave_out(r, 0)
    assert (r.pages, r.keys) == (PAGES - 1, KEYS[2:-1])
    assert r.sources == ((Span(0, 2), Tier.HOST), (Span(2, PAGES - 1), Tier.STORAGE))
    assert r.keys_of(Span(2, 4)) == [KEYS[3], KEYS[2]]
    whole = scene.restoration("whole", host_pages=PAGES)
    scene.attach.leave_out(whole, 0)
    assert (whole.pages, whole.keys) == (PAGES - 1, ())
    assert whole.sources == ((Span(0, PAGES - 1), Tier.HOST),)


def test_a_restoration_that_would_be_too_short_stays_whole(scene):
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


def test_first_all_are_looked_at_and_then_one_in_so_many(one_in_ten):
    assert left_out(one_in_ten, 5) == [0, 1, 2, 3, 4]
    one_in_ten.proof.attaches["equal"] = FIRST_ATTACHES
    assert left_out(one_in_ten, 20) == [4, 14]


@pytest.mark.parametrize(
    ("state", "shown", "count"),
    [(State.PROVEN, "equal", 0), (State.PROVING, "skipped", 4 * FIRST_ATTACHES)],
    ids=["proven by an earlier server", "never comparable"],
)
def test_fewer_are_looked_at_where_more_would_show_nothing(one_in_ten, state, shown, count):
    one_in_ten.proof.state, one_in_ten.proof.attaches[shown] = state, count
    assert left_out(one_in_ten, 20) == [9, 19]


def test_so_many_at_a_time(scene):
    offered = [scene.restoration(f"{number}") for number in range(8)]
    for r in offered:
        scene.attach.leave_out(r, 0)
    assert [r.pages < PAGES for r in offered] == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("loaded", "how"),
    [(True, "aborted"), (True, "gave room"), (True, "flushed"), (False, "met")],
    ids=["aborted", "gave room", "flushed", "computed whole"],
)
def test_one_whose_loaded_pages_are_not_attached_is_not_compared(scene, loaded, how):
    r = scene.restoration(host_pages=PAGES)
    scene.attach.leave_out(r, 0)
    if loaded:
        scene.attach.attached(r, Span(0, 2))
    scene.attach.closed(r, how)
    scene.finish()
    assert scene.attach.polls() == [] and scene.pinned == [] and not scene.proof.attaches


def test_a_request_that_ends_before_its_last_page_leaves_nothing_behind(scene):
    scene.attached(host_pages=PAGES)
    scene.attach.forget("r")
    assert scene.pinned == []
    scene.finish()
    assert scene.attach.polls() == []


def test_one_that_ends_right_after_the_launch_is_compared(scene):
    scene.attached()
    scene.finish()
    scene.attach.forget("r")
    assert compared(scene) == "equal"


def test_a_chunk_that_ends_before_the_page_does_is_not_yet_the_one(scene):
    scene.attached()
    scene.run("r", (PAGES - 1) * PAGE, PAGES * PAGE - 1)
    assert scene.attach.polls() == []
    scene.run("r", PAGES * PAGE - 1, PAGES * PAGE + 1)
    assert compared(scene) == "equal"


def test_emptied_pools_skip_what_is_compared_with_host_pages(scene, monkeypatch):
    """The host page may be another's as soon as it is let go."""
    scene.attached(host_pages=PAGES)
    gate, views = threading.Event(), attach.parts_of

    def late(*which: Any) -> Any:
        assert gate.wait(60)
        return views(*which)

    monkeypatch.setattr(attach, "parts_of", late)
    scene.finish()
    scene.attach.reset()
    assert scene.pinned == []
    scene.host.kv_buffer.zero_()
    gate.set()
    assert compared(scene) == "skipped"


# --- all ranks ------------------------------------------------------------------------------------------


class Rank(Scene):
    """One rank's tick, with another restoration in flight. Its reductions are the test's."""

    def __init__(self, number: int, reduce: Callable[[int, torch.Tensor], None]) -> None:
        tree = {"tp_world_size": 2, "pp_size": 1, "evict_host": None}
        super().__init__(tree={**tree, "_all_reduce": lambda data, op: reduce(number, data)})
        mover: Any = SimpleNamespace(close=lambda: None)
        self.engine = RestoreEngine(self.context, mover, 0, lambda offer: None)
        self.engine.proof, self.engine.attach = self.proof, self.attach
        self.tick = idle_tick(self.engine, first=number == 0)
        self.other = self.restoration("other")
        self.other.mode = Mode.BOTH
        self.engine.begin(self.other)


def test_a_difference_on_one_rank_refutes_on_both_in_the_same_step():
    barrier, given = threading.Barrier(2, timeout=60), dict[int, list[int]]()

    def reduce(number: int, data: torch.Tensor) -> None:
        given[number] = data.tolist()
        barrier.wait()
        data.copy_(torch.tensor([min(pair) for pair in zip(given[0], given[1], strict=True)]))
        barrier.wait()

    def step() -> None:
        with ThreadPoolExecutor(2) as both:
            list(both.map(lambda rank: rank.tick.report_facts(), ranks))

    ranks = Rank(0, reduce), Rank(1, reduce)
    ranks[1].layer()[slots(ROW[-1:], PAGE)] = 0
    for rank in ranks:
        rank.attached()
        rank.finish()
        assert rank.engine.busy and len(rank.engine.polls()) == 1
    polls = [rank.attach.polls()[0] for rank in ranks]
    until = time.monotonic() + 60
    while not all(poll.local[0] for poll in polls):
        assert time.monotonic() < until
        time.sleep(0.001)
    assert polls[1].local[0] == DIFFERS
    polls[0].local[0] = 0  # as if it were slower
    step()
    assert [rank.proof.state for rank in ranks] == [State.PROVING] * 2
    polls[0].mark(0, LANDED, 1.0)
    step()
    for rank in ranks:
        assert rank.proof.state is State.REFUTED and not rank.engine.is_on
        assert rank.proof.attaches == {"differs": 1}
        assert rank.other.closed and rank.engine.counters.ended == {"differs": 1}
        rank.attach.close()


def test_a_request_is_offered_without_its_last_page_and_the_planner_hears_of_no_other(
    scene, monkeypatch
):
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
    scene, asked, at_once, every, guarded
):
    engine = RestoreEngine(scene.context, None, 0, lambda offer: None)
    _watch(engine, scene.controller, PolicyConfig(proof=asked), at_once)
    made = engine.attach
    assert (None if made is None else made._every) == every
    assert engine.proof.looks_at_attaches is (every is not None)
    assert (engine.offers.shorten is not None) is (every is not None)
    assert (engine.guard is not None) is guarded
    if made is not None:
        made.close()


def test_pools_whose_pages_cannot_be_compared_leave_every_restoration_whole(scene, caplog):
    engine = RestoreEngine(scene.context, None, 0, lambda offer: None)
    scene.host.layout = "layer_first"
    _watch(engine, scene.controller, PolicyConfig(proof="all"), True)
    assert engine.attach is None and not engine.proof.looks_at_attaches
    assert "host pages of layout layer_first" in caplog.text


def test_rows_are_looked_up_before_a_forward_and_copied_after_its_launch():
    calls: list[str] = []

    def noted(name: str, result: Any = None) -> Callable[..., Any]:
        return lambda *args, **named: calls.append(name) or result

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
        mode = SimpleNamespace(is_extend=lambda on=extend: on)
        batch = SimpleNamespace(forward_mode=mode, global_num_tokens=None)
        time_batch(noted("forward"), scheduler, batch)
        time_result(None, scheduler, batch)
    prefill = ["guard", "clock", "rows", "forward", "copied", "timed", "end", "gap", "results"]
    assert calls == [*prefill, "guard", "forward", "end", "gap", "results"]
