"""What all ranks know: one reduction per scheduler tick, only while something is being restored.

Of page states the smallest counts (`restoration.OPEN` < lost < `LANDED`). Of times, those of the first rank count. The
ranks call with vectors of the same length, because what they hold follows from the same plans.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

_MICRO = 1_000_000
_OTHERS = (1 << 62) - 1
_LARGEST = (1 << 63) - 1


class Agreement:
    """Reduces over the TP ranks and hands the first pipeline stage's result down. `reductions` counts the collectives."""

    def __init__(self, tree: Any, ranks: int, first: bool) -> None:
        """`ranks` is the number of processes that have to agree; `first` says whether this one's clock counts."""
        self._tree = tree
        self._ranks = ranks
        self._first = first
        self.reductions = 0

    @property
    def alone(self) -> bool:
        """Nobody to agree with."""
        return self._ranks == 1

    def first_says(self, values: Sequence[float]) -> list[float]:
        """The first rank's values, none of them negative. A collective of its own, for the start; not counted."""
        if self.alone:
            return list(values)
        # Doubles that are not negative are ordered as their bits are.
        bits = [struct.unpack(">q", struct.pack(">d", v))[0] if self._first else _LARGEST for v in values]
        data = torch.tensor(bits, dtype=torch.int64)
        self._tree._all_reduce(data, torch.distributed.ReduceOp.MIN)
        return [struct.unpack(">d", struct.pack(">q", v))[0] for v in data.tolist()]

    def reduce(self, times: Sequence[float], states: bytes) -> tuple[list[float], bytes]:
        """The agreed times and page states. A collective unless this process is alone."""
        if self.alone:
            return list(times), states
        clock = [int(t * _MICRO) if self._first else _OTHERS for t in times]
        data = torch.tensor([*clock, *states], dtype=torch.int64)
        self._tree._all_reduce(data, torch.distributed.ReduceOp.MIN)
        self.reductions += 1
        values = data.tolist()
        return [v / _MICRO for v in values[: len(clock)]], bytes(values[len(clock) :])
