import random

from random_hands import RandomHands
from virtual_hands import COST, ENGINE, profile_of

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.rules import ByArrival, GivesWay, LongestFirst
from sgl_kvtier.policy.messages import (
    ChunkDone,
    ChunkStarted,
    RequestFinished,
    RestoreOffered,
    RunOrder,
    StepPlan,
    StepView,
    TransferDone,
    Waiter,
)
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.rules import Rules
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


def planner_of(rules: Rules | None = None, **pages: int) -> Planner:
    """A planner that restores these prefixes, offered in this order; the first holds the slot."""
    planner = make_planner(PolicyConfig(), ENGINE, profile_of(COST, 50e6), rules or GivesWay())
    for rid, n in pages.items():
        planner.observe(RestoreOffered(rid, 0.0, n * 16 + 100, 0, n, ((Span(0, n), Tier.STORAGE),)))
    planner.step(StepView(0.0, tuple(pages), None, prefill_tokens=512))
    planner.observe(ChunkStarted("a", Span(0, 512), 0.0))
    planner.observe(ChunkDone("a", Span(0, 512), 0.1, 0.1))
    return planner


def ordered(planner: Planner, *rids: str, now: float = 0.1) -> tuple[str, ...]:
    """In the order they came; their prompts end with their prefixes."""
    return planner.query(RunOrder(tuple(Waiter(rid, 1) for rid in rids), now))


def held(planner: Planner, *waiting: str, now: float = 0.1, **view: object) -> StepPlan:
    return planner.step(StepView(now, waiting, "a", prefill_tokens=512, **view))  # type: ignore[arg-type]


def whom(plan: StepPlan) -> tuple[str | None, list[str]]:
    return plan.aside, [compute.rid for compute in plan.computes]


def test_the_slots_holder_gives_it_up_to_a_shorter_one_between_two_chunks():
    planner = planner_of(a=400, b=60)
    assert ordered(planner, "a", "b") == ("b", "a")
    plan = held(planner, "b")
    assert whom(plan) == ("a", ["b"])
    # "b" has the slot, and "a" waits before all others.
    planner.observe(ChunkStarted("b", Span(0, 512), 0.2))
    plan = planner.step(StepView(0.3, ("a",), "b", slot_open=False, prefill_tokens=512))
    assert plan.aside is None


def test_it_keeps_it_before_one_that_is_hardly_shorter():
    planner = planner_of(a=100, b=95)
    assert ordered(planner, "a", "b") == ("a", "b")
    assert whom(held(planner, "b")) == (None, ["a"])


def test_it_keeps_it_where_requests_run_in_the_order_of_arrival():
    planner = planner_of(ByArrival(gives_way=True), a=400, b=60)
    ordered(planner, "a", "b")
    assert whom(held(planner, "b")) == (None, ["a"])


def test_it_keeps_it_by_rules_that_never_give_way():
    planner = planner_of(Rules(), a=400, b=60)
    assert ordered(planner, "a", "b") == ("b",), "it is no longer in the order"
    assert whom(held(planner, "b")) == (None, ["a"])


def test_it_keeps_it_while_another_has_given_it_up_or_there_is_no_row():
    planner = planner_of(a=400, b=60)
    ordered(planner, "a", "b")
    assert whom(held(planner, "b", slot_open=False)) == (None, ["a"])


def test_it_keeps_it_before_one_that_is_gone():
    planner = planner_of(a=400, b=60)
    ordered(planner, "a", "b")
    planner.observe(RequestFinished("b", 0.1, aborted=True))
    assert whom(held(planner)) == (None, ["a"])


def test_one_that_did_not_get_the_slot_is_tried_again_after_a_second():
    planner = planner_of(a=400, b=60)
    ordered(planner, "a", "b")
    assert held(planner, "b").aside == "a"
    assert whom(held(planner, "b", now=0.2)) == (None, ["a"])
    assert held(planner, "b", now=1.2).aside == "a"


def test_whatever_hands_do_with_the_slot_every_page_comes_once_and_nobody_is_stuck():
    given_up = 0
    for seed in range(40):
        config = PolicyConfig(restore="both")
        hands = RandomHands(random.Random(seed), config, True, GivesWay(), orders=True)
        for _ in range(200):
            hands.act()
        hands.drain()
        assert hands.replay() == hands.plans
        given_up += hands.given_up
    assert given_up > 20


def test_a_holder_is_overtaken_no_longer_than_its_bound():
    """A stream of short ones: the first is overtaken for half of its predicted work and no longer."""
    planner, now, overtaken = planner_of(a=400), 0.1, 0
    ordered(planner, "a")
    for number in range(40):
        rid = f"b{number}"
        offer = RestoreOffered(rid, now, 1060, 0, 60, ((Span(0, 60), Tier.STORAGE),))
        planner.observe(offer)
        ordered(planner, "a", rid, now=now)
        planner.step(StepView(now, (rid,), "a", slot_open=False))
        plan = held(planner, rid, now=now + 0.01)
        overtaken += plan.aside == "a"
        now += 0.1
        planner.observe(RequestFinished(rid, now))
        ordered(planner, "a", now=now)
    assert 0 < overtaken < 20
