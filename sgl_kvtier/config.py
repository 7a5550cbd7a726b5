"""kvtier.json as frozen dataclasses: one file for the server and the tools, checked key by key.

Every field carries its unit in its name, its default here and its allowed range in `setting(...)`.
A wrong key, type or value raises ConfigError naming the key, the value and what is allowed. A
server takes two settings from the environment where the file lacks them (runtime/settings.py).
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
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
from sgl_kvtier.tenants import parse_tenants

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
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,3})?) ?%", re.ASCII)
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def setting(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    is_bytes: bool = False,
    is_class: bool = False,
    is_path: bool = False,
    check: Callable[[str], Any] | None = None,
) -> Any:
    """A dataclass field with its description and its allowed range. Checks, messages and docs are
    made from them. Numbers have both bounds. `is_class`: beside its default and its choices it may
    name a class, as package.module:Class. `is_path`: a path, made absolute when it is read.
    `check` raises ValueError for a text that is wrong.
    """
    meta = {
        "doc": doc,
        "low": low,
        "high": high,
        "choices": choices,
        "is_bytes": is_bytes,
        "is_class": is_class,
        "is_path": is_path,
        "check": check,
    }
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class StoreConfig:
    """The page store on local disk (the SSD tier)."""

    path: str = setting(
        "",
        "folder for the pages; created with mode 0700. ~ is this user's home; variables are not "
        "expanded. Without it: $KVTIER_STORE_PATH, or kvtier/pages in this user's cache folder",
        is_path=True,
    )
    capacity_bytes: int = setting(
        64 << 30,
        "most bytes on disk, over all servers and ranks of the folder; also a share of the disk, "
        'such as "80%"',
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
        "bypass the page cache: auto = if the disk allows it, but not for pages that TP ranks of "
        "one host share (MLA); on = or the start is refused",
        choices=("auto", "on", "off"),
    )
    io_threads: int = setting(8, "threads that read and write pages", low=1, high=256)
    native_io: bool = setting(
        True, "use the I/O threads in C where they are built; false: Python threads"
    )
    io: str = setting(
        "auto",
        "how the I/O threads in C read: threads = one read each, io_uring = many in flight each, "
        "auto = io_uring where the kernel allows it and the page cache is bypassed",
        choices=("auto", "threads", "io_uring"),
    )
    verify_reads: bool = setting(
        True, "check the checksum of every page read; off, pages of other servers are not read"
    )
    admission: str = setting(
        "all",
        "which new pages are written: all, or second-hit = those offered twice, which spares flash",
        choices=("all", "second-hit"),
    )
    tenants: str = setting(
        "",
        "shares of the capacity that other tenants never evict, as NAME=DIGEST:SHARE, by commas: "
        "DIGEST of a cache salt (kvtier stat --salt -), SHARE a size or a percentage",
        check=parse_tenants,
    )
    durable: bool = setting(
        False,
        "fdatasync after every write batch. Off: a power loss may lose pages, never corrupt them",
    )


@dataclass(frozen=True)
class RemoteConfig:
    """A store that servers on many hosts share, after the one on local disk. See remote.md."""

    engine: str = setting(
        "off",
        "what keeps the shared pages: off, mooncake = Mooncake Store, memory = a folder in the "
        "memory of this host, for tests",
        choices=("off", "mooncake", "memory"),
    )
    master: str = setting(
        "", "where Mooncake's master listens, as host:port; for memory, the folder"
    )
    hostname: str = setting(
        "", "this host as others reach it; empty = the address from which the master is reached"
    )
    write: str = setting(
        "all",
        "which pages are sent: all, second-hit = those written or read here twice, on-evict = "
        "those used longest ago once the local disk is nine tenths full, off = none, others' "
        "pages are read all the same",
        choices=("all", "second-hit", "on-evict", "off"),
    )


@dataclass(frozen=True)
class PolicyConfig:
    """What is decided: the same section steers the server and the simulator."""

    restore: str = setting(
        "auto",
        "how a prefix found in a lower tier comes back: auto = fastest on one CPU rank and on one "
        "NVIDIA GPU, off elsewhere; fastest = as predicted fastest for each request; both = "
        "compute its first pages while loading its last ones; load; compute; off = as without "
        "kvtier",
        choices=("auto", "both", "load", "compute", "off", "fastest"),
    )
    proof: str = setting(
        "auto",
        "which restored pages are compared with their source before they are used: auto = on an "
        "accelerator all of the first 16 loads and 8 GiB, then a sample; all = every page, on a "
        "CPU too; off = none (docs/manual/restore-on-gpu.md)",
        choices=("auto", "all", "off"),
    )
    min_restore_tokens: int = setting(
        256, "SGLang loads or computes shorter prefixes", low=0, high=10_000_000
    )
    load_tokens: int = setting(
        128,
        "most tokens per load, the unit that lands or fails. On an accelerator loads have up to "
        "128 MiB, where that is more",
        low=1,
        high=65536,
    )
    load_deadline_s: float = setting(
        2.0,
        "a load that has not begun this long after its predicted end is given up",
        low=0.001,
        high=600,
    )
    max_stall_ms: float = setting(
        15.0,
        "most milliseconds that a restoration's chunk is predicted to take in a step in which "
        "requests decode (--enable-mixed-chunk); where chunks have steps of their own, six times "
        "as many; in both cases no fewer than two and a half times a chunk's fixed cost. 0 = no "
        "bound. Measured gaps between tokens are longer (docs/results/emulated-h100.md)",
        low=0,
        high=100_000,
    )
    queue: str = setting(
        "shortest",
        "which waiting request runs next: shortest = the one with the shortest predicted time to "
        "first token, with a bound on how long one is overtaken; arrival = the oldest",
        choices=("shortest", "arrival"),
    )
    rules: str = setting(
        "", "a class of your own that decides instead (sgl_kvtier/policy/rules.py)", is_class=True
    )
    prefetch: str = setting(
        "auto",
        "prefetch pages of waiting requests and of sessions expected back, as far as links have "
        "time; auto = on for one NVIDIA GPU that restores, else off",
        choices=("auto", "on", "off"),
    )
    prefetch_share: float = setting(
        0.2, "most of the device pool that may hold prefetched pages not used yet", low=0, high=1
    )
    prefetch_waste: float = setting(
        0.1, "fraction of prefetched bytes that may go unused; 1 = no limit", low=0, high=1
    )
    eviction: str = setting(
        "auto",
        "which pages leave device and host memory first: lru = least recently used, next-use = "
        "needed last, or a class of your own (examples/own_eviction.py); auto = next-use for one "
        "NVIDIA GPU that restores, else lru",
        choices=("auto", "lru", "next-use"),
        is_class=True,
    )
    map_pages: int = setting(
        1_000_000, "pages whose tier is remembered, 200 bytes each", low=1, high=100_000_000
    )
    sessions: bool = setting(
        True, "learn when idle sessions return; keep or bring back their pages accordingly"
    )
    session_idle_s: float = setting(
        900.0,
        "a session idle for longer is expected no more, unless a client named a later time",
        low=0.001,
        high=1_000_000,
    )
    hint_limit_s: float = setting(
        3600.0, "longest delay or lifetime a client's hint may ask for", low=0, high=1_000_000
    )
    decision_log: str = setting(
        "",
        "file for every fact, view and plan as lines of JSON, to be replayed (kvtier sim "
        "replay-log); empty = none",
        is_path=True,
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
    """Failures on purpose: nothing may depend on the store working. Never for production."""

    read_error_rate: float = setting(0.0, "share of page reads that fail", low=0, high=1)
    write_error_rate: float = setting(0.0, "share of page writes that fail", low=0, high=1)
    corrupt_rate: float = setting(0.0, "share of stored pages with one flipped bit", low=0, high=1)
    stall_ms: float = setting(0.0, "time added to one read in a hundred", low=0, high=600_000)
    lose_rate: float = setting(
        0.0, "share of stored pages that are deleted when they are looked up", low=0, high=1
    )
    lose_first: int = setting(
        0, "first pages of each look-up that are deleted before it is answered", low=0, high=65_535
    )
    seed: int = setting(0, "which reads and writes fail", low=0, high=1_000_000_000)
    rank: int = setting(
        -1,
        "only on this tensor-parallel rank, so that ranks differ; -1: on all",
        low=-1,
        high=65_535,
    )


@dataclass(frozen=True)
class LabConfig:
    """A worse device than the one at hand, on purpose, and checks that cost time. Only the
    laboratory writes this section: it is no user's decision, and `kvtier doctor --settings` leaves
    it out.
    """

    audit: bool = setting(
        False,
        "read restored pages back from the device and compare them with the store's; slow. "
        "kvtier:restore_audited_pages_total counts what was found",
    )

    layer_parts: int = setting(
        0,
        "parts of some layers each in which pages are stored, so that rules may restore by layers; "
        "divides the number of layers, and 0 stores whole pages",
        low=0,
        high=65_535,
    )

    throttle: ThrottleConfig = field(default_factory=ThrottleConfig)
    remote_throttle: ThrottleConfig = field(default_factory=ThrottleConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)


@dataclass(frozen=True)
class KVTierConfig:
    """Everything in kvtier.json but the keys SGLang reads itself (`HOST_KEYS`)."""

    store: StoreConfig = field(default_factory=StoreConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    lab: LabConfig = field(default_factory=LabConfig)


def full_path(text: str) -> str:
    """A path as it is used: `~` is the user's home, and a relative path begins in the working
    directory. Raises ValueError for a home that is not known, and for variables: nothing expands
    those, and they would become the name of a folder.
    """
    if any(part.startswith("$") for part in text.split("/")):
        raise ValueError("variables are not expanded: write the path itself")
    try:
        return str(Path(text).expanduser().absolute())
    except RuntimeError:
        raise ValueError("the home it begins with is not known: write the path itself") from None


def load_config(path: str | Path) -> KVTierConfig:
    """The settings in a kvtier.json. Raises ConfigError where it is missing or wrong."""
    return parse_config(read_config(path))


def read_config(path: str | Path) -> Any:
    """A decoded kvtier.json, not checked. Raises ConfigError where it is missing or not JSON."""
    try:
        return parse_json(read_bounded(Path(path)))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}. Copy examples/kvtier.json and set store.path"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


_PATH = next(f for f in fields(StoreConfig) if f.name == "path")


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
        if key == "store" and isinstance(value, dict):
            value = _with_capacity(value)
        sections[key] = _parse_section(_SECTIONS[key], key, value)
    return KVTierConfig(**sections)


def _with_capacity(store: dict[str, Any]) -> dict[str, Any]:
    """The section `store` with a capacity in bytes, where it was a share of the disk ("80%"): of
    all bytes of the filesystem that has the folder, or will have it. Raises ConfigError.
    """
    given, path = store.get("capacity_bytes"), store.get("path")
    match = _SHARE.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        return store
    share = float(match[1])
    if not 0 < share <= 100:
        raise ConfigError(
            refusal("store.capacity_bytes", given, "a share of the disk from 0 to 100%")
        )
    if not isinstance(path, str) or not path:
        raise ConfigError(f"store.capacity_bytes = {shown(given)} is of the disk of store.path")
    place = Path(_parse_value(_PATH, "store.path", path))
    try:
        there = next(folder for folder in (place, *place.parents) if os.path.lexists(folder))
        disk = os.statvfs(f"{there}{os.sep}")
    except OSError as error:
        raise ConfigError(
            f"store.capacity_bytes = {shown(given)}: the disk of {shown(path)} cannot be looked "
            f"at: {error.strerror}. Give a size instead"
        ) from error
    return {**store, "capacity_bytes": int(disk.f_blocks * disk.f_frsize * share / 100)}


def parse_setting(section: str, name: str, value: Any) -> Any:
    """One setting's value, checked as in a kvtier.json. Raises ConfigError."""
    known = {f.name: f for f in fields(_SECTIONS[section])} if section in _SECTIONS else {}
    if name not in known:
        raise ConfigError(f"there is no setting {shown(f'{section}.{name}')}")
    return _parse_value(known[name], f"{section}.{name}", value)


def describe_config(
    sections: Iterable[str] = ("store", "remote", "policy"),
) -> list[dict[str, str]]:
    """One row per setting (key, default, allowed, meaning), for `kvtier doctor --settings` and the
    docs. What the laboratory alone writes, `LAB_SECTIONS`, is left out unless it is asked for.
    """
    rows = []
    for section in sections:
        for f in fields(_SECTIONS[section]):
            if f.default is MISSING:
                continue  # a section in it
            shown = format_bytes(f.default) if f.metadata["is_bytes"] else json.dumps(f.default)
            key = f"{section}.{f.name}"
            rows.append(
                {"key": key, "default": shown, "allowed": _allowed(f), "meaning": f.metadata["doc"]}
            )
    return rows


def _parse_section(cls: Any, section: str, data: Any) -> Any:
    if data is None:
        return cls()  # a section without settings, as YAML reads it
    if not isinstance(data, dict):
        raise ConfigError(refusal(section, data, "an object"))
    known = {f.name: f for f in fields(cls)}
    values = {}
    for key, value in data.items():
        if key not in known:
            removed = _REMOVED.get(f"{section}.{key}") if isinstance(key, str) else None
            raise ConfigError(removed or _unknown(key, section + ".", list(known)))
        setting, name = known[key], f"{section}.{key}"
        if setting.default is MISSING:
            values[key] = _parse_section(_SECTIONS[name], name, value)
        else:
            values[key] = _parse_value(setting, name, value)
    return cls(**values)


def _parse_value(f: Any, key: str, value: Any) -> Any:
    wanted = type(f.default)
    meta = f.metadata
    if value is None and f.default == "":
        return f.default  # a setting without a value, as YAML reads it
    if isinstance(value, bool) and _ON_OFF[value] in meta["choices"]:
        value = _ON_OFF[value]
    if _REMOVED.get(f"{key} = {value}" if isinstance(value, str) else ""):
        raise ConfigError(_REMOVED[f"{key} = {value}"])
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
    if type(value) is not wanted:
        raise wrong
    if wanted is str and (not is_text(value, _MOST_TEXT) or "\0" in value):
        raise wrong
    if meta["is_class"] and _CLASS.fullmatch(value):
        return value
    if (meta["choices"] or meta["is_class"]) and value not in (*meta["choices"], f.default):
        raise wrong
    if meta["check"] is not None:
        try:
            meta["check"](value)
        except ValueError as error:
            raise ConfigError(f"{key} = {shown(value)}: {error}") from None
    if meta["is_path"] and value:
        try:
            return full_path(value)
        except ValueError as error:
            raise ConfigError(f"{key} = {shown(value)}: {error}") from None
    return value


def _allowed(f: Any) -> str:
    meta = f.metadata
    if meta["is_class"]:
        return ", ".join((*(meta["choices"] or ["empty"]), "or a class as package.module:Class"))
    if meta["choices"]:
        return "one of " + ", ".join(meta["choices"])
    show = format_bytes if meta["is_bytes"] else "{:.15g}".format
    name = {
        bool: "true or false",
        str: f"a text of at most {_MOST_TEXT} characters",
        int: "a whole number",
        float: "a number",
    }[type(f.default)]
    if meta["is_bytes"]:
        name = "a size such as 64MiB"
    return (
        name if meta["low"] is None else f"{name} from {show(meta['low'])} to {show(meta['high'])}"
    )


def _unknown(key: str, prefix: str, known: list[str]) -> str:
    # Comparing takes time that grows with the square of the key's length.
    short = is_text(key, MOST_SHOWN)
    close = difflib.get_close_matches(key, known, n=1) if short else []
    named = key if short else shown(key)
    hint = f" Did you mean {prefix}{close[0]}?" if close else ""
    return f"unknown setting {prefix}{named}.{hint} Known: {', '.join(prefix + k for k in known)}"


_ON_OFF = {True: "on", False: "off"}
"""YAML reads the words on and off as booleans."""
_REMOVED = {
    "store.admission_cost_s": "store.admission_cost_s is no setting any more, because no server "
    "knew what a page costs: remove it",
    "store.admission = recompute-cost": "store.admission = recompute-cost is no choice any more, "
    "because no server knew what a page costs: choose all (the default) or second-hit",
}
LAB_SECTIONS = ("lab", "lab.throttle", "lab.remote_throttle", "lab.faults")
"""Sections that only the laboratory writes."""
_SECTIONS: dict[str, Any] = {
    "store": StoreConfig,
    "remote": RemoteConfig,
    "policy": PolicyConfig,
    "lab": LabConfig,
    "lab.throttle": ThrottleConfig,
    "lab.remote_throttle": ThrottleConfig,
    "lab.faults": FaultConfig,
}
