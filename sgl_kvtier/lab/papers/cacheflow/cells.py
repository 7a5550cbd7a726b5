"""CacheFlow's printed numbers, and ours beside them.

The paper (arXiv 2604.25080) prints ratios in its text and no tables; most conditions are not
stated. A cell's `reading` says over what a ratio is taken. Where the paper gives a range,
`published` is the end of it nearer to ours, or ours inside it.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache

from sgl_kvtier.lab.papers.cacheflow.rig import BY_TOKENS, SINGLE
from sgl_kvtier.lab.papers.cake.grid import PUBLISHED
from sgl_kvtier.lab.sim.cells import NULL, Cell

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
    table: str, row: str, column: str, ours: float, unit: str = "x", reading: str = ""
) -> Cell:
    """Ours beside what is printed for it, if anything is."""
    low, high = printed().get((table, row, column), (None, None))
    published = None
    if low is not None and high is not None:
        published = round(min(max(ours, low), high), 4)
        if low < high:
            reading = "; ".join(filter(None, (f"printed {low:g} to {high:g}", reading)))
    return Cell(f"cacheflow {table}", row, column, published, round(ours, 4), unit, reading=reading)


def null(table: str, row: str, seconds: Mapping[str, float], over: str) -> Cell:
    """Eq. 1 on the simulated baselines' own ratio, beside the print: what both resources at once
    could gain over this arm, without any planner.
    """
    other = next(arm for arm in SINGLE if arm != over)
    gain = 1 + seconds[over] / seconds[other]
    return cell(table, row, "TTFT speedup", gain, reading=NULL)


def speedups(table: str, row: str, seconds: Mapping[str, float]) -> list[Cell]:
    """Mean TTFT of every arm, over CacheFlow's and over ours. Printed numbers stand beside the
    better single resource.
    """
    best = min(seconds[arm] for arm in SINGLE)
    cells = [
        cell(
            table,
            row,
            "TTFT speedup",
            best / seconds[THEIRS],
            reading="CacheFlow over the better of vLLM and LMCache",
        )
    ]
    cells += [
        cell(
            table,
            row,
            f"over {arm}",
            seconds[arm] / seconds[THEIRS],
            reading=f"CacheFlow over {arm}",
        )
        for arm in (*SINGLE, "Cake", BY_TOKENS)
    ]
    faster = min(SINGLE, key=lambda arm: seconds[arm])
    cells.append(null(table, row, seconds, faster))
    cells.append(cell(table, row, "ours over best single", best / seconds[OURS], reading="kvtier"))
    cells.append(
        cell(
            table,
            row,
            "ours over CacheFlow",
            seconds[THEIRS] / seconds[OURS],
            reading="kvtier over CacheFlow",
        )
    )
    return cells
