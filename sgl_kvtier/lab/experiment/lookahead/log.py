"""What `kvtier compare lookahead` has measured so far, as lines of JSON that a later run goes on
from.

A line is one trial: a round of one arm in one cell, with everything its figures are made of. Runs
that go on from each other have to have the same load and settings, which the first line keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvtier.lab.experiment.json_lines import JsonLines, check_about
from sgl_kvtier.lab.experiment.machine import CpuShare
from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.outside.client import Cached, Completion, Metrics
from sgl_kvtier.lab.outside.replay import Sample
from sgl_kvtier.lab.outside.server import Usage


@dataclass(frozen=True)
class Trial:
    """A round of one arm in a cell. `number` counts the cell's rounds from 1; `one.number` counts
    over all cells.
    """

    cell: str
    arm: str
    number: int
    one: Round
    start_s: float | None
    command: tuple[str, ...]


@dataclass
class LookaheadLog:
    """Trials, in memory and with a path on disk before the next one begins."""

    path: Path | None = None
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = JsonLines(self.path)

    @classmethod
    def open(cls, path: Path | None, about: Mapping[str, Any]) -> LookaheadLog:
        """The log in a file, or a new one. `about` is the load and the settings. A torn last line
        is dropped. Raises BenchError on a file of another kind, and on one whose load or settings
        are others.
        """
        log = cls(path)

        def take(number: int, data: Any) -> None:
            if number == 1:
                check_about(path, data["about"], about)
            else:
                log.trials.append(_trial(data))

        if not log._lines.read(take):
            log._lines.append({"about": dict(about)})
        return log

    def find(self, cell: str, arm: str, number: int) -> Trial | None:
        """This trial, if it was made."""
        return next(
            (one for one in self.trials if (one.cell, one.arm, one.number) == (cell, arm, number)),
            None,
        )

    def keep(self, trial: Trial) -> None:
        """Adds a trial."""
        self.trials.append(trial)
        one = trial.one
        self._lines.append(
            {
                "cell": trial.cell,
                "arm": trial.arm,
                "number": trial.number,
                "start_s": trial.start_s,
                "command": trial.command,
                "samples": [dataclasses.asdict(sample) for sample in one.samples],
                "before": one.before.to_json(_PREFIXES),
                "after": one.after.to_json(_PREFIXES),
                "wall_s": one.wall_s,
                "cpu": None if one.cpu is None else dataclasses.asdict(one.cpu),
                "usage": None if one.usage is None else dataclasses.asdict(one.usage),
                "disk_bytes": one.disk_bytes,
                "occupancy": one.occupancy,
            }
        )


_PREFIXES = ("sglang:", "kvtier:")


def _trial(data: Mapping[str, Any]) -> Trial:
    one = Round(
        arm=data["arm"],
        number=data["number"],
        samples=[_sample(sample) for sample in data["samples"]],
        before=Metrics.from_json(data["before"]),
        after=Metrics.from_json(data["after"]),
        wall_s=data["wall_s"],
        cpu=None if data["cpu"] is None else CpuShare(**data["cpu"]),
        usage=None if data["usage"] is None else Usage(**data["usage"]),
        disk_bytes=None
        if data["disk_bytes"] is None
        else (data["disk_bytes"][0], data["disk_bytes"][1]),
        complete=True,
        occupancy=data["occupancy"],
    )
    return Trial(
        data["cell"], data["arm"], data["number"], one, data["start_s"], tuple(data["command"])
    )


def _sample(data: Mapping[str, Any]) -> Sample:
    done = dict(data["completion"])
    for name in ("output_ids", "token_times_s", "logprobs"):
        done[name] = tuple(done[name])
    done["cached"] = None if done["cached"] is None else Cached(**done["cached"])
    return Sample(data["session"], data["turn"], Completion(**done))
