"""The load of TierKV's simulated server: Poisson arrivals with contexts and generation lengths from
stated ranges.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `context` tokens of KV are there when it starts, `generate` tokens are added one
    per step.
    """

    rid: int
    arrival_s: float
    context: int
    generate: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """A mixture of uniform ranges of tokens: (share, lowest, highest), the shares adding up to
    1.
    """

    parts: tuple[tuple[float, int, int], ...]

    def __post_init__(self) -> None:
        if abs(sum(share for share, _, _ in self.parts) - 1) > 1e-9 or any(
            not 0 < a <= b for _, a, b in self.parts
        ):
            raise ValueError(
                f"shares must add up to 1 and ranges ascend from 1 or more: {self.parts}"
            )

    @property
    def mean(self) -> float:
        """Tokens on average."""
        return sum(share * (low + high) / 2 for share, low, high in self.parts)

    def draw(self, rng: random.Random) -> int:
        """One length."""
        at = rng.random()
        for share, low, high in self.parts:
            at -= share
            if at < 0:
                return rng.randint(low, high)
        return rng.randint(*self.parts[-1][1:])


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests of which lengths; `tokens_per_s` is what they ask to be generated per
    second.
    """

    requests: int
    tokens_per_s: float
    contexts: Lengths
    generated: Lengths


def arrivals(load: Load, seed: int) -> Sequence[Request]:
    """The requests in order of arrival; the same for the same load and seed."""
    rng = random.Random(seed)
    now, made = 0.0, []
    for rid in range(load.requests):
        now += rng.expovariate(load.tokens_per_s / load.generated.mean)
        made.append(Request(rid, now, load.contexts.draw(rng), load.generated.draw(rng)))
    return made
