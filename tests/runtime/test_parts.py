"""What the parts of one process ask the planner before a prefix is restored."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from sgl_kvtier.policy.messages import LeftToEngine, RestoreOffered, StepView
from sgl_kvtier.runtime.proof.record import Proof
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.scheduler.parts import Parts, parts_of
from sgl_kvtier.types import Span, Tier

PAGE = 4
OFFER = RestoreOffered("r", 0.0, 50, 2, 10, ((Span(2, 4), Tier.HOST), (Span(4, 10), Tier.STORAGE)))


class Queue:
    """A view of the queue with `fresh` tokens, `ahead` of them before any request; what it is told
    of prefixes left to SGLang is in `left_tokens`.
    """

    def __init__(self, fresh: int, ahead: int) -> None:
        self.view = StepView(3.0, ("r",), fresh_tokens=fresh)
        self.ahead = ahead
        self.left_tokens: dict[str, int] = {}

    def of(self, scheduler: Any, now: float) -> StepView:
        return self.view

    def before(self, view: StepView, scheduler: Any, rid: str) -> StepView:
        return replace(view, fresh_tokens=self.ahead)

    def left(self, rid: str, tokens: int) -> None:
        self.left_tokens[rid] = tokens


def parts_with(query: Any, queue: Queue) -> Parts:
    """Parts with this view of the queue, and whose planner answers so."""
    parts = object.__new__(Parts)
    parts.context = SimpleNamespace(page=PAGE, scheduler=object(), moment=lambda: 3.0)  # type: ignore[assignment]
    parts.views = queue  # type: ignore[assignment]
    parts.planner = SimpleNamespace(query=query)  # type: ignore[assignment]
    parts.engine = SimpleNamespace(counters=RestoreCounters())  # type: ignore[assignment]
    return parts


def test_only_what_is_computed_before_a_request_is_fresh_in_the_view_it_is_asked_with() -> None:
    asked: list[LeftToEngine] = []
    parts = parts_with(asked.append, Queue(fresh=100, ahead=30))
    assert parts._why_left(OFFER) is None
    (question,) = asked
    assert question.offer is OFFER
    assert question.view.fresh_tokens == 30


def test_a_prefix_that_is_left_to_sglang_is_told_to_those_behind_it() -> None:
    queue = Queue(fresh=0, ahead=0)
    assert parts_with(lambda question: "no room", queue)._why_left(OFFER) == "no room"
    assert queue.left_tokens == {"r": 10 * PAGE}


def test_a_prefix_that_is_offered_is_not_loaded_by_sglang() -> None:
    queue = Queue(fresh=0, ahead=0)
    assert parts_with(lambda question: None, queue)._why_left(OFFER) is None
    assert queue.left_tokens == {"r": 0}


def test_a_planner_that_fails_leaves_the_prefix_to_sglang_and_is_counted() -> None:
    def fails(question: Any) -> str:
        raise ValueError("a defect")

    parts = parts_with(fails, Queue(fresh=0, ahead=0))
    assert parts._why_left(OFFER) == "planner failed"
    assert parts.engine.counters.planner_failures == 1


def test_whether_one_waits_is_asked_with_the_empty_pages_of_host_memory() -> None:
    asked: list[Any] = []

    def held_back(*question: Any) -> bool:
        asked.append(question)
        return True

    parts = parts_with(None, Queue(fresh=0, ahead=0))
    parts.context.host = SimpleNamespace(available=lambda: 7 * PAGE)  # type: ignore[assignment]
    parts.queue = SimpleNamespace(held_back=held_back)  # type: ignore[assignment]
    req: Any = object()
    assert parts.held_back(req)
    assert asked == [(req, 7, 3.0)]


def parts_that_order(proof: Proof) -> tuple[Parts, list[float]]:
    """Parts whose queue notes when it was sorted."""
    parts, sorted_at = parts_with(None, Queue(fresh=0, ahead=0)), list[float]()
    parts.context.tree = SimpleNamespace(pp_size=1)  # type: ignore[assignment]
    parts.engine.proof = proof
    queue = SimpleNamespace(sort=lambda waiting, now: sorted_at.append(now), in_force=True)
    parts.queue = queue  # type: ignore[assignment]
    return parts, sorted_at


def test_the_queue_is_ordered_once_restoring_is_proven_and_no_more_once_refuted() -> None:
    proof = Proof(looks=True)
    parts, sorted_at = parts_that_order(proof)
    parts.order_queue([])
    assert not sorted_at and proof.in_doubt
    proof.was_proven()
    parts.order_queue([])
    assert sorted_at == [3.0] and parts.orders
    proof.refute()
    parts.order_queue([])
    assert sorted_at == [3.0] and not parts.orders


def test_where_nothing_is_compared_the_queue_is_ordered_from_the_start() -> None:
    parts, sorted_at = parts_that_order(Proof())
    parts.order_queue([])
    assert sorted_at == [3.0]


def test_a_cache_of_sglangs_own_has_no_parts() -> None:
    assert parts_of(SimpleNamespace()) is None
