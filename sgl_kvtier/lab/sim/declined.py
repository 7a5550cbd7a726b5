"""Offers of a decision log that were declined, and whether that was right in hindsight.

A planner made as the log says decides it again. At each offer that was left to the engine it is
asked what restoring would have taken, as it knew the server then. The log has when the request's
prompt was computed in fact. The prediction knows no lack of memory: where there was no room, it
says what room would have been worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.pages.stats import summary
from sgl_kvtier.policy.decision_log import (
    LinesDropped,
    PlannerFailed,
    Query,
    Reader,
    Record,
    decode_header,
)
from sgl_kvtier.policy.messages import ChunkDone, Fact, LeftToEngine, StepPlan, StepView
from sgl_kvtier.policy.planner import Planner, make_planner


@dataclass
class Declined:
    """One offer that was left to the engine. Seconds count from then, until its prompt was
    computed.
    """

    rid: str
    reason: str
    now: float
    prompt_tokens: int
    promised_s: float
    took_s: float | None = None

    @property
    def right(self) -> bool | None:
        """Whether it was computed no later than a restoration was predicted to; None where the log
        ends before.
        """
        return None if self.took_s is None else self.took_s <= self.promised_s


def declined(lines: Iterable[str]) -> list[Declined]:
    """The declined offers of a log in their order, up to a gap in it or a failure of the planner.
    Raises TraceError on a damaged log, and where the planner decides otherwise than raising.
    """
    planner: Planner | None = None
    reader, found = Reader(), list[Declined]()
    waiting: dict[str, list[Declined]] = {}
    for line in lines:
        if planner is None:
            header = decode_header(line)
            planner = make_planner(header.config, header.engine, header.profile)
            continue
        record = reader.decode(line)
        if isinstance(record, (LinesDropped, PlannerFailed)):
            break
        if isinstance(record, Query) and isinstance(record.question, LeftToEngine):
            rid = record.question.offer.rid
            if record.answer is not None:
                one = _declined(planner, record.question, str(record.answer))
                found.append(one)
                waiting.setdefault(rid, []).append(one)
            else:  # restored after all
                gone = waiting.pop(rid, ())
                found = [one for one in found if one not in gone]
        elif isinstance(record, ChunkDone):
            _computed(waiting, record)
        _follow(planner, record)
    return found


def _declined(planner: Planner, question: LeftToEngine, reason: str) -> Declined:
    offer, now = question.offer, question.view.now
    return Declined(offer.rid, reason, now, offer.prompt_tokens, planner.promised_s(question))


def _computed(waiting: dict[str, list[Declined]], chunk: ChunkDone) -> None:
    """Notes that the prompts of these offers are computed, if they are."""
    for one in waiting.get(chunk.rid, ()):
        if one.took_s is None and chunk.tokens.stop >= one.prompt_tokens:
            one.took_s = chunk.now - one.now


def _follow(planner: Planner, record: Record) -> None:
    try:
        if isinstance(record, StepView):
            planner.step(record)
        elif isinstance(record, Query):
            planner.query(record.question)
        elif not isinstance(record, (StepPlan, LinesDropped, PlannerFailed)):
            fact: Fact = record
            planner.observe(fact)
    except Exception as error:
        raise TraceError(f"the planner failed where the log's did not: {error!r:.200}") from error


def by_reason(found: Sequence[Declined], dilation: float = 1.0) -> dict[str, dict[str, Any]]:
    """Per reason, the most frequent first: `offers`, `requests`, of how many the end is `known`,
    `right_fraction` of these, and the means `promised_ms` and `took_ms`, divided by a dilation.
    """
    reasons = sorted({one.reason for one in found})
    rows = {
        reason: _figures([o for o in found if o.reason == reason], dilation) for reason in reasons
    }
    return dict(sorted(rows.items(), key=lambda row: -row[1]["offers"]))


def _figures(found: Sequence[Declined], dilation: float) -> dict[str, Any]:
    known = [one for one in found if one.took_s is not None]
    return {
        "offers": len(found),
        "requests": len({one.rid for one in found}),
        "known": len(known),
        "right_fraction": _mean([float(bool(one.right)) for one in known]),
        "promised_ms": _mean([1e3 * one.promised_s / dilation for one in known]),
        "took_ms": _mean([1e3 * (one.took_s or 0.0) / dilation for one in known]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return summary(values)["mean"]
