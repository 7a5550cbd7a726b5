"""What only a running server's log has: changed settings, a planner that failed, and holes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.sim.replay import replay
from sgl_kvtier.policy.decision_log import (
    Header,
    LinesDropped,
    PlannerFailed,
    Query,
    Record,
    encode,
    encode_header,
)
from sgl_kvtier.policy.messages import (
    Fact,
    Hint,
    Hinted,
    LeftToEngine,
    Mode,
    PolicyChanged,
    Question,
    Queued,
    ReadsDue,
    RequestArrived,
    RequestFinished,
    RestoreOffered,
    SessionsWith,
    StepPlan,
    StepView,
)
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import PageKey, Span, Tier

CONFIG = PolicyConfig(restore="both")
ENGINE = EngineShape(page_tokens=16, page_bytes=4096, chunk_tokens=256)
PAGES = {Tier.DEVICE: 500, Tier.HOST: 500}


def offer(rid: str, now: float) -> RestoreOffered:
    return RestoreOffered(rid, now, 1024, 0, 60, ((Span(0, 60), Tier.STORAGE),))


class Raises:
    """A planner with a defect: it raises at every offer named "bad"."""

    def __init__(self) -> None:
        self.inner = make_planner(CONFIG, ENGINE)

    def observe(self, fact: Fact) -> None:
        if isinstance(fact, RestoreOffered) and fact.rid == "bad":
            raise ValueError("a defect")
        self.inner.observe(fact)

    def step(self, view: StepView) -> StepPlan:
        return self.inner.step(view)


def log_of(*records: Record) -> list[str]:
    return [encode_header(Header(CONFIG, ENGINE)), *map(encode, records)]


def answered(config: PolicyConfig = CONFIG) -> tuple[list[Record], StepPlan]:
    """An offer, a change of settings, a view, and the plan that follows."""
    planner = make_planner(CONFIG, ENGINE)
    view = StepView(1.5, ("a",), free_pages=PAGES)
    planner.observe(offer("a", 1.0))
    planner.observe(PolicyChanged(config, 1.2))
    plan = planner.step(view)
    return [offer("a", 1.0), PolicyChanged(config, 1.2), view, plan], plan


def test_a_log_with_changed_settings_is_replayed_under_them() -> None:
    records, plan = answered(replace(CONFIG, restore="load"))
    assert [start.mode for start in plan.starts] == [Mode.LOAD]
    replayed = replay(log_of(*records))
    assert replayed.difference is None
    assert (replayed.facts, replayed.steps, replayed.changes) == (2, 1, 1)


def test_without_the_change_the_same_log_is_decided_otherwise() -> None:
    records, _ = answered(replace(CONFIG, restore="load"))
    replayed = replay(log_of(*(r for r in records if not isinstance(r, PolicyChanged))))
    assert replayed.difference is not None
    assert replayed.difference.line == 4


def test_a_hole_ends_the_replay_and_says_how_much_was_the_same() -> None:
    records, _ = answered()
    with pytest.raises(
        TraceError, match=r"line 6: 3 lines were dropped .* the 1 plans before are identical"
    ):
        replay(log_of(*records, LinesDropped(3), StepView(2.0)))


def test_a_planner_that_failed_must_fail_again() -> None:
    lines = log_of(
        offer("bad", 1.0), PlannerFailed("ValueError('a defect')"), StepView(1.5), StepPlan()
    )
    again = replay(lines, lambda header: Raises())
    assert (again.difference, again.failures, again.steps) == (None, 1, 1)
    mended = replay(lines)
    assert mended.difference is not None
    assert mended.difference.line == 3
    assert "no failure" in str(mended.difference)


def test_a_planner_that_fails_only_now_is_a_difference() -> None:
    replayed = replay(log_of(offer("bad", 1.0), StepView(1.5), StepPlan()), lambda header: Raises())
    assert replayed.difference is not None
    assert isinstance(replayed.difference.planned, PlannerFailed)


QUEUE = (Queued("a", 3, True), Queued("b", 4, False), Queued("c", 5, True))


def questions() -> list[Record]:
    """What was asked between two steps, with the answers of a planner of its own; the last two have
    others.
    """
    config = replace(CONFIG, restore="auto")
    planner = make_planner(config, ENGINE)
    planner.observe(PolicyChanged(config, 1.0))
    view = StepView(1.0, ("a",), free_pages={Tier.DEVICE: 1})
    asked = LeftToEngine(offer("a", 1.0), view)
    why = planner.query(asked)
    assert why == "no room"
    return [
        PolicyChanged(config, 1.0),
        Query(asked, why),
        Query(ReadsDue(QUEUE, 12), ("a", "c")),
        Query(ReadsDue(QUEUE, 11), ("a",)),
        Query(asked, None),
        Query(ReadsDue(QUEUE, 11), ("a", "c")),
    ]


def test_answers_between_steps_must_be_the_same() -> None:
    *same, other_reason, other_reads = questions()
    replayed = replay(log_of(*same))
    assert (replayed.difference, replayed.questions) == (None, 3)
    for other in (other_reason, other_reads):
        difference = replay(log_of(*same, other)).difference
        assert difference is not None
        assert difference.line == 6
        assert '"no room"' in str(difference) or '"answer":["a"]' in str(difference)


class FailsToAnswer(Raises):
    """And it raises when it is asked for reads."""

    def query(self, question: Question[object]) -> object:
        raise ValueError("another defect")


def test_a_planner_that_fails_to_answer_is_a_difference_and_one_that_cannot_ends_the_replay() -> (
    None
):
    lines = log_of(Query(ReadsDue(QUEUE, 12), ("a", "c")))
    difference = replay(lines, lambda header: FailsToAnswer()).difference
    assert difference is not None
    assert isinstance(difference.planned, PlannerFailed)
    assert "at the beginning" in str(difference)
    with pytest.raises(TraceError, match="no way to answer"):
        replay(lines, lambda header: Raises())


def test_what_a_hint_was_answered_must_be_the_same() -> None:
    key = PageKey(b"k" * 32)
    planner = make_planner(CONFIG, ENGINE)
    facts = RequestArrived("r", 0.0, 20, (key,), "s"), RequestFinished("r", 1.0, keys=(key,))
    for fact in facts:
        planner.observe(fact)
    asked, hinted = SessionsWith(key), Hinted("s", Hint(expected_delay_s=5.0), 2.0)
    said = Query(asked, planner.query(asked)), Query(hinted, planner.query(hinted))
    assert said[0].answer == ("s",) and said[1].answer.returns_at == 7.0  # type: ignore[union-attr]
    assert replay(log_of(*facts, *said)).difference is None
    other = replace(said[1], answer=replace(said[1].answer, returns_at=8.0))  # type: ignore[type-var]
    difference = replay(log_of(*facts, said[0], other)).difference
    assert difference is not None and difference.line == 5
