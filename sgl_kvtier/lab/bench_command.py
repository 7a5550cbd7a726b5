"""`kvtier bench PART`: measurements of single parts, each with both sides in one run."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from sgl_kvtier.lab.attention import arguments as attention_arguments
from sgl_kvtier.lab.copies import arguments as copies_arguments

PARTS: dict[str, tuple[Any, str]] = {
    "attention": (
        attention_arguments,
        "CPU prefill attention per chunk, torch_native and ours in turn",
    ),
    "copies": (
        copies_arguments,
        "the interpreter's time per load onto a card, SGLang's kernels and staging in turn",
    ),
    "copy-table": (
        "sgl_kvtier.lab.copies.copy_table_command",
        "every way to bring host pages to the device: bandwidth, time to begin, what a GEMM beside "
        "it loses",
    ),
    "equal": (
        "sgl_kvtier.lab.equal.command",
        "restored answers against what stock's own differ by between two chunk sizes",
    ),
    "remote": (
        "sgl_kvtier.lab.remotebench.command",
        "the remote store against Mooncake's own client, and under injected faults",
    ),
    "restore": (
        "sgl_kvtier.lab.experiment.scenarios.restore",
        "stored prompts at many bandwidths: computed, loaded, stock's way, and ours",
    ),
    "restore-fuzz": (
        "sgl_kvtier.lab.fuzz.command",
        "agent sessions against a server in trouble: nothing hangs, leaks or differs",
    ),
    "restore-timeline": (
        "sgl_kvtier.lab.pages.timeline",
        "restorations of a decision log, and their two pointers",
    ),
    "restore-overhead": (
        "sgl_kvtier.lab.experiment.scenarios.overhead",
        "decoding where nothing is restored, stock and ours in paired rounds",
    ),
    "store": (
        "sgl_kvtier.lab.storebench.command",
        "the page store against fio and HiCache's file backend on this disk",
    ),
    "torture": (
        "sgl_kvtier.lab.torture.command",
        "crashes, faults and damage: what the store loses, and that it never lies",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one sub-command per part."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, (where, summary) in PARTS.items():
        part: Any = importlib.import_module(where) if isinstance(where, str) else where
        one = parts.add_parser(name, help=summary, description=summary)
        part.add_arguments(one)
        one.set_defaults(run_part=part.run)


def run(args: argparse.Namespace) -> int:
    """Carries out one benchmark; the exit status. Raises KVTierError."""
    status: int = args.run_part(args)
    return status
