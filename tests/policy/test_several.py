"""Several restorations at once: what is done for one is nothing that another waits for, and none is
forgotten.
"""

from dataclasses import replace

import pytest
from test_leave import offer, planner, rate
from virtual_hands import COST, ENGINE, profile_of

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import (
    ChunkStarted,
    LeftToEngine,
    Mode,
    RestoreOffered,
    StepPlan,
    StepView,
)
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link, Span, Tier

PAGE = ENGINE.page_tokens


def beside_a_busy_disk(**settings: object) -> Planner:
    """A planner that has handed out loads over the storage link for "b", of which it takes long to
    bring all.
    """
    one = planner(storage=rate(4096, 1 / 4), host=rate(4096, 20), **settings)
    one.observe(RestoreOffered("b", 0.0, 4200, 0, 256, ((Span(0, 256), Tier.STORAGE),)))
    assert (
        sum(len(load.span) for load in one.step(StepView(0.0, ("b",), prefill_tokens=512)).loads)
        > 8
    )
    return one


def test_a_request_does_not_wait_for_a_link_it_does_not_use():
    one = beside_a_busy_disk(restore="both")
    one.observe(RestoreOffered("a", 0.0, 600, 0, 32, ((Span(0, 32), Tier.HOST),)))
    plan = one.step(StepView(0.0, ("a", "b"), prefill_tokens=512))
    # Copying all of it takes 5 % of computing it: waiting for the disk, computing all would look as
    # good.
    copied = sum(len(load.span) for load in plan.loads if load.rid == "a")
    assert copied > 24
    assert all(compute.tokens is not None for compute in plan.computes)


def test_nor_is_a_restoration_given_up_for_another_links_queue():
    one = beside_a_busy_disk(restore="auto")
    short = RestoreOffered("a", 0.0, 600, 0, 32, ((Span(0, 32), Tier.HOST),))
    assert (
        one.query(LeftToEngine(short, StepView(0.0, ("a", "b"), prefill_tokens=512)))
        == "host memory"
    )
    one.observe(short)
    (start,) = one.step(StepView(0.0, ("a", "b"), prefill_tokens=512)).starts
    assert start.mode is not Mode.COMPUTE


def test_a_waiting_request_that_finds_no_room_for_loads_for_long_is_computed():
    one = make_planner(PolicyConfig(restore="both"), ENGINE, profile_of(COST, rate(4096, 5000)))
    one.observe(RestoreOffered("a", 0.0, 4200, 0, 256, ((Span(0, 256), Tier.STORAGE),)))
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


def handed_out_s(fresh_tokens: int, front: int = 0) -> float:
    """How long its link needs for what is handed out of a long prefix in one step; `front` tokens
    are computed already.
    """
    bytes_per_s = rate(8192, 1)
    one = make_planner(
        PolicyConfig(), ENGINE, profile_of(COST, bytes_per_s), Rules(load_horizon_s=0.01)
    )
    one.observe(
        RestoreOffered(
            "a", 0.0, 32800, front // PAGE, 2048, ((Span(front // PAGE, 2048), Tier.STORAGE),)
        )
    )
    plan = one.step(StepView(0.0, ("a",), prefill_tokens=512, fresh_tokens=fresh_tokens))
    return sum(len(load.span) for load in plan.loads) * ENGINE.page_bytes / bytes_per_s


@pytest.mark.parametrize("front", [0, 16384])
def test_a_link_has_work_until_the_chunk_is_done_wherever_in_the_prompt_it_is(front):
    assert handed_out_s(0, front) > 2 * COST.chunk_seconds(front, 512)


def test_a_link_has_work_while_fresh_prompts_are_prefilled():
    one = make_planner(
        PolicyConfig(restore="load"),
        ENGINE,
        profile_of(COST, rate(8192, 1)),
        Rules(load_horizon_s=0.001),
    )
    one.observe(RestoreOffered("a", 0.0, 16500, 0, 1024, ((Span(0, 1024), Tier.STORAGE),)))
    loaded = [
        sum(
            len(load.span)
            for load in one.step(
                StepView(0.0, ("a",), prefill_tokens=512, fresh_tokens=fresh)
            ).loads
        )
        for fresh in (0, 2000)
    ]
    seconds = sum(loaded) * ENGINE.page_bytes / rate(8192, 1)
    assert loaded[1] and seconds > 2 * COST.chunk_seconds(0, 512)


def test_after_a_failure_nothing_is_taken_to_be_under_way():
    one = planner(storage=rate(4096, 1))
    one.observe(offer(storage=256))
    plan = one.step(StepView(0.0, ("a",), prefill_tokens=512))
    assert plan.loads
    last = plan.loads[0].span
    with pytest.raises(ValueError, match="a transfer has taken"):
        one.observe(ChunkStarted("a", Span(0, last.stop * PAGE), 0.0))
    assert one.restoring == ()
    one.observe(RestoreOffered("b", 60.0, 4160, 0, 256, ((Span(0, 256), Tier.STORAGE),)))
    again = one.step(StepView(60.0, ("b",), prefill_tokens=512))
    assert [load.span for load in again.loads] == [load.span for load in plan.loads]
    assert {load.link for load in again.loads} == {Link.STORAGE_TO_DEVICE}


def test_loads_of_several_requests_take_no_more_pages_than_there_are():
    one = make_planner(PolicyConfig(restore="load"), ENGINE, profile_of(COST, rate(4096, 5000)))
    for rid in "abc":
        one.observe(RestoreOffered(rid, 0.0, 4200, 0, 256, ((Span(0, 256), Tier.STORAGE),)))
    view = StepView(0.0, ("a", "b", "c"), prefill_tokens=512, free_pages={Tier.DEVICE: 300})
    loads = one.step(view).loads
    assert sum(len(load.span) for load in loads) == 300
    assert {load.rid for load in loads} == {"a", "b"}


def test_pages_that_pass_through_host_memory_take_its_room_too():
    staged = replace(ENGINE, staged=True)
    one = make_planner(PolicyConfig(restore="load"), staged, profile_of(COST, rate(4096, 5000)))
    for rid in "ab":
        one.observe(RestoreOffered(rid, 0.0, 4200, 0, 256, ((Span(0, 256), Tier.STORAGE),)))
    free = {Tier.DEVICE: 1000, Tier.HOST: 100}
    plan = one.step(StepView(0.0, ("a", "b"), prefill_tokens=512, free_pages=free))
    assert sum(len(load.span) for load in plan.loads) == 100
