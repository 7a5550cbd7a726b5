"""When a session returns, and whether it does: learned per session and per tool, or stated by the
client.

An agent returns after its tool call, a person after reading. A gap is the time between the end of a
turn and the arrival of the next one. Gaps of one tool, and of one session, are similar (Continuum
decides by them how long KV caches are kept). The gaps longer than the time waited so far tell when
to expect the session, and when to give up on it.
"""

from __future__ import annotations

import heapq
import math
from array import array
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sgl_kvtier.policy.messages import Hint, HintAnswer

_PRIOR: Final = 2.0
"""The gaps of other sessions weigh as much as this many of the session's own."""
_EARLY, _MIDDLE, _LATE = 0.1, 0.5, 0.98
_MOST_TOOLS: Final = 256
_DISTRUST: Final = 3
"""After this many hints in a row that were wrong by more than a factor of _FAR, the delays that a
session's client states are ignored until one is right again.
"""
_FAR: Final = 4.0
_SOON_S: Final = 0.1
"""Delays below this many seconds count as equal."""
_BELIEVED: Final = 0.95
"""Probability that a session returns whose client stated a delay."""
_ALL: Final = ""
_SPARE_CHECKS: Final = 1000
LIKELY: Final = 0.5
"""A session counts as likely to return from this probability on."""
_KEEP_SHARE: Final = 0.99
_EVERYBODY: Final = 2.0
"""All sessions together weigh as much as this many sessions of the same class."""
_CLASSES: Final = 8
_LOW_S: Final = 1e-3
_PER_DECADE: Final = 8
_BUCKETS: Final = 64
"""1 ms to 10^5 s, each bucket a third longer than the one before: 256 bytes."""


def bucket_of(seconds: float) -> int:
    """The bucket of a duration. The first and the last one are open-ended."""
    if seconds <= _LOW_S:
        return 0
    return min(_BUCKETS - 1, int(math.log10(seconds / _LOW_S) * _PER_DECADE))


def _edge(bucket: int) -> float:
    return _LOW_S * 10 ** (bucket / _PER_DECADE)


class Gaps:
    """A histogram of durations. With each new sample, earlier ones keep `keep` of their weight."""

    def __init__(self, keep: float = 0.98) -> None:
        self._weights = array("f", bytes(4 * _BUCKETS))
        self._keep = keep
        self.total = 0.0

    def saw(self, seconds: float) -> None:
        """Adds a sample."""
        for bucket in range(_BUCKETS):
            self._weights[bucket] *= self._keep
        self._weights[bucket_of(seconds)] += 1.0
        self.total = self.total * self._keep + 1.0

    def weight(self, bucket: int) -> float:
        """The weight of the samples in a bucket."""
        return self._weights[bucket]


def longer(parts: list[tuple[Gaps, float]], elapsed_s: float) -> float:
    """The share of samples longer than this; 1 if there are none. `parts` as in `quantile`."""
    mix = _mixed(parts)
    whole = sum(mix)
    if whole <= 1e-9 or elapsed_s <= 0:
        return 1.0
    first = bucket_of(elapsed_s)
    return sum(mix[first + 1 :], mix[first] * _left_of(first, elapsed_s)) / whole


def quantile(parts: list[tuple[Gaps, float]], share: float, elapsed_s: float = 0.0) -> float | None:
    """The duration that `share` of the samples longer than `elapsed_s` do not exceed; None if there
    are none.

    `parts` are histograms with their weights. A weight is that of the whole histogram, however many
    samples it has. Samples are assumed to be evenly distributed within a bucket on the logarithmic
    scale, so a quantile is right to within a third.
    """
    mix = _mixed(parts)
    first = bucket_of(elapsed_s) if elapsed_s > 0 else 0
    mix[first] *= _left_of(first, elapsed_s)
    rest = sum(mix[first:])
    if rest <= 1e-9:
        return None
    below = 0.0
    for bucket in range(first, _BUCKETS):
        if below + mix[bucket] >= share * rest and mix[bucket] > 0:
            inside = (share * rest - below) / mix[bucket]
            low = max(elapsed_s, _edge(bucket)) if bucket else elapsed_s
            return (
                low * (_edge(bucket + 1) / low) ** inside if low > 0 else _edge(bucket + 1) * inside
            )
        below += mix[bucket]
    return _edge(_BUCKETS)


def _mixed(parts: list[tuple[Gaps, float]]) -> list[float]:
    mix = [0.0] * _BUCKETS
    for gaps, weight in parts:
        if gaps.total > 0:
            for bucket in range(_BUCKETS):
                mix[bucket] += gaps.weight(bucket) * weight / gaps.total
    return mix


def _left_of(bucket: int, elapsed_s: float) -> float:
    """The share of a bucket that is above a duration inside it."""
    if elapsed_s <= _LOW_S:
        return 1.0
    return max(0.0, 1 - math.log10(elapsed_s / _edge(bucket)) * _PER_DECADE)


def class_of(turns: int) -> int:
    """The class of a session: sessions of 1, 2 to 3, 4 to 7, ... turns behave similarly."""
    return min(turns.bit_length(), _CLASSES - 1)


class _Share:
    """Decayed counts of sessions that returned and that did not."""

    __slots__ = ("back", "gone")

    def __init__(self) -> None:
        self.back = self.gone = 0.0

    def count(self, back: float, gone: float) -> None:
        self.back = self.back * _KEEP_SHARE + back
        self.gone = max(0.0, self.gone * _KEEP_SHARE + gone)


class Returns:
    """Probability of return per class. Corrects itself if a session counted as gone returns."""

    def __init__(self) -> None:
        self._classes = [_Share() for _ in range(_CLASSES)]
        self._all = _Share()

    def came_back(self, turns: int, was_gone: bool) -> None:
        """A session returned after this number of turns."""
        for share in (self._classes[class_of(turns)], self._all):
            share.count(1.0, -1.0 if was_gone else 0.0)

    def gone(self, turns: int) -> None:
        """A session is no longer expected after this number of turns."""
        for share in (self._classes[class_of(turns)], self._all):
            share.count(0.0, 1.0)

    def chance(self, turns: int) -> float:
        """The probability that a session returns after this many turns; 0.5 if nothing is known."""
        everybody = (self._all.back + 1.0) / (self._all.back + self._all.gone + 2.0)
        own = self._classes[class_of(turns)]
        return (own.back + _EVERYBODY * everybody) / (own.back + own.gone + _EVERYBODY)


@dataclass(frozen=True, slots=True)
class Return:
    """When a session is expected, in seconds of the executor's clock."""

    session: str
    early: float
    """The time before which it probably does not return."""
    at: float
    """The time around which it probably returns; infinity: it is not expected."""
    next_use: float
    """The time of return that eviction uses, adjusted by its priority."""
    chance: float = 1.0
    """The probability that it returns at all."""


@dataclass(slots=True)
class _Session:
    gaps: Gaps = field(default_factory=lambda: Gaps(0.7))
    """Its own gaps so far."""
    left_at: float | None = None
    """When its last turn ended; None: it is not idle."""
    tool: str = _ALL
    """The tool that its last turn called; _ALL: not known."""
    delay_s: float | None = None
    """The gap that its client stated, in seconds, if it is believed."""
    claimed_s: float | None = None
    """The gap that its client stated, believed or not."""
    until: float = math.inf
    """The time until which it can return, as its client stated."""
    priority: int = 0
    """Priority of its pages, from -3 to 3, as its client stated."""
    wrong_hints: int = 0
    """Number of hints in a row that were wrong by more than a factor of _FAR."""
    turns: int = 0
    """Number of turns that have ended."""
    gone: bool = False
    """Whether it was counted as not returning."""
    serial: int = 0
    """Serial number of its valid check; 0: none."""


class _Check(NamedTuple):
    """When the prediction for a session has to be renewed."""

    at: float
    """Seconds of the executor's clock."""
    serial: int
    """The check is outdated if its session has another serial number."""
    session: str


class Sessions:
    """Expected returns of idle sessions. O(log sessions) per event, under 1 KB per session. With
    more than `most` sessions, those whose last turn is oldest are forgotten. One thread, no clock.
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
        self._checks: list[_Check] = []
        """A heap of the next checks, outdated ones included."""
        self._forgotten_checks = 0
        self._serial = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def returned(self, session: str, now: float) -> None:
        """The next turn of a session arrived."""
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
        """A turn ended, which called this tool, if known. Returns when to expect the next one."""
        known = self._touch(session)
        known.left_at = now
        known.turns += 1
        known.tool = tool or known.tool
        return self._expect(session, known, now)

    def hint(self, session: str, hint: Hint, now: float) -> HintAnswer:
        """Applies a client's hint. Delays and lifetimes are cut to the configured limit, unusable
        values refused with a reason.
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
        """When an idle session should return, as of now; None if it is unknown or not idle."""
        known = self._sessions.get(session)
        if known is None or known.left_at is None:
            return None
        return self._predict(session, known, now)

    def changed(self, now: float) -> list[Return]:
        """Renewed predictions of sessions whose predicted time, or stated lifetime, has passed."""
        due = []
        while self._checks and self._checks[0][0] <= now:
            _, serial, session = heapq.heappop(self._checks)
            known = self._sessions.get(session)
            if known is None:
                # A forgotten session is reported as not expected, and not checked again.
                due.append(Return(session, math.inf, math.inf, math.inf, 0.0))
            elif known.serial == serial and known.left_at is not None:
                due.append(self._expect(session, known, now))
        return due

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
        """Predicts the return, and schedules a check for when that time has passed."""
        expected = self._predict(session, known, now)
        self._serial += 1
        known.serial = self._serial
        if expected.at < math.inf:
            # Not at once again if the elapsed time hardly changes the prediction.
            again = max(expected.at, now + 0.05 * (now - (known.left_at or now)), now + 1e-3)
            check = _Check(min(again, max(known.until, now)), self._serial, session)
            heapq.heappush(self._checks, check)
            self._clear_checks()
        elif not known.gone and self._tools:
            known.gone = True
            self._returns.gone(known.turns)
        return expected

    def _clear_checks(self) -> None:
        """Removes outdated checks once most are. Keeps the valid one of each session, and the first
        one of each forgotten session.
        """
        if (
            len(self._checks)
            <= _SPARE_CHECKS + 4 * len(self._sessions) + 2 * self._forgotten_checks
        ):
            return
        kept: list[_Check] = []
        forgotten: dict[str, None] = {}
        for check in sorted(self._checks):
            known = self._sessions.get(check.session)
            if known is not None and known.serial == check.serial:
                kept.append(check)
            elif known is None and check.session not in forgotten:
                forgotten[check.session] = None
                kept.append(check)
        # A sorted list is a heap.
        self._checks = kept
        self._forgotten_checks = len(forgotten)

    def _predict(self, session: str, known: _Session, now: float) -> Return:
        assert known.left_at is not None, "only of idle sessions"
        idle_s = max(0.0, now - known.left_at)
        early, at = self._window(known, idle_s)
        if at == math.inf and known.priority > 0 and known.until < math.inf:
            # Its client wants its pages kept until then, and nothing else is known.
            early = at = known.until - known.left_at
        # A session whose client stated a delay may still be late.
        limit_s = self._idle_limit_s + (known.delay_s or 0.0)
        if known.priority > 0 and known.until < math.inf:
            limit_s = max(limit_s, known.until - known.left_at)
        if idle_s >= limit_s or now >= known.until:
            at = math.inf
        early = known.left_at + min(early, at)
        at = known.left_at + at
        next_use = now + (at - now) / 2.0**known.priority if at < math.inf else math.inf
        return Return(
            session, early, at, next_use, self._chance(known, idle_s) if at < math.inf else 0.0
        )

    def _chance(self, known: _Session, idle_s: float) -> float:
        """The probability that it returns at all, given that it has not returned yet."""
        if known.delay_s is not None and idle_s < _FAR * max(known.delay_s, _SOON_S):
            return _BELIEVED
        share = self._returns.chance(known.turns)
        waits = share * longer(self._parts(known), idle_s)
        return waits / (waits + 1 - share) if waits > 0 else 0.0

    def _parts(self, known: _Session) -> list[tuple[Gaps, float]]:
        """Its own gaps, and those of other sessions after the same tool, with their weights."""
        others = self._tools.get(known.tool) or self._tools.get(_ALL)
        own = (known.gaps, known.gaps.total)
        return [own] if others is None else [own, (others, _PRIOR)]

    def _window(self, known: _Session, idle_s: float) -> tuple[float, float]:
        """Early and median estimate of the gap, given that it is longer than the time passed."""
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
