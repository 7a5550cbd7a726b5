"""Counters of lookahead since the server started, written by the scheduler's thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from sgl_kvtier.runtime.metrics import Sample, plain_numbers
from sgl_kvtier.types import PLACES, Link, Tier


@dataclass
class LookaheadCounters:
    """Pages are SGLang's. Tokens under tier None were in no tier, so they had to be computed."""

    moved_bytes: Counter[Link] = field(default_factory=Counter)
    failed_moves: Counter[str] = field(default_factory=Counter)
    hit_tokens: Counter[Tier | None] = field(default_factory=Counter)
    victims: int = 0
    host_victims: int = 0
    drift: int = 0
    failures: int = 0
    checks: int = 0

    def counts(self, wasted_bytes: int) -> Iterator[Sample]:
        """All of them, for /metrics. Any thread: iterates over copies."""
        for link in (Link.HOST_TO_DEVICE, Link.STORAGE_TO_HOST, Link.REMOTE_TO_HOST):
            yield "moved_bytes", {"link": link.value}, self.moved_bytes[link]
        for reason, pages in dict(self.failed_moves).items():
            yield "failed_moves", {"reason": reason}, pages
        for tier in (*Tier, None):
            yield (
                "hit_tokens",
                {"tier": "none" if tier is None else PLACES[tier]},
                self.hit_tokens[tier],
            )
        yield "wasted_bytes", {}, wasted_bytes
        for name in plain_numbers(LookaheadCounters):
            yield name, {}, getattr(self, name)
