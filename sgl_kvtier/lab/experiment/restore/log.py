"""The trials of a restoration bench so far, in memory and in a file of JSON lines. A run can be
continued from that file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sgl_kvtier.lab.experiment.log import Log
from sgl_kvtier.lab.experiment.restore.trial import Attempt, Batch, Trial

GRID, FIRST, CURVE, RESIDENT, PAGE, WARM, PRIME = (
    "grid",
    "first",
    "curve",
    "resident",
    "page",
    "warm",
    "prime",
)
"""Purposes of trials. `grid`: a cell. `first`: the first restoration after the bandwidth was
changed. `curve`: the compute curve. `resident`: a prompt still in device memory. `page`: a prompt
of one page. `warm`: nothing. `prime`: storing.
"""


@dataclass(frozen=True)
class Scale:
    """The quantities that one model's prompts of one length are measured with, fixed when they are
    first measured.

    `compute_s` is the time to first token when the prompt is computed; `prefix_bytes` are the bytes
    that loading it moves. The bandwidth of every cell follows from the two, so a continued run has
    the same cells.
    """

    model: str
    length: int
    page: int
    prefix_bytes: int
    compute_s: float

    def gbps(self, load_over_compute: float) -> float:
        """The bandwidth, in gigabits per second, for that ratio of loading time to computing time."""
        return self.prefix_bytes * 8e-9 / (load_over_compute * self.compute_s)


class RestoreLog(Log):
    """Trials, batches, and the scales they stand on. With a path every one is on disk before the next
    begins. A `PRIME` batch has the answers that computing each prompt alone gave.
    """

    kinds: ClassVar = {"trial": Trial, "scale": Scale, "batch": Batch}

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self.trials: list[Trial] = []
        self.scales: list[Scale] = []
        self.batches: list[Batch] = []

    def take(self, kind: str, record: Any) -> None:
        """Adds a record."""
        kept: dict[str, list[Any]]
        kept = {"trial": self.trials, "scale": self.scales, "batch": self.batches}
        kept[kind].append(record)

    def keep(self, made: Attempt) -> None:
        """Adds a trial or a batch."""
        self.add("batch" if isinstance(made, Batch) else "trial", made)

    def scale(self, model: str, length: int) -> Scale | None:
        """The scale this length was measured with; None when it was not measured yet."""
        return next((s for s in self.scales if (s.model, s.length) == (model, length)), None)

    def of(self, model: str, length: int, kind: str) -> list[Trial]:
        """Trials of one length for one purpose, those that succeeded."""
        return [
            t
            for t in self.trials
            if (t.model, t.length, t.kind) == (model, length, kind) and t.error is None
        ]

    def failed(self, model: str, length: int, kind: str) -> list[Trial]:
        """Trials that failed and were not made again since.

        A run that goes on from the log makes failed trials again, and then only the last attempt
        counts.
        """
        wanted = (model, length, kind)
        last = {t.key: t for t in self.trials if (t.model, t.length, t.kind) == wanted}
        return [t for t in last.values() if t.error is not None]

    def has(self, wanted: Attempt) -> bool:
        """Whether the trial or batch that this describes was made, and succeeded."""
        made = self.batches if isinstance(wanted, Batch) else self.trials
        key = (wanted.kind, wanted.key, None)
        return any((one.kind, one.key, one.error) == key for one in made)

    def reference(self, one: Batch) -> Batch | None:
        """The batch with the answers that a batch is compared with."""
        return next((b for b in self.batches if (b.kind, b.place) == (PRIME, one.place)), None)


def seconds(trials: Iterable[Trial]) -> list[float]:
    """The times to first token of those that have one."""
    return [trial.ttft_s for trial in trials if trial.ttft_s is not None]
