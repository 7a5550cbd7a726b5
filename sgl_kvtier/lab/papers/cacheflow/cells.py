"""CacheFlow's printed numbers, and ours beside them.

The paper (arXiv 2604.25080) prints ratios in its text and no tables; most conditions are not
stated. A cell's `reading` says over what a ratio is taken. Where the paper gives a range,
`published` is the end of it nearer to ours, or ours inside it.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import TypeAlias

from sgl_kvtier.lab.papers.cacheflow.rig import BY_TOKENS, SINGLE
from sgl_kvtier.lab.papers.cake.grid import PUBLISHED
from sgl_kvtier.lab.sim.cells import NULL, Cell

Seconds: TypeAlias = Mapping[str, Sequence[float]]
"""Of each arm in each draw."""

OURS = "kvtier"
THEIRS = "CacheFlow"


@cache
def printed() -> Mapping[tuple[str, str, str], tuple[float, float]]:
    """(table, row, column) to the least and the most the paper says."""
    with (PUBLISHED / "cacheflow.csv").open(newline="", encoding="utf-8") as file:
        return {
            (row["table"], row["row"], row["column"]): (float(row["low"]), float(row["high"]))
            for row in csv.DictReader(file)
            if row["low"]
        }


def cell(
    table: str,
    row: str,
    column: str,
    ours: float,
    unit: str = "x",
    reading: str = "",
    each: Sequence[float] = (),
) -> Cell:
    """Ours beside what is printed for it, if anything is. `each` are the values of single draws."""
    low, high = printed().get((table, row, column), (None, None))
    published = None
    if low is not None and high is not None:
        published = round(min(max(ours, low), high), 4)
        if low < high:
            reading = "; ".join(filter(None, (f"printed {low:g} to {high:g}", reading)))
    spread = (round(min(each), 4), round(max(each), 4)) if len(each) > 1 else None
    name = f"cacheflow {table}"
    return Cell(name, row, column, published, round(ours, 4), unit, False, reading, spread)


def ratio(
    table: str,
    row: str,
    column: str,
    over: Sequence[float],
    under: Sequence[float],
    reading: str = "",
) -> Cell:
    """Mean seconds over mean seconds, and the same in each draw."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    return cell(table, row, column, fmean(over) / fmean(under), reading=reading, each=each)


def null(table: str, row: str, seconds: Seconds, over: str) -> Cell:
    """Eq. 1 on the simulated baselines' own ratio, beside the print: what both resources at once
    could gain over this arm, without any planner.
    """
    other = next(arm for arm in SINGLE if arm != over)
    both = [a + b for a, b in zip(seconds[over], seconds[other], strict=True)]
    return ratio(table, row, "TTFT speedup", both, seconds[other], NULL)


def speedups(table: str, row: str, seconds: Seconds) -> list[Cell]:
    """Mean TTFT of every arm, over CacheFlow's and over ours. Printed numbers stand beside the
    better single resource.
    """
    best = min(SINGLE, key=lambda arm: fmean(seconds[arm]))
    theirs, ours = seconds[THEIRS], seconds[OURS]
    reading = "CacheFlow over the better of vLLM and LMCache"
    return [
        ratio(table, row, "TTFT speedup", seconds[best], theirs, reading),
        *(
            ratio(table, row, f"over {arm}", seconds[arm], theirs, f"CacheFlow over {arm}")
            for arm in (*SINGLE, "Cake", BY_TOKENS)
        ),
        null(table, row, seconds, best),
        ratio(table, row, "ours over best single", seconds[best], ours, "kvtier"),
        ratio(table, row, "ours over CacheFlow", theirs, ours, "kvtier over CacheFlow"),
    ]
