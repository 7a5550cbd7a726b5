"""Several restorations at once: what is done for one is nothing that another waits for, and none is
forgotten.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_leave import offer, planner
from virtual_hands import COST, ENGINE, balance, planner_of, profile_of, stored

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.rules import LongestFirst
from sgl_kvtier.policy.messages import (
    ChunkDone,
    ChunkStarted,
    Compute,
    LeftToEngine,
    Mode,
    StepPlan,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.restore.ends import Chunks
from sgl_kvtier.policy.restore.forecast import Outlook
from sgl_kvtier.policy.restore.restorations import Restoration, Restorations
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link, Span, Tier

PAGE = ENGINE.page_tokens
VIEW = StepView(0.0, ("a",), prefill_tokens=512)


def loaded(plan: StepPlan, rid: str = "") -> int:
    """Pages that a plan loads."""
    return sum(len(load.span) for load in plan.loads if rid in load.rid)


def beside_a_busy_disk(**settings: object) -> Planner:
    """A planner that has handed out loads over the storage link for "b", of which it takes long to
    bring all.
    """
    one = planner(storage=balance(4096, 1 / 4), host=balance(4096, 20), **settings)
    one.observe(stored("b"))
    assert loaded(one.step(StepView(0.0, ("b",), prefill_tokens=512))) > 8
    return one


def test_a_request_does_not_wait_for_a_link_it_does_not_use():
    one = beside_a_busy_disk(restore="both")
    one.observe(stored("a", 32, tier=Tier.HOST))
    plan = one.step(StepView(0.0, ("a", "b"), prefill_tokens=512))
    # Copying all of it takes 5 % of computing it: waiting for the disk, computing all would look as
    # good.
    assert loaded(plan, "a") > 24
    assert all(compute.tokens is not None for compute in plan.computes)


def test_nor_is_a_restoration_given_up_for_another_links_queue():
    one = beside_a_busy_disk(restore="auto")
    short = stored("a", 32, tier=Tier.HOST)
    view = StepView(0.0, ("a", "b"), prefill_tokens=512)
    assert one.query(LeftToEngine(short, view)) == "host memory"
    one.observe(short)
    (start,) = one.step(view).starts
    assert start.mode is not Mode.COMPUTE


def test_a_waiting_request_that_finds_no_room_for_loads_for_long_is_computed():
    one = planner_of(balance(4096, 5000), restore="both")
    one.observe(stored())
    full = StepView(0.0, ("a",), prefill_tokens=512, free_pages={Tier.DEVICE: 0})
    assert len(one.step(full).starts) == 1
    assert one.step(replace(full, now=1.9)) == StepPlan()
    plan = one.step(replace(full, now=2.1))
    assert plan.loads == ()
    assert [(compute.rid, compute.tokens) for compute in plan.computes] == [("a", 512)]
    # With room all of it is loaded, and it waits for that.
    plan = one.step(replace(full, now=2.2, free_pages={Tier.DEVICE: 1000}))
    assert plan.loads
    assert plan.computes == ()


def handed_out_s(front: int) -> float:
    """How long its link needs for what is handed out of a long prefix in one step; `front` tokens
    are computed already.
    """
    one = planner_of(balance(8192), Rules(load_horizon_s=0.01))
    one.observe(stored(pages=2048, resident=front // PAGE))
    return loaded(one.step(VIEW)) * ENGINE.page_bytes / balance(8192)


@pytest.mark.parametrize("front", [0, 16384])
def test_a_link_has_work_until_the_chunk_is_done_wherever_in_the_prompt_it_is(front):
    assert handed_out_s(front) > 2 * COST.chunk_seconds(front, 512)


def test_a_link_has_work_while_fresh_prompts_are_prefilled():
    one = planner_of(balance(8192), Rules(load_horizon_s=0.001), restore="load")
    one.observe(stored(pages=1024))
    pages = [loaded(one.step(replace(VIEW, fresh_tokens=fresh))) for fresh in (0, 2000)]
    seconds = sum(pages) * ENGINE.page_bytes / balance(8192)
    assert pages[1] and seconds > 2 * COST.chunk_seconds(0, 512)


def test_after_a_failure_nothing_is_taken_to_be_under_way():
    one = planner(storage=balance(4096))
    one.observe(offer(storage=256))
    plan = one.step(VIEW)
    assert plan.loads
    last = plan.loads[0].span
    with pytest.raises(ValueError, match="a transfer has taken"):
        one.observe(ChunkStarted("a", Span(0, last.stop * PAGE), 0.0))
    assert one.restoring == ()
    one.observe(stored("b", now=60.0))
    again = one.step(StepView(60.0, ("b",), prefill_tokens=512))
    assert [load.span for load in again.loads] == [load.span for load in plan.loads]
    assert {load.link for load in again.loads} == {Link.STORAGE_TO_DEVICE}


def test_loads_of_several_requests_take_no_more_pages_than_there_are():
    one = planner_of(balance(4096, 5000), restore="load")
    for rid in "abc":
        one.observe(stored(rid))
    view = StepView(0.0, ("a", "b", "c"), prefill_tokens=512, free_pages={Tier.DEVICE: 300})
    plan = one.step(view)
    assert loaded(plan) == 300
    assert {load.rid for load in plan.loads} == {"a", "b"}


def test_pages_that_pass_through_host_memory_take_its_room_too():
    staged = replace(ENGINE, staged=True)
    one = make_planner(PolicyConfig(restore="load"), staged, profile_of(COST, balance(4096, 5000)))
    for rid in "ab":
        one.observe(stored(rid))
    free = {Tier.DEVICE: 1000, Tier.HOST: 100}
    plan = one.step(StepView(0.0, ("a", "b"), prefill_tokens=512, free_pages=free))
    assert loaded(plan) == 100


def test_a_front_that_has_computed_its_way_to_the_landed_tail_steps_over_it_although_others_wait():
    planner = planner_of(50e6)
    planner.observe(stored(pages=80))
    plan = planner.step(StepView(0.0, ("a",), None, prefill_tokens=512))
    front = plan.computes[0].tokens // ENGINE.page_tokens
    planner.observe(ChunkStarted("a", Span(0, front * ENGINE.page_tokens), 0.0))
    planner.observe(ChunkDone("a", Span(0, front * ENGINE.page_tokens), 0.1, 0.1))
    now, loads = 0.1, list(plan.loads)
    for _ in range(50):
        for load in loads:
            now += 0.01
            nbytes = len(load.span) * ENGINE.page_bytes
            planner.observe(TransferDone("a", Link.STORAGE_TO_DEVICE, load.span, nbytes, 0.01, now))
        plan = planner.step(StepView(now, (), "a", prefill_tokens=512, fresh_tokens=4000))
        loads, compute = list(plan.loads), plan.computes[0]
        if compute.splice.stop == 80:
            break
        if compute.tokens:
            start = (compute.splice.stop if compute.splice else front) * ENGINE.page_tokens
            planner.observe(ChunkStarted("a", Span(start, start + compute.tokens), now))
            planner.observe(ChunkDone("a", Span(start, start + compute.tokens), 0.1, now + 0.1))
            front = (start + compute.tokens) // ENGINE.page_tokens
    assert compute.splice.stop == 80
    assert compute.tokens is None


def test_a_page_the_front_may_be_granted_late_is_not_promised_to_anothers_load():
    planner = planner_of(50e6, LongestFirst())
    planner.observe(stored(pages=80))
    planner.observe(stored("b", 160))
    planner.step(StepView(0.0, ("a", "b"), None, prefill_tokens=0, free_pages={Tier.DEVICE: 0}))
    # The budget holds one page, less than the smallest chunk worth computing: only since nothing of
    # it loads may "a" go on.
    view = StepView(0.1, ("b",), "a", prefill_tokens=PAGE, free_pages={Tier.DEVICE: 1})
    plan = planner.step(view)
    assert [(compute.rid, compute.tokens) for compute in plan.computes] == [("a", PAGE)]
    assert plan.loads == ()
    # With room for both, "b" is loaded for beside it.
    plan = planner.step(replace(view, now=0.2, free_pages={Tier.DEVICE: 2}))
    assert [(load.rid, len(load.span)) for load in plan.loads] == [("b", 1)]


# The compute end of one restoration between two steps.


PAGES = 256
SOURCES = ((Span(0, PAGES), Tier.STORAGE),)
TOKENS = PAGES * PAGE


def test_compute_that_waits_goes_on_only_when_nothing_is_in_flight() -> None:
    known = Restorations(PolicyConfig(), ENGINE, profile_of(COST, 1e9), Rules())
    chunks = Chunks(known, Outlook(known))
    item = Restoration("a", 1, TOKENS + 64, TwoPointer(0, PAGES), SOURCES)
    known.begin(item)
    waits = Compute("a", Span(0, 0), 0)
    loading = item.pointer.take_back(4)
    assert chunks.unstuck(waits, VIEW) == waits
    item.pointer.lose(loading)
    assert chunks.unstuck(waits, VIEW).tokens == 512


def test_loads_are_taken_back_once_and_not_in_every_step_until_it_is_told() -> None:
    """The link is a hundred times slower than was known when its loads were handed out."""
    rate = balance(TOKENS)
    one = planner_of(20 * rate, restore="both")
    one.observe(stored())
    plan = one.step(VIEW)
    loads = sorted((load.span for load in plan.loads), key=lambda span: span.start)
    (compute,) = plan.computes or (Compute("a", Span(0, 0), 0),)
    now, low = 1.0, loads[0].start
    if low:
        one.observe(ChunkStarted("a", Span(0, low * PAGE), 0.0))
    for span in loads[-3:]:
        nbytes = len(span) * ENGINE.page_bytes
        one.observe(TransferDone("a", Link.STORAGE_TO_DEVICE, span, nbytes, nbytes / rate * 5, now))
    view = StepView(now, ("b", "a"), prefill_tokens=512, slot="a" if low else None)
    first = one.step(view)
    assert first.cancels, (compute, loads)
    assert one.step(view).cancels == ()
