"""Offers of a decision log that were declined, and whether that was right in hindsight.

A planner made as the log says decides it again. At each offer that was left to the engine it is
asked what restoring would have taken, as it knew the server then. The log has when the request's
prompt was computed in fact. The prediction knows no lack of memory: where there was no room, it
says what room would have been worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvtier.lab.pages.stats import summary
from sgl_kvtier.policy.decision_log import LinesDropped, PlannerFailed, Query, Record
from sgl_kvtier.policy.messages import ChunkDone, LeftToEngine
from sgl_kvtier.policy.planner import Planner


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


class Hindsight:
    """Notes the declined offers of a log while it is replayed, up to a gap in it or a failure of
    the planner.
    """

    def __init__(self) -> None:
        self.found: list[Declined] = []
        """In their order."""
        self.over = False
        self._waiting: dict[str, list[Declined]] = {}

    def see(self, planner: Planner, record: Record) -> None:
        """The next record, before the planner is given it."""
        self.over = self.over or isinstance(record, (LinesDropped, PlannerFailed))
        if self.over:
            return
        if isinstance(record, Query) and isinstance(record.question, LeftToEngine):
            self._asked(planner, record.question, record.answer)
        elif isinstance(record, ChunkDone):
            for one in self._waiting.get(record.rid, ()):
                if one.took_s is None and record.tokens.stop >= one.prompt_tokens:
                    one.took_s = record.now - one.now

    def _asked(self, planner: Planner, question: LeftToEngine, answer: object) -> None:
        offer, now = question.offer, question.view.now
        if answer is None:  # restored after all
            gone = self._waiting.pop(offer.rid, ())
            self.found = [one for one in self.found if one not in gone]
            return
        try:
            promised_s = planner.promised_s(question)
        except Exception:  # the replay tells where the planner fails
            self.over = True
            return
        one = Declined(offer.rid, str(answer), now, offer.prompt_tokens, promised_s)
        self.found.append(one)
        self._waiting.setdefault(offer.rid, []).append(one)


def by_reason(found: Sequence[Declined]) -> dict[str, dict[str, Any]]:
    """Per reason, the most frequent first: `offers`, `requests`, of how many the end is `known`,
    `right_fraction` of these, and the means `promised_ms` and `took_ms`.
    """
    reasons = sorted({one.reason for one in found})
    rows = {reason: _figures([o for o in found if o.reason == reason]) for reason in reasons}
    return dict(sorted(rows.items(), key=lambda row: -row[1]["offers"]))


def _figures(found: Sequence[Declined]) -> dict[str, Any]:
    known = [one for one in found if one.took_s is not None]
    return {
        "offers": len(found),
        "requests": len({one.rid for one in found}),
        "known": len(known),
        "right_fraction": _mean([float(bool(one.right)) for one in known]),
        "promised_ms": _mean([1e3 * one.promised_s for one in known]),
        "took_ms": _mean([1e3 * (one.took_s or 0.0) for one in known]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return summary(values)["mean"]
