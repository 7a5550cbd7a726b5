"""The store's counters in SGLang's /metrics, under names that begin with kvtier:."""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import Any

from sgl_kvtier.store.base import PageStore, StoreStats

PERIOD_S = 0.5
_GAUGES = ("pages", "bytes_on_disk", "capacity_bytes")
_DOC = "sgl_kvtier page store: "
_instruments: dict[str, Any] = {}


class StoreMetrics:
    """Publishes a store's statistics twice a second from a thread of its own, also while the server is idle."""

    def __init__(self, store: PageStore, labels: dict[str, str]) -> None:
        """Begins publishing. `labels` name the rank."""
        _make_instruments(tuple(labels))
        self._store = store
        self._labels = labels
        self._seen = StoreStats()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publishes a last time and ends the thread. Call it while the store is still open. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self._publish()
        self._publish()

    def _publish(self) -> None:
        stats = self._store.stats()
        for f in fields(StoreStats):
            value, instrument = getattr(stats, f.name), _instruments[f.name].labels(**self._labels)
            if f.name in _GAUGES:
                instrument.set(value)
            else:
                instrument.inc(max(0, value - getattr(self._seen, f.name)))
        self._seen = stats


def _make_instruments(labels: tuple[str, ...]) -> None:
    """Once per process: a second attach meets the registered ones. The library is imported here because SGLang sets the
    folder up that its processes share before the backend is built."""
    from prometheus_client import Counter, Gauge

    for f in fields(StoreStats):
        if f.name in _instruments:
            continue
        if f.name in _GAUGES:
            _instruments[f.name] = Gauge(f"kvtier:store_{f.name}", _DOC + f.name, labels, multiprocess_mode="mostrecent")
        else:
            _instruments[f.name] = Counter(f"kvtier:{f.name}_total", _DOC + f.name, labels)
