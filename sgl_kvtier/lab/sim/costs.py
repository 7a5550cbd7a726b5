"""The true cost of an engine step in virtual time. A planner learns its own model of it, or is told
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sgl_kvtier.lab.profile import Profile
from sgl_kvtier.types import Span


@dataclass(frozen=True, slots=True)
class Batch:
    """The contents of one engine step. `prefills` are token spans of prompts. `decodes` are running
    sequences with `kv_tokens` of context in all. `background` are prefill tokens of other users
    (Cake 5.1: the rest of the token budget). `passes` are (tokens, share of the layers) of prefixes
    that are computed by layers.
    """

    prefills: tuple[Span, ...] = ()
    decodes: int = 0
    kv_tokens: int = 0
    background: int = 0
    passes: tuple[tuple[int, float], ...] = ()

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of requests that are simulated."""
        return sum(map(len, self.prefills))


class Cost(Protocol):
    """Seconds of one step."""

    def seconds(self, batch: Batch) -> float:
        """How long the step takes with the machine to itself."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, linear in its contents. There is a floor: the weights have to be read
    whatever the batch holds.

    fixed + max(floor, a * tokens) + b * sum n (start + n / 2) + c * kv tokens of decoding
    sequences, tokens being those of prefill, background and decode.
    """

    fixed_s: float
    per_token_s: float
    per_token_position_s: float = 0.0
    floor_s: float = 0.0
    per_kv_token_s: float = 0.0

    def seconds(self, batch: Batch) -> float:
        """How long the step takes with the machine to itself. A pass through some layers takes
        their share of one through all.
        """
        if batch.passes:
            return sum(
                share * self.seconds(Batch((Span(0, tokens),))) for tokens, share in batch.passes
            ) + (self.seconds(Batch(batch.prefills)) if batch.prefills else 0.0)
        tokens = batch.prefill_tokens + batch.background + batch.decodes
        pairs = sum(len(span) * (span.start + len(span) / 2) for span in batch.prefills)
        pairs += batch.background**2 / 2
        return (
            self.fixed_s
            + max(self.floor_s, self.per_token_s * tokens)
            + self.per_token_position_s * pairs
            + self.per_kv_token_s * batch.kv_tokens
        )


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Seconds of a step by a profile of measured operators, as a paced device takes them. Launches
    and the scheduler's own time are in none of them.

    In a step with both, decoding tokens count as tokens of the prefill, and their contexts as in a
    decode step. Background tokens and passes by layers are of papers, which have other costs.
    """

    profile: Profile

    def seconds(self, batch: Batch) -> float:
        """How long the step takes with the machine to itself."""
        assert not batch.background and not batch.passes, "no profile has times of these"
        spans = [(len(span), span.start) for span in batch.prefills]
        if not batch.decodes:
            return self.profile.prefill_seconds(spans)
        context = batch.kv_tokens / batch.decodes
        decode = self.profile.decode
        if not spans:
            return decode.at(batch.decodes, context)
        contexts_s = decode.at(batch.decodes, context) - decode.at(batch.decodes, 0)
        return self.profile.prefill_seconds([*spans, (batch.decodes, 0)]) + max(contexts_s, 0.0)
