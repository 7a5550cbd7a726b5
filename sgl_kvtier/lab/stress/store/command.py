"""The `kvtier bench torture` command: runs every kind of torture with one seed and adds up what
went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sgl_kvtier import arguments
from sgl_kvtier.console import Progress, check_target, envelope, print_table, progress, write_json
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.stress.store.busy import busy, stall
from sgl_kvtier.lab.stress.store.campaign import Campaign, Plan, alone
from sgl_kvtier.lab.stress.store.damage import torture_bytes
from sgl_kvtier.lab.stress.store.faults import POINTS, arm, engines
from sgl_kvtier.lab.stress.store.oracle import Verdict
from sgl_kvtier.lab.stress.store.power import torture_power
from sgl_kvtier.lab.stress.store.sweep import sweep
from sgl_kvtier.lab.stress.trouble import Finding, counted

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
    together: Plan
    points: tuple[tuple[str, str], ...] = POINTS
    """Where to kill, of `POINTS`. Each has its own seed, whichever are chosen."""


FULL = Amounts(1000, 100, 1000, 1, 10_000, 100_000, 1_000_000, 300.0, 20, Plan(1000, 0.8, 20.0))
QUICK = Amounts(25, 1, 20, 183, 100, 2_000, 20_000, 3.0, 3, Plan(20, 0.1, 1.0))
FAILING = ("points", "deletes", "sweep", "stall")
"""Parts that need the I/O threads with faults."""
PARTS = ("kills", "points", "deletes", "sweep", "power", "damage", "crowd", "stall", "together")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier bench torture`."""
    parser.epilog = (
        "example: kvtier bench torture --only together --seed 1 --json shared.json    "
        "(1,000 kills and stops of processes that share a folder, about 20 minutes; exit status 1 "
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
    parts, seed = tuple(args.only or PARTS), args.seed
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
        result = torture(root, QUICK if args.quick else FULL, seed, parts)
    finally:
        logger.setLevel(level)
        shutil.rmtree(root, ignore_errors=True)
    if args.json != "-":
        tried = [name for name in _COUNTS if name not in MUST_BE_ZERO and result[name]]
        kinds = {f"I/O threads of {n}": ", ".join(used) for n, used in result["engine"].items()}
        figures = {"seed": seed, **{name: result[name] for name in tried}, **kinds}
        print_table(counted("What was tried", figures))
        print_table(counted("What must be 0", result, MUST_BE_ZERO))
        print("\n".join(result["findings"][:10]))
    if args.json is not None:
        write_json(envelope(SCHEMA, ["kvtier", *sys.argv[1:]], result), args.json)
    return 1 if bad(result) else 0


def bad(result: dict[str, Any]) -> int:
    """Everything that must be 0."""
    return sum(int(result[name]) for name in MUST_BE_ZERO)


def torture(
    root: str, amounts: Amounts, seed: int, parts: tuple[str, ...] = PARTS
) -> dict[str, Any]:
    """Runs the parts below `root` and returns the counts, zero for parts left out."""
    result: dict[str, Any] = dict.fromkeys(_COUNTS, 0) | {
        "seed": seed,
        "must_be_zero": list(MUST_BE_ZERO),
        "findings": [],
        "points": {},
        "damage_by_kind": {},
        "engine": {},
    }
    for name in parts:
        part = _PARTS[name]
        folder = os.path.join(root, name)
        os.mkdir(folder)
        with progress(part.title, part.total(amounts), part.unit) as shown:
            found = part.run(folder, amounts, seed, shown)
        shutil.rmtree(folder)
        result["engine"][name] = sorted(found.pop("engine"))
        result["findings"] += found.pop("findings", ())
        for what, value in found.items():
            result[what] = result[what] + value if what in _COUNTS else value
    for share, found_of, of in (
        ("recovered_share", "recent_found", "recent"),
        ("synced_recovered_share", "synced_found", "synced"),
    ):
        result[share] = result[found_of] / result[of] if result[of] else None
    return result


Found = dict[str, Any]
"""What a part found: counts of `_COUNTS`, which are added up, and values of its own; `engine` are
the I/O threads that its stores had, as `DiskStore.io` calls them.
"""


@dataclass(frozen=True)
class Part:
    """One kind of torture: (folder, amounts, seed, what is shown) to what it found."""

    run: Callable[[str, Amounts, int, Progress], Found]
    title: str
    unit: str
    total: Callable[[Amounts], float | None] = lambda _: None


def _kills(root: str, amounts: Amounts, seed: int, shown: Progress) -> Found:
    return _counted(_played(Campaign(root, seed, alone(amounts.kills)), shown))


def _deletes(root: str, amounts: Amounts, seed: int, shown: Progress) -> Found:
    plan = alone(amounts.delete_kills, threads=4, troubled=True)
    return _counted(_played(Campaign(root, seed, plan), shown))


def _together(root: str, amounts: Amounts, seed: int, shown: Progress) -> Found:
    campaign = _played(Campaign(root, seed, amounts.together), shown)
    found = _counted(campaign)
    return {**found, "together": campaign.result()}


def _points(root: str, amounts: Amounts, seed: int, shown: Progress) -> Found:
    total: Counter[str] = Counter()
    kinds: set[str] = set()
    findings: list[str] = []
    at = {}
    for number, point in enumerate(POINTS):
        if point not in amounts.points:
            continue
        name = " ".join(point)
        folder = os.path.join(root, str(number))
        os.mkdir(folder)
        campaign = Campaign(folder, seed + number, alone(amounts.per_point))
        with _told(campaign):
            step = functools.partial(shown.advance, note=name)
            at[name] = campaign.kill_at(point, amounts.per_point, step)
        found = _counted(campaign)
        kinds |= set(found.pop("engine"))
        findings += found["findings"]
        total.update({what: found[what] for what in _OF_CAMPAIGN})
        shutil.rmtree(folder)
    return {**total, "engine": kinds, "findings": findings, "points": at}


def _played(campaign: Campaign, shown: Progress) -> Campaign:
    with _told(campaign):
        campaign.run(lambda ended: shown.advance(ended, f"{campaign.faults} findings"))
    return campaign


@contextlib.contextmanager
def _told(campaign: Campaign) -> Iterator[None]:
    """Tells what led to each fault, also of a run that was interrupted: it may not go wrong
    again.
    """
    try:
        yield
    finally:
        for history in campaign.result()["histories"]:
            print("\n".join(history), file=sys.stderr)


def _counted(campaign: Campaign) -> Found:
    found = campaign.result()
    counts = {name: found[own] for name, own in _OF_CAMPAIGN.items()}
    kinds = [name for name in engines() if found[name]]
    return {"engine": kinds, "findings": [lines[0] for lines in found["histories"]], **counts}


def _judged(verdict: Verdict) -> Found:
    checked = verdict.right + verdict.wrong + verdict.resurrected
    return {
        "wrong_pages": verdict.wrong,
        "resurrected": verdict.resurrected,
        "pages_checked": checked,
    }


def _sweep(root: str, amounts: Amounts, _: int, shown: Progress) -> Found:
    found = sweep(root, amounts.sweep_stride, shown.advance)
    return {
        "engine": found.by_engine,
        "io_faults": found.io_faults,
        "io_calls": found.calls,
        "io_faults_by_kind": dict(found.by_kind),
        "io_faults_by_engine": {name: dict(by) for name, by in found.by_engine.items()},
        "exceptions": len(found.exceptions),
        "findings": [f"{Finding.EXCEPTION.label}: {text}" for text in found.exceptions[:20]],
        "deletes": found.deletes,
        **_judged(found.verdict),
    }


def _power(root: str, amounts: Amounts, seed: int, shown: Progress) -> Found:
    found = torture_power(root, seed, amounts.power_states, shown.advance)
    names = ("power_loss_states", "failed_opens", "deletes", "synced", "synced_found")
    counts = {name: getattr(found, name) for name in names}
    lost = found.synced - found.synced_found
    return {"engine": found.engines, "lost_pages": lost, **counts, **_judged(found.verdict)}


def _damage(root: str, amounts: Amounts, seed: int, shown: Progress) -> Found:
    found = torture_bytes(root, seed, amounts.corruptions, amounts.clean_reads, shown.advance)
    names = ("corruptions", "undetected", "clean_reads", "false_alarms")
    counts = {name: getattr(found, name) for name in names}
    return {"engine": [found.engine], **counts, "damage_by_kind": dict(found.by_kind)}


def _crowd(root: str, amounts: Amounts, seed: int, shown: Progress) -> Found:
    found = busy(root, amounts.crowd_s, seed)
    shown.advance()
    return {
        "engine": found.io,
        "crowd_pages": found.compared,
        "wrong_pages": found.wrong,
        "exceptions": found.strange,
        "over_cap_bytes": found.over_cap_bytes,
    }


def _stall(root: str, amounts: Amounts, _: int, shown: Progress) -> Found:
    found = dataclasses.asdict(stall(root, amounts.stalls))
    shown.advance()
    kinds = found.pop("engines")
    return {"engine": kinds, "canary_touched": found["canary_touched"], "stall": found}


_OF_CAMPAIGN = {
    "kills": "kill",
    "deletes": "deletes",
    "pages_checked": "compared",
    "recent": "looked_for",
    "recent_found": "found",
    "wrong_pages": "wrong",
    "resurrected": "resurrected",
    "lost_pages": "lost",
    "failed_opens": "failed_open",
    "exceptions": "exception",
    "stats_raised": "stats_raised",
    "followers_stopped": "follower_stopped",
    "over_cap_bytes": "over_cap_bytes",
}
MUST_BE_ZERO = (
    "wrong_pages", "resurrected", "failed_opens", "undetected", "false_alarms", "exceptions",
    "over_cap_bytes", "canary_touched", "lost_pages", "stats_raised", "followers_stopped",
)  # fmt: skip
_COUNTS = (
    *MUST_BE_ZERO,
    "kills", "deletes", "pages_checked", "recent", "recent_found", "io_faults", "io_calls",
    "power_loss_states", "synced", "synced_found", "corruptions", "clean_reads", "crowd_pages",
)  # fmt: skip
_PARTS = {
    "kills": Part(_kills, "random kills", "kills", lambda a: a.kills),
    "points": Part(
        _points, "kills at system calls", "kills", lambda a: a.per_point * len(a.points)
    ),
    "deletes": Part(_deletes, "kills beside deletes", "kills", lambda a: a.delete_kills),
    "sweep": Part(_sweep, "failing system calls", "runs"),
    "power": Part(_power, "power losses", "states", lambda a: a.power_states),
    "damage": Part(
        _damage, "damage and clean reads", "pages", lambda a: a.corruptions + a.clean_reads
    ),
    "crowd": Part(_crowd, "many threads", "run", lambda _: 1),
    "stall": Part(_stall, "stalled device", "run", lambda _: 1),
    "together": Part(_together, "kills and stops of owners", "ends", lambda a: a.together.ends),
}
