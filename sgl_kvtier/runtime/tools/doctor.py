"""`kvtier doctor`: checks whether this machine is ready, and says what to do if not. Imports no
SGLang, and torch only to find accelerators.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import resource
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier import __version__
from sgl_kvtier.arguments import above_nought, positive
from sgl_kvtier.config import (
    KVTierConfig,
    PolicyConfig,
    RemoteConfig,
    describe_config,
    full_path,
    parse_config,
)
from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    format_bytes,
    format_share,
    print_table,
    write_json,
)
from sgl_kvtier.console.environment import planner_build
from sgl_kvtier.errors import KVTierError, StoreError
from sgl_kvtier.extras import how_to_compile, how_to_install
from sgl_kvtier.launch import refuse_missing_model, tier_flags
from sgl_kvtier.outside import brief
from sgl_kvtier.page_hash import compile_page_hash
from sgl_kvtier.policy.pages.eviction import eviction_of
from sgl_kvtier.policy.rules import rules_of
from sgl_kvtier.runtime.cpu import platform
from sgl_kvtier.runtime.settings import of_file, store_of_environment, with_environment
from sgl_kvtier.runtime.sglang import features, seams
from sgl_kvtier.runtime.tools import disk_fit, disk_probe, remote_probe
from sgl_kvtier.runtime.tools.container_memory import MemoryLimit, memory_limit
from sgl_kvtier.runtime.tools.disk_fit import Fit, Shape
from sgl_kvtier.runtime.tools.disk_probe import DiskSpeed
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.namespace import check_root
from sgl_kvtier.store.disk.space import no_room
from sgl_kvtier.store.tools import master

SCHEMA = "kvtier.doctor/1"
_OPEN_FILES = 4096
_METRICS_PORT = 9003
"""Default port of the metrics of Mooncake's master."""
_HOST_RESERVE = 10 << 30
"""Host memory that SGLang leaves free in addition to HiCache's pools (pool_host/base.py)."""
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Finding:
    """One check. `state` is ok, warn or fail; `advice` says what to do, if anything."""

    check: str
    state: str
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier doctor`."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="with --gpu: whether the disk is fast enough for this model (folder or name)",
    )
    parser.add_argument(
        "--gpu", choices=tuple(disk_fit.GPUS), help="the kind of GPU the model will run on"
    )
    parser.add_argument(
        "--gpus", type=positive, default=1, metavar="N", help="how many of them (default 1)"
    )
    parser.add_argument(
        "--read",
        type=_speeds,
        metavar="GB/S[,GB/S]",
        help="with MODEL: for disks that read so fast, in place of this machine's",
    )
    pages = parser.add_mutually_exclusive_group()
    pages.add_argument(
        "--config", metavar="FILE", help="also check this kvtier.json and the folder it names"
    )
    pages.add_argument(
        "--store", metavar="FOLDER", help="folder for pages, when no --config is given"
    )
    parser.add_argument(
        "--settings", action="store_true", help="list every setting of kvtier.json and leave"
    )
    parser.add_argument("--no-disk", action="store_true", help="do not write and read test files")
    parser.add_argument(
        "--verbose", action="store_true", help="also a row for each feature that SGLang allows"
    )
    parser.add_argument("--json", metavar="FILE", help="results as JSON; - for standard output")


def run(args: argparse.Namespace) -> int:
    """Runs all checks and prints the results; 0 if a server can run here, 1 if something fails."""
    if args.settings:
        return _list_settings(args.json)
    if args.json:
        check_target(args.json)
    if args.model is None and (args.gpu or args.read):
        raise KVTierError(
            "--gpu and --read are about a model: kvtier doctor MODEL --gpu h100 --read 3,6.4"
        )
    shape = None if args.model is None else _shape(args)
    if shape is not None and args.read is not None:
        return _map(shape, args)
    cards, speeds = _accelerators(), list[DiskSpeed]()
    findings = [
        *_versions(),
        *_page_hash(),
        *_features(cards),
        *_platform(args, cards),
        *_settings(args, speeds),
        *_memory(cpu=not cards, container=memory_limit()),
        *_huge_pages(),
        *_open_files(),
    ]
    failed = [f for f in findings if f.state == "fail"]
    fits = [] if shape is None or not speeds else _fits(shape, args, speeds[-1].read_mbps * 1e6)
    if args.json != "-":
        _print(findings if args.verbose else _shortened(findings))
        if shape is not None and fits:
            _print_fits(shape, args, fits)
        if failed:
            print(f"{len(failed)} to correct before a server can run here")
        else:
            print(_launch_line(args.config, _place(args)))
    if args.json:
        symbols = [{**asdict(s.seam), "problem": s.problem} for s in seams.check()]
        found = [asdict(f) for f in findings]
        results = {"findings": found, "seams": symbols, "fits": _rows(shape, args, fits)}
        write_json(envelope(SCHEMA, sys.argv, results), args.json)
    return 1 if failed else 0


def _speeds(text: str) -> list[float]:
    """Gigabytes per second, separated by commas."""
    return [above_nought(part) for part in text.split(",")]


def _map(shape: Shape, args: argparse.Namespace) -> int:
    """Whether disks with other speeds are fast enough. Nothing on this machine is checked."""
    found = [_fits(shape, args, gbytes * 1e9) for gbytes in args.read]
    if args.json != "-":
        for fits in found:
            _print_fits(shape, args, fits)
    if args.json:
        rows = _rows(shape, args, [fit for fits in found for fit in fits])
        results = {"findings": [], "seams": [], "fits": rows}
        write_json(envelope(SCHEMA, sys.argv, results), args.json)
    return 0


def _rows(shape: Shape | None, args: argparse.Namespace, fits: Sequence[Fit]) -> list[Any]:
    return [
        {**asdict(f), "saved_fraction": f.saved, "break_even_tokens": _shortest(shape, args, f)}
        for f in fits
        if shape is not None
    ]


def _shortest(shape: Shape, args: argparse.Namespace, fit: Fit) -> int | None:
    return disk_fit.break_even_tokens(shape, args.gpu, args.gpus, 1e9 * fit.read_gb_per_s)


def _shape(args: argparse.Namespace) -> Shape:
    """The model's shape. Raises KVTierError, also if GPU or disk are missing in the arguments."""
    if args.gpu is None or (args.no_disk and not args.read):
        raise KVTierError(
            "whether a disk is fast enough for a model needs the GPU and the disk: kvtier doctor "
            f"MODEL --gpu {'|'.join(disk_fit.GPUS)}, without --no-disk or with --read GB/S"
        )
    from transformers import PretrainedConfig

    refuse_missing_model(args.model)
    try:
        found, _ = PretrainedConfig.get_config_dict(args.model)
    except (OSError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise KVTierError(brief(f"{args.model}: no config.json can be read: {said}")) from error
    if not found:
        raise KVTierError(f"{args.model}: no config.json can be read there")
    return disk_fit.shape_of(args.model, found)


def _fits(shape: Shape, args: argparse.Namespace, bytes_per_s: float) -> list[Fit]:
    return disk_fit.fits(shape, args.gpu, args.gpus, bytes_per_s)


def _print_fits(shape: Shape, args: argparse.Namespace, fits: Sequence[Fit]) -> None:
    """Prints the table, and a sentence about prompts of 32k tokens."""
    columns = (
        Column("tokens", "prompt", unit="tokens", decimals=0),
        Column("compute_s", "computed", unit="s", decimals=2),
        Column("load_s", "loaded", unit="s", decimals=2),
        Column("both_s", "from both ends", unit="s", decimals=2),
        Column("saved", "saved by that", format=format_share),
    )
    rows = [{**asdict(f), "saved": f.saved} for f in fits]
    of = f"{args.gpus} x {args.gpu}" if args.gpus > 1 else args.gpu
    disk = "this disk" if args.read is None else f"a disk of {fits[0].read_gb_per_s:g} GB/s"
    print("", *_wrapped(f"Is {disk} fast enough for {shape.name} on {of}?"), sep="\n")
    print_table(Table("Estimated, for one prompt at a time", columns, rows))
    (long,) = (f for f in fits if f.tokens == _ANSWERED)
    needed = disk_fit.break_even(shape, args.gpu, args.gpus, long.tokens)
    read = 1e9 * long.read_gb_per_s
    answer = (
        f"loading beats computing at {long.tokens // 1024}k tokens"
        if read >= needed
        else f"loading alone is slower than computing at {long.tokens // 1024}k tokens"
    )
    shortest = _shortest(shape, args, long)
    where = (
        f"at no length up to {shape.most_tokens:,} tokens"
        if shortest is None
        else "at any length"
        if shortest == 1
        else f"from {shortest:,} tokens on"
    )
    said = (
        f"A token takes {format_bytes(shape.kv_bytes)} of KV cache. The disk reads "
        f"{read / 1e9:.1f} GB/s and the break-even is {needed / 1e9:.1f} GB/s: {answer}, and "
        f"restoring from both ends saves {format_share(long.saved)} of the better of the two.",
        f"The disk loads {read / shape.kv_bytes:,.0f} tokens/s; prefill on {of} computes "
        f"{long.tokens / long.compute_s:,.0f} tokens/s of a prompt of {long.tokens // 1024}k "
        f"tokens. Break-even length: loading is faster than computing {where}.",
    )
    print("", *(line for text in said for line in _wrapped(text)), "", sep="\n")


def _wrapped(text: str, indent: int = 0) -> list[str]:
    """Lines that fit the terminal after an indent, or 80 columns if there is none. Long words, such
    as paths, stay whole.
    """
    width = shutil.get_terminal_size().columns - indent
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)


_ANSWERED = 32768
_STATES = ("fail", "warn", "ok")
_FEATURE = "feature: "


def _print(findings: Sequence[Finding]) -> None:
    """Prints a row for each finding, failures first. Advice starts on a new line."""
    width = max(len(f.check) for f in findings)
    for f in sorted(findings, key=lambda f: _STATES.index(f.state)):
        head = f"{f.state:4}  {f.check:{width}}  "
        for text in filter(None, (f.found, f.advice)):
            for line in _wrapped(text, len(head)):
                print(head + line)
                head = " " * len(head)


def _shortened(findings: Sequence[Finding]) -> list[Finding]:
    """Merges the features that this SGLang allows into one row."""
    fine = [f for f in findings if f.check.startswith(_FEATURE) and f.state == "ok"]
    rest = [f for f in findings if f not in fine]
    if not fine:
        return rest
    names = ", ".join(f.check.removeprefix(_FEATURE) for f in fine)
    return [*rest, Finding("features", "ok", names)]


def _launch_line(config: str | None, store: str | None) -> str:
    place = ["--config", config] if config else ["--store", store or "FOLDER"]
    serve = shlex.join(["kvtier", "serve", "MODEL", *place])
    settings = json.dumps({"store": {"path": full_path(store) if store else "FOLDER"}})
    flags = shlex.join(tier_flags(f"@{config}" if config else settings))
    return f"ready: {serve}\nor add to your own launch line:\n{flags}"


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
        advice = (
            "it plans the same, 1.5 to 4 times slower. With a C compiler, and without -e: "
            f"{how_to_compile()}"
        )
        yield Finding("planner", "warn", "Python source", advice)
    if importlib.util.find_spec("sgl_kvtier.store._native") is not None:
        yield Finding("I/O threads", "ok", "compiled")
    else:
        advice = f"With a C compiler, and without -e: {how_to_compile()}"
        yield Finding("I/O threads", "warn", "Python", advice)
    version = seams.installed_version()
    if version is None:
        advice = f"{how_to_install('sglang')} (about 10 GB)"
        yield Finding("sglang", "fail", "not installed", advice)
    else:
        untried = features.untried()
        yield Finding("sglang", "warn" if untried else "ok", version, untried or "")
    for name in ("torch", "flashinfer-python", "numpy"):
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "warn", "not installed", "comes with sglang")


def _page_hash() -> Iterator[Finding]:
    """Compiles SGLang's page hash if necessary, as a server would do at its start."""
    if seams.installed_version() is None:
        return
    refused = compile_page_hash()
    if refused:
        yield Finding("page hash", "fail", "cannot be compiled", refused)
    else:
        yield Finding("page hash", "ok", "compiled")


def _features(cards: Sequence[str]) -> Iterator[Finding]:
    """Which features this SGLang allows. Without storage, or without a device, no server runs."""
    if seams.installed_version() is None:
        return
    needed = {"storage"} if cards else {"storage", "cpu"}
    for feature in features.FEATURES:
        check, moved = f"{_FEATURE}{feature.name}", features.moved(feature.name)
        if moved:
            state = "fail" if feature.name in needed else "warn"
            yield Finding(check, state, features.described(moved), feature.without)
        else:
            yield Finding(check, "ok", f"{features.counted(feature.name)} symbols as expected")


def _restoration(args: argparse.Namespace) -> Iterator[Finding]:
    """Whether prefixes would be restored on the accelerator that was found."""
    try:
        policy = of_file(args.config).policy if args.config else PolicyConfig()
    except KVTierError:
        return  # the finding of the settings reports it
    yield Finding("restoration", "ok", f"policy.restore = {policy.restore}")


def _copies(args: argparse.Namespace) -> Iterator[Finding]:
    """Whether pages arrive correctly on this GPU, how fast, and earlier results of servers. Only if
    torch can use an NVIDIA or AMD GPU.
    """
    import torch  # there is an accelerator

    if not torch.cuda.is_available():
        return
    from sgl_kvtier.runtime.tools import gpu_probe

    try:
        probe = gpu_probe.try_out()
    except Exception as error:  # a driver or a compiler may raise anything: that is the finding
        said = str(error).partition("\n")[0] or type(error).__name__
        advice = "a server leaves restoring to SGLang there: scripts/gpu-run setup says more"
        yield Finding("copies", "warn", brief(f"pages do not arrive as they were: {said}"), advice)
        return
    found = f"{probe.device}: {probe.result.line}"
    before = next(gpu_probe.shown_before(_folder(args), probe.device), None)
    if before is None:
        yield Finding("copies", "ok", f"{found}; no server has proven restoring on it yet")
        return
    state, pages, written, what = before
    when = time.strftime("%Y-%m-%d", time.gmtime(written))
    if state == "proven":
        yield Finding("copies", "ok", f"{found}; proven on {when}: {pages:,} pages equal, 0 differ")
        return
    advice = 'delete proof.json, or start a server with policy.proof = "all", to try again'
    yield Finding("copies", "warn", brief(f"{found}; refuted on {when}: {what}"), advice)


def _place(args: argparse.Namespace) -> str | None:
    """The folder for pages without --config. If a model needs a disk: that of `KVTIER=1`."""
    if args.store is None and args.model is not None:
        return str(Path(store_of_environment()["path"]).expanduser())
    return None if args.store is None else str(args.store)


def _folder(args: argparse.Namespace) -> Path:
    """The folder for pages, as far as the arguments tell."""
    try:
        path = of_file(args.config).store.path if args.config else _place(args)
    except KVTierError:
        path = None  # the settings' own finding says so
    return Path(path) if path else Path(os.devnull)


def _accelerators() -> list[str]:
    try:
        return platform.accelerators()
    except ImportError:
        return []


def _platform(args: argparse.Namespace, found: Sequence[str]) -> Iterator[Finding]:
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
        yield from _copies(args)
    names = {ep.name for ep in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    if "kvtier" not in names:
        yield Finding(
            "plugin", "fail", "SGLang does not find it", f"reinstall: {how_to_install('sglang')}"
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


def _settings(args: argparse.Namespace, speeds: list[DiskSpeed]) -> Iterator[Finding]:
    config = KVTierConfig()
    if args.config:
        try:
            config = of_file(args.config)
            rules_of(config.policy.rules)
            eviction_of(config.policy.eviction)
        except KVTierError as error:
            yield Finding("settings", "fail", args.config, str(error))
            return
        yield Finding("settings", "ok", args.config)
        yield from _remote(config.remote)
    elif _place(args) is not None:
        try:
            config = parse_config(with_environment({"store": {"path": _place(args)}}))
        except KVTierError as error:
            yield Finding("disk", "fail", "--store", str(error))
            return
        if args.store is None:
            advice = "--store FOLDER measures another disk"
            yield Finding("store", "ok", "the folder that KVTIER=1 uses", advice)
    if not config.store.path:
        yield Finding(
            "disk", "warn", "no folder given", "kvtier doctor --store FOLDER measures the disk"
        )
        return
    folder = Path(config.store.path)
    made = _missing(folder)
    try:
        yield from _disk(folder, config, speeds, measure=not args.no_disk)
    finally:
        for part in made:  # remove the folders that the check created
            with contextlib.suppress(OSError):
                part.rmdir()


def _missing(folder: Path) -> list[Path]:
    """The folder and its parents that do not exist, innermost first."""
    try:
        return [part for part in (folder, *folder.parents) if not part.exists()]
    except OSError:
        return []  # such as a name that is too long, which cannot be created either


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


def _disk(
    folder: Path, config: KVTierConfig, speeds: list[DiskSpeed], *, measure: bool
) -> Iterator[Finding]:
    """Findings about the disk. A measured speed is appended to `speeds`."""
    try:
        probe = disk_probe.look(folder)
    except OSError as error:
        advice = "choose a folder that this user can create and write"
        yield Finding("disk", "fail", brief(f"{folder}: {error.strerror}"), advice)
        return
    try:
        check_root(str(folder))
    except StoreError as error:
        yield Finding("store.path", "fail", str(folder), str(error))
    found = f"{folder} ({probe.filesystem}), {format_bytes(probe.free_bytes)} free"
    room = no_room(Env(), str(folder), config.store)
    if room is None:
        yield Finding("disk", "ok", found)
    else:
        yield Finding("disk", "fail", f"{found}: no page could be written", room.why)
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
        try:
            speed = disk_probe.measure(folder, direct=probe.direct_io)
        except OSError as error:
            advice = "make room on the disk, or in this user's quota"
            yield Finding("disk speed", "fail", brief(f"not measured: {error.strerror}"), advice)
            return
        found = (
            f"write {speed.write_mbps:,.0f} MB/s, read {speed.read_mbps:,.0f} MB/s "
            f"({format_bytes(speed.nbytes)}, {disk_probe.READERS} threads read)"
        )
        speeds.append(speed)
        yield Finding("disk speed", "ok", found)


def _memory(
    meminfo: Path = _MEMINFO, *, cpu: bool = False, container: MemoryLimit | None = None
) -> Iterator[Finding]:
    """Free memory for host pools: the machine's, or what the container's limit leaves."""
    fields = _meminfo(meminfo)
    available, total = fields.get("MemAvailable", 0) << 10, fields.get("MemTotal", 0) << 10
    found = f"{format_bytes(available)} of {format_bytes(total)} free"
    if container is not None and container.free_bytes < available:
        available = container.free_bytes
        found = (
            f"{format_bytes(available)} of the container's {format_bytes(container.limit_bytes)} "
            f"free (the machine has {found})"
        )
    reserve = platform.RESERVE_BYTES if cpu else _HOST_RESERVE
    if available < reserve:
        advice = (
            f"SGLang leaves {format_bytes(reserve)} free and refuses every HiCache host pool here: "
            "give the container or the machine more memory"
        )
        yield Finding("memory", "fail", found, advice)
    elif available < _HOST_RESERVE:
        advice = "a server takes some GiB beside its pools: name a small --max-total-tokens"
        yield Finding("memory", "warn", found, advice)
    else:
        yield Finding("memory", "ok", found)


def _huge_pages(meminfo: Path = _MEMINFO) -> Iterator[Finding]:
    """Whether SGLang's host pools can use huge pages: it does if SGLANG_HUGEPAGE_SIZE is set and
    the system has reserved some.
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
    """The kernel's memory statistics by name: KiB, or a number of pages; may be empty."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in lines)
        if value
    }
