"""A workload in numbers: lengths, waits, and how much of its prompts an infinite cache would hold.

Two figures of reuse are weighted by tokens. `session_reuse` is what a prompt shares with the same
session's previous prompt and output; first calls count as misses. `infinite_cache` is what it
shares with any earlier content of any session, sent or received, in the order given. It counts
whole pages from the prompt's start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from sgl_kvtier.lab.workload.encoder import Encoder, Ids, PromptTokens
from sgl_kvtier.lab.workload.encoder import output_tokens as tokens_asked
from sgl_kvtier.lab.workload.session import Call, Context, Session

_COUNTS = (
    *("sessions", "sub_agents", "calls", "edits", "clipped_messages", "truncated_sessions"),
    *("divisor", "page_tokens", "prompt_tokens_total"),
)
_SHOWN = {"min": 0, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass
class WorkloadStats:
    """The findings of `describe`. Lists have one entry per session, per call, or per call but the
    first, as their names say.
    """

    divisor: int
    page_tokens: int
    sessions: int = 0
    sub_agents: int = 0
    calls: int = 0
    edits: int = 0
    clipped_messages: int = 0
    truncated_sessions: int = 0
    prompt_tokens_total: int = 0
    kept_tokens_total: int = 0
    cached_tokens_total: int = 0
    calls_per_session: list[int] = field(default_factory=list)
    first_prompt_tokens: list[int] = field(default_factory=list)
    final_context_tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)

    @property
    def session_reuse(self) -> float:
        """Share of all prompt tokens that stood in the same session's previous prompt and
        output.
        """
        return self.kept_tokens_total / max(1, self.prompt_tokens_total)

    @property
    def infinite_cache(self) -> float:
        """Share of all prompt tokens that a cache of all sessions and without a bound would hold,
        in whole pages.
        """
        return self.cached_tokens_total / max(1, self.prompt_tokens_total)

    def totals(self) -> dict[str, Any]:
        """The single numbers, by name."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "session_reuse_fraction": self.session_reuse,
            "infinite_cache_fraction": self.infinite_cache,
        }

    def rows(self) -> list[dict[str, Any]]:
        """The distributions: one row each with its unit, min, p10, p50, p90, p99, max, mean and n.
        Empty ones are left out.
        """
        named: list[tuple[str, str, list[int] | list[float]]] = [
            ("calls per session", "", self.calls_per_session),
            ("first prompt", "tokens", self.first_prompt_tokens),
            ("prompt per call", "tokens", self.prompt_tokens),
            ("new in the prompt since the call before", "tokens", self.new_tokens),
            ("output per call", "tokens", self.output_tokens),
            ("context at the end", "tokens", self.final_context_tokens),
            ("client's wait before a call", "s", self.gap_s),
            ("recorded server time", "s", self.latency_s),
        ]
        return [_row(name, unit, values) for name, unit, values in named if values]


def describe(
    sessions: Iterable[Session], encoder: Encoder, *, page_tokens: int = 16
) -> WorkloadStats:
    """The statistics of `sessions` as `encoder` would send them; tokens are at its scale."""
    stats = WorkloadStats(divisor=encoder.divisor, page_tokens=page_tokens)
    seen: set[int] = set()
    for session in sessions:
        _add_session(stats, session, encoder, seen)
    return stats


def _add_session(stats: WorkloadStats, session: Session, encoder: Encoder, seen: set[int]) -> None:
    tokens = PromptTokens(encoder)
    pages = _PageChain(stats.page_tokens, seen)
    context = Context(session)
    calls = 0
    for call, prompt in context.calls():
        kept = tokens.show(prompt)
        length = len(tokens)
        stats.cached_tokens_total += pages.extend(tokens.ids, kept)
        stats.prompt_tokens_total += length
        stats.kept_tokens_total += kept
        stats.prompt_tokens.append(length)
        if calls:
            stats.new_tokens.append(length - kept)
            stats.gap_s.append(call.gap_s)
        else:
            stats.first_prompt_tokens.append(length)
        _add_call(stats, call, encoder)
        if call.output is not None:
            tokens.append(call.output)
            pages.extend(tokens.ids, length)
        calls += 1
    stats.sessions += session.parent is None
    stats.sub_agents += session.parent is not None
    stats.calls += calls
    stats.edits += session.edits
    stats.clipped_messages += session.clipped_messages
    stats.truncated_sessions += session.truncated
    stats.calls_per_session.append(calls)
    stats.final_context_tokens.append(len(tokens))


def _add_call(stats: WorkloadStats, call: Call, encoder: Encoder) -> None:
    stats.output_tokens.append(tokens_asked(call, encoder))
    if call.latency_s is not None:
        stats.latency_s.append(call.latency_s)


class _PageChain:
    """One session's whole pages as chained hashes, each naming all tokens up to its end, added to
    what was seen.
    """

    def __init__(self, page_tokens: int, seen: set[int]) -> None:
        self._page = page_tokens
        self._seen = seen
        self._keys: list[int] = []

    def extend(self, ids: Ids, kept: int) -> int:
        """Takes `ids`, whose first `kept` are as before, as the present prompt. Returns how many
        leading tokens were seen.
        """
        del self._keys[kept // self._page :]
        hit = len(self._keys)
        all_seen = True
        for start in range(hit * self._page, len(ids) // self._page * self._page, self._page):
            before = self._keys[-1] if self._keys else 0
            key = xxhash.xxh3_64_intdigest(ids[start : start + self._page].tobytes(), before)
            all_seen = all_seen and key in self._seen
            hit += all_seen
            self._keys.append(key)
            self._seen.add(key)
        return hit * self._page


def _row(name: str, unit: str, values: list[int] | list[float]) -> dict[str, Any]:
    points = np.percentile(values, list(_SHOWN.values()))
    shown = {key: float(point) for key, point in zip(_SHOWN, points, strict=True)}
    return {
        "quantity": name,
        "unit": unit,
        **shown,
        "mean": float(np.mean(values)),
        "n": len(values),
    }
