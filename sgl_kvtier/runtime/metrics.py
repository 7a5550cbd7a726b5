"""The store's counters in SGLang's /metrics, under names that begin with kvtier:."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

from sgl_kvtier.store.base import PageStore, StoreStats

_GAUGES = ("pages", "bytes_on_disk", "capacity_bytes")
_PERIOD_S = 0.5
_DOC = "sgl_kvtier page store: "
_instruments: dict[str, Any] = {}


class StoreMetrics:
    """Copies a store's statistics into Prometheus, at most twice a second. Scheduler thread only."""

    def __init__(self, labels: dict[str, str]) -> None:
        """`labels` name the rank. The library is imported here because SGLang sets its folder up first."""
        from prometheus_client import Counter, Gauge

        self._labels = labels
        self._seen = StoreStats()
        self._next = 0.0
        if not _instruments:  # a second attach in this process meets the registered ones
            for f in fields(StoreStats):
                if f.name in _GAUGES:
                    _instruments[f.name] = Gauge(
                        f"kvtier:store_{f.name}", _DOC + f.name, list(labels), multiprocess_mode="mostrecent"
                    )
                else:
                    _instruments[f.name] = Counter(f"kvtier:{f.name}_total", _DOC + f.name, list(labels))

    def update(self, store: PageStore) -> None:
        """Publishes what changed since the last time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PERIOD_S
        stats = store.stats()
        for f in fields(StoreStats):
            value, instrument = getattr(stats, f.name), _instruments[f.name].labels(**self._labels)
            if f.name in _GAUGES:
                instrument.set(value)
            else:
                instrument.inc(max(0, value - getattr(self._seen, f.name)))
        self._seen = stats
