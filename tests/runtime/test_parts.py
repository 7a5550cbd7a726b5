"""What the parts of one process ask the planner before a prefix is restored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sgl_kvtier.policy.messages import LeftToEngine, RestoreOffered, StepView
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.scheduler.parts import Parts, parts_of
from sgl_kvtier.types import Span, Tier

PAGE = 4
OFFER = RestoreOffered("r", 0.0, 50, 2, 10, ((Span(2, 4), Tier.HOST), (Span(4, 10), Tier.STORAGE)))


def parts_with(query: Any, fresh_tokens: int) -> Parts:
    """Parts whose view of the queue has so many fresh tokens, and whose planner answers so."""
    parts = object.__new__(Parts)
    view = StepView(3.0, ("r",), fresh_tokens=fresh_tokens)
    parts.context = SimpleNamespace(page=PAGE, scheduler=object(), moment=lambda: 3.0)  # type: ignore[assignment]
    parts.views = SimpleNamespace(of=lambda scheduler, now: view)  # type: ignore[assignment]
    parts.planner = SimpleNamespace(query=query)  # type: ignore[assignment]
    parts.engine = SimpleNamespace(counters=RestoreCounters())  # type: ignore[assignment]
    return parts


def test_what_a_request_itself_would_compute_is_not_fresh_in_the_view_it_is_asked_with() -> None:
    asked: list[LeftToEngine] = []
    parts = parts_with(asked.append, fresh_tokens=100)
    assert parts._why_left(OFFER) is None
    (question,) = asked
    assert question.offer is OFFER
    assert question.view.fresh_tokens == 100 - (50 - 4 * PAGE), (
        "of its 50 tokens 4 pages are on the device or in host memory"
    )


def test_a_planner_that_fails_leaves_the_prefix_to_sglang_and_is_counted() -> None:
    def fails(question: Any) -> str:
        raise ValueError("a defect")

    parts = parts_with(fails, fresh_tokens=0)
    assert parts._why_left(OFFER) == "planner failed"
    assert parts.engine.counters.planner_failures == 1


def test_a_cache_of_sglangs_own_has_no_parts() -> None:
    assert parts_of(SimpleNamespace()) is None
