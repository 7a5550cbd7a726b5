"""Metrics of the store, of restorations and of lookahead in SGLang's /metrics: one table of names,
one thread that publishes.

Each source keeps plain numbers and returns them on request (`Sample`); names begin with `kvtier:`.
Labels name tiers device, host, storage and remote (`types.PLACES`), and links between them
storage-host and so on (`types.Link`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeAlias

from sgl_kvtier.runtime.sglang import features
from sgl_kvtier.store.base import PageStore, StoreStats
from sgl_kvtier.store.index.shares import Holding
from sgl_kvtier.store.tiered.store import TieredStore

logger = logging.getLogger(__name__)

PERIOD_S = 0.5

Sample: TypeAlias = tuple[str, dict[str, str], float]
"""A name in the table without its source's prefix, labels, and a value: for a counter the total,
which only grows; for a histogram one new observation.
"""


class Kind(Enum):
    """The type of a metric in Prometheus, which appends `_total` to the name of a counter."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One row of the table. `labels` come after those of the rank."""

    name: str
    doc: str
    labels: tuple[str, ...] = ()
    kind: Kind = Kind.COUNTER


_STORE = (
    Metric("store_pages", "pages stored now", kind=Kind.GAUGE),
    Metric("store_pages_retained", "of them pages that clients asked to keep", kind=Kind.GAUGE),
    Metric("store_bytes_on_disk", "bytes of the disk in use now", kind=Kind.GAUGE),
    Metric("store_capacity_bytes", "bytes of the disk that may be used", kind=Kind.GAUGE),
    Metric("pages_read", "pages read"),
    Metric("read_bytes", "payload bytes read"),
    Metric("pages_written", "pages written"),
    Metric("written_bytes", "payload bytes written"),
    Metric("device_written_bytes", "bytes written with headers and padding"),
    Metric("pages_kept", "writes of pages that were there already"),
    Metric("pages_not_admitted", "first offers of pages that store.admission did not let in"),
    Metric("pages_refused", "pages that could not be stored"),
    Metric("pages_evicted", "pages evicted to make room for others"),
    Metric("pages_missed", "pages looked for that were not there"),
    Metric(
        "pages_corrupt", "pages that failed the check on reading: torn, stale, swapped or damaged"
    ),
    Metric("reads_failed", "reads that the device failed"),
    Metric("reads_late", "reads that did not end before their deadline"),
    Metric("reads_cancelled", "reads that were cancelled"),
    Metric("follow_failures", "looks at other servers' folders that failed and were tried again"),
    Metric("read_busy_seconds", "seconds with a read in flight"),
    Metric("write_busy_seconds", "seconds with a write in flight"),
    Metric("open_seconds", "seconds since the store was opened"),
    Metric(
        "feature",
        "1 where this SGLang has all that the feature relies on, 0 where it is off",
        ("feature",),
        Kind.GAUGE,
    ),
)
_REMOTE = (
    Metric("remote_up", "1 while calls to the remote store go through", kind=Kind.GAUGE),
    Metric("remote_pages_read", "pages read from the remote store"),
    Metric("remote_read_bytes", "payload bytes read from the remote store"),
    Metric("remote_pages_missed", "pages looked for that had left the remote store"),
    Metric("remote_pages_corrupt", "pages of the remote store that failed the check on reading"),
    Metric("remote_reads_failed", "pages that the engine failed to bring, or brought too slowly"),
    Metric("remote_reads_late", "pages of the remote store not begun before their deadline"),
    Metric("remote_pages_sent", "pages sent to the remote store"),
    Metric("remote_sent_bytes", "payload bytes sent to the remote store"),
    Metric("remote_pages_refused", "pages that the remote store did not take"),
    Metric(
        "remote_names_dropped",
        "pages not sent: gone from the disk, or too many, when their turn came",
    ),
    Metric(
        "remote_child_starts",
        "starts of the process that has the engine; more than one after a crash or a hung call",
    ),
    Metric(
        "remote_names_waiting", "pages that wait to be sent to the remote store", kind=Kind.GAUGE
    ),
    Metric("remote_pages_kept", "pages of the remote store that were written to the local disk"),
    Metric(
        "remote_calls_late",
        "writes, deletes and clears that returned, after at most 2 s, before they were done",
    ),
    Metric(
        "remote_removals_waiting",
        "pages deleted here that the remote store may still have, and that this server does not "
        "use; a clear counts as one",
        kind=Kind.GAUGE,
    ),
)
_RESTORE = (
    Metric(
        "restore_started",
        "restore candidates by the planner's answer and its reason",
        ("mode", "reason"),
    ),
    Metric(
        "restore_declined",
        "restore candidates that were rejected, so that SGLang loads or computes them",
        ("reason",),
    ),
    Metric("restore_ended", "restorations by their end: met is the ordinary one", ("how",)),
    Metric("restore_computed_tokens", "tokens of restored prefixes that were computed"),
    Metric("restore_loaded_tokens", "tokens of restored prefixes that were loaded", ("tier",)),
    Metric("restore_loaded_bytes", "bytes of restorations that landed in device memory", ("link",)),
    Metric("restore_lost_pages", "loads that brought no page", ("reason",)),
    Metric(
        "restore_turn_reads",
        "stored prefixes that SGLang reads in queue order: kept back (no room yet), read again "
        "(evicted while they waited), given up, taken back (restored after all)",
        ("what",),
    ),
    Metric(
        "restore_audited_pages",
        "with lab.audit, attached pages read back from the device: equal, differs (a defect), not "
        "read, skipped",
        ("result",),
    ),
    Metric(
        "restore_proof_pages",
        "restored pages compared with their host pages before use: equal, differs (ends "
        "restoration), skipped",
        ("result",),
    ),
    Metric(
        "restore_proof_attaches",
        "last pages of prefixes computed after the loaded ones and compared with the stored page: "
        "equal, differs (ends restoration), skipped",
        ("result",),
    ),
    Metric(
        "restore_proof",
        "0: restoring was not right on this device and has ended; 1: being proven; 2: proven",
        kind=Kind.GAUGE,
    ),
    Metric(
        "restore_paused",
        "times restoration paused for a minute, since output tokens came later with loads in "
        "flight",
        ("reason",),
    ),
    Metric(
        "restore_unused_pages", "pages loaded for nothing: work done twice, or an aborted request"
    ),
    Metric("restore_jumps", "times loaded pages were attached to a request"),
    Metric("restore_parks", "times a request in the prefill slot waited for loads"),
    Metric(
        "restore_parked_seconds", "seconds in which a request in the prefill slot waited for loads"
    ),
    Metric(
        "restore_meeting_wait_seconds",
        "seconds in which the prefill waited for loads right before the meeting",
    ),
    Metric(
        "restore_restoring_seconds",
        "seconds from becoming a candidate to the meeting, of restorations that met",
    ),
    Metric(
        "restore_reductions",
        "collectives over the ranks; few while nothing is restored, none with lookahead",
    ),
    Metric("restore_planner_failures", "times the planner raised; its requests were computed"),
    Metric("restore_untimed_chunks", "prefill chunks whose time was not learned"),
    Metric("restore_log_lines_dropped", "lines missing in the decision log"),
    Metric(
        "restore_meeting_position",
        "where prefill and loads met: tokens computed over all tokens restored",
        kind=Kind.HISTOGRAM,
    ),
    Metric("restore_under_way", "restorations now", kind=Kind.GAUGE),
    Metric(
        "restore_writes_waiting",
        "prefixes in host memory whose write to storage has not ended",
        kind=Kind.GAUGE,
    ),
    Metric(
        "restore_break_even_bytes_per_second",
        "learned bandwidth from which on loading the first chunk of a prompt is faster than "
        "computing it",
        kind=Kind.GAUGE,
    ),
)
_LOOKAHEAD = (
    Metric("lookahead_moved_bytes", "bytes prefetched", ("link",)),
    Metric(
        "lookahead_failed_moves",
        "pages whose prefetch or eviction was not carried out",
        ("reason",),
    ),
    Metric("lookahead_wasted_bytes", "bytes prefetched and evicted again without having been used"),
    Metric(
        "lookahead_hit_tokens",
        "prompt tokens by tier when their request was first scheduled; restored ones count as "
        "device",
        ("tier",),
    ),
    Metric("lookahead_hints", "clients' hints by result", ("result",)),
    Metric("lookahead_victims", "pages evicted from the device in the map's order"),
    Metric("lookahead_host_victims", "pages evicted from host memory while others were pinned"),
    Metric(
        "lookahead_drift",
        "pages found in another tier than the map said; evictions of the store count",
    ),
    Metric(
        "lookahead_overlap",
        "turns by whether all they lacked was predicted to come in time (held, failed), and by "
        "what came true (held_right, held_wrong, failed_right, failed_wrong)",
        ("result",),
    ),
    Metric("lookahead_checks", "times the whole map was compared with the truth"),
    Metric(
        "lookahead_failures",
        "times lookahead ended, or choosing victims raised; SGLang chooses from then on",
    ),
    Metric("lookahead_map_pages", "pages known", kind=Kind.GAUGE),
    Metric("lookahead_map_device_pages", "pages known to be on the device", kind=Kind.GAUGE),
    Metric("lookahead_map_host_pages", "pages known to be in host memory", kind=Kind.GAUGE),
    Metric("lookahead_map_storage_pages", "pages known to be in storage", kind=Kind.GAUGE),
    Metric("lookahead_map_remote_pages", "pages known to be in the remote store", kind=Kind.GAUGE),
    Metric("lookahead_sessions", "idle sessions whose pages could be prefetched", kind=Kind.GAUGE),
)
_TENANTS = (
    Metric(
        "tenant_bytes",
        "bytes of a tenant's pages in this server's folder; other: those of all others",
        ("tenant",),
        Kind.GAUGE,
    ),
    Metric(
        "tenant_share_bytes",
        "bytes of this server's part that other tenants never evict",
        ("tenant",),
        Kind.GAUGE,
    ),
    Metric("tenant_pages_evicted", "pages of a tenant evicted to make room", ("tenant",)),
)
METRICS = {metric.name: metric for metric in (*_STORE, *_TENANTS, *_REMOTE, *_RESTORE, *_LOOKAHEAD)}

_POSITIONS = tuple(n / 10 for n in range(1, 11))
"""Buckets of the only histogram."""
_instruments: dict[str, Any] = {}
_making = threading.Lock()


def count(name: str, **labels: str) -> None:
    """Adds one to a counter that no source publishes. Any thread, once SGLang has set up the folder
    that its processes share.
    """
    _instrument(name, tuple(labels)).labels(**labels).inc()


def store_samples(store: PageStore) -> Iterator[Sample]:
    """A store's statistics."""
    stats = store.stats()
    for field in fields(StoreStats):
        now = f"store_{field.name}"
        name = now if now in METRICS else with_unit_last(field.name)
        yield name, {}, getattr(stats, field.name)


def with_unit_last(name: str) -> str:
    """Converts a field's name to Prometheus's convention: the unit at the end, spelled out."""
    if name.endswith("_s"):
        return f"{name}econds"
    if name == "bytes_written_to_device":
        return "device_written_bytes"
    return f"{name.removeprefix('bytes_')}_bytes" if name.startswith("bytes_") else name


def plain_numbers(counters: type) -> list[str]:
    """The fields of a class of counters that are numbers without labels: each is a metric."""
    return [field.name for field in fields(counters) if isinstance(field.default, int | float)]


def feature_samples() -> Iterator[Sample]:
    """Which features work with this SGLang."""
    for feature in features.FEATURES:
        yield "feature", {"feature": feature.name}, not features.moved(feature.name)


def tenant_samples(tenants: Callable[[], list[Holding]]) -> Iterator[Sample]:
    """What the tenants in the settings hold, by name, and all others together."""
    for one in tenants():
        label = {"tenant": one.name}
        yield "bytes", label, one.nbytes
        yield "share_bytes", label, one.promised
        yield "pages_evicted", label, one.evicted


def remote_samples(store: TieredStore) -> Iterator[Sample]:
    """Statistics of the store that servers share, as used by this server."""
    stats = store.tiered_stats()
    remote = stats.remote
    yield "up", {}, stats.usable
    yield "child_starts", {}, stats.child_starts
    yield "pages_read", {}, remote.pages_read
    yield "read_bytes", {}, remote.bytes_read
    yield "pages_missed", {}, remote.pages_missed
    yield "pages_corrupt", {}, remote.pages_corrupt
    yield "reads_failed", {}, remote.reads_failed
    yield "reads_late", {}, remote.reads_late
    yield "pages_sent", {}, stats.uploaded
    yield "sent_bytes", {}, remote.bytes_written
    yield "pages_refused", {}, stats.refused
    yield "names_dropped", {}, stats.uploads_dropped
    yield "names_waiting", {}, stats.uploads_waiting
    yield "pages_kept", {}, stats.kept
    yield "calls_late", {}, stats.calls_late
    yield "removals_waiting", {}, stats.removals_waiting


class Source:
    """One source of metrics, published until it is closed."""

    def __init__(
        self,
        publisher: Publisher,
        prefix: str,
        read: Callable[[], Iterable[Sample]],
        labels: dict[str, str],
    ) -> None:
        self._publisher = publisher
        self._prefix = prefix
        self._read = read
        self._labels = labels
        self._seen: dict[tuple[str, ...], float] = {}

    def close(self) -> None:
        """Publishes a last time, while the objects it reads still exist. Idempotent."""
        self._publisher.remove(self)

    def publish(self) -> None:
        """Passes the current numbers to Prometheus. One thread at a time."""
        for name, more, value in self._read():
            metric = METRICS[self._prefix + name]
            instrument = _instrument(metric.name, (*self._labels, *more)).labels(
                **self._labels, **more
            )
            if metric.kind is Kind.GAUGE:
                instrument.set(value)
            elif metric.kind is Kind.HISTOGRAM:
                instrument.observe(value)
            else:
                key = (name, *more.values())
                seen = self._seen.get(key, 0.0)
                instrument.inc(max(0.0, value - seen))
                self._seen[key] = max(value, seen)


class Publisher:
    """Publishes its sources twice a second, also while the server is idle, on one thread that runs
    while there are any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: list[Source] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def add(
        self, prefix: str, read: Callable[[], Iterable[Sample]], labels: dict[str, str]
    ) -> Source:
        """Starts publishing what `read` returns, on the publisher's thread, under names that begin
        with `prefix`. `labels` name the rank.
        """
        source = Source(self, prefix, read, labels)
        with self._lock:
            self._sources.append(source)
            if self._thread is None:
                self._stopping = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stopping,), name="kvtier-metrics", daemon=True
                )
                self._thread.start()
        return source

    def remove(self, source: Source) -> None:
        """Publishes a source a last time. Blocks while the thread publishes."""
        ended = None
        with self._lock:
            if source not in self._sources:
                return
            self._publish(source)
            if source in self._sources:
                self._sources.remove(source)
            if not self._sources:
                ended, self._thread = self._thread, None
                self._stopping.set()
        if ended is not None:
            ended.join()

    def _run(self, stopping: threading.Event) -> None:
        while not stopping.wait(PERIOD_S):
            with self._lock:
                for source in list(self._sources):
                    self._publish(source)

    def _publish(self, source: Source) -> None:
        """Publishes one source; lock held. If it raises, it is removed; the others continue."""
        try:
            source.publish()
        except Exception:
            logger.exception("kvtier: some metrics are not published any more")
            self._sources.remove(source)


PUBLISHER = Publisher()
"""The publisher of this process."""


def _instrument(name: str, labels: tuple[str, ...]) -> Any:
    """The Prometheus metric, made once per process, since a second attach finds it registered. The
    library is imported here because SGLang must first set up the folder that its processes share.
    """
    from prometheus_client import Counter, Gauge, Histogram

    metric, full = METRICS[name], f"kvtier:{name}"
    about = f"sgl_kvtier: {metric.doc}"
    with _making:
        if name not in _instruments:
            if metric.kind is Kind.GAUGE:
                made: Any = Gauge(full, about, labels, multiprocess_mode="mostrecent")
            elif metric.kind is Kind.HISTOGRAM:
                made = Histogram(full, about, labels, buckets=_POSITIONS)
            else:
                made = Counter(f"{full}_total", about, labels)
            _instruments[name] = made
        return _instruments[name]
