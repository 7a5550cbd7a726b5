"""The counters of the store and of restorations in SGLang's /metrics, under names that begin with kvtier:."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from sgl_kvtier.runtime.restore_counters import Count
from sgl_kvtier.store.base import PageStore, StoreStats

PERIOD_S = 0.5
_GAUGES = ("pages", "bytes_on_disk", "capacity_bytes")
_DOC = "sgl_kvtier page store: "
_RESTORE_DOC = {
    "started": "offers answered",
    "declined": "hits left to SGLang's own way",
    "ended": "restorations ended",
    "computed_tokens": "tokens of restored prefixes that were computed",
    "loaded_tokens": "tokens of restored prefixes that were loaded",
    "loaded_bytes": "bytes that landed on the device",
    "lost_pages": "pages asked for that did not come",
    "turn_reads": "stored prefixes left to SGLang that were kept back, read again, or given up",
    "unused_pages": "pages that were loaded for nothing",
    "jumps": "times a front stepped over what had landed",
    "parks": "times a request in the slot waited for loads",
    "parked_s": "seconds it waited so",
    "meeting_wait_s": "of these, the seconds right before the two ends met",
    "restoring_s": "seconds from offer to meeting",
    "reductions": "collectives over the ranks",
    "planner_failures": "times the planner raised",
    "log_lines_dropped": "lines missing in the decision log",
}
_POSITIONS = tuple(n / 10 for n in range(1, 11))
_instruments: dict[str, Any] = {}


class Publisher(ABC):
    """Calls `_publish` twice a second from a thread of its own, and once more at the end."""

    def __init__(self, name: str) -> None:
        """Begins publishing: the last thing a subclass does when it is built."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publishes a last time and ends the thread, while what it publishes is still there. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self._publish()
        self._publish()

    @abstractmethod
    def _publish(self) -> None:
        """Gives the present numbers to Prometheus."""


class StoreMetrics(Publisher):
    """Publishes a store's statistics twice a second from a thread of its own, also while the server is idle."""

    def __init__(self, store: PageStore, labels: dict[str, str]) -> None:
        """Begins publishing. `labels` name the rank."""
        _make_instruments(tuple(labels))
        self._store = store
        self._labels = labels
        self._seen = StoreStats()
        super().__init__("kvtier-metrics")

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


class RestoreMetrics(Publisher):
    """Publishes what restorations did, twice a second, from a thread of its own."""

    def __init__(
        self,
        counts: Callable[[], Iterable[Count]],
        meetings: Callable[[], Iterable[float]],
        under_way: Callable[[], int],
        labels: dict[str, str],
    ) -> None:
        """Begins publishing. `counts` are totals, `meetings` what is new since the last call; `labels` name the rank."""
        self._counts = counts
        self._meetings = meetings
        self._under_way = under_way
        self._labels = labels
        self._seen: dict[tuple[str, ...], float] = {}
        super().__init__("kvtier-restore-metrics")

    def _publish(self) -> None:
        for name, labels, value in self._counts():
            key = (name, *labels.values())
            self._instrument(name, tuple(labels)).labels(**self._labels, **labels).inc(
                max(0.0, value - self._seen.get(key, 0.0))
            )
            self._seen[key] = value
        positions = self._instrument("meeting_position", ()).labels(**self._labels)
        for position in self._meetings():
            positions.observe(position)
        self._instrument("under_way", ()).labels(**self._labels).set(self._under_way())

    def _instrument(self, name: str, more: tuple[str, ...]) -> Any:
        """Once per process, as in `_make_instruments`."""
        from prometheus_client import Counter, Gauge, Histogram

        full, labels = f"kvtier:restore_{name}", (*self._labels, *more)
        if full in _instruments:
            return _instruments[full]
        if name == "meeting_position":
            about = "where front and loads met: computed over all of what was restored"
            made: Any = Histogram(full, about, labels, buckets=_POSITIONS)
        elif name == "under_way":
            made = Gauge(full, "restorations now", labels, multiprocess_mode="mostrecent")
        else:
            made = Counter(f"{full}_total", f"sgl_kvtier restoration: {_RESTORE_DOC[name]}", labels)
        _instruments[full] = made
        return made
