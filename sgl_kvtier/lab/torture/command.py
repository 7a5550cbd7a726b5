"""The `kvtier bench torture` command: runs every kind of torture with one seed and adds up what
went wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_kvtier import arguments
from sgl_kvtier.console import (
    Column,
    Progress,
    Table,
    check_target,
    envelope,
    print_table,
    progress,
    write_json,
)
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.torture.crowd import crowd, stall
from sgl_kvtier.lab.torture.damage import torture_bytes
from sgl_kvtier.lab.torture.deletes import AMPLE, EVICTING, Deleting
from sgl_kvtier.lab.torture.kills import POINTS, Killing
from sgl_kvtier.lab.torture.oracle import Verdict
from sgl_kvtier.lab.torture.power import torture_power
from sgl_kvtier.lab.torture.sweep import sweep
from sgl_kvtier.lab.torture.together import AMPLE as ROOM_FOR_ALL
from sgl_kvtier.lab.torture.together import together

SCHEMA = "kvtier.torture/1"


@dataclass(frozen=True)
class Amounts:
    """How much of each kind."""

    kills: int
    per_point: int
    delete_kills: int
    sweep_stride: int
    power_states: int
    corruptions: int
    clean_reads: int
    crowd_operations: int
    stalls: int
    together_kills: int


FULL = Amounts(1000, 100, 1000, 1, 10_000, 100_000, 1_000_000, 1_000_000, 20, 200)
QUICK = Amounts(25, 1, 20, 61, 100, 2_000, 20_000, 8_000, 3, 20)
Points = tuple[tuple[str, str], ...]
PARTS = ("kills", "points", "deletes", "sweep", "power", "damage", "crowd", "stall", "together")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier bench torture`."""
    parser.add_argument(
        "--quick", action="store_true", help="a short run of everything, about half a minute"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="only this kind; repeatable")
    parser.add_argument(
        "--points",
        metavar="NAMES",
        help='of the kind "points" only these, as "pwritev before,rename after"; all: see '
        "the result",
    )
    parser.add_argument(
        "--seed", type=arguments.seed, default=1, help="another seed, other accidents (default 1)"
    )
    parser.add_argument(
        "--dir",
        metavar="DIR",
        help="where to work (default: a new folder in the system's temporary one)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for standard output"
    )


def run(args: argparse.Namespace) -> int:
    """Tortures; 1 when anything was wrong. Raises KVTierError."""
    if args.json is not None:
        check_target(args.json)
    points = chosen_points(args.points)
    try:
        root = tempfile.mkdtemp(prefix="kvtier-torture-", dir=args.dir)
    except OSError as error:
        raise BenchError(f"cannot work in {args.dir}: {error}. Give another --dir") from error
    logger = logging.getLogger("sgl_kvtier.store")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # every warning here is caused on purpose
    try:
        result = torture(
            root, QUICK if args.quick else FULL, args.seed, tuple(args.only or PARTS), points
        )
    finally:
        logger.setLevel(level)
        shutil.rmtree(root, ignore_errors=True)
    if args.json != "-":
        rows = [
            {"what": name.replace("_", " "), "value": value}
            for name, value in result.items()
            if not isinstance(value, dict)
        ]
        print_table(
            Table(
                "Torture of the page store",
                [Column("what", "what"), Column("value", "value")],
                rows,
            )
        )
    if args.json is not None:
        write_json(envelope(SCHEMA, ["kvtier", *sys.argv[1:]], result), args.json)
    return 1 if bad(result) else 0


def bad(result: dict[str, Any]) -> int:
    """Everything that must be 0."""
    names = (
        "wrong_pages",
        "resurrected",
        "failed_opens",
        "undetected",
        "false_alarms",
        "exceptions",
        "over_cap_bytes",
        "canary_touched",
        "lost_pages",
    )
    return sum(int(result[name]) for name in names)


def chosen_points(names: str | None) -> Points:
    """Points by name, in their own order: each has its own seed, whichever are chosen. Raises
    BenchError for no point's name.
    """
    known = {" ".join(point): point for point in POINTS}
    wanted = [name.strip() for name in names.split(",")] if names is not None else list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise BenchError(
            f"no such point: {', '.join(map(repr, unknown))}. There are {', '.join(known)}"
        )
    return tuple(point for name, point in known.items() if name in wanted)


def torture(
    root: str, amounts: Amounts, seed: int, parts: tuple[str, ...] = PARTS, points: Points = POINTS
) -> dict[str, Any]:
    """Runs the parts below `root` and returns the counts, zero for parts left out."""
    killed_at = dict.fromkeys(map(" ".join, points if "points" in parts else ()), 0)
    result: dict[str, Any] = dict.fromkeys(_COUNTS, 0) | {
        "seed": seed,
        "points": killed_at,
        "damage_by_kind": {},
    }
    for part in parts:
        folder = os.path.join(root, part)
        os.mkdir(folder)
        _PARTS[part](folder, amounts, seed, result)
        shutil.rmtree(folder)
    result["recovered_share"] = (
        result["recent_found"] / result["recent"] if result["recent"] else None
    )
    result["synced_recovered_share"] = (
        result["synced_found"] / result["synced"] if result["synced"] else None
    )
    return result


def _kills(root: str, amounts: Amounts, seed: int, result: dict[str, Any]) -> None:
    killing = Killing(root, seed)
    with progress("random kills", amounts.kills, "kills") as shown:
        while killing.kills < amounts.kills:
            killing.blackbox()
            shown.advance()
    _add_killing(killing, result)


def _points(root: str, amounts: Amounts, seed: int, result: dict[str, Any]) -> None:
    with progress(
        "kills at system calls", amounts.per_point * len(result["points"]), "kills"
    ) as shown:
        for number, point in enumerate(POINTS):
            if " ".join(point) not in result["points"]:
                continue
            killing = Killing(os.path.join(root, str(number)), seed + number)
            tries = 0
            while killing.kills < amounts.per_point and tries < 20 * amounts.per_point + 20:
                tries += 1
                shown.advance(float(killing.whitebox(point)), " ".join(point))
            _add_killing(killing, result)
            shutil.rmtree(killing.root, ignore_errors=True)


def _deletes(root: str, amounts: Amounts, seed: int, result: dict[str, Any]) -> None:
    rooms = [Deleting(os.path.join(root, str(room)), seed, room) for room in (EVICTING, AMPLE)]
    with progress("kills beside deletes", amounts.delete_kills, "kills") as shown:
        for number in range(amounts.delete_kills):
            rooms[number % 2].kill()
            shown.advance()
    for deleting in rooms:
        result["kills"] += deleting.kills
        result["failed_opens"] += deleting.failed_opens
        result["deletes"] += deleting.oracle.answered
        result["recent"] += deleting.sure
        result["recent_found"] += deleting.sure_found
        _add_verdict(deleting.verdict, result)


def _add_verdict(verdict: Verdict, result: dict[str, Any]) -> None:
    result["wrong_pages"] += verdict.wrong
    result["resurrected"] += verdict.resurrected
    result["pages_checked"] += verdict.right + verdict.wrong + verdict.resurrected


def _add_killing(killing: Killing, result: dict[str, Any]) -> None:
    result["kills"] += killing.kills
    result["failed_opens"] += killing.failed_opens
    result["deletes"] += killing.deletes
    _add_verdict(killing.verdict, result)
    result["recent"] += killing.recent
    result["recent_found"] += killing.recent_found
    result["points"] |= dict(killing.points)


def _sweep(root: str, amounts: Amounts, _: int, result: dict[str, Any]) -> None:
    with progress("failing system calls", None, "runs") as shown:
        found = sweep(root, amounts.sweep_stride, _advance(shown))
    result["io_faults"] += found.io_faults
    result["io_calls"] = found.calls
    result["exceptions"] += len(found.exceptions)
    result["exception_texts"] = {str(i): text for i, text in enumerate(found.exceptions[:20])}
    result["deletes"] += found.deletes
    _add_verdict(found.verdict, result)


def _power(root: str, amounts: Amounts, seed: int, result: dict[str, Any]) -> None:
    with progress("power losses", amounts.power_states, "states") as shown:
        found = torture_power(root, seed, amounts.power_states, _advance(shown))
    result["power_loss_states"] += found.power_loss_states
    result["failed_opens"] += found.failed_opens
    result["deletes"] += found.deletes
    _add_verdict(found.verdict, result)
    result["synced"] += found.synced
    result["synced_found"] += found.synced_found


def _damage(root: str, amounts: Amounts, seed: int, result: dict[str, Any]) -> None:
    with progress(
        "damage and clean reads", amounts.corruptions + amounts.clean_reads, "pages"
    ) as shown:
        found = torture_bytes(root, seed, amounts.corruptions, amounts.clean_reads, _advance(shown))
    for name in ("corruptions", "undetected", "clean_reads", "false_alarms"):
        result[name] += getattr(found, name)
    result["damage_by_kind"] = dict(found.by_kind)


def _crowd(root: str, amounts: Amounts, seed: int, result: dict[str, Any]) -> None:
    with progress("threads and processes", 1, "run") as shown:
        found = crowd(root, seed, 3, 4, amounts.crowd_operations)
        shown.advance()
    result["crowd_operations"] = found.operations
    result["wrong_pages"] += found.wrong
    result["exceptions"] += found.failures
    result["over_cap_bytes"] += found.over_cap_bytes


def _stall(root: str, amounts: Amounts, _: int, result: dict[str, Any]) -> None:
    with progress("stalled device", 1, "run") as shown:
        found = stall(root, amounts.stalls)
        shown.advance()
    result["canary_touched"] += found.canary_touched
    result["stall"] = dataclasses.asdict(found)


def _together(root: str, amounts: Amounts, seed: int, result: dict[str, Any]) -> None:
    with progress("kills beside another owner", amounts.together_kills, "kills") as shown:
        rooms = together(root, seed, amounts.together_kills, _advance(shown))
    for room in rooms:
        result["kills"] += room.kills
        result["deletes"] += room.deletes
        result["pages_checked"] += room.found
        result["wrong_pages"] += room.wrong
        result["resurrected"] += room.resurrected
        result["failed_opens"] += room.failed_opens
        result["exceptions"] += room.failed_lives
        result["lost_pages"] += room.lost
        result["over_cap_bytes"] += room.over_cap_bytes
        if room.capacity_bytes == ROOM_FOR_ALL:
            result["recent"] += room.checked
            result["recent_found"] += room.found


def _advance(shown: Progress) -> Callable[[int], None]:
    def step(steps: int) -> None:
        shown.advance(steps)

    return step


_COUNTS = (
    "kills",
    "failed_opens",
    "wrong_pages",
    "deletes",
    "resurrected",
    "pages_checked",
    "recent",
    "recent_found",
    "io_faults",
    "io_calls",
    "exceptions",
    "power_loss_states",
    "synced",
    "synced_found",
    "corruptions",
    "undetected",
    "clean_reads",
    "false_alarms",
    "crowd_operations",
    "over_cap_bytes",
    "canary_touched",
    "lost_pages",
)
_PARTS = {
    "kills": _kills,
    "points": _points,
    "sweep": _sweep,
    "power": _power,
    "damage": _damage,
    "crowd": _crowd,
    "deletes": _deletes,
    "stall": _stall,
    "together": _together,
}
