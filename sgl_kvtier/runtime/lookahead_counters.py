"""What looking ahead did since the server started, and its publication in /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sgl_kvtier.runtime.metrics import Publisher
from sgl_kvtier.runtime.restore_counters import Count
from sgl_kvtier.types import Link, Tier

_DOC = {
    "moved_bytes": "bytes moved between tiers before they were asked for",
    "failed_moves": "moves that the planner asked for and that were not carried out, by reason",
    "wasted_bytes": "bytes moved up early that left without having been used",
    "hit_tokens": "prompt tokens by the tier they were in when their request was first scheduled",
    "victims": "pages that left the device by our choice",
    "host_victims": "pages that left host memory while pages wanted soon were held back",
    "drift": "pages that the map had in another place than they were",
    "overlap": "turns by whether their transfers were predicted to be hidden (held, failed), and whether that was right when they ran",
    "checks": "times the whole map was compared with the truth",
    "failures": "times choosing victims raised, or looking ahead was given up",
}
TIERS = {Tier.HBM: "hbm", Tier.DRAM: "dram", Tier.SSD: "ssd", None: "none"}
"""As labels; None: in no tier, so it had to be computed."""


@dataclass
class LookaheadCounters:
    """Plain counters, written by the scheduler's thread."""

    moved_bytes: Counter[Link] = field(default_factory=Counter)
    failed_moves: Counter[str] = field(default_factory=Counter)
    hit_tokens: Counter[Tier | None] = field(default_factory=Counter)
    victims: int = 0
    host_victims: int = 0
    drift: int = 0
    failures: int = 0
    checks: int = 0

    def counts(self, wasted_bytes: int) -> Iterator[Count]:
        """All of them, for /metrics. Any thread: counters are copied before they are gone through."""
        for link in (Link.DRAM_TO_HBM, Link.SSD_TO_DRAM):
            yield "moved_bytes", {"link": link.value}, self.moved_bytes[link]
        for reason, pages in dict(self.failed_moves).items():
            yield "failed_moves", {"reason": reason}, pages
        for tier, name in TIERS.items():
            yield "hit_tokens", {"tier": name}, self.hit_tokens[tier]
        yield "wasted_bytes", {}, wasted_bytes
        for name in ("victims", "host_victims", "drift", "failures", "checks"):
            yield name, {}, getattr(self, name)


class LookaheadMetrics(Publisher):
    """Publishes counters and gauges twice a second from a thread of its own."""

    def __init__(
        self, counts: Callable[[], Iterable[Count]], gauges: Callable[[], dict[str, float]], labels: dict[str, str]
    ) -> None:
        """Begins publishing. `labels` name the rank."""
        self._counts = counts
        self._gauges = gauges
        self._labels = labels
        self._seen: dict[tuple[str, ...], float] = {}
        super().__init__("kvtier-lookahead-metrics")

    def _publish(self) -> None:
        for name, labels, value in self._counts():
            key = (name, *labels.values())
            counter = _instrument(name, (*self._labels, *labels), gauge=False)
            counter.labels(**self._labels, **labels).inc(max(0.0, value - self._seen.get(key, 0.0)))
            self._seen[key] = max(value, self._seen.get(key, 0.0))
        for name, value in self._gauges().items():
            _instrument(name, tuple(self._labels), gauge=True).labels(**self._labels).set(value)


_instruments: dict[str, Any] = {}


def _instrument(name: str, labels: tuple[str, ...], *, gauge: bool) -> Any:
    """Once per process. The library is imported here because SGLang sets up the folder that its processes share first."""
    from prometheus_client import Counter as Total
    from prometheus_client import Gauge

    full = f"kvtier:lookahead_{name}"
    if full not in _instruments:
        about = f"sgl_kvtier lookahead: {_DOC.get(name, name.replace('_', ' '))}"
        made = Gauge(full, about, labels, multiprocess_mode="mostrecent") if gauge else Total(f"{full}_total", about, labels)
        _instruments[full] = made
    return _instruments[full]
