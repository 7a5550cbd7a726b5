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
from collections.abc import Callable, Iterable
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
from sgl_kvtier.lab.stress.store.busy import busy, stall
from sgl_kvtier.lab.stress.store.damage import torture_bytes
from sgl_kvtier.lab.stress.store.faults import arm, engines
from sgl_kvtier.lab.stress.store.kills import AMPLE, EVICTING, POINTS, Killing
from sgl_kvtier.lab.stress.store.oracle import Verdict
from sgl_kvtier.lab.stress.store.power import torture_power
from sgl_kvtier.lab.stress.store.sweep import sweep
from sgl_kvtier.lab.stress.store.together import Pace, Together

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
    crowd_s: float
    stalls: int
    together: Pace


FULL = Amounts(1000, 100, 1000, 1, 10_000, 100_000, 1_000_000, 300.0, 20, Pace(1000, 0.8, 20.0))
QUICK = Amounts(25, 1, 20, 183, 100, 2_000, 20_000, 3.0, 3, Pace(20, 0.1, 1.0))
Points = tuple[tuple[str, str], ...]
FAILING = ("points", "deletes", "sweep", "stall")
"""Parts that need the I/O threads with faults."""
PARTS = ("kills", "points", "deletes", "sweep", "power", "damage", "crowd", "stall", "together")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier bench torture`."""
    parser.epilog = (
        "example: kvtier bench torture --only together --seed 1 --json shared.json    "
        "(1,000 kills and stops of processes that share a folder, about 25 minutes; exit status 1 "
        "when a page was wrong, lost or came back, an open failed, or a call raised)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a short run of everything, about half a minute"
    )
    parser.add_argument(
        "--only",
        choices=PARTS,
        action="append",
        help="only this kind; repeatable. together: processes that share one folder, killed, "
        "stopped, suspended for up to 20 seconds, and troubled",
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
    parts = tuple(args.only or PARTS)
    if not set(parts).isdisjoint(FAILING):
        arm()
    try:
        root = tempfile.mkdtemp(prefix="kvtier-torture-", dir=args.dir)
    except OSError as error:
        raise BenchError(f"cannot work in {args.dir}: {error}. Give another --dir") from error
    logger = logging.getLogger("sgl_kvtier.store")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # every warning here is caused on purpose
    try:
        result = torture(root, QUICK if args.quick else FULL, args.seed, parts)
    finally:
        logger.setLevel(level)
        shutil.rmtree(root, ignore_errors=True)
    if args.json != "-":
        rows = [
            {"what": name.replace("_", " "), "value": value}
            for name, value in result.items()
            if not isinstance(value, dict)
        ]
        rows += [
            {"what": f"I/O threads of {part}", "value": ", ".join(kinds)}
            for part, kinds in result["engine"].items()
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
        "stats_raised",
        "followers_stopped",
    )
    return sum(int(result[name]) for name in names)


def torture(
    root: str, amounts: Amounts, seed: int, parts: tuple[str, ...] = PARTS, points: Points = POINTS
) -> dict[str, Any]:
    """Runs the parts below `root` and returns the counts, zero for parts left out."""
    killed_at = dict.fromkeys(map(" ".join, points if "points" in parts else ()), 0)
    result: dict[str, Any] = dict.fromkeys(_COUNTS, 0) | {
        "seed": seed,
        "points": killed_at,
        "damage_by_kind": {},
        "engine": {},
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
    _kill_at_random("kills", [Killing(root, seed)], amounts.kills, result)


def _deletes(root: str, amounts: Amounts, seed: int, result: dict[str, Any]) -> None:
    rooms = [
        Killing(os.path.join(root, str(room)), seed, room, threads=4, troubled=True)
        for room in (EVICTING, AMPLE)
    ]
    _kill_at_random("deletes", rooms, amounts.delete_kills, result)


def _kill_at_random(part: str, rooms: list[Killing], kills: int, result: dict[str, Any]) -> None:
    with progress(f"random kills ({part})", kills, "kills") as shown:
        for number in range(kills):
            rooms[number % len(rooms)].at_random()
            shown.advance()
    for killing in rooms:
        _add_killing(killing, part, result)


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
                shown.advance(float(killing.at_point(point)), " ".join(point))
            _add_killing(killing, "points", result)
            shutil.rmtree(killing.root, ignore_errors=True)


def _add_verdict(verdict: Verdict, result: dict[str, Any]) -> None:
    result["wrong_pages"] += verdict.wrong
    result["resurrected"] += verdict.resurrected
    result["pages_checked"] += verdict.right + verdict.wrong + verdict.resurrected


def _add_engines(part: str, kinds: Iterable[str], result: dict[str, Any]) -> None:
    """Which I/O threads the stores of a part had, as `DiskStore.io` calls them."""
    result["engine"][part] = sorted({*result["engine"].get(part, ()), *kinds})


def _add_killing(killing: Killing, part: str, result: dict[str, Any]) -> None:
    _add_engines(part, killing.oracle.engines, result)
    for name in ("kills", "failed_opens", "recent", "recent_found"):
        result[name] += getattr(killing, name)
    result["deletes"] += killing.oracle.answered
    result["points"] |= dict(killing.points)
    _add_verdict(killing.verdict, result)


def _sweep(root: str, amounts: Amounts, _: int, result: dict[str, Any]) -> None:
    with progress("failing system calls", None, "runs") as shown:
        found = sweep(root, amounts.sweep_stride, _advance(shown))
    result["io_faults"] += found.io_faults
    result["io_calls"] = found.calls
    result["io_faults_by_kind"] = dict(found.by_kind)
    result["io_faults_by_engine"] = {name: dict(by) for name, by in found.by_engine.items()}
    _add_engines("sweep", found.by_engine, result)
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
    _add_engines("power", found.engines, result)


def _damage(root: str, amounts: Amounts, seed: int, result: dict[str, Any]) -> None:
    with progress(
        "damage and clean reads", amounts.corruptions + amounts.clean_reads, "pages"
    ) as shown:
        found = torture_bytes(root, seed, amounts.corruptions, amounts.clean_reads, _advance(shown))
    for name in ("corruptions", "undetected", "clean_reads", "false_alarms"):
        result[name] += getattr(found, name)
    result["damage_by_kind"] = dict(found.by_kind)
    _add_engines("damage", [found.engine], result)


def _crowd(root: str, amounts: Amounts, seed: int, result: dict[str, Any]) -> None:
    with progress("many threads", 1, "run") as shown:
        found = busy(root, amounts.crowd_s, seed)
        shown.advance()
    result["crowd_pages"] = found.compared
    result["wrong_pages"] += found.wrong
    result["exceptions"] += found.strange
    result["over_cap_bytes"] += max(0, found.over_cap_bytes)
    _add_engines("crowd", found.io, result)


def _stall(root: str, amounts: Amounts, _: int, result: dict[str, Any]) -> None:
    with progress("stalled device", 1, "run") as shown:
        found = stall(root, amounts.stalls)
        shown.advance()
    result["canary_touched"] += found.canary_touched
    _add_engines("stall", found.engines, result)
    result["stall"] = {
        name: value for name, value in dataclasses.asdict(found).items() if name != "engines"
    }


def _together(root: str, amounts: Amounts, seed: int, result: dict[str, Any]) -> None:
    campaign = Together(root, seed, amounts.together)
    try:
        with progress("kills and stops of owners", amounts.together.ends, "ends") as shown:
            campaign.run(lambda ended: shown.advance(ended, f"{campaign.faults} faults"))
    finally:
        # Also of a run that was interrupted: it may not go wrong again.
        found = campaign.result()
        for history in found["histories"]:
            print("\n".join(history), file=sys.stderr)
    result["kills"] += found["kill"]
    result["deletes"] += found["deletes"]
    result["pages_checked"] += found["compared"]
    result["recent"] += found["looked_for"]
    result["recent_found"] += found["found"]
    result["wrong_pages"] += found["wrong"]
    result["resurrected"] += found["resurrected"]
    result["lost_pages"] += found["lost"]
    result["failed_opens"] += found["failed_open"]
    result["exceptions"] += found["exception"]
    result["stats_raised"] = found["stats_raised"]
    result["followers_stopped"] = found["follower_stopped"]
    result["over_cap_bytes"] += found["over_cap_bytes"]
    result["together"] = found
    _add_engines("together", engines(), result)  # drawn for each owner


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
    "crowd_pages",
    "over_cap_bytes",
    "canary_touched",
    "lost_pages",
    "stats_raised",
    "followers_stopped",
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
