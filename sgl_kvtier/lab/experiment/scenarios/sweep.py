"""`kvtier compare sweep`: the same comparison at rising load. What throughput costs in time to first
token, for every arm.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import (
    add_session_arguments,
    each_once,
    load_options,
    model_of,
    replay_options,
    shape_of,
)
from sgl_kvtier.lab.experiment.comparison import Cell, Comparison, device_of, failed, over_cells
from sgl_kvtier.lab.experiment.frame import check, work_folder
from sgl_kvtier.lab.experiment.load import Load, choose_encoder, load
from sgl_kvtier.lab.experiment.measures import arm_figures, ratios, sample_rows, within_bound
from sgl_kvtier.lab.experiment.rounds import Replaying, RoundLog, rotated
from sgl_kvtier.lab.experiment.scenarios.compare import (
    REPLAY,
    ServedOptions,
    about,
    add_comparison,
    announce,
    choose_device,
    chosen_arms,
    load_defaults,
    make_setup,
    name_outputs,
    plan_of,
    standing,
)
from sgl_kvtier.lab.pages.kinds import SWEEP
from sgl_kvtier.outside import is_number, is_whole

_CONCURRENCIES = [1, 2, 4, 8, 16]
_QUICK = [1, 2, 4]
BOUND_MS = 2000.0
"""Goodput counts requests whose first token came within it."""

_concurrencies = each_once(
    "whole numbers of at least 1, each once, as 1,2,4", int, lambda value: is_whole(value, 1)
)
_rates = each_once(
    "numbers above 0, each once, as 0.1,0.2", float, lambda value: is_number(value, 0) and value > 0
)
_OF_ARM = ("requests", "errors", "equal_tokens_fraction", "pace")
"""Figures over all cells; times of different loads have nothing in common."""


@dataclass(frozen=True)
class SweepOptions(ServedOptions):
    """The command's options."""

    concurrencies: Sequence[int] | None = None
    rates: Sequence[float] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    quick = "a small load, three values of --concurrency, one round"
    rounds = "rounds for each value, each with every arm (default 2; 1 with --quick)"
    add_comparison(parser, quick, rounds)
    group = parser.add_argument_group("replay")
    how_many = group.add_mutually_exclusive_group()
    how_many.add_argument(
        "--concurrency",
        dest="concurrencies",
        type=_concurrencies,
        metavar="N,N",
        help="sessions at a time, one comparison for each (default 1,2,4,8,16; 1,2,4 with --quick); at least as many "
        "sessions are replayed",
    )
    how_many.add_argument(
        "--rate",
        dest="rates",
        type=_rates,
        metavar="R,R",
        help="open loop instead: sessions that arrive a second on average, at random times that follow from the seed",
    )
    add_session_arguments(group, REPLAY)


def run(given: argparse.Namespace) -> int:
    """Compares and reports. The exit status: 0, 1 when an arm failed, 130 after Ctrl-C. Raises
    KVTierError.
    """
    args = name_outputs(choose_device(SweepOptions.of(given)), "sweep")
    check(args)
    name, values = _loads(args)
    # one server for all loads, and so for the largest
    args = replace(args, **{name: values[-1]})
    arms = chosen_arms(args)
    cells: list[Cell] = []
    with work_folder(args.folder, lambda: failed(cells)) as folder:
        shape = shape_of(args)
        model = model_of(args, shape.device)
        wanted = load_options(args, load_defaults(args, shape.device))
        if name == "concurrency":
            wanted = replace(wanted, sessions=_enough_sessions(args, wanted.sessions, values[-1]))
        chosen = load(wanted, choose_encoder(Path(model), wanted.divisor))
        replaying = replay_options(args, REPLAY, wanted.most_output_tokens)
        setup = make_setup(args, shape, model, chosen, replaying)
        rounds = args.rounds or (1 if args.quick else 2)
        for place, value in enumerate(values):
            where = f"{name} {value:g}"
            plan = plan_of(
                *(args, arms, setup, folder, rounds, replaying.route),
                order=partial(_begin_further_on, place),
                first_round=place * rounds + 1,
                place=partial(_place, where),
            )
            asked = replace(replaying, **{name: value})
            kept = folder / f"{name}-{value:g}" / "requests.jsonl"
            work = Replaying(chosen, asked, setup, kept)
            cells.append(Cell({name: value}, where, plan, work, f"{where}:"))
        alike = replace(replaying, concurrency=None, rate=None)
        log = RoundLog.open(args.log, about(setup, chosen, alike))
        loads = ", ".join(f"{value:g}" for value in values)
        announce(
            chosen, "round and arm", cells[0].plan, f"{name} {loads}; rounds of each: {rounds}"
        )
        compared = Comparison(cells, log)
        settings = {**asdict(replaying), name: values, "ttft_bound_ms": BOUND_MS}
        return compared.experiment(
            args,
            SWEEP.schema,
            results=lambda: results(compared, chosen, settings),
            tables=SWEEP.tables,
            page=SWEEP.page,
            standing=standing(setup, chosen, replaying),
        ).run()


def results(compared: Comparison, chosen: Load, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The result of the cells, schema kvtier.sweep/1 (docs/manual/json.md)."""
    cells, plan = compared.cells, compared.cells[0].plan
    rows = [[{**cell.axes, **row} for row in sample_rows(cell.outcome.rounds)] for cell in cells]
    every = [row for found in rows for row in found]
    commands = {a: c for cell in cells for a, c in cell.outcome.commands.items()}
    servers = {**asdict(plan.setup), "host_tokens": plan.setup.host_tokens}
    rounds = compared.rounds()
    arms: dict[str, Any] = {}
    for arm in plan.arms:
        figures = arm_figures(arm, rounds, every)
        own = {name: figures[name] for name in _OF_ARM if name in figures}
        arms[arm] = {**own, **over_cells(cells, arm)}
    bound_ms = settings["ttft_bound_ms"]
    return {
        **device_of(plan.setup.paced),
        "workload": chosen.to_json(),
        "settings": {**servers, **settings, "commands": commands},
        "rounds": plan.rounds,
        "arms": arms,
        "cells": [_cell(cell, found, bound_ms) for cell, found in zip(cells, rows, strict=True)],
        "samples": every,
    }


def _cell(cell: Cell, rows: Sequence[dict[str, Any]], bound_ms: float) -> dict[str, Any]:
    rounds, arms = cell.outcome.rounds, cell.plan.arms
    figures = {
        arm: {
            **arm_figures(arm, rounds, rows),
            "goodput_requests_per_s": within_bound(arm, rounds, bound_ms),
        }
        for arm in arms
    }
    return {**cell.axes, "arms": figures, "ratios": ratios(rounds, rows, arms)}


def _begin_further_on(places: int, arms: Sequence[str], number: int) -> list[str]:
    return rotated(arms, number + places)


def _place(cell: str, _arm: str) -> str:
    """Where the log keeps the rounds of a cell."""
    return cell


def _loads(args: SweepOptions) -> tuple[str, list[Any]]:
    """What changes from cell to cell, and its values in rising order."""
    if args.rates is not None:
        return "rate", sorted(args.rates)
    return "concurrency", sorted(args.concurrencies or (_QUICK if args.quick else _CONCURRENCIES))


def _enough_sessions(args: SweepOptions, usual: int, most: int) -> int:
    """As many sessions as are at a time. Raises BenchError where fewer are asked for."""
    if args.sessions is not None and args.sessions < most:
        raise BenchError(
            f"--sessions {args.sessions}: --concurrency {most} needs at least {most} sessions"
        )
    return max(usual, most)
