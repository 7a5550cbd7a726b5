"""kvtier.json as frozen dataclasses: one file for the server and the tools, checked key by key.

Every field carries its unit in its name, its default here and its allowed range in `setting(...)`.
A wrong key, type or value raises ConfigError naming the key, the value and what is allowed. There
are no environment variables of our own.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.outside import (
    MOST_SHOWN,
    is_number,
    is_text,
    is_whole,
    parse_json,
    read_bounded,
    refusal,
    shown,
)
from sgl_kvtier.sizes import format_bytes, parse_bytes

HOST_KEYS = frozenset(
    {
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "tp_lcm_size",
        "allocator",
        "backend_name",
        "module_path",
        "class_name",
    }
)
"""Top-level keys of the same file that belong to SGLang; they are skipped here."""

_MOST_BYTES = 1 << 50
"""The largest store: 1,024 TiB."""
_MOST_TEXT = 4096
"""Most characters of a text: no system takes a longer path."""


def setting(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    is_bytes: bool = False,
) -> Any:
    """A dataclass field with its description and its allowed range. Checks, messages and docs are
    made from them. Numbers have both bounds.
    """
    meta = {"doc": doc, "low": low, "high": high, "choices": choices, "is_bytes": is_bytes}
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class StoreConfig:
    """The page store on local disk (the SSD tier)."""

    path: str = setting("", "folder for the pages; created with mode 0700. Required")
    capacity_bytes: int = setting(
        64 << 30,
        "most bytes on disk, all ranks of a server together",
        low=1 << 20,
        high=_MOST_BYTES,
        is_bytes=True,
    )
    min_free_bytes: int = setting(
        1 << 30,
        "the store stops growing while the filesystem has less free",
        low=0,
        high=_MOST_BYTES,
        is_bytes=True,
    )
    segment_bytes: int = setting(
        256 << 20,
        "size of one pre-allocated segment file",
        low=64 << 10,
        high=64 << 30,
        is_bytes=True,
    )
    direct_io: str = setting(
        "auto",
        "bypass the page cache: auto probes, on insists, off never",
        choices=("auto", "on", "off"),
    )
    io_threads: int = setting(8, "threads that read and write pages", low=1, high=256)
    native_io: bool = setting(
        True, "use the I/O threads in C where they are built; false: Python threads"
    )
    io: str = setting(
        "auto",
        "how the I/O threads in C read: threads = one read each, io_uring = many under way each, auto = io_uring where the "
        "kernel allows it and the page cache is bypassed",
        choices=("auto", "threads", "io_uring"),
    )
    verify_reads: bool = setting(True, "check the checksum of every page read")
    admission: str = setting(
        "all",
        "which new pages are written: all, second-hit = those offered twice, or recompute-cost = those that take "
        "store.admission_cost_s or longer to compute again (both spare flash)",
        choices=("all", "second-hit", "recompute-cost"),
    )
    admission_cost_s: float = setting(
        0.0,
        "for recompute-cost: least seconds to compute a page again; pages of unknown cost are written",
        low=0,
        high=1_000_000,
    )
    durable: bool = setting(
        False,
        "fdatasync after every write batch. Off: a power loss may lose pages, never corrupt them",
    )


@dataclass(frozen=True)
class ThrottleConfig:
    """A slower device than the present one, to repeat published bandwidths. 0 = no limit."""

    read_gbps: float = setting(
        0.0, "read bandwidth in gigabits per second; 0 = as fast as the disk", low=0, high=10_000
    )
    write_gbps: float = setting(
        0.0, "write bandwidth in gigabits per second; 0 = as fast as the disk", low=0, high=10_000
    )
    latency_ms: float = setting(0.0, "added to each read or write batch", low=0, high=60_000)


@dataclass(frozen=True)
class FaultConfig:
    """Failures on purpose, to check that nothing depends on the store working. Never set this in
    production.
    """

    read_error_rate: float = setting(0.0, "share of page reads that fail", low=0, high=1)
    write_error_rate: float = setting(0.0, "share of page writes that fail", low=0, high=1)
    corrupt_rate: float = setting(0.0, "share of stored pages with one flipped bit", low=0, high=1)
    stall_ms: float = setting(0.0, "time added to one read in a hundred", low=0, high=600_000)
    seed: int = setting(0, "which reads and writes fail", low=0, high=1_000_000_000)
    rank: int = setting(
        -1,
        "only on this tensor-parallel rank, so that ranks differ; -1: on all",
        low=-1,
        high=65_535,
    )


@dataclass(frozen=True)
class PolicyConfig:
    """Settings of the planner: the server and the simulator read the same section."""

    restore: str = setting(
        "auto",
        "how a prefix found in a lower tier comes back: auto = whatever is predicted fastest for each request, "
        "both = compute its front while loading its back, load, compute, or off = SGLang's own way. auto is off on more than "
        "one rank and on a GPU, where it was not shown under stress yet",
        choices=("auto", "both", "load", "compute", "off"),
    )
    rule: str = setting(
        "kvtier",
        "kvtier, or the published rule of a paper for comparison: cake (whole chunks, no fallback, arrival order), "
        "cacheflow (whole chunks, I/O goes to the longest remaining restoration)",
        choices=("kvtier", "cake", "cacheflow"),
    )
    io_order: str = setting(
        "auto",
        "which restoration is loaded for first: arrival, longest or shortest remaining recompute time; auto = the rule's",
        choices=("auto", "arrival", "longest", "shortest"),
    )
    min_restore_tokens: int = setting(
        256, "shorter restorations are left to SGLang's own way", low=0, high=10_000_000
    )
    split_margin: float = setting(
        0.02,
        "compute and load together only if that is predicted to save this share of the faster of the two alone",
        low=0,
        high=1,
    )
    split_gain_s: float = setting(
        0.005,
        "and at least this many seconds: what splitting a prefix costs by itself",
        low=0,
        high=60,
    )
    fixed_split: float = setting(
        -1.0,
        "share of a prefix that is computed while the rest is loaded, fixed beforehand, to measure what planning at run time is "
        "worth; -1 = planned at run time",
        low=-1,
        high=1,
    )
    queue_charge: float = setting(
        1.0,
        "extra weight of computing a prefix per request that waits behind it, when the planner chooses what to load instead",
        low=0,
        high=10,
    )
    min_chunk_tokens: int = setting(
        32, "smallest chunk worth computing while loads are under way", low=1, high=65536
    )
    load_tokens: int = setting(
        128,
        "most tokens per load, the unit that is in flight, lands or fails; fewer near the meeting point if they take over 20 ms",
        low=1,
        high=65536,
    )
    load_horizon_s: float = setting(
        0.3, "loads issued ahead, in seconds of the device's bandwidth", low=0.001, high=60
    )
    load_deadline_s: float = setting(
        2.0,
        "a load that has not begun this long after its predicted end is given up",
        low=0.001,
        high=600,
    )
    yield_to_fresh: bool = setting(
        True,
        "requests that restore nothing are prefilled before a restoring one that can go on loading (Cake, section 4)",
    )
    max_yields: int = setting(
        4,
        "scheduler steps in a row for which a restoring request may be held back so",
        low=0,
        high=10_000,
    )
    prefetch: str = setting(
        "kvtier",
        "pages of waiting requests are prefetched before their turn: kvtier = by deadline, bytes charged to the links; "
        "tierkv = the paper's test per page; or off, a server's default",
        choices=("kvtier", "tierkv", "off"),
    )
    lookahead: int = setting(
        -1,
        "K: iterations ahead whose requests' pages are brought to HBM; 0 = none, -1 = from measured speeds",
        low=-1,
        high=4096,
    )
    lookahead_ssd: int = setting(
        -1,
        "iterations ahead whose requests' pages are brought from SSD to DRAM; -1 = from measured speeds",
        low=-1,
        high=4096,
    )
    scheduling_slack_s: float = setting(
        0.0001, "TierKV's delta: how late a prefetched page may come", low=0, high=10
    )
    prefetch_margin: float = setting(
        0.25, "links are taken to be this share slower than measured", low=0, high=10
    )
    prefetch_share: float = setting(
        0.2, "most of HBM that may hold prefetched pages not used yet", low=0, high=1
    )
    prefetch_waste: float = setting(
        0.1,
        "share of what is prefetched for expected sessions that may go unused; 1 = no limit",
        low=0,
        high=1,
    )
    eviction: str = setting(
        "next-use",
        "which pages are evicted first from HBM and DRAM: next-use = those needed last, lru (a server's default) or lfu",
        choices=("next-use", "lru", "lfu"),
    )
    map_pages: int = setting(
        1_000_000, "pages whose tier is remembered, 200 bytes each", low=1, high=100_000_000
    )
    sessions: bool = setting(
        True, "learn when idle sessions return; keep or bring back their pages accordingly"
    )
    session_idle_s: float = setting(
        900.0, "a session idle for longer is expected no more", low=0.001, high=1_000_000
    )
    demote_after_s: float = setting(
        10.0,
        "pages of sessions expected back later than this many seconds get a copy in a lower tier early",
        low=0,
        high=1_000_000,
    )
    hint_limit_s: float = setting(
        3600.0, "longest delay or lifetime a client's hint may ask for", low=0, high=1_000_000
    )
    decision_log: str = setting(
        "",
        "file for every fact, view and plan as lines of JSON, to be replayed (kvtier sim replay-log); empty = none",
    )


@dataclass(frozen=True)
class KVTierConfig:
    """Everything in kvtier.json but the keys SGLang reads itself (`HOST_KEYS`)."""

    store: StoreConfig = field(default_factory=StoreConfig)
    throttle: ThrottleConfig = field(default_factory=ThrottleConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)


def load_config(path: str | Path) -> KVTierConfig:
    """The settings in a kvtier.json. Raises ConfigError when it is missing, not JSON, or has a
    wrong setting.
    """
    try:
        data = parse_json(read_bounded(Path(path)))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}. Copy examples/kvtier.json and set store.path"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return parse_config(data)


def parse_config(data: Any) -> KVTierConfig:
    """The settings in a decoded kvtier.json. Raises ConfigError on a wrong key, type or value."""
    if not isinstance(data, dict):
        raise ConfigError(f"kvtier.json must be an object with sections, not {type(data).__name__}")
    known = {f.name: f for f in fields(KVTierConfig)}
    sections: dict[str, Any] = {}
    for key, value in data.items():
        if key in HOST_KEYS:
            continue
        if key not in known:
            raise ConfigError(_unknown(key, "", [*known, *sorted(HOST_KEYS)]))
        sections[key] = _parse_section(type(getattr(KVTierConfig(), key)), key, value)
    return KVTierConfig(**sections)


def parse_setting(section: str, name: str, value: Any) -> Any:
    """One setting's value, checked as in a kvtier.json. Raises ConfigError."""
    sections = {f.name: f for f in fields(KVTierConfig)}
    known = {f.name: f for f in _settings_of(sections[section])} if section in sections else {}
    if name not in known:
        raise ConfigError(f"there is no setting {shown(f'{section}.{name}')}")
    return _parse_value(known[name], f"{section}.{name}", value)


def describe_config() -> list[dict[str, str]]:
    """One row per setting (key, default, allowed, meaning), for `kvtier doctor --settings` and the
    docs.
    """
    rows = []
    for section in fields(KVTierConfig):
        for f in _settings_of(section):
            shown = format_bytes(f.default) if f.metadata["is_bytes"] else json.dumps(f.default)
            key = f"{section.name}.{f.name}"
            rows.append(
                {"key": key, "default": shown, "allowed": _allowed(f), "meaning": f.metadata["doc"]}
            )
    return rows


def to_dict(config: KVTierConfig) -> dict[str, Any]:
    """The settings as plain data: what `load_config` would read back to an equal object."""
    return dataclasses.asdict(config)


def _settings_of(section: Any) -> tuple[Any, ...]:
    return fields(section.default_factory)


def _parse_section(cls: Any, section: str, data: Any) -> Any:
    if not isinstance(data, dict):
        raise ConfigError(refusal(section, data, "an object"))
    known = {f.name: f for f in fields(cls)}
    values = {}
    for key, value in data.items():
        if key not in known:
            raise ConfigError(_unknown(key, section + ".", list(known)))
        values[key] = _parse_value(known[key], f"{section}.{key}", value)
    return cls(**values)


def _parse_value(f: Any, key: str, value: Any) -> Any:
    wanted = type(f.default)
    meta = f.metadata
    wrong = ConfigError(refusal(key, value, f"{_allowed(f)} ({meta['doc']})"))
    if meta["is_bytes"]:
        try:
            value = parse_bytes(value)
        except ValueError:
            raise wrong from None
    if wanted in (int, float):
        if not (is_whole if wanted is int else is_number)(value, meta["low"], meta["high"]):
            raise wrong
        return wanted(value)
    if type(value) is not wanted or (meta["choices"] and value not in meta["choices"]):
        raise wrong
    if wanted is str and (not is_text(value, _MOST_TEXT) or "\0" in value):
        raise wrong
    return value


def _allowed(f: Any) -> str:
    meta = f.metadata
    if meta["choices"]:
        return "one of " + ", ".join(meta["choices"])
    show = format_bytes if meta["is_bytes"] else "{:g}".format
    name = {
        bool: "true or false",
        str: f"a text of at most {_MOST_TEXT} characters",
        int: "a whole number",
        float: "a number",
    }[type(f.default)]
    if meta["is_bytes"]:
        name = "a size such as 67108864 or 64MiB"
    return (
        name if meta["low"] is None else f"{name} from {show(meta['low'])} to {show(meta['high'])}"
    )


def _unknown(key: str, prefix: str, known: list[str]) -> str:
    # Comparing takes time that grows with the square of the key's length.
    close = difflib.get_close_matches(key, known, n=1) if is_text(key, MOST_SHOWN) else []
    named = key if is_text(key, MOST_SHOWN) else shown(key)
    hint = f" Did you mean {prefix}{close[0]}?" if close else ""
    return f"unknown setting {prefix}{named}.{hint} Known: {', '.join(prefix + k for k in known)}"
