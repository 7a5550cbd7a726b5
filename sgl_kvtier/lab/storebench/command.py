"""The `kvtier bench store` command: pairs of measurements in turns, and the medians of their
ratios.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from sgl_kvtier.arguments import not_negative, size
from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    format_bytes,
    print_table,
    progress,
    write_json,
)
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.storebench.disk import Reference
from sgl_kvtier.lab.storebench.peer import NixlPeer, Peer
from sgl_kvtier.lab.storebench.subject import Subject, memory_slots

SCHEMA = "kvtier.bench.store/1"
_LANES = 8
_KEYS = 1000
IN_FLIGHT = (1, 4, 16)
"""Reads in flight that are measured too."""
PAIRS = 7
"""Interleaved pairs of measurements."""

Samples = dict[str, list[float]]
Peers = dict[str, Peer]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier bench store`."""
    parser.add_argument(
        "--dir", required=True, metavar="DIR", help="the disk to measure: a folder on it"
    )
    parser.add_argument(
        "--pages",
        type=_sizes,
        default="64KiB,256KiB,2MiB,8MiB",
        metavar="SIZES",
        help="page sizes (default %(default)s)",
    )
    parser.add_argument(
        "--bytes",
        type=size,
        default="512MiB",
        metavar="SIZE",
        help="data per page size (default %(default)s)",
    )
    parser.add_argument(
        "--runtime",
        type=not_negative,
        default=1.0,
        help="seconds per reference measurement (default %(default)s)",
    )
    parser.add_argument(
        "--sglang-python",
        metavar="FILE",
        help="the Python that has SGLang, to measure HiCacheFile beside",
    )
    parser.add_argument(
        "--nixl-python",
        metavar="FILE",
        help="a Python that has nixl, to measure its POSIX backend with io_uring beside",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for standard output"
    )


def _sizes(text: str) -> list[int]:
    """Sizes in bytes, separated by commas."""
    return [size(part) for part in text.split(",") if part]


def run(args: argparse.Namespace) -> int:
    """Measures. Raises KVTierError."""
    if args.json is not None:
        check_target(args.json)
    try:
        root = tempfile.mkdtemp(prefix="kvtier-bench-", dir=args.dir)
    except OSError as error:
        raise BenchError(f"cannot work in {args.dir}: {error}. Give another --dir") from error
    try:
        result: dict[str, Any] = {"cells": [], "reference": Reference(root, 0, 0).tool}
        pairs = len(args.pages) * (PAIRS + len(IN_FLIGHT))
        with progress("store benchmark", pairs, "pairs") as shown:
            for page in args.pages:
                shown.describe(format_bytes(page))
                result["cells"] += _cells(root, page, args.bytes, args, shown.advance)
        result |= _fixed_costs(root, args)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if args.json != "-":
        for table in tables(result):
            print_table(table)
    if args.json is not None:
        write_json(envelope(SCHEMA, ["kvtier", *sys.argv[1:]], result), args.json)
    return 0


def tables(result: dict[str, Any]) -> list[Table]:
    """Ratios per page size, and fixed costs."""
    first: list[Column] = [
        Column("page_bytes", "page", format=lambda n: format_bytes(float(str(n)))),
        Column("in_flight", "in flight", decimals=0),
    ]
    ratios: list[Column] = [
        *first,
        *(Column(name, name.replace("_", " "), decimals=2) for name in _RATIOS),
    ]
    rates = [
        *first,
        *(
            Column(f"mb_per_s.{name}", name.replace("_", " "), "MB/s", decimals=0)
            for name in _RATES
        ),
    ]
    reference = f"reference: {result['reference']}"
    fixed = [{"what": what, "value": value} for what, value in result["fixed"].items()]
    costs = [Column("what", "what"), Column("value", "value")]
    return [
        Table("Median ratio of interleaved pairs", ratios, result["cells"], notes=[reference]),
        Table("Median rates", rates, result["cells"]),
        Table("Fixed costs", costs, fixed),
    ]


_RATIOS = {
    "read_vs_fio": ("read", "fio_read"),
    "prefix_vs_fio": ("prefix", "fio_read"),
    "busy_vs_idle": ("busy", "read"),
    "verified_vs_not": ("read", "unverified"),
    "read_vs_own_threads": ("read", "threads"),
    "write_vs_fio": ("write", "fio_write"),
    "read_vs_hicache_file": ("read", "hicache_file_cold"),
    "read_vs_hicache_file_warm": ("read", "hicache_file_warm"),
    "write_vs_hicache_file": ("write", "hicache_file_write"),
    "read_vs_nixl": ("read", "nixl_read"),
    "prefix_vs_nixl": ("prefix", "nixl_prefix"),
    "write_vs_nixl": ("write", "nixl_write"),
}
_RATES = tuple(dict.fromkeys(name for sides in _RATIOS.values() for name in sides))
"""What is measured, in bytes per second."""


def _cells(
    root: str, size: int, nbytes: int, args: argparse.Namespace, step: Callable[[], None]
) -> list[dict[str, Any]]:
    nbytes = max(nbytes, 4 * size) // size * size
    reference = Reference(root, nbytes, args.runtime)
    reference.prepare()
    store_at, peers_at = (os.path.join(root, name) for name in ("store", "peers"))
    peers = _peers(args, peers_at, size, nbytes)
    cells = []
    try:
        subject = Subject(store_at, size, nbytes, io_threads=_LANES)
        try:
            cells.append(_main_cell(size, subject, reference, peers, step))
        finally:
            subject.close()
            shutil.rmtree(store_at)
        for count in IN_FLIGHT:
            subject = Subject(store_at, size, nbytes, io_threads=count)
            try:
                cells.append(_lane_cell(size, subject, reference, count))
            finally:
                subject.close()
                shutil.rmtree(store_at)
            step()
    finally:
        for peer in peers.values():
            peer.close()
        shutil.rmtree(peers_at)
        os.unlink(reference.path)
    return cells


def _peers(args: argparse.Namespace, folder: str, size: int, nbytes: int) -> Peers:
    peers: Peers = {}
    os.makedirs(folder)
    for name, make, python in (
        ("hicache_file", Peer, args.sglang_python),
        ("nixl", NixlPeer, args.nixl_python),
    ):
        if python:
            at = os.path.join(folder, name)
            os.makedirs(at)
            peers[name] = make(python, at, size, nbytes, memory_slots(size, nbytes))
    return peers


def _main_cell(
    size: int, subject: Subject, reference: Reference, peers: Peers, step: Callable[[], None]
) -> dict[str, Any]:
    samples: Samples = {name: [] for name in _RATES}
    subject.write()
    for peer in peers.values():
        peer.write()
    for number in range(PAIRS):
        measures: list[tuple[str, Callable[[], float]]] = [
            ("fio_read", lambda: reference.read(size)),
            ("read", subject.read_random),
            ("unverified", subject.read_unverified),
            ("threads", subject.read_by_threads),
            ("busy", subject.read_beside_a_busy_thread),
            ("prefix", subject.read_prefix),
        ]
        if file := peers.get("hicache_file"):
            measures += [
                ("hicache_file_cold", file.read_cold),
                ("hicache_file_warm", file.read_warm),
            ]
        if isinstance(nixl := peers.get("nixl"), NixlPeer):
            measures += [("nixl_read", nixl.read_cold), ("nixl_prefix", nixl.read_prefix)]
        measures += [("fio_write", lambda: reference.write(size)), ("write", subject.write)]
        measures += [(f"{name}_write", peer.write) for name, peer in peers.items()]
        # Every other pair runs backwards, so that a drift of the machine favours neither.
        for name, measure in measures if number % 2 == 0 else measures[::-1]:
            samples[name].append(measure())
        step()
    return _cell(size, _LANES, samples)


def _lane_cell(size: int, subject: Subject, reference: Reference, lanes: int) -> dict[str, Any]:
    samples: Samples = {name: [] for name in _RATES}
    subject.write()
    for _ in range(3):
        samples["fio_read"].append(reference.read_threads(size, lanes))
        samples["read"].append(subject.read_random())
    return _cell(size, lanes, samples)


def _cell(size: int, lanes: int, samples: Samples) -> dict[str, Any]:
    cell: dict[str, Any] = {"page_bytes": size, "in_flight": lanes, "pairs": len(samples["read"])}
    for name, (ours, theirs) in _RATIOS.items():
        ratios = [a / b for a, b in zip(samples[ours], samples[theirs], strict=False)]
        cell[name + "_pairs"] = ratios
        cell[name] = statistics.median(ratios) if ratios else None
        if len(ratios) >= 4:
            low, _, high = statistics.quantiles(ratios, n=4)
            cell[name + "_iqr"] = [low, high]
    cell["mb_per_s"] = {
        name: statistics.median(values) / 1e6 if values else None
        for name, values in samples.items()
    }
    cell["samples_mb_per_s"] = {
        name: [v / 1e6 for v in values] for name, values in samples.items() if values
    }
    return cell


def _fixed_costs(root: str, args: argparse.Namespace) -> dict[str, Any]:
    fixed: dict[str, Any] = {}
    subject = Subject(os.path.join(root, "fixed"), 65_536, _KEYS * 65_536)
    subject.write()
    fixed["lookup of 1000 keys (ms)"] = 1e3 * statistics.median(
        subject.lookup_seconds(_KEYS) for _ in range(21)
    )
    subject.close()
    if args.sglang_python:
        folder = os.path.join(root, "peer")
        os.mkdir(folder)
        peer = Peer(args.sglang_python, folder, 65_536, _KEYS * 65_536)
        peer.write()
        peer.exists_seconds(_KEYS)
        fixed["HiCacheFile, existence of 1000 keys, warm (ms)"] = 1e3 * statistics.median(
            peer.exists_seconds(_KEYS) for _ in range(7)
        )
        peer.close()
    return {"fixed": fixed}
