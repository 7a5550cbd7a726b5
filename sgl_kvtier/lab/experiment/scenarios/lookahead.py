"""`kvtier compare lookahead`: what each part of looking ahead brings, against stock and against a
server that never evicts.

Arms with the kvtier backend differ in kvtier.json's policy section only, each by one more part of
looking ahead; `oracle` is `recompute` with a device pool for everything.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import (
    RUN,
    SERVER,
    add_load_arguments,
    add_options,
    deadline_of,
    each_once,
    load_options,
    model_of,
    setup_of,
    shape_of,
    thresholds,
    words,
)
from sgl_kvtier.lab.experiment.arms import (
    BASELINE,
    ORACLE,
    OURS,
    Setup,
    Variant,
    check_names,
    oracle,
)
from sgl_kvtier.lab.experiment.comparison import Cell, Comparison, failed, over_cells
from sgl_kvtier.lab.experiment.frame import check, work_folder
from sgl_kvtier.lab.experiment.load import (
    Load,
    LoadOptions,
    choose_encoder,
    load,
    undisturbed_tokens,
)
from sgl_kvtier.lab.experiment.measures import Round, arm_figures, left_out, ratios, sample_rows
from sgl_kvtier.lab.experiment.options import Options
from sgl_kvtier.lab.experiment.rounds import Plan, Replaying, RoundLog
from sgl_kvtier.lab.experiment.scenarios.compare import about
from sgl_kvtier.lab.experiment.timeline import watch
from sgl_kvtier.lab.outside.replay import ReplayOptions
from sgl_kvtier.lab.pages.kinds import LOOKAHEAD
from sgl_kvtier.lab.pages.stats import summary
from sgl_kvtier.outside import is_number

AUTO = -1
"""As many iterations as measured speeds ask for."""
_OFF: Mapping[str, Any] = {"prefetch": "off", "eviction": "lru", "sessions": False}
_STEPS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    (
        "restore",
        "prefixes are restored by computing and loading at once, nothing is done ahead",
        {},
    ),
    (
        "lookahead",
        "and pages of waiting requests are moved up before their turn",
        {"prefetch": "on"},
    ),
    (
        "next-use",
        "and what runs latest is evicted first",
        {"prefetch": "on", "eviction": "next-use"},
    ),
    (
        OURS,
        "and sessions are expected back",
        {"prefetch": "on", "eviction": "next-use", "sessions": True},
    ),
)
AHEAD = tuple(name for name, _, policy in _STEPS if policy)
"""Arms that move pages ahead of requests."""
LOOKAHEAD_ARMS = (BASELINE, "hicache-file", *(name for name, _, _ in _STEPS), ORACLE)
"""In the order in which results are shown."""

_GAPS = (0.0, 0.1, 0.5, 1.0, 3.0)
_QUICK_GAPS = (0.5,)
_CPU = LoadOptions(sessions=8, turns=8, most_output_tokens=16)
_QUICK = LoadOptions(sessions=6, turns=4, most_output_tokens=8)
_GPU = LoadOptions(sessions=16, turns=40, divisor=1)
_UP = ("storage-host", "host-device", "storage-device")
_QUANTILES = ("p50", "p90", "p99")

_STANDING = (
    "Every trial has a fresh server process; its pools and its storage are empty at the first request.",
    "Pauses between the turns of a session are fixed; the trace's own are not used. A session's first request does not wait.",
    "The trace's own outputs are fed back, so all arms get the same prompts. Every request names its session.",
    "The arms with the kvtier backend differ in kvtier.json's policy section only. oracle is recompute with a device pool for everything.",
    "The host pool has copies of what is on the device, as SGLang keeps it, beside half of what is not.",
    "Hits are where tokens lay when their request was scheduled: by the server's own count where it has one, else by its responses.",
    "The operating system's page cache is not emptied: hicache-file may read from it, kvtier goes round it where it can.",
)


_ratios = each_once(
    "ratios of at least 1, each once, as 1.5,3", float, lambda value: is_number(value, 1.0)
)
_seconds = each_once(
    "seconds of at least 0, each once, as 0,0.5", float, lambda value: is_number(value, 0.0)
)


def _iterations(part: str) -> int:
    if part.strip() == "auto":
        return AUTO
    found = int(part)
    if not 0 <= found <= 4096:
        raise ValueError(found)
    return found


_lookaheads = each_once(
    "auto or whole numbers from 0 to 4096, each once, as 0,1,auto", _iterations, lambda _: True
)


@dataclass(frozen=True)
class LookaheadOptions(Options):
    """The command's options."""

    arms: Sequence[str] | None = None
    oversubscription: Sequence[float] = (3.0,)
    gaps: Sequence[float] | None = None
    lookahead: Sequence[int] = (AUTO,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    quick = "a small load, one pause, one round: about 8 minutes on 2 cores"
    rounds = "rounds, each with every arm at every pause (default 3)"
    add_options(
        parser,
        RUN,
        "quick rounds json html log minutes seed",
        quick={"help": quick},
        rounds={"help": rounds},
    )
    parser.add_argument(
        "--arms", type=words, metavar="A,B", help=f"of {', '.join(LOOKAHEAD_ARMS)} (default: all)"
    )
    parser.add_argument(
        "--oversubscription",
        type=_ratios,
        default=[3.0],
        metavar="X,X",
        help="all contexts over the device pool, as 1.5,3,5 (default 3); host memory holds half of the rest",
    )
    parser.add_argument(
        "--gaps",
        type=_seconds,
        metavar="S,S",
        help="pauses between the turns of a session, in seconds (default 0,0.1,0.5,1,3)",
    )
    parser.add_argument(
        "--lookahead",
        type=_lookaheads,
        default=[AUTO],
        metavar="K,K",
        help="iterations ahead, or auto; several make one arm of kvtier each, as 0,1,2,4,8,auto (default auto)",
    )
    add_options(parser.add_argument_group("servers"), SERVER)
    add_load_arguments(parser, _CPU, {"on a GPU": _GPU, "with --quick": _QUICK})


def run(given: argparse.Namespace) -> int:
    """Compares and reports. The exit status: 0, 1 when an arm failed, 130 after Ctrl-C. Raises
    KVTierError.
    """
    args = LookaheadOptions.of(given)
    check(args)
    arms = arm_names(args.arms, args.lookahead)
    cells: list[Cell] = []
    with work_folder(args.folder, lambda: failed(cells)) as folder:
        shape = shape_of(args)
        usual = _QUICK if args.quick else _CPU if shape.device == "cpu" else _GPU
        wanted = load_options(args, usual)
        model = model_of(args)
        chosen = load(wanted, choose_encoder(Path(model), wanted.divisor))
        setup = _setup(args, model, chosen)
        replaying = ReplayOptions(
            concurrency=len(chosen.sessions),
            most_output_tokens=wanted.most_output_tokens,
            named=True,
            seed=args.seed,
        )
        sizes = {over: pools(chosen, over, setup.page_size) for over in args.oversubscription}
        cells += _cells(args, arms, setup, sizes, chosen, replaying, folder)
        log = RoundLog.open(args.log, _about(cells[0], setup, chosen, replaying))
        trials = sum(cell.plan.rounds * len(arms) for cell in cells)
        print(
            f"{chosen.describe('trial')}\n"
            f"arms: {', '.join(arms)}; {trials} trials, each with a server of its own; logs in {folder}",
            file=sys.stderr,
        )
        compared = Comparison(cells, log, keeps_storage=False)
        return compared.experiment(
            args,
            LOOKAHEAD.schema,
            results=lambda: make_results(cells, sizes, chosen, replaying),
            tables=LOOKAHEAD.tables,
            page=LOOKAHEAD.page,
            standing=[*chosen.notes, *_STANDING],
            notes=lambda: notes_of(cells, arms),
        ).run()


def _cells(
    args: LookaheadOptions,
    arms: Sequence[str],
    setup: Setup,
    sizes: Mapping[float, Pools],
    chosen: Load,
    replaying: ReplayOptions,
    folder: Path,
) -> list[Cell]:
    """Every oversubscription with every pause."""
    rounds = args.rounds or (1 if args.quick else 3)
    restore = "auto" if setup.device == "cpu" and setup.tp == 1 else "both"
    until = deadline_of(args)
    found: list[Cell] = []
    gaps = args.gaps or (_QUICK_GAPS if args.quick else _GAPS)
    for over, gap_s in itertools.product(args.oversubscription, gaps):
        name, own, pool = (
            f"{over:g}x, pause {gap_s:g} s",
            folder / f"{over:g}x-{gap_s:g}s",
            sizes[over],
        )
        plan = Plan(
            arms=arms,
            setup=arm_setup(setup, pool, restore, args.lookahead),
            folder=own,
            rounds=rounds,
            together=False,
            first_round=len(found) * rounds + 1,
            place=partial(_place, over, gap_s),
            until=until,
        )
        axes = {"oversubscription": over, "gap_s": gap_s}
        about = f"{name}: device pool {pool.device:,} tokens, host pool {pool.host:,}"
        asked, path = replace(replaying, pause_s=gap_s), own / "requests.jsonl"
        beside = partial(watch, page_tokens=setup.page_size)
        work = Replaying(chosen, asked, plan.setup, path, beside)
        found.append(Cell(axes, name, plan, work, about))
    return found


def _about(cell: Cell, setup: Setup, chosen: Load, replaying: ReplayOptions) -> dict[str, Any]:
    """The settings that trials of one log have in common, but for the pools and the pauses. Of
    a sweep the arm with K from measured speeds counts; the others are named by theirs.
    """
    ours = cell.plan.setup.variants[OURS].policy
    return {
        **about(setup, chosen, replaying),
        **{name: ours[name] for name in ("restore", "rules")},
    }


def _place(oversubscription: float, gap_s: float, arm: str) -> str:
    """Where the log keeps an arm's rounds. An oracle's pool holds everything, whatever the
    oversubscription, so its rounds are those of every cell with the same pause.
    """
    pause = f"pause {gap_s:g} s"
    return pause if arm == ORACLE else f"{oversubscription:g}x, {pause}"


def _setup(args: LookaheadOptions, model: str, chosen: Load) -> Setup:
    shape = shape_of(args)
    cpu = shape.device == "cpu"
    return setup_of(
        args,
        shape,
        model,
        context_tokens=chosen.longest_tokens + 2 * shape.page if cpu else None,
        max_running=8 if cpu else None,
        **thresholds(chosen, shape.page),
    )


@dataclass(frozen=True)
class Pools:
    """Tokens in each pool, for a load that needs `needed` to keep the contexts of all its sessions."""

    needed: int
    device: int
    host: int
    oracle: int

    @property
    def host_ratio(self) -> float:
        """The host pool as SGLang is told of it."""
        return self.host / self.device


def pools(load: Load, oversubscription: float, page: int) -> Pools:
    """The device pool holds needed / oversubscription, and host memory half of the rest. SGLang's
    host pool has copies of what is on the device too, so it is given room for both. Raises
    BenchError where not even one request fits.
    """
    needed = load.context_tokens
    device = _pages(needed / oversubscription, page)
    least = load.longest_tokens + 2 * page
    if device < least:
        most = needed / least
        raise BenchError(
            f"--oversubscription {oversubscription:g}: the device pool would have {device:,} tokens, and the longest request needs "
            f"{least:,}. With these sessions at most {most:.1f} is possible: take more with --sessions"
        )
    return Pools(
        needed=needed,
        device=device,
        host=_pages(device + max(0, needed - device) / 2, page) + page,
        oracle=undisturbed_tokens(load, page),
    )


def arm_setup(setup: Setup, sizes: Pools, restore: str, lookahead: Sequence[int]) -> Setup:
    """The setup with these pools and all arms in it. Several values of `lookahead` make the full
    arm one arm per value.
    """
    steps = {
        name: Variant(
            OURS, about, {**_OFF, "restore": restore, "rules": _k(name, lookahead), **policy}
        )
        for name, about, policy in _STEPS
    }
    swept = {
        sweep_name(k): Variant(
            OURS, f"kvtier, {k} iterations ahead", {**steps[OURS].policy, "rules": _rules(k)}
        )
        for k in lookahead
        if len(lookahead) > 1 and k != AUTO
    }
    return replace(
        setup,
        device_tokens=sizes.device,
        host_ratio=sizes.host_ratio,
        variants={**steps, **swept, ORACLE: oracle(sizes.oracle)},
    )


def arm_names(wanted: Sequence[str] | None, lookahead: Sequence[int]) -> list[str]:
    """The arms to measure, in their order. Raises BenchError for a name that is none."""
    chosen = list(LOOKAHEAD_ARMS if wanted is None else wanted)
    check_names(chosen, LOOKAHEAD_ARMS)
    found: list[str] = []
    for arm in LOOKAHEAD_ARMS:
        if arm not in chosen:
            continue
        if arm == OURS and len(lookahead) > 1:
            found += [sweep_name(k) for k in lookahead]
        else:
            found.append(arm)
    return found


def sweep_name(k: int) -> str:
    """The full arm's name with this lookahead; `auto` is the full arm itself."""
    return OURS if k == AUTO else f"{OURS}-k{k}"


def _k(name: str, lookahead: Sequence[int]) -> str:
    return _rules(lookahead[0]) if len(lookahead) == 1 and name in AHEAD else ""


def _rules(k: int) -> str:
    """policy.rules of kvtier's own with this lookahead."""
    return "" if k == AUTO else f"sgl_kvtier.lab.rules:K{k}"


def _pages(tokens: float, page: int) -> int:
    return -(-int(tokens) // page) * page


def make_results(
    cells: Sequence[Cell], sizes: Mapping[float, Pools], load: Load, options: ReplayOptions
) -> dict[str, Any]:
    """The result of the cells, schema kvtier.compare.lookahead/1 (docs/manual/json.md). `sizes` are
    the pools of each oversubscription.
    """
    plan = cells[0].plan
    arms, setup = plan.arms, plan.setup
    rounds = [one for cell in cells for one in cell.outcome.rounds]
    rows = sample_rows(rounds)
    where = {one.number: cell for cell in cells for one in cell.outcome.rounds}
    for row in rows:
        row |= where[row["round"]].axes
    settings = {
        **asdict(replace(setup, variants={})),
        "arms": {name: asdict(variant) for name, variant in setup.variants.items()},
        "concurrency": options.concurrency,
        "most_output_tokens": options.most_output_tokens,
        "feedback": options.feedback,
        "cores": os.cpu_count(),
    }
    return {
        "workload": load.to_json(),
        "settings": settings,
        "rounds": plan.rounds,
        "cells": [_cell(cell, sizes[cell.axes["oversubscription"]], rows) for cell in cells],
        "arms": {arm: figures(arm, rounds, rows, cells) for arm in arms},
        "ratios": ratios(rounds, rows, arms),
        "samples": rows,
    }


def figures(
    arm: str, rounds: Sequence[Round], rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell]
) -> dict[str, Any]:
    """An arm's figures as in `kvtier compare`, with what was moved ahead for nothing and read for
    nothing.
    """
    found = arm_figures(arm, rounds, rows)
    later = (
        row["ttft_ms"]
        for row in rows
        if row["arm"] == arm and row["turn"] > 1 and row["error"] is None
    )
    found["ttft_later_ms"] = summary(later)
    moved = sum(found["moved_bytes"].get(link, 0.0) for link in _UP)
    found["wasted_fraction"] = (
        found["wasted_bytes"] / moved if moved and found["wasted_bytes"] is not None else None
    )
    found["storage_read_bytes"] = _read(found, cells[0].plan.setup.page_size)
    found["surplus_read_bytes"] = _surplus(found)
    found["failure"] = over_cells(cells, arm)["failure"]
    starts = [cell.outcome.start_s[arm] for cell in cells if arm in cell.outcome.start_s]
    found["server_start_s"] = max(starts, default=None)
    return found


def _read(found: Mapping[str, Any], page_tokens: int) -> float | None:
    """Bytes of KV cache read from storage, for whatever reason. The store's own count is used where
    it has one, else SGLang's.
    """
    per_token, pages = found["bytes_per_token"], found["store_pages_read"]
    if pages is None or not per_token:
        return None if found["bytes"]["read"] is None else float(found["bytes"]["read"])
    return float(pages * page_tokens * per_token)


def _surplus(found: Mapping[str, Any]) -> float | None:
    """Bytes read from storage that no request used: read twice, too late, or for no request."""
    per_token, read = found["bytes_per_token"], found["storage_read_bytes"]
    if not per_token or read is None:
        return None
    ahead = max(0.0, found["moved_bytes"].get("storage-host", 0.0) - (found["wasted_bytes"] or 0.0))
    return max(0.0, float(read) - found["cached_tokens"]["storage"] * per_token - ahead)


def _cell(cell: Cell, pool: Pools, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rounds, arms = cell.outcome.rounds, cell.plan.arms
    numbers = {one.number for one in rounds}
    own = [row for row in rows if row["round"] in numbers]
    found = {arm: figures(arm, rounds, own, [cell]) for arm in arms}
    oracle = found.get(ORACLE, {}).get("ttft_ms", {})
    return {
        **cell.axes,
        "pools": asdict(pool),
        "arms": found,
        "over_oracle": {
            arm: _over(one["ttft_ms"], oracle) for arm, one in found.items() if arm != ORACLE
        },
        "occupancy": {one.arm: one.occupancy for one in reversed(rounds) if one.occupancy},
        "commands": cell.outcome.commands,
    }


def _over(mine: Mapping[str, Any], oracle: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        q: mine[q] / oracle[q] if mine.get(q) is not None and oracle.get(q) else None
        for q in _QUANTILES
    }


def notes_of(cells: Sequence[Cell], arms: Sequence[str]) -> list[str]:
    """Notes that the rounds of these cells have to be read with."""
    rounds = [one for cell in cells for one in cell.outcome.rounds]
    notes = [f"{cell.name}: {note}" for cell in cells for note in dict.fromkeys(cell.outcome.notes)]
    for cell in cells:
        evicted = [
            one.counted("sglang:evicted_tokens_total")
            for one in cell.outcome.rounds
            if one.arm == ORACLE
        ]
        if tokens := sum(count or 0 for count in evicted):
            notes.append(
                f"{cell.name}: the oracle's device pool was too small after all: {tokens:.0f} tokens were evicted."
            )
    notes += left_out(rounds)
    for arm in arms:
        if arm.startswith(AHEAD) and any(one.arm == arm for one in rounds):
            found = arm_figures(arm, rounds, [])
            if found["hit_tokens_counted_by"] != "server":
                notes.append(
                    f"{arm}: its server counts nothing of looking ahead, so nothing shows that it did."
                )
            elif not any(found["moved_bytes"].values()):
                notes.append(f"{arm}: its server moved no page ahead.")
    return [*notes, *dict.fromkeys(text for cell in cells for text in cell.outcome.failed())]
