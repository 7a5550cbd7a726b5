"""What is asked: sessions that are drawn, their turns, and the log of what came of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sgl_kvtier.lab.experiment.log import Log
from sgl_kvtier.lab.experiment.restore.log import Scale
from sgl_kvtier.lab.experiment.restore.trial import Trial
from sgl_kvtier.lab.outside.model_shapes import BYTES

NEW_TOKENS = 64
"""By which a session's prompt grows from turn to turn: an answer, and what a user or tool says."""
WARM = 1
"""Sessions of every cell that are played first and not counted."""


@dataclass(frozen=True)
class Cell:
    """A speed of the link: `gbps`, or the one at which loading a prompt takes `load_over_compute`
    times as long as computing it.
    """

    gbps: float | None
    load_over_compute: float | None = None

    @property
    def name(self) -> str:
        """What draws its sessions."""
        ratio = self.load_over_compute
        return f"{self.gbps:g} Gbit/s" if ratio is None else f"load/compute {ratio:g}"


@dataclass(frozen=True)
class Moved(Trial):
    """A turn's outcome. `session` counts from 0, those below `WARM` do not count. `number` is the
    turn's, from 0; `moved` says that the turn before was another server's, `server` who answered (0
    is A). `remote_bytes` came from the remote store meanwhile.
    """

    cell: str = ""
    session: int = 0
    number: int = 0
    server: int = 0
    moved: bool = False
    remote_bytes: float = 0.0

    @property
    def place(self) -> tuple[Any, ...]:
        """What every arm has one of."""
        return self.round, self.cell, self.session, self.number


class MovedLog(Log):
    """Turns, arm by arm and cell by cell, and the scale that bandwidths follow from. An arm's cell
    counts when it is there whole.
    """

    kinds: ClassVar = {"turn": Moved, "scale": Scale}

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self._turns: dict[tuple[Any, ...], Moved] = {}
        self.scales: list[Scale] = []

    def take(self, kind: str, record: Any) -> None:
        """Adds a record, in place of an earlier one of the same turn."""
        if kind == "scale":
            self.scales.append(record)
        else:
            key = (record.arm, *record.place)
            self._turns[key] = record

    @property
    def turns(self) -> list[Moved]:
        """All of them; of a cell that was begun and played again, those that were played last."""
        return list(self._turns.values())

    def gbps(self, cell: Cell) -> float | None:
        """The bandwidth of a cell; None where it follows from computing that was not timed yet."""
        if cell.load_over_compute is None:
            return cell.gbps or 0.0
        return self.scales[0].gbps(cell.load_over_compute) if self.scales else None

    def has(self, arm: str, number: int, cell: Cell, turns: int) -> bool:
        """Whether an arm's round of a cell is there whole."""
        wanted = (arm, number, cell.name)
        return sum((one.arm, one.round, one.cell) == wanted for one in self.turns) >= turns


def prompts(drawn_by: tuple[object, ...], length: int, turns: int) -> Sequence[Sequence[int]]:
    """The prompts of a session's turns. They follow from what a session is drawn by alone, so they
    are the same for all arms, and no two sessions share a page.
    """
    rng = random.Random(":".join(map(str, drawn_by)))
    ids = rng.choices(range(BYTES), k=length + (turns - 1) * NEW_TOKENS)
    return [ids[: length + turn * NEW_TOKENS] for turn in range(turns)]
