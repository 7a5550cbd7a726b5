"""Metrics of a running server about its prompts, restorations and store: one reading of its
/metrics and /server_info, and the changes between two readings.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.outside import parse_json, read_bounded

_WAIT_S: Final = 10.0
_MOST_BYTES: Final = 64 << 20
DEFAULT_THRESHOLD: Final = 256
"""Default of `prefetch_threshold` in SGLang 0.5.23, in tokens (hybrid_cache_controller.py)."""

Labels = frozenset[tuple[str, str]]


class Reading:
    """The counters and gauges of /metrics at one moment, and the server's arguments.

    Only the first rank of each data-parallel replica counts, since all ranks do the same
    restorations and hold as many pages. Replicas are added up.
    """

    def __init__(self, values: Mapping[tuple[str, Labels], float], info: Mapping[str, Any]) -> None:
        self._values = {
            key: value for key, value in values.items() if _is_of_first_rank(dict(key[1]))
        }
        self.info = info

    def get(self, name: str) -> float | None:
        """The sum of all samples of this name, or None."""
        found = [value for (key, _), value in self._values.items() if key == name]
        return sum(found) if found else None

    def least(self, name: str) -> float | None:
        """The smallest of all samples of this name, for values that do not add up over replicas; or
        None.
        """
        return min((value for (key, _), value in self._values.items() if key == name), default=None)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums of the samples of this name by the value of a label."""
        sums: dict[str, float] = {}
        for (key, labels), value in self._values.items():
            if key == name:
                of = dict(labels).get(label, "")
                sums[of] = sums.get(of, 0.0) + value
        return sums


@dataclass(frozen=True)
class Server:
    """What a server was started with, as far as it tells."""

    model: str | None
    page_tokens: int | None
    hicache_write_policy: str | None
    prefetch_threshold_tokens: int
    """SGLang's default if the server's settings cannot be read from here."""
    has_kvtier: bool
    """Whether it publishes metrics of a kvtier store."""


@dataclass(frozen=True)
class StoreFigures:
    """The stores of the replicas' first ranks: counts in the period, and present sizes."""

    pages: int
    bytes_on_disk: int
    capacity_bytes: int
    """Their part of `store.capacity_bytes`."""
    opened_s: float
    """Seconds since they were opened."""
    pages_at_opening: int
    """Upper bound of the pages that were stored then."""
    pages_before: int
    """Upper bound of the pages that were stored when the period began."""
    pages_read: int
    bytes_read: int
    read_bytes_per_s: float | None
    """While a read was in flight."""
    break_even_bytes_per_s: float | None
    """Bandwidth from which on loading is faster than computing, learned from prefill chunks."""
    pages_written: int
    pages_kept: int
    """Writes of pages that were stored already."""
    pages_not_admitted: int
    pages_refused: int
    pages_evicted: int
    pages_corrupt: int
    reads_failed: int
    reads_late: int
    bytes_written: int
    """With headers and padding."""


@dataclass(frozen=True)
class RemoteFigures:
    """The remote store in the period, in pages."""

    up: bool
    pages_read: int
    pages_missed: int
    pages_corrupt: int
    reads_failed: int
    reads_late: int
    pages_sent: int


@dataclass(frozen=True)
class Figures:
    """Metrics of a period. In tokens, unless a name says otherwise."""

    seconds: float
    requests: int
    """Requests that ended."""
    prompt: int
    device: int
    host: int
    storage: int
    remote: int
    """Part of `storage`: at most so many came from a store that servers share."""
    writes_waiting: int
    """Prefixes in host memory, now, whose write to storage has not ended."""
    started: dict[str, int]
    """The planner's decisions on restore candidates, by mode."""
    ended: dict[str, int]
    """Restorations by how they ended."""
    restored_loaded: dict[str, int]
    """Tokens of restored prefixes by the tier they were loaded from."""
    restored_computed: int
    proof: str | None
    """State of the checks of restored pages, now: `proving`, `proven`, or `ended` by a difference;
    None if nothing is compared.
    """
    declined: dict[str, int]
    """Requests by reason."""
    unfulfilled: dict[str, int]
    """Stored tokens that SGLang did not use, by its reason."""
    store: StoreFigures
    remote_store: RemoteFigures | None

    @property
    def cached(self) -> int:
        """Prompt tokens that came from a cache."""
        return self.device + self.host + self.storage

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed."""
        return max(0, self.prompt - self.cached)

    @property
    def hit_fraction(self) -> float | None:
        """Fraction of prompt tokens from caches; None without prompts."""
        return self.cached / self.prompt if self.prompt else None

    @property
    def written_bytes_per_prompt_token(self) -> float | None:
        """Disk writes of the first ranks; None without prompts."""
        return self.store.bytes_written / self.prompt if self.prompt else None

    @property
    def written_bytes_per_day(self) -> float | None:
        """At the rate of the period; None if that is not known."""
        return 86400 * self.store.bytes_written / self.seconds if self.seconds > 0 else None


def read(url: str, api_key: str | None = None) -> Reading:
    """Reads a server's metrics. `info` is empty if it refuses to tell its arguments.

    Raises KVTierError if it does not answer or publishes no metrics, and ModuleNotFoundError
    without prometheus_client, which comes with SGLang.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        text = _get(url, "/metrics", None)
    except urllib.error.HTTPError as error:
        raise KVTierError(
            f"{url}/metrics answers {error.code}. Start the server with --enable-metrics"
        ) from error
    values: dict[tuple[str, Labels], float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name, frozenset(sample.labels.items())] = sample.value
    except ValueError as error:
        raise KVTierError(f"{url}/metrics is no page of Prometheus: {error}") from error
    try:
        info = parse_json(_get(url, "/server_info", api_key))
    except (urllib.error.HTTPError, ValueError):
        info = {}
    return Reading(values, info if isinstance(info, dict) else {})


def read_requests(url: str, api_key: str | None = None) -> dict[str, Any]:
    """What a server knows of its requests now: `requests` and `omitted` of GET /kvtier/requests.
    Raises KVTierError if it does not answer.
    """
    try:
        return dict(parse_json(_get(url, "/kvtier/requests", api_key)))
    except (urllib.error.HTTPError, ValueError, TypeError) as error:
        raise KVTierError(
            f"{url}/kvtier/requests: {error}. It needs a server with the kvtier plugin, and its "
            "--admin-api-key (--api-key here) if it has one"
        ) from error


def server_of(reading: Reading) -> Server:
    """What the server was started with."""
    states = reading.info.get("internal_states")
    # These are updated when another storage backend is attached.
    state = states[0] if isinstance(states, list) and states else {}
    info = {**reading.info, **(state if isinstance(state, dict) else {})}
    page, model, policy = (
        info.get(name) for name in ("page_size", "model_path", "hicache_write_policy")
    )
    return Server(
        model=model if isinstance(model, str) else None,
        page_tokens=page if isinstance(page, int) and page > 0 else None,
        hicache_write_policy=policy if isinstance(policy, str) else None,
        prefetch_threshold_tokens=_threshold(info.get("hicache_storage_backend_extra_config")),
        has_kvtier=reading.get("kvtier:open_seconds_total") is not None,
    )


def figures_of(now: Reading, before: Reading | None, seconds: float) -> Figures:
    """The metrics of the `seconds` between two readings, or since the server started (`before` is
    None).
    """
    page = server_of(now).page_tokens or 0

    def count(name: str) -> int:
        end = now.get(name) or 0.0
        return round(max(0.0, end - (before.get(name) or 0.0))) if before else round(end)

    def counts(name: str, label: str) -> dict[str, int]:
        start = before.by(name, label) if before else {}
        grown = {of: end - start.get(of, 0.0) for of, end in now.by(name, label).items()}
        return {of: round(by) for of, by in sorted(grown.items()) if by >= 0.5}

    def life(name: str) -> int:
        return round(now.get(name) or 0.0)

    def pages_before(counted: Callable[[str], int]) -> int:
        came = counted("kvtier:pages_written_total") - counted("kvtier:pages_evicted_total")
        return max(0, life("kvtier:store_pages") - came)

    cached = counts("sglang:cached_tokens_total", "cache_source")
    remote = (
        None
        if now.least("kvtier:remote_up") is None
        else RemoteFigures(
            up=bool(now.least("kvtier:remote_up")),
            pages_read=count("kvtier:remote_pages_read_total"),
            pages_missed=count("kvtier:remote_pages_missed_total"),
            pages_corrupt=count("kvtier:remote_pages_corrupt_total"),
            reads_failed=count("kvtier:remote_reads_failed_total"),
            reads_late=count("kvtier:remote_reads_late_total"),
            pages_sent=count("kvtier:remote_pages_sent_total"),
        )
    )
    busy_s = (now.get("kvtier:read_busy_seconds_total") or 0.0) - (
        (before.get("kvtier:read_busy_seconds_total") or 0.0) if before else 0.0
    )
    read_bytes = count("kvtier:read_bytes_total")
    storage, proof = cached.get("storage", 0), now.least("kvtier:restore_proof")
    return Figures(
        seconds=seconds,
        requests=count("sglang:num_requests_total"),
        prompt=count("sglang:prompt_tokens_total"),
        device=cached.get("device", 0) + cached.get("total", 0),
        host=cached.get("host", 0),
        storage=storage,
        remote=min(storage, remote.pages_read * page) if remote else 0,
        writes_waiting=life("kvtier:restore_writes_waiting"),
        started=counts("kvtier:restore_started_total", "mode"),
        ended=counts("kvtier:restore_ended_total", "how"),
        restored_loaded=counts("kvtier:restore_loaded_tokens_total", "tier"),
        restored_computed=count("kvtier:restore_computed_tokens_total"),
        proof=None if proof is None else ("ended", "proving", "proven")[int(proof)],
        declined=counts("kvtier:restore_declined_total", "reason"),
        unfulfilled=counts("sglang:storage_prefetch_unfulfilled_tokens_total", "reason"),
        store=StoreFigures(
            pages=life("kvtier:store_pages"),
            bytes_on_disk=life("kvtier:store_bytes_on_disk"),
            capacity_bytes=life("kvtier:store_capacity_bytes"),
            opened_s=now.least("kvtier:open_seconds_total") or 0.0,
            pages_at_opening=pages_before(life),
            pages_before=pages_before(count),
            pages_read=count("kvtier:pages_read_total"),
            bytes_read=read_bytes,
            read_bytes_per_s=read_bytes / busy_s if read_bytes and busy_s > 0 else None,
            break_even_bytes_per_s=now.least("kvtier:restore_break_even_bytes_per_second"),
            pages_written=count("kvtier:pages_written_total"),
            pages_kept=count("kvtier:pages_kept_total"),
            pages_not_admitted=count("kvtier:pages_not_admitted_total"),
            pages_refused=count("kvtier:pages_refused_total"),
            pages_evicted=count("kvtier:pages_evicted_total"),
            pages_corrupt=count("kvtier:pages_corrupt_total"),
            reads_failed=count("kvtier:reads_failed_total"),
            reads_late=count("kvtier:reads_late_total"),
            bytes_written=count("kvtier:device_written_bytes_total"),
        ),
        remote_store=remote,
    )


def _is_of_first_rank(labels: Mapping[str, str]) -> bool:
    return all(labels.get(name, "0") == "0" for name in ("tp_rank", "pp_rank"))


def _get(url: str, path: str, api_key: str | None) -> str:
    """Raises KVTierError if nothing answers, and urllib's HTTPError for an error status."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
        with urllib.request.urlopen(request, timeout=_WAIT_S) as response:
            return str(response.read(_MOST_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise KVTierError(
            f"no answer from {url}{path} ({why}). Give the address of a running server"
        ) from error


def _threshold(extra: object) -> int:
    """`prefetch_threshold` in the settings of the storage backend: JSON, or `@FILE` if that file is
    on this machine.
    """
    try:
        text = read_bounded(Path(extra[1:])) if str(extra).startswith("@") else extra  # type: ignore[index]
        told = json.loads(text) if isinstance(text, str) else text
        value = told.get("prefetch_threshold", DEFAULT_THRESHOLD)  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError, TypeError):
        return DEFAULT_THRESHOLD
    return value if isinstance(value, int) and value > 0 else DEFAULT_THRESHOLD
