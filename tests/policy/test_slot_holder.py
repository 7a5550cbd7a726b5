from virtual_hands import COST, ENGINE, profile_of

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.rules import LongestFirst
from sgl_kvtier.policy.messages import (
    ChunkDone,
    ChunkStarted,
    RestoreOffered,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.types import Link, Span, Tier


def test_a_front_that_has_computed_its_way_to_the_landed_tail_steps_over_it_although_others_wait():
    planner = make_planner(PolicyConfig(), ENGINE, profile_of(COST, 50e6))
    planner.observe(RestoreOffered("a", 0.0, 1300, 0, 80, ((Span(0, 80), Tier.STORAGE),)))
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
    planner = make_planner(PolicyConfig(), ENGINE, profile_of(COST, 50e6), LongestFirst())
    for rid, pages in (("a", 80), ("b", 160)):
        planner.observe(RestoreOffered(rid, 0.0, 2600, 0, pages, ((Span(0, pages), Tier.STORAGE),)))
    planner.step(StepView(0.0, ("a", "b"), None, prefill_tokens=0, free_pages={Tier.DEVICE: 0}))
    # The budget holds one page, less than the smallest chunk worth computing: only since nothing of
    # it loads may "a" go on.
    plan = planner.step(
        StepView(0.1, ("b",), "a", prefill_tokens=ENGINE.page_tokens, free_pages={Tier.DEVICE: 1})
    )
    assert [(compute.rid, compute.tokens) for compute in plan.computes] == [
        ("a", ENGINE.page_tokens)
    ]
    assert plan.loads == ()
    # With room for both, "b" is loaded for beside it.
    plan = planner.step(
        StepView(0.2, ("b",), "a", prefill_tokens=ENGINE.page_tokens, free_pages={Tier.DEVICE: 2})
    )
    assert [(load.rid, len(load.span)) for load in plan.loads] == [("b", 1)]
