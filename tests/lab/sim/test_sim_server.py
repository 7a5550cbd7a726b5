"""The simulated server: times that can be worked out by hand, and plans it must refuse."""

from __future__ import annotations

import pytest
from scenes import Scripted, keys, machine, serve

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.sim.baselines import RecomputeOnly
from sgl_kvtier.lab.sim.requests import SimRequest
from sgl_kvtier.policy.messages import (
    Cancel,
    ChunkDone,
    ChunkStarted,
    Compute,
    Load,
    Mode,
    Move,
    PagesDropped,
    PagesLost,
    PagesPlaced,
    RestoreOffered,
    RestoreStart,
    StepPlan,
    TransferDone,
)
from sgl_kvtier.types import Link, Span, Tier

CACHED = ((Span(0, 8), Tier.STORAGE),)
START = RestoreStart("r", Mode.BOTH, "test")


def _request(**changes: object) -> SimRequest:
    return SimRequest(
        **{"rid": "r", "arrival_s": 0.0, "prompt_tokens": 129, "cached": CACHED, **changes}
    )  # type: ignore[arg-type]


def _load(start: int, stop: int, deadline_s: float = 100.0) -> Load:
    return Load("r", Span(start, stop), Tier.STORAGE, Link.STORAGE_TO_DEVICE, deadline_s)


def test_a_prompt_is_prefilled_in_chunks_of_the_token_budget() -> None:
    result = serve(RecomputeOnly(), [_request(cached=(), prompt_tokens=80)])
    # 32 + 32 + 16 tokens: 1 + 1 + 0.75 s
    assert result.requests[0].ttft_s == 2.75
    assert result.requests[0].chunks == 3


def test_a_request_decodes_one_token_per_step_after_its_first() -> None:
    result = serve(RecomputeOnly(), [_request(cached=(), prompt_tokens=32, output_tokens=3)])
    assert result.requests[0].finished_s == pytest.approx(1 + 2 * (0.5 + 1 / 64))


def test_a_follower_arrives_its_gap_after_the_one_before_has_ended() -> None:
    first = _request(cached=(), prompt_tokens=32)
    second = SimRequest("s", 2.0, 32, after="r")
    assert serve(RecomputeOnly(), [first, second]).requests[1].arrived_s == 3.0


def _finish() -> list[StepPlan]:
    return [
        StepPlan(computes=(Compute("r", Span(4, 4), 32),)),
        StepPlan(computes=(Compute("r", Span(6, 8), None),)),
    ]


def test_facts_of_a_restoration_arrive_in_order_with_true_numbers() -> None:
    planner = Scripted(
        StepPlan(starts=(START,), loads=(_load(6, 8),), computes=(Compute("r", Span(0, 0), 32),)),
        StepPlan(computes=(Compute("r", Span(2, 2), 32),)),
        *_finish(),
    )
    result = serve(planner, [_request()])
    offered = next(fact for fact in planner.facts if isinstance(fact, RestoreOffered))
    assert (offered.resident, offered.pages, offered.sources) == (0, 8, CACHED)
    landed = next(fact for fact in planner.facts if isinstance(fact, TransferDone))
    assert (landed.span, landed.nbytes, landed.seconds, landed.now) == (Span(6, 8), 32, 0.5, 0.5)
    done = [fact for fact in planner.facts if isinstance(fact, ChunkDone)]
    assert [(fact.tokens, fact.seconds) for fact in done][:2] == [
        (Span(0, 32), 1.0),
        (Span(32, 64), 1.0),
    ]
    assert result.requests[0].spliced_tokens == 32
    assert result.links[Link.STORAGE_TO_DEVICE].nbytes == 32


def test_a_chunk_is_cut_to_the_budget_and_reported_as_it_ran() -> None:
    planner = Scripted(
        StepPlan(starts=(START,), computes=(Compute("r", Span(0, 0), 128),)),
        *[StepPlan(computes=(Compute("r", Span(place, place), None),)) for place in (2, 4, 6)],
    )
    serve(planner, [_request()])
    started = [fact.tokens for fact in planner.facts if isinstance(fact, ChunkStarted)]
    assert started[0] == Span(0, 32)


def test_an_offer_that_is_not_answered_is_computed() -> None:
    planner = Scripted()
    assert serve(planner, [_request()]).requests[0].computed_tokens == 129


def test_a_cancelled_load_comes_back_as_lost_where_it_had_not_begun() -> None:
    planner = Scripted(
        StepPlan(
            starts=(START,),
            loads=(_load(6, 8), _load(2, 6)),
            computes=(Compute("r", Span(0, 0), 32),),
        ),
        StepPlan(cancels=(Cancel("r", Span(2, 4)),), computes=(Compute("r", Span(2, 2), 0),)),
    )
    hardware = machine(storage=8)
    with pytest.raises(AssertionError, match="stuck"):
        serve(planner, [_request()], hardware=hardware)
    lost = [fact for fact in planner.facts if isinstance(fact, PagesLost)]
    assert [(fact.span, fact.reason) for fact in lost] == [(Span(2, 4), "cancelled")]
    landed = [fact.span for fact in planner.facts if isinstance(fact, TransferDone)]
    assert landed == [Span(6, 8), Span(4, 6)]


def test_a_load_that_does_not_begin_before_its_deadline_is_late() -> None:
    planner = Scripted(StepPlan(starts=(START,), loads=(_load(6, 8), _load(4, 6, deadline_s=0.1))))
    with pytest.raises(AssertionError, match="stuck"):
        serve(planner, [_request()])
    lost = next(fact for fact in planner.facts if isinstance(fact, PagesLost))
    assert (lost.span, lost.reason, lost.now) == (Span(4, 6), "late", 0.1)


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (StepPlan(starts=(START,), loads=(_load(6, 8), _load(7, 8))), "claimed twice"),
        (StepPlan(starts=(START,), loads=(_load(6, 9),)), "only 8 pages are offered"),
        (
            StepPlan(starts=(START,), computes=(Compute("r", Span(0, 2), 32),)),
            "only 0 pages have landed",
        ),
        (StepPlan(starts=(START,), computes=(Compute("r", Span(1, 1), 32),)), "the front is at 0"),
        (
            StepPlan(starts=(START,), computes=(Compute("r", Span(0, 0), 24),)),
            "multiple of the page",
        ),
        (
            StepPlan(starts=(START,), computes=(Compute("r", Span(0, 0), 256),)),
            "beyond the 8 pages",
        ),
        (
            StepPlan(
                starts=(START,), loads=(_load(1, 2),), computes=(Compute("r", Span(0, 0), 32),)
            ),
            "a transfer has taken",
        ),
        (
            StepPlan(
                starts=(START,), loads=(_load(1, 2),), computes=(Compute("r", Span(0, 0), None),)
            ),
            "a transfer has taken",
        ),
        (StepPlan(starts=(RestoreStart("x", Mode.BOTH, ""),)), "answers no offer"),
        (StepPlan(loads=(_load(0, 1),)), "restores nothing"),
        (
            StepPlan(
                starts=(START,), loads=(Load("r", Span(0, 1), Tier.HOST, Link.HOST_TO_DEVICE, 1.0),)
            ),
            "do not all lie in host",
        ),
    ],
)
def test_a_plan_that_contradicts_itself_stops_the_run(plan: StepPlan, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        serve(Scripted(plan), [_request()])


def test_a_second_restoring_request_cannot_take_the_slot() -> None:
    other = SimRequest("s", 0.0, 129, cached=CACHED)
    plan = StepPlan(
        starts=(START, RestoreStart("s", Mode.BOTH, "")),
        computes=(Compute("r", Span(0, 0), 16), Compute("s", Span(0, 0), 16)),
    )
    with pytest.raises(AssertionError, match="no slot is free"):
        serve(Scripted(plan), [_request(), other])


def test_a_prompt_repeated_is_found_on_the_device_and_only_its_last_page_is_computed() -> None:
    chain = keys("a", 4)
    first = SimRequest("r", 0.0, 64, keys=chain)
    second = SimRequest("s", 0.0, 64, keys=chain, after="r")
    result = serve(RecomputeOnly(), [first, second])
    assert result.requests[1].resident_tokens == 48
    assert result.requests[1].computed_tokens == 16


def test_an_output_is_found_again_by_the_next_turn() -> None:
    chain = keys("a", 6)
    first = SimRequest("r", 0.0, 64, 32, keys=chain[:4], final_keys=chain)
    second = SimRequest("s", 0.0, 112, keys=(*chain, *keys("b", 1)), after="r")
    assert serve(RecomputeOnly(), [first, second]).requests[1].resident_tokens == 96


def test_what_leaves_the_device_is_found_in_host_memory_and_what_leaves_that_in_storage() -> None:
    turns = [
        SimRequest(f"r{i}", 5.0, 65, keys=keys(f"{i}-", 4), after=f"r{i - 1}" if i else None)
        for i in range(3)
    ]
    again = SimRequest("again", 5.0, 65, keys=keys("0-", 4), after="r2")
    in_host = serve(RecomputeOnly(), [*turns, again], device_pages=6)
    assert in_host.requests[-1].hit_tokens == {Tier.HOST: 64}
    on_ssd = serve(RecomputeOnly(), [*turns, again], device_pages=6, host_pages=5)
    assert on_ssd.requests[-1].hit_tokens.get(Tier.STORAGE, 0) >= 48
    none = serve(RecomputeOnly(), [*turns, again], device_pages=6, host_pages=5, storage_pages=5)
    assert sum(none.requests[-1].hit_tokens.values()) < 64


def test_a_move_without_room_is_told_as_pages_that_are_not_there() -> None:
    chain = keys("a", 4)
    first = SimRequest("r", 0.0, 65, keys=chain)
    other = SimRequest("x", 5.0, 65, keys=keys("b", 4), after="r")
    last = SimRequest("s", 5.0, 65, keys=chain, after="x")
    move = StepPlan(moves=(Move(chain, Tier.STORAGE, Tier.HOST),))
    planner = Scripted(*[StepPlan()] * 12, *[move] * 2)
    serve(planner, [first, other, last], device_pages=6, host_pages=0)
    assert not any(
        isinstance(fact, PagesPlaced) and fact.tier is Tier.HOST for fact in planner.facts
    )
    assert any(isinstance(fact, PagesDropped) and fact.tier is Tier.HOST for fact in planner.facts)


def test_a_share_of_the_budget_leaves_the_rest_of_the_step_to_others() -> None:
    result = serve(RecomputeOnly(), [_request(cached=(), prompt_tokens=64)], share=0.5)
    # Four steps of 16 tokens each, which take as long as 32.
    assert result.requests[0].chunks == 4
    assert result.requests[0].ttft_s == 4.0


def test_a_request_that_can_never_fit_is_named_before_the_run() -> None:
    with pytest.raises(ConfigError, match="request r takes 130 tokens"):
        serve(RecomputeOnly(), [_request()], device_pages=4)
