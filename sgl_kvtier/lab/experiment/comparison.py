"""Arms x cells x rounds: every arm is given the work of every cell. A cell is one value of each axis
that a command varies: none, how many sessions there are at a time, how large the pools are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_kvtier.console import Table
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import Options
from sgl_kvtier.lab.experiment.frame import Experiment
from sgl_kvtier.lab.experiment.measures import Round, arm_figures, left_out, sample_rows
from sgl_kvtier.lab.experiment.rounds import Outcome, Plan, RoundLog, Rounds, Work, servers_up
from sgl_kvtier.lab.paced.launching import Paced


@dataclass
class Cell:
    """One value of each axis, by its key in results; `name` is for people, "" where nothing varies.
    `about` is said when it begins.
    """

    axes: Mapping[str, float]
    name: str
    plan: Plan
    work: Work
    about: str = ""
    outcome: Outcome = field(default_factory=Outcome)
    choose: Callable[[Cell, RoundLog], None] | None = None
    """Called before its first round: changes the plan after trials of its own."""
    tried: list[dict[str, Any]] = field(default_factory=list)
    """What those trials found."""

    def lost_pace(self) -> list[str]:
        """A note for every arm that a paced device could not keep the pace of. Its steps are read
        when a round is complete: of an arm without one nothing is known.
        """
        paced, rounds = self.plan.setup.paced, self.outcome.rounds
        if paced is None:
            return []
        rows, notes = sample_rows(rounds), []
        for arm in dict.fromkeys(one.arm for one in rounds if one.complete):
            pace = arm_figures(arm, rounds, rows).get("pace")
            if pace is None:
                notes.append(f"INVALID: {arm}: the paced device wrote no step.")
            elif pace["valid"] is not True:
                notes.append(
                    f"INVALID: {arm} lost {pace['overrun']:.0%} of its steps' time (10 % are allowed), "
                    f"{pace['mismatches']} mismatches."
                )
                if not pace["mismatches"]:
                    notes[-1] += (
                        " This machine is too slow or too busy for that: repeat with --dilation "
                        f"{2 * paced.dilation:g}."
                    )
        return notes

    def notes(self) -> list[str]:
        """What has to be known where it was not measured as planned."""
        found = (
            *self.lost_pace(),
            *self.outcome.notes,
            *left_out(self.outcome.rounds),
            *self.outcome.failed(),
        )
        return [f"{self.name}: {note}" if self.name else note for note in found]


@dataclass(frozen=True)
class Comparison:
    """The cells of one run, measured one after the other on the same servers where these stay up."""

    cells: Sequence[Cell]
    log: RoundLog = field(default_factory=RoundLog)

    def measure(self) -> None:
        """Every cell. One in which every arm failed is noted, and the next one is tried with new
        servers. Raises BenchError when no cell is left.
        """
        failed = 0
        with servers_up() as up:
            for cell in self.cells:
                if cell.about:
                    print(cell.about, file=sys.stderr)
                try:
                    if cell.choose is not None:
                        # Those that are up have what another cell chose.
                        for arm in [*up.servers]:
                            up.stop(arm)
                        cell.choose(cell, self.log)
                    Rounds(cell.plan, cell.work, cell.outcome, self.log, up).run()
                except BenchError as error:
                    failed += 1
                    if failed == len(self.cells):
                        raise
                    cell.outcome.notes.append(str(error).splitlines()[0])

    def rounds(self) -> list[Round]:
        """Those of all cells that have a request."""
        return [one for cell in self.cells for one in cell.outcome.rounds if one.samples]

    def experiment(
        self,
        args: Options,
        schema: str,
        results: Callable[[], dict[str, Any]],
        tables: Callable[[dict[str, Any]], Sequence[Table]],
        **more: Any,
    ) -> Experiment:
        """The run of the command."""
        notes = {"notes": lambda: [note for cell in self.cells for note in cell.notes()]}
        return Experiment(
            args,
            schema,
            measure=self.measure,
            results=results,
            tables=tables,
            measured=lambda: bool(self.rounds()),
            sound=lambda _: not failed(self.cells) and not any(map(Cell.lost_pace, self.cells)),
            **(notes | more),
        )


def failed(cells: Sequence[Cell]) -> bool:
    """Whether an arm failed in one of the cells."""
    return any(cell.outcome.failures for cell in cells)


def over_cells(cells: Sequence[Cell], arm: str) -> dict[str, Any]:
    """How an arm's servers started, failed or were skipped: the first that there is of each."""
    return {
        key: next((found[arm] for cell in cells if arm in (found := of(cell.outcome))), None)
        for key, of in (
            ("server_start_s", lambda outcome: outcome.start_s),
            ("failure", lambda outcome: outcome.failures),
            ("skipped", lambda outcome: outcome.skipped),
        )
    }


def paced_notes(paced: Paced | None, *more: str, scaled: bool = True) -> list[str]:
    """What has to be known of a result of a paced device, `more` of it beside; nothing of another.
    `scaled`: it names bytes and bandwidths.
    """
    if paced is None:
        return []
    bytes_ = (
        " Bytes and bandwidths are those of the modelled machine: "
        f"{paced.bytes_scale:g} times those kept and moved here."
    )
    return [
        f"Paced, not computed: forwards, copies and the disk take the time of {paced.modelled}, "
        f"dilation {paced.dilation:g}; times are divided by it.{bytes_ if scaled else ''}",
        *more,
    ]


def device_of(paced: Paced | None) -> dict[str, Any]:
    """What a result says of a paced device; nothing of another."""
    return {} if paced is None else {"device": {"paced": paced.document()}}
