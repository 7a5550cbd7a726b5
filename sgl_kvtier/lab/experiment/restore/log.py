"""What a restoration bench has measured so far, in memory and in a file of JSON lines it can be
continued from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.json_lines import JsonLines, check_about
from sgl_kvtier.lab.experiment.restore.trial import Trial

GRID, FIRST, CURVE, RESIDENT, PAGE, WARM, PRIME = (
    "grid",
    "first",
    "curve",
    "resident",
    "page",
    "warm",
    "prime",
)
"""What a trial is for: a cell, the first restoration after the bandwidth was changed, the compute
curve, a prompt still in device memory, a prompt of one page, nothing, storing.
"""


@dataclass(frozen=True)
class Scale:
    """What one model's prompts of one length were measured with: fixed when they are first
    measured.

    `compute_s`: time to first token when the prompt is computed; `prefix_bytes`: what loading it
    moves. From the two follows the bandwidth of every cell, so that a continued run has the same
    cells.
    """

    model: str
    length: int
    page: int
    prefix_bytes: int
    compute_s: float

    def gbps(self, load_over_compute: float) -> float:
        """The bandwidth at which loading the prefix takes so many times as long as computing it."""
        return self.prefix_bytes * 8e-9 / (load_over_compute * self.compute_s)

    def link_s(self, gbps: float) -> float:
        """What a link of that bandwidth alone takes for the prefix."""
        return self.prefix_bytes * 8e-9 / gbps


@dataclass
class RestoreLog:
    """Trials and scales. With a path every one is on disk before the next begins."""

    path: Path | None = None
    trials: list[Trial] = field(default_factory=list)
    scales: list[Scale] = field(default_factory=list)
    fluctuations: list[dict[str, Any]] = field(default_factory=list)
    """Finished cells of the fluctuation part."""
    continued: int = 0
    """Trials that were in the file already."""

    def __post_init__(self) -> None:
        self._lines = JsonLines(self.path)

    @classmethod
    def open(cls, path: Path | None, about: Mapping[str, Any]) -> RestoreLog:
        """The log in a file, or a new one. `about` is what its trials have to have in common; the
        first line keeps it. A torn last line is dropped. Raises BenchError on a file of another
        kind, and on a log that was made with other settings.
        """
        log = cls(path)

        def take(number: int, data: Any) -> None:
            if number > 1:
                log._take(data)
            elif {"trial", "scale", "fluctuation"} & set(data):
                raise BenchError(
                    f"{path}: an earlier version's, it does not say what its trials were made with. Name another --log"
                )
            else:
                check_about(path, data["about"], about)

        if not log._lines.read(take):
            log._lines.append({"about": dict(about)})
        log.continued = len(log.trials)
        return log

    def _take(self, data: dict[str, Any]) -> None:
        if "scale" in data:
            self.scales.append(Scale(**data["scale"]))
        elif "fluctuation" in data:
            self._take_fluctuation(dict(data["fluctuation"]))
        else:
            self.trials.append(Trial.from_json(data["trial"]))

    def keep(self, trial: Trial) -> None:
        """Adds a trial."""
        self.trials.append(trial)
        self._lines.append({"trial": trial.to_json()})

    def keep_scale(self, scale: Scale) -> None:
        """Adds what a length is measured with."""
        self.scales.append(scale)
        self._lines.append({"scale": dataclasses.asdict(scale)})

    def keep_fluctuation(self, cell: dict[str, Any]) -> None:
        """Adds a finished cell of the fluctuation part, in place of an earlier one of the same
        trace.
        """
        self._take_fluctuation(cell)
        self._lines.append({"fluctuation": cell})

    def _take_fluctuation(self, cell: dict[str, Any]) -> None:
        place = _trace_of(cell)
        self.fluctuations[:] = [
            *(one for one in self.fluctuations if _trace_of(one) != place),
            cell,
        ]

    def scale(self, model: str, length: int) -> Scale | None:
        """What this length was measured with; None when it was not yet."""
        return next((s for s in self.scales if (s.model, s.length) == (model, length)), None)

    def of(self, model: str, length: int, kind: str) -> list[Trial]:
        """Trials of one length for one purpose, those that succeeded."""
        return [
            t
            for t in self.trials
            if (t.model, t.length, t.kind) == (model, length, kind) and t.error is None
        ]

    def failed(self, model: str, length: int, kind: str) -> list[Trial]:
        """Those that failed and were not made again since: a run that goes on from the log makes
        failed trials again, and then only the last attempt counts.
        """
        last = {
            _key(t): t for t in self.trials if (t.model, t.length, t.kind) == (model, length, kind)
        }
        return [t for t in last.values() if t.error is not None]

    def has(self, wanted: Trial) -> bool:
        """Whether the trial this describes was made, and succeeded."""
        key = _key(wanted)
        return any(_key(one) == key for one in self.of(wanted.model, wanted.length, wanted.kind))


def _trace_of(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["model"], cell["length"], cell["kind"], cell["trace"]


def _key(trial: Trial) -> tuple[Any, ...]:
    return trial.arm, trial.round, trial.load_over_compute, trial.prompt_tokens


def seconds(trials: Iterable[Trial]) -> list[float]:
    """The times to first token of those that have one."""
    return [trial.ttft_s for trial in trials if trial.ttft_s is not None]
