"""The cost of a prefill chunk by its position and size, learned from measured chunks, and the fixed
overhead of a restoration, learned from restorations that ran alone.

A chunk of n tokens that starts after s others takes

    fixed + a n + b n (s + n / 2)        seconds,

because each token attends to all before it. Cake Fig. 4: the cost grows linearly with the chunk's
index. CacheFlow Fig. 1c: a short chunk costs little less than a longer one. The total over the
chunks of one range depends only on their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from sgl_kvtier.policy.shape import EngineShape

_KEEP: Final = 0.985
"""Weight that earlier chunks keep with each later one: about the last 70 chunks count."""
_GUESS_WEIGHT: Final = 0.01
"""Weight of the first guess at each of its points, as a share of that of a measured chunk."""
CPU_S: Final = 0.02
"""The first guess on a CPU. Restorations of 2k tokens, the shortest measured, ended 5 to 46 ms
after the best split if loading took 1/4 to 4 times as long as computing; 19 ms in the median of two
models (docs/results/data/restore.json).
"""
ACCELERATOR_S: Final = 0.007
"""The first guess on an accelerator. On the emulated H100, restorations of 8k tokens, the shortest
there, ended 4 to 11 ms after the best split at the same ratios, 7 ms in the median
(docs/results/data/restore.json). It was not measured on a GPU.
"""

_MOST_OVERHEAD_S: Final = 0.1
_COUNTED: Final = 31
"""Number of the latest measurements that count."""
_GUESSED: Final = 5
"""The first guess counts as this many measurements."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The coefficients: seconds, seconds per token, seconds per token and preceding token."""

    fixed_s: float
    per_token_s: float
    per_token_position_s: float = 0.0

    def chunk_seconds(self, start: int, tokens: float) -> float:
        """Seconds of one forward pass over tokens [start, start + tokens)."""
        return self.fixed_s + self.work_seconds(start, tokens)

    def work_seconds(self, start: float, tokens: float) -> float:
        """The same without the fixed cost of each chunk."""
        return tokens * (self.per_token_s + self.per_token_position_s * (start + tokens / 2))

    def range_seconds(self, start: int, tokens: float, chunk_tokens: int) -> float:
        """Seconds of all chunks of [start, start + tokens), each of at most `chunk_tokens`."""
        if tokens <= 0:
            return 0.0
        return math.ceil(tokens / chunk_tokens) * self.fixed_s + self.work_seconds(start, tokens)


GUESS: Final = PrefillCost(0.01, 1 / 4000)
"""Used before anything is measured. It only has to be plausible until a few chunks have run."""


class CostModel:
    """A PrefillCost, fitted online by weighted least squares with exponential forgetting; never
    negative. No clock.

    `initial` comes from a profile and counts as a few weak measurements. It holds until chunks of
    several sizes and positions are measured, which then outweigh it.
    """

    def __init__(self, initial: PrefillCost = GUESS) -> None:
        self._initial = initial
        self._matrix = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3
        self._seen = 0
        self._cost = initial
        for start in (0, 4096):
            for tokens in (64, 512):
                self._add(start, tokens, initial.chunk_seconds(start, tokens), _GUESS_WEIGHT)

    @property
    def cost(self) -> PrefillCost:
        """The current estimate."""
        return self._cost

    @property
    def seen(self) -> int:
        """Number of measured chunks."""
        return self._seen

    def saw(self, start: int, tokens: int, seconds: float) -> None:
        """A chunk of one request ran alone and took `seconds`."""
        if tokens <= 0 or seconds <= 0:
            return
        self._seen += 1
        for row in self._matrix:
            for column in range(3):
                row[column] *= _KEEP
        self._right = [value * _KEEP for value in self._right]
        self._add(start, tokens, seconds, 1.0)
        self._cost = _solve(self._matrix, self._right) or self._initial

    def profile(self) -> dict[str, float]:
        """The estimate as plain data."""
        cost = self._cost
        return {
            "fixed_s": cost.fixed_s,
            "per_token_s": cost.per_token_s,
            "per_token_position_s": cost.per_token_position_s,
        }

    def _add(self, start: int, tokens: int, seconds: float, weight: float) -> None:
        # Weighted by 1/seconds^2, so that relative errors count and small chunks shape the fixed
        # cost.
        weight /= seconds * seconds
        terms = (1.0, float(tokens), tokens * (start + tokens / 2))
        for i in range(3):
            for j in range(3):
                self._matrix[i][j] += weight * terms[i] * terms[j]
            self._right[i] += weight * terms[i] * seconds


def _solve(matrix: list[list[float]], right: list[float]) -> PrefillCost | None:
    """The least-squares solution without negative coefficients: the best among those subsets of
    terms whose solution has none.
    """
    best: tuple[float, tuple[float, ...]] | None = None
    for used in ((0, 1, 2), (0, 1), (1, 2), (0, 2), (1,), (0,), (2,)):
        values = _solve_subset(matrix, right, used)
        if values is None or min(values) < 0:
            continue
        if used == (0, 1, 2):
            return PrefillCost(*values)
        # Up to a constant: |A x - y|^2 = x'Mx - 2 r'x
        error = sum(
            values[i] * (sum(matrix[i][j] * values[j] for j in range(3)) - 2 * right[i])
            for i in range(3)
        )
        if best is None or error < best[0] - 1e-12 * abs(best[0]):
            best = (error, values)
    return PrefillCost(*best[1]) if best else None


def _solve_subset(
    matrix: list[list[float]], right: list[float], used: tuple[int, ...]
) -> tuple[float, ...] | None:
    """Gaussian elimination on the chosen terms, scaled; None if they are linearly dependent."""
    scale = [math.sqrt(matrix[i][i]) for i in used]
    if min(scale) <= 0:
        return None
    rows = [
        [matrix[i][j] / (scale[a] * scale[b]) for b, j in enumerate(used)] + [right[i] / scale[a]]
        for a, i in enumerate(used)
    ]
    size = len(used)
    for a in range(size):
        pivot = a
        for row in range(a + 1, size):
            if abs(rows[row][a]) > abs(rows[pivot][a]):
                pivot = row
        top = rows[pivot]
        if abs(top[a]) < 1e-9:
            return None
        rows[a], rows[pivot] = top, rows[a]
        for row in range(size):
            if row != a:
                values = rows[row]
                factor = values[a] / top[a]
                for column in range(size + 1):
                    values[column] -= factor * top[column]
    solution = [0.0, 0.0, 0.0]
    for a, i in enumerate(used):
        solution[i] = rows[a][size] / rows[a][a] / scale[a]
    return tuple(solution)


def guess_s(engine: EngineShape) -> float:
    """The fixed overhead in seconds on this kind of device, before it is measured."""
    return ACCELERATOR_S if engine.accelerator else CPU_S


class FixedOverhead:
    """The fixed overhead of a restoration: scheduler steps, attaching the last load to the request,
    and waiting at the meeting page. It is the median amount, from 0 to 0.1 seconds, by which
    restorations that ran alone finished later than predicted from compute and links. `initial_s`
    counts as a few measurements, so that one or two delayed restorations change little.
    """

    def __init__(self, initial_s: float) -> None:
        self._late_s = [initial_s] * _GUESSED
        self.seconds = initial_s

    def saw(self, late_s: float) -> None:
        """A restoration that ran alone ended `late_s` seconds later than predicted."""
        self._late_s.append(late_s)
        if len(self._late_s) > _COUNTED:
            del self._late_s[0]
        ranked = sorted(self._late_s)
        self.seconds = min(max(ranked[len(ranked) // 2], 0.0), _MOST_OVERHEAD_S)

    def profile(self) -> dict[str, float]:
        """The estimate as plain data."""
        return {"own_s": self.seconds}
