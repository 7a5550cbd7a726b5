"""`kvtier doctor`: is this machine ready, and if not, what to do. Imports no SGLang, and torch only
to look for accelerators.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import resource
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sgl_kvtier import __version__
from sgl_kvtier.config import KVTierConfig, PolicyConfig, RemoteConfig, describe_config, load_config
from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    format_bytes,
    print_table,
    write_json,
)
from sgl_kvtier.console.environment import planner_build
from sgl_kvtier.errors import KVTierError, StoreError
from sgl_kvtier.policy.pages.eviction import eviction_of
from sgl_kvtier.policy.rules import rules_of
from sgl_kvtier.runtime.cpu import platform
from sgl_kvtier.runtime.settings import off_on_a_card
from sgl_kvtier.runtime.sglang import seams
from sgl_kvtier.runtime.tools import disk_probe, remote_probe
from sgl_kvtier.store.disk.namespace import check_root
from sgl_kvtier.store.tools import master

SCHEMA = "kvtier.doctor/1"
_OPEN_FILES = 4096
_METRICS_PORT = 9003
"""Where Mooncake's master has its figures unless it was told otherwise."""
_HOST_RESERVE = 10 << 30
_MEMINFO = Path("/proc/meminfo")
"""Host memory SGLang leaves free when it sizes HiCache pools by itself (pool_host/base.py)."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `state` is ok, warn or fail; `advice` says what to do, if anything."""

    check: str
    state: str
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier doctor`."""
    parser.add_argument(
        "--config", metavar="FILE", help="also check this kvtier.json and the folder it names"
    )
    parser.add_argument(
        "--store", metavar="FOLDER", help="folder for pages, when no --config is given"
    )
    parser.add_argument(
        "--settings", action="store_true", help="list every setting of kvtier.json and leave"
    )
    parser.add_argument("--no-disk", action="store_true", help="do not write and read test files")
    parser.add_argument("--json", metavar="FILE", help="results as JSON; - for standard output")


def run(args: argparse.Namespace) -> int:
    """Looks at everything and prints it; 0 when a server can run here, 1 when something fails."""
    if args.settings:
        return _list_settings(args.json)
    if args.json:
        check_target(args.json)
    findings = [
        *_versions(),
        *_seams(),
        *_platform(args),
        *_settings(args),
        *_memory(),
        *_huge_pages(),
        *_open_files(),
    ]
    if args.json != "-":
        columns = (
            Column("check", "check"),
            Column("state", ""),
            Column("found", "found"),
            Column("advice", "what to do"),
        )
        print_table(Table("kvtier doctor", columns, [asdict(f) for f in findings]))
    if args.json:
        symbols = [{**asdict(s.seam), "problem": s.problem} for s in seams.check()]
        results = {"findings": [asdict(f) for f in findings], "seams": symbols}
        write_json(envelope(SCHEMA, sys.argv, results), args.json)
    failed = [f for f in findings if f.state == "fail"]
    if args.json != "-":
        print(f"{len(failed)} to correct before a server can run here" if failed else "ready")
    return 1 if failed else 0


def _list_settings(target: str | None) -> int:
    rows = describe_config()
    if target:
        check_target(target)
        write_json(envelope("kvtier.settings/1", sys.argv, {"settings": rows}), target)
        return 0
    columns = tuple(Column(name, name) for name in ("key", "default", "allowed", "meaning"))
    print_table(Table("settings of kvtier.json", columns, rows))
    return 0


def _versions() -> Iterator[Finding]:
    yield Finding("kvtier", "ok", f"{__version__} on Python {sys.version.split()[0]}")
    if planner_build() == "compiled":
        yield Finding("planner", "ok", "compiled")
    else:
        advice = f"it plans the same, 1.5 to 4 times slower. {_compile_again()}"
        yield Finding("planner", "warn", "Python source", advice)
    if importlib.util.find_spec("sgl_kvtier.store._native") is not None:
        yield Finding("I/O threads", "ok", "compiled")
    else:
        yield Finding("I/O threads", "warn", "Python", _compile_again())
    version = seams.installed_version()
    if version is None:
        yield Finding(
            "sglang", "fail", "not installed", "pip install 'sgl-kvtier[sglang]' (about 10 GB)"
        )
    elif version != seams.SGLANG_VERSION:
        yield Finding("sglang", "fail", version, f"pip install 'sglang=={seams.SGLANG_VERSION}'")
    else:
        yield Finding("sglang", "ok", version)
    for name in ("torch", "flashinfer-python", "numpy"):
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "warn", "not installed", "comes with sglang")


def compiling(direct_url: str | None) -> str:
    """The command that installs the package again with its compiled parts. `direct_url` is what pip
    noted of where it came from (PEP 610), None where that was a package index.
    """
    told = json.loads(direct_url or "{}")
    source = told.get("url", "")
    if "vcs_info" in told:
        source = f"{told['vcs_info']['vcs']}+{source}"
    elif source.startswith("file:"):
        source = shlex.quote(unquote(urlsplit(source).path))
    if not source or source.endswith(".whl"):
        source = "--no-binary sgl-kvtier sgl-kvtier"
    return f"pip install --force-reinstall --no-deps --no-cache-dir {source}"


def _compile_again() -> str:
    try:
        noted = importlib.metadata.distribution("sgl-kvtier").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        noted = None
    return f"With a C compiler, and without -e: {compiling(noted)}"


def _seams() -> Iterator[Finding]:
    if seams.installed_version() is None:
        return
    statuses = seams.check()
    for feature in dict.fromkeys(s.seam.feature for s in statuses):
        mine = [s for s in statuses if s.seam.feature == feature]
        broken = [s for s in mine if s.problem]
        if broken:
            found = "; ".join(f"{s.seam.symbol.rsplit('.', 1)[1]}: {s.problem}" for s in broken)
            yield Finding(
                f"seams: {feature}", "fail", found, f"reinstall sglang=={seams.SGLANG_VERSION}"
            )
        else:
            yield Finding(f"seams: {feature}", "ok", f"{len(mine)} symbols as expected")


def _restoration(args: argparse.Namespace) -> Iterator[Finding]:
    """Whether prefixes would be restored on the accelerator that was found."""
    try:
        policy = load_config(args.config).policy if args.config else PolicyConfig()
    except KVTierError:
        return  # the settings' own finding says so
    note = off_on_a_card(policy)
    if note is None:
        yield Finding("restoration", "ok", f"policy.restore = {policy.restore}")
    else:
        yield Finding("restoration", "warn", "off on a GPU", note)


def _platform(args: argparse.Namespace) -> Iterator[Finding]:
    try:
        found = platform.accelerators()
    except ImportError:
        found = []
    if found:
        yield Finding("platform", "ok", f"accelerator: {', '.join(found[:4])}")
    else:
        yield Finding(
            "platform",
            "ok",
            f"no accelerator: the CPU platform {platform.NAME} will run the server",
        )
    if found:
        yield from _restoration(args)
    names = {ep.name for ep in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    if "kvtier" not in names:
        yield Finding(
            "plugin", "fail", "SGLang does not find it", "reinstall: pip install sgl-kvtier"
        )
    chosen = [
        name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()
    ]
    if chosen and not {"kvtier", platform.NAME} <= set(chosen):
        yield Finding(
            "SGLANG_PLUGINS", "fail", ",".join(chosen), f"unset it, or add kvtier,{platform.NAME}"
        )
    other = os.environ.get("SGLANG_PLATFORM", "")
    if other and other != platform.NAME:
        advice = "SGLang skips this plugin then; use the dynamic form (docs/manual/store.md)"
        yield Finding("SGLANG_PLATFORM", "warn", other, advice)


def _settings(args: argparse.Namespace) -> Iterator[Finding]:
    config = KVTierConfig()
    if args.config:
        try:
            config = load_config(args.config)
            rules_of(config.policy.rules)
            eviction_of(config.policy.eviction)
        except KVTierError as error:
            yield Finding("settings", "fail", args.config, str(error))
            return
        if not config.store.path:
            yield Finding(
                "settings", "fail", args.config, "set store.path to a folder on a local disk"
            )
            return
        yield Finding("settings", "ok", args.config)
        yield from _remote(config.remote)
    folder = config.store.path or args.store
    if folder is None:
        yield Finding(
            "disk", "warn", "no folder given", "kvtier doctor --store FOLDER measures the disk"
        )
        return
    made = not Path(folder).exists()
    try:
        yield from _disk(Path(folder), config, measure=not args.no_disk)
    finally:
        if made and Path(folder).is_dir():
            Path(folder).rmdir()  # looking leaves nothing behind


def _remote(config: RemoteConfig) -> Iterator[Finding]:
    if config.engine == "off":
        return
    named = f"{config.engine} at {config.master}"
    try:
        speed = remote_probe.try_out(config)
    except KVTierError as error:
        yield Finding("remote store", "fail", named, str(error))
        return
    found = (
        f"{named}: write {speed.write_mbps:,.0f} MB/s, read {speed.read_mbps:,.0f} MB/s, look-up "
        f"{speed.exists_ms:.1f} ms ({remote_probe.PAGES} pages of "
        f"{format_bytes(remote_probe.PAGE_BYTES)})"
    )
    yield Finding("remote store", "ok", found)
    if config.engine != "mooncake":
        return
    advice = "it has no authentication and no encryption: keep it in a private network"
    yield Finding("remote security", "warn", "all who reach it read and change pages", advice)
    host = config.master.rpartition(":")[0]
    try:
        status = master.look(f"{host}:{_METRICS_PORT}")
    except StoreError:
        advice = "kvtier stat --remote HOST:PORT, with the --metrics_port of its master"
        yield Finding("remote memory", "ok", f"no figures at port {_METRICS_PORT}", advice)
        return
    free = format_bytes(status.capacity_bytes - status.nbytes)
    found = f"{free} free of {format_bytes(status.capacity_bytes)}, {len(status.segments)} owners"
    yield Finding("remote memory", "ok", found)


def _disk(folder: Path, config: KVTierConfig, *, measure: bool) -> Iterator[Finding]:
    try:
        probe = disk_probe.look(folder)
    except OSError as error:
        advice = "choose a folder that this user can create and write"
        yield Finding("disk", "fail", f"{folder}: {error.strerror}", advice)
        return
    try:
        check_root(str(folder))
    except StoreError as error:
        yield Finding("store.path", "fail", str(folder), str(error))
    wanted = config.store.min_free_bytes
    state = "ok" if probe.free_bytes > wanted else "fail"
    advice = (
        "" if state == "ok" else f"writes stop below store.min_free_bytes = {format_bytes(wanted)}"
    )
    yield Finding(
        "disk",
        state,
        f"{folder} ({probe.filesystem}), {format_bytes(probe.free_bytes)} free",
        advice,
    )
    if probe.direct_io:
        yield Finding("direct I/O", "ok", "works here")
    else:
        yield Finding(
            "direct I/O",
            "warn",
            "not on this filesystem",
            "reads go through the page cache; use a local ext4 or xfs",
        )
    if measure:
        speed = disk_probe.measure(folder, direct=probe.direct_io)
        found = (
            f"write {speed.write_mbps:,.0f} MB/s, read {speed.read_mbps:,.0f} MB/s "
            f"({format_bytes(speed.nbytes)}, one thread)"
        )
        yield Finding("disk speed", "ok", found)


def _memory(meminfo: Path = _MEMINFO) -> Iterator[Finding]:
    fields = _meminfo(meminfo)
    available = fields.get("MemAvailable", 0) << 10
    found = f"{format_bytes(available)} of {format_bytes(fields.get('MemTotal', 0) << 10)} free"
    if available < _HOST_RESERVE:
        advice = (
            "SGLang keeps 10 GiB free when it sizes host pools: give --hicache-ratio or "
            "--hicache-size"
        )
        yield Finding("memory", "warn", found, advice)
    else:
        yield Finding("memory", "ok", found)


def _huge_pages(meminfo: Path = _MEMINFO) -> Iterator[Finding]:
    """SGLang takes its host pools from huge pages when SGLANG_HUGEPAGE_SIZE says so and the system
    has reserved some.
    """
    asked = os.environ.get("SGLANG_HUGEPAGE_SIZE", "").strip().upper()
    fields = _meminfo(meminfo)
    free = fields.get("HugePages_Free", 0) * fields.get("Hugepagesize", 0) << 10
    found = f"{asked or 'not used'}, {format_bytes(free)} reserved and free"
    if asked in ("2MB", "1GB"):
        advice = (
            "" if free else "reserve them: sysctl vm.nr_hugepages=N, as many as the host pool needs"
        )
        yield Finding("huge pages", "ok" if free else "fail", found, advice)
    elif asked:
        yield Finding("huge pages", "warn", found, "SGLANG_HUGEPAGE_SIZE knows 2MB and 1GB")
    else:
        advice = (
            "a virtual disk reads faster into huge pages: sysctl vm.nr_hugepages=N and "
            "SGLANG_HUGEPAGE_SIZE=2MB"
        )
        yield Finding("huge pages", "ok", found, advice)


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = "ok" if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES else "warn"
    yield Finding(
        "open files",
        state,
        f"{soft} (hard limit {hard})",
        "" if state == "ok" else f"ulimit -n {_OPEN_FILES}",
    )


def _meminfo(path: Path) -> dict[str, int]:
    """The kernel's account of memory by name: KiB, or a count of pages; may be empty."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in lines)
        if value
    }
