"""When a session comes back: learned per session and per tool, or told by the client.

An agent returns after its tool call, a person after reading. The time between a turn's end and the
next turn's arrival is a gap. Gaps of one tool, and of one session, resemble each other (Continuum
keeps KV caches by exactly that). The gaps longer than the time already waited say when to expect
the session, and when to give it up.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Final

from sgl_kvtier.policy.messages import Hint, HintAnswer
from sgl_kvtier.policy.sessions.gaps import Gaps, longer, quantile
from sgl_kvtier.policy.sessions.returns import Returns

_PRIOR: Final = 2.0
"""Gaps of other sessions count as much as this many of the session's own."""
_EARLY, _MIDDLE, _LATE = 0.1, 0.5, 0.98
_MOST_TOOLS: Final = 256
_DISTRUST: Final = 3
"""After this many hints in a row that were wrong by more than _FAR, a session's delays are ignored
until one is right again.
"""
_FAR: Final = 4.0
_SOON_S: Final = 0.1
"""Delays shorter than this many seconds count as equal."""
_BELIEVED: Final = 0.95
"""The chance of return of a session whose client said when it comes."""
_ALL: Final = ""
_SPARE_CHECKS: Final = 1000


@dataclass(frozen=True, slots=True)
class Return:
    """When a session is expected, in seconds of the executor's clock. `early`: hardly before. `at`:
    probably around then (infinity: not any more). `next_use`: the time used for eviction, weighed
    by its priority. `chance`: the probability that it comes back at all.
    """

    session: str
    early: float
    at: float
    next_use: float
    chance: float = 1.0


@dataclass(slots=True)
class _Session:
    gaps: Gaps = field(default_factory=lambda: Gaps(0.7))
    left_at: float | None = None
    tool: str = _ALL
    delay_s: float | None = None
    claimed_s: float | None = None
    """The delay its client stated, believed or not."""
    until: float = math.inf
    priority: int = 0
    wrong_hints: int = 0
    turns: int = 0
    gone: bool = False
    serial: int = 0


class Sessions:
    """Expected returns of idle sessions. O(log sessions) per event, under 1 KB per session;
    sessions idle the longest are forgotten beyond `most`. One thread, no clock: seconds are the
    executor's.
    """

    def __init__(
        self, idle_limit_s: float = 900.0, hint_limit_s: float = 3600.0, most: int = 10_000
    ) -> None:
        self._idle_limit_s = idle_limit_s
        self._hint_limit_s = hint_limit_s
        self._most = most
        self._sessions: dict[str, _Session] = {}
        self._tools: dict[str, Gaps] = {}
        self._returns = Returns()
        self._checks: list[tuple[float, int, str]] = []
        """A heap of the times of the next checks; it also has outdated entries."""
        self._forgotten_checks = 0
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def returned(self, session: str, now: float) -> None:
        """A session's next turn has arrived."""
        known = self._touch(session)
        if known.left_at is not None:
            gap_s = max(0.0, now - known.left_at)
            self._returns.came_back(known.turns, known.gone)
            known.gone = False
            known.gaps.saw(gap_s)
            for tool in dict.fromkeys((known.tool, _ALL)):
                self._tool(tool).saw(gap_s)
            if known.claimed_s is not None:
                off = max(known.claimed_s, _SOON_S) / max(gap_s, _SOON_S)
                known.wrong_hints = known.wrong_hints + 1 if not 1 / _FAR <= off <= _FAR else 0
        known.left_at = known.delay_s = known.claimed_s = None
        known.until = math.inf
        known.tool = _ALL
        known.serial = 0

    def left(self, session: str, now: float, tool: str | None = None) -> Return:
        """A turn has ended; `tool`: the one it called, if known. Returns when to expect it."""
        known = self._touch(session)
        known.left_at = now
        known.turns += 1
        known.tool = tool or known.tool
        return self._expect(session, known, now)

    def hint(self, session: str, hint: Hint, now: float) -> HintAnswer:
        """Takes a client's hint. Delays and lifetimes are cut to the configured limit; unusable
        values are refused with a reason.
        """
        known = self._sessions.get(session)
        if known is None:
            return HintAnswer(
                False, "no turn of this session is known; send the hint after its first request"
            )
        for name, value in (("expected_delay_s", hint.expected_delay_s), ("ttl_s", hint.ttl_s)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                return HintAnswer(
                    False, f"{name} = {value}: must be a number of seconds of at least 0"
                )
        notes: list[str] = []
        cut: list[str] = []
        if hint.expected_delay_s is not None:
            idle_s = now - known.left_at if known.left_at is not None else 0.0
            known.claimed_s = idle_s + self._clip("expected_delay_s", hint.expected_delay_s, cut)
        if hint.expected_delay_s is not None and known.wrong_hints >= _DISTRUST:
            return HintAnswer(
                False,
                f"the last {known.wrong_hints} expected delays of this session were wrong by more "
                f"than a factor of {_FAR:g}; they are believed again once one is right",
            )
        if hint.priority is not None:
            known.priority = max(-3, min(3, hint.priority))
            if known.priority != hint.priority:
                notes.append(f"priority {hint.priority} taken as {known.priority}")
        if hint.expected_delay_s is not None:
            known.delay_s = known.claimed_s
            notes += cut
        if hint.ttl_s is not None:
            known.until = now + self._clip("ttl_s", hint.ttl_s, notes)
        if hint.tool is not None:
            known.tool = hint.tool[:64]
        if known.left_at is not None:
            self._expect(session, known, now)
        return HintAnswer(True, "; ".join(notes))

    def expected(self, session: str, now: float) -> Return | None:
        """When an idle session should return, as of now; None when it is unknown or not idle."""
        known = self._sessions.get(session)
        if known is None or known.left_at is None:
            return None
        return self._predict(session, known, now)

    def changed(self, now: float) -> list[Return]:
        """Sessions whose expectation is to be renewed: it has passed, or a hint changed it."""
        due = []
        while self._checks and self._checks[0][0] <= now:
            _, serial, session = heapq.heappop(self._checks)
            known = self._sessions.get(session)
            if known is None:
                # Forgotten sessions are not checked again.
                due.append(Return(session, math.inf, math.inf, math.inf, 0.0))
            elif known.serial == serial and known.left_at is not None:
                due.append(self._expect(session, known, now))
        return due

    def forget(self, session: str) -> None:
        """A session has ended."""
        self._sessions.pop(session, None)
        self._clear_checks()

    # --- inside -----------------------------------------------------------------------------------

    def _touch(self, session: str) -> _Session:
        known = self._sessions.pop(session, None) or _Session()
        self._sessions[session] = known
        if len(self._sessions) > self._most:
            del self._sessions[next(iter(self._sessions))]
        return known

    def _tool(self, tool: str) -> Gaps:
        gaps = self._tools.pop(tool, None) or Gaps()
        self._tools[tool] = gaps
        if len(self._tools) > _MOST_TOOLS:
            del self._tools[next(name for name in self._tools if name != _ALL)]
        return gaps

    def _clip(self, name: str, value: float, notes: list[str]) -> float:
        if value > self._hint_limit_s:
            notes.append(f"{name} {value:g} cut to {self._hint_limit_s:g}")
        return min(value, self._hint_limit_s)

    def _expect(self, session: str, known: _Session, now: float) -> Return:
        """Predicts, and schedules a check for when the prediction has passed."""
        expected = self._predict(session, known, now)
        self._serial += 1
        known.serial = self._serial
        if expected.at < math.inf:
            # Not again at once where elapsed time hardly moves the prediction.
            again = max(expected.at, now + 0.05 * (now - (known.left_at or now)), now + 1e-3)
            heapq.heappush(self._checks, (min(again, max(known.until, now)), self._serial, session))
            self._clear_checks()
        elif not known.gone and self._tools:
            known.gone = True
            self._returns.gone(known.turns)
        return expected

    def _clear_checks(self) -> None:
        """Removes outdated entries once most of them are: keeps the valid one of each session, and
        the first of each that was forgotten.
        """
        if (
            len(self._checks)
            <= _SPARE_CHECKS + 4 * len(self._sessions) + 2 * self._forgotten_checks
        ):
            return
        kept: list[tuple[float, int, str]] = []
        forgotten: dict[str, None] = {}
        for check in sorted(self._checks):
            known = self._sessions.get(check[2])
            if known is not None and known.serial == check[1]:
                kept.append(check)
            elif known is None and check[2] not in forgotten:
                forgotten[check[2]] = None
                kept.append(check)
        # A sorted list is a heap.
        self._checks = kept
        self._forgotten_checks = len(forgotten)

    def _predict(self, session: str, known: _Session, now: float) -> Return:
        assert known.left_at is not None, "only of idle sessions"
        idle_s = max(0.0, now - known.left_at)
        early, at = self._window(known, idle_s)
        # A session whose client said when it comes may still be late.
        limit_s = self._idle_limit_s + (known.delay_s or 0.0)
        if idle_s >= limit_s or now >= known.until:
            at = math.inf
        early = known.left_at + min(early, at)
        at = known.left_at + at
        next_use = now + (at - now) / 2.0**known.priority if at < math.inf else math.inf
        return Return(
            session, early, at, next_use, self._chance(known, idle_s) if at < math.inf else 0.0
        )

    def _chance(self, known: _Session, idle_s: float) -> float:
        """The chance that it comes back at all, given that it has not come yet."""
        if known.delay_s is not None and idle_s < _FAR * max(known.delay_s, _SOON_S):
            return _BELIEVED
        share = self._returns.chance(known.turns)
        waits = share * longer(self._parts(known), idle_s)
        return waits / (waits + 1 - share) if waits > 0 else 0.0

    def _parts(self, known: _Session) -> list[tuple[Gaps, float]]:
        """Its own gaps, and those of other sessions with the same tool, with their weights."""
        others = self._tools.get(known.tool) or self._tools.get(_ALL)
        own = (known.gaps, known.gaps.total)
        return [own] if others is None else [own, (others, _PRIOR)]

    def _window(self, known: _Session, idle_s: float) -> tuple[float, float]:
        """Early and middle guess of the gap, given that it is longer than the time passed."""
        if known.delay_s is not None and idle_s < _FAR * max(known.delay_s, _SOON_S):
            return (
                (known.delay_s * 0.8, known.delay_s)
                if idle_s <= known.delay_s
                else (idle_s, idle_s * 1.25)
            )
        parts = self._parts(known)
        if known.delay_s is None:
            latest = quantile(parts, _LATE)
            if latest is None or idle_s > 2 * latest:
                return math.inf, math.inf
        early, at = (quantile(parts, share, idle_s) for share in (_EARLY, _MIDDLE))
        return (math.inf, math.inf) if early is None or at is None else (early, at)
