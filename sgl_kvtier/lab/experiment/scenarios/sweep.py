"""`kvtier compare sweep`: the same comparison at rising load. What throughput costs in time to first
token, for every arm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import above_nought
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import (
    add_session_arguments,
    each_once,
    load_options,
    model_of,
    replay_options,
    shape_of,
)
from sgl_kvtier.lab.experiment.arms import Setup
from sgl_kvtier.lab.experiment.frame import Experiment, check, work_folder
from sgl_kvtier.lab.experiment.load import Load, choose_encoder, load
from sgl_kvtier.lab.experiment.measures import (
    Round,
    arm_figures,
    left_out,
    ratios,
    sample_rows,
    within_bound,
)
from sgl_kvtier.lab.experiment.rounds import (
    Outcome,
    Plan,
    Replaying,
    RoundLog,
    Rounds,
    rotated,
    servers_up,
)
from sgl_kvtier.lab.experiment.scenarios.compare import (
    REPLAY,
    STANDING,
    about,
    add_comparison,
    choose_device,
    chosen_arms,
    load_defaults,
    lost_pace,
    make_setup,
    name_outputs,
    paced_notes,
    plan_of,
    replay_notes,
)
from sgl_kvtier.lab.outside.replay import ReplayOptions
from sgl_kvtier.lab.pages.sweep import SCHEMA, sweep_page, sweep_tables
from sgl_kvtier.outside import is_number, is_whole

_CONCURRENCIES = [1, 2, 4, 8, 16]
_QUICK = [1, 2, 4]
_BOUND_MS = 2000.0

_concurrencies = each_once(
    "whole numbers of at least 1, each once, as 1,2,4", int, lambda value: is_whole(value, 1)
)
_rates = each_once(
    "numbers above 0, each once, as 0.1,0.2", float, lambda value: is_number(value, 0) and value > 0
)
_OF_ARM = ("requests", "errors", "equal_tokens_fraction", "pace")
"""Figures over all cells; times of different loads have nothing in common."""


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
    group.add_argument(
        "--ttft-bound-ms",
        type=above_nought,
        default=_BOUND_MS,
        metavar="MS",
        help="goodput counts requests whose first token came within it (default %(default)g)",
    )
    add_session_arguments(group, REPLAY)


def run(args: argparse.Namespace) -> int:
    """Compares and reports. The exit status: 0, 1 when an arm failed, 130 after Ctrl-C. Raises
    KVTierError.
    """
    choose_device(args)
    name_outputs(args, "sweep")
    check(args)
    name, values = _loads(args)
    # one server for all loads, and so for the largest
    args = argparse.Namespace(**{**vars(args), "concurrency": None, "rate": None, name: values[-1]})
    arms = chosen_arms(args)
    cells: list[Cell] = []
    with work_folder(args.folder, lambda: any(cell.outcome.failures for cell in cells)) as folder:
        shape = shape_of(args)
        model = model_of(args, shape.device)
        wanted = load_options(args, load_defaults(args, shape.device))
        if name == "concurrency":
            wanted = replace(wanted, sessions=_enough_sessions(args, wanted.sessions, values[-1]))
        chosen = load(wanted, choose_encoder(Path(model), wanted.divisor))
        replaying = replay_options(args, REPLAY, wanted.most_output_tokens)
        setup = make_setup(args, shape, model, chosen, replaying)
        one = Sweep(args, name, arms, setup, chosen, replaying, folder)
        cells += one.cells(values)
        log = RoundLog.open(args.log, one.about())
        print(one.announcement(cells), file=sys.stderr)
        return Experiment(
            args,
            SCHEMA,
            measure=lambda: one.measure(cells, log),
            results=lambda: one.results(cells),
            tables=sweep_tables,
            page=sweep_page,
            standing=[
                *paced_notes(setup.paced),
                *chosen.notes,
                *replay_notes(replaying),
                *STANDING,
            ],
            notes=lambda: one.notes(cells),
            measured=lambda: any(_measured(cells)),
            sound=lambda _: not any(cell.outcome.failures or one.lost(cell) for cell in cells),
        ).run()


@dataclass
class Cell:
    """One load: its value of --concurrency or --rate, its plan, and what was measured."""

    value: float
    plan: Plan
    outcome: Outcome = field(default_factory=Outcome)


@dataclass(frozen=True)
class Sweep:
    """One run of the command. `name` is what changes from cell to cell: concurrency or rate."""

    args: argparse.Namespace
    name: str
    arms: Sequence[str]
    setup: Setup
    chosen: Load
    replaying: ReplayOptions
    folder: Path

    def cells(self, values: Sequence[float]) -> list[Cell]:
        """One for every load. The arm that begins is another one in the next cell."""
        args = self.args
        rounds = args.rounds or (1 if args.quick else 2)
        return [
            Cell(
                value,
                plan_of(
                    args,
                    self.arms,
                    self.setup,
                    self.folder,
                    rounds,
                    self.replaying.route,
                    order=partial(_begin_further_on, place),
                    first_round=place * rounds + 1,
                    place=partial(_place, f"{self.name} {value:g}"),
                ),
            )
            for place, value in enumerate(values)
        ]

    def about(self) -> dict[str, Any]:
        """The settings that the rounds of one log have in common: all but the load."""
        return about(self.setup, self.chosen, replace(self.replaying, concurrency=None, rate=None))

    def announcement(self, cells: Sequence[Cell]) -> str:
        """The plan of the run as text for people."""
        setup, values = self.setup, ", ".join(f"{cell.value:g}" for cell in cells)
        return (
            f"{self.chosen.describe('round and arm')}; device pool {setup.device_tokens:,} tokens, "
            f"host pool {setup.host_tokens:,}\n"
            f"arms: {', '.join(self.arms)}; {self.name} {values}; rounds of each: {cells[0].plan.rounds}; "
            f"logs in {self.folder}"
        )

    def measure(self, cells: Sequence[Cell], log: RoundLog) -> None:
        """Every cell in turn, on the same servers. One in which every arm failed is noted, and the
        next one is tried with new servers.
        """
        failed = 0
        with servers_up() as up:
            for cell in cells:
                print(f"{self.name} {cell.value:g}:", file=sys.stderr)
                path = self.folder / f"{self.name}-{cell.value:g}" / "requests.jsonl"
                work = Replaying(self.chosen, self._options(cell), self.setup, path)
                try:
                    Rounds(cell.plan, work, cell.outcome, log, up).run()
                except BenchError as error:
                    failed += 1
                    if failed == len(cells):
                        raise
                    cell.outcome.notes.append(str(error).splitlines()[0])

    def results(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """The result of the cells, schema kvtier.sweep/1 (docs/manual/json.md)."""
        rows = [self._rows(cell) for cell in cells]
        paced = self.setup.paced
        settings = {
            **asdict(self.setup),
            "host_tokens": self.setup.host_tokens,
            **asdict(self.replaying),
            self.name: [cell.value for cell in cells],
            "ttft_bound_ms": self.args.ttft_bound_ms,
            "commands": {a: c for cell in cells for a, c in cell.outcome.commands.items()},
        }
        return {
            **({} if paced is None else {"device": {"paced": paced.document()}}),
            "workload": self.chosen.to_json(),
            "settings": settings,
            "rounds": cells[0].plan.rounds,
            "arms": self._arms(cells, [row for found in rows for row in found]),
            "cells": [self._cell(cell, found) for cell, found in zip(cells, rows, strict=True)],
            "samples": [row for found in rows for row in found],
        }

    def notes(self, cells: Sequence[Cell]) -> list[str]:
        """What has to be known of cells that were not measured as planned."""
        return [
            f"{self.name} {cell.value:g}: {note}"
            for cell in cells
            for note in (
                *self.lost(cell),
                *cell.outcome.notes,
                *left_out(cell.outcome.rounds),
                *cell.outcome.failed(),
            )
        ]

    def lost(self, cell: Cell) -> list[str]:
        """Arms whose paced device did not keep pace in a cell."""
        return lost_pace(self.setup.paced, cell.outcome)

    def _options(self, cell: Cell) -> ReplayOptions:
        if self.name == "rate":
            return replace(self.replaying, rate=cell.value)
        return replace(self.replaying, concurrency=int(cell.value))

    def _rows(self, cell: Cell) -> list[dict[str, Any]]:
        return [{self.name: cell.value, **row} for row in sample_rows(cell.outcome.rounds)]

    def _arms(self, cells: Sequence[Cell], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        rounds = _measured(cells)
        found: dict[str, Any] = {}
        for arm in self.arms:
            figures = arm_figures(arm, rounds, rows)
            starts = [cell.outcome.start_s.get(arm) for cell in cells]
            failures = [cell.outcome.failures.get(arm) for cell in cells]
            skipped = [cell.outcome.skipped.get(arm) for cell in cells]
            found[arm] = {
                **{name: figures[name] for name in _OF_ARM if name in figures},
                "server_start_s": next(filter(None, starts), None),
                "failure": next(filter(None, failures), None),
                "skipped": next(filter(None, skipped), None),
            }
        return found

    def _cell(self, cell: Cell, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        rounds, bound_ms = cell.outcome.rounds, self.args.ttft_bound_ms
        arms = {
            arm: {
                **arm_figures(arm, rounds, rows),
                "goodput_requests_per_s": within_bound(arm, rounds, bound_ms),
            }
            for arm in self.arms
        }
        return {self.name: cell.value, "arms": arms, "ratios": ratios(rounds, rows, self.arms)}


def _measured(cells: Sequence[Cell]) -> list[Round]:
    """Rounds of all cells that have a request."""
    return [one for cell in cells for one in cell.outcome.rounds if one.samples]


def _begin_further_on(places: int, arms: Sequence[str], number: int) -> list[str]:
    return rotated(arms, number + places)


def _place(cell: str, _arm: str) -> str:
    """Where the log keeps the rounds of a cell."""
    return cell


def _loads(args: argparse.Namespace) -> tuple[str, list[Any]]:
    """What changes from cell to cell, and its values in rising order."""
    if args.rates is not None:
        return "rate", sorted(args.rates)
    return "concurrency", sorted(args.concurrencies or (_QUICK if args.quick else _CONCURRENCIES))


def _enough_sessions(args: argparse.Namespace, usual: int, most: int) -> int:
    """As many sessions as are at a time. Raises BenchError where fewer are asked for."""
    if args.sessions is not None and args.sessions < most:
        raise BenchError(
            f"--sessions {args.sessions}: --concurrency {most} needs at least {most} sessions"
        )
    return max(usual, most)
