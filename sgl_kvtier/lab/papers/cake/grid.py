"""Cake's Tables 3 to 7 as printed, and the set-up that stands behind every printed pair.

Source: Jin et al., "Compute Or Load KV Cache? Why Not Both?" (ICML 2025), sections 5.1 to 5.6. A
pair `a\\b` is the speedup over I/O-only and over compute-only. Both have the same denominator. So
a/b is the ratio of the two baselines and holds whatever Cake itself does. `fit` uses only that
ratio.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PUBLISHED = Path(__file__).parents[1] / "published"

TABLES = ("3", "4", "5", "6", "7")

_TOKENS = 16384
"""Section 5.2 says 16K: 32 chunks of 512."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The set-up of a measurement; hardware and model have the paper's names.

    `share` is the utilisation: the share of the token budget of a step that the restoring request
    gets. The rest goes to others. `kv_scale` is the stored size against 16 bit.
    """

    hardware: str
    model: str
    tokens: int
    gbps: float
    share: float = 1.0
    budget: int = 512
    kv_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Pair:
    """One printed pair with its place: `over_io` is the speedup over I/O-only, `over_compute` over
    compute-only.
    """

    table: str
    row: str
    column: str
    over_io: float
    over_compute: float
    setup: Setup

    @property
    def io_over_compute(self) -> float:
        """The baselines' ratio: I/O-only time over compute-only time."""
        return self.over_io / self.over_compute


def printed(table: str) -> list[Pair]:
    """All pairs of one table, row by row."""
    with (PUBLISHED / f"cake_table{table}.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file))
    labels = [name for name in header if name in ("Hardware", "BW", "Util", "ChunkSize")]
    return list(_pairs(table, labels, header[len(labels) :], rows))


def printed_all() -> list[Pair]:
    """Tables 3 to 7."""
    return [pair for table in TABLES for pair in printed(table)]


def printed_averages() -> list[tuple[str, float, float]]:
    """Tables with the averages the text gives for them: over I/O-only, over compute-only."""
    with (PUBLISHED / "cake_averages.csv").open(newline="", encoding="utf-8") as file:
        return [
            (row["table"], float(row["over I/O"]), float(row["over compute"]))
            for row in csv.DictReader(file)
        ]


def _pairs(
    table: str, labels: list[str], columns: list[str], rows: list[list[str]]
) -> Iterator[Pair]:
    for row in rows:
        named = dict(zip(labels, row, strict=False))
        for column, cell in zip(columns, row[len(labels) :], strict=True):
            over_io, over_compute = (float(part) for part in cell.split("\\"))
            yield Pair(
                table,
                " ".join(row[: len(labels)]),
                column,
                over_io,
                over_compute,
                _setup(table, named, column),
            )


def _setup(table: str, named: dict[str, str], column: str) -> Setup:
    """A cell's set-up from its row labels and its column, with the caption's constants for the
    rest.
    """
    share = _number(named["Util"]) / 100 if "Util" in named else 1.0
    gbps = _number(named["BW"]) if "BW" in named else 0.0
    # Table 5's caption names 2xA100 alone; its rows say 1xA100 too, and those agree with Table 3's
    # A100.
    hardware = named.get("Hardware", "2xA100").replace("1xA100", "A100")
    if table == "3":
        return Setup(hardware, "LongAlpaca-13B", _TOKENS, _number(column), share)
    if table == "4":
        return Setup("A100", column, _TOKENS, gbps, budget=int(named["ChunkSize"]))
    if table == "5":
        return Setup(hardware, "LongAlpaca-13B", int(_number(column)) * 1024, gbps, share)
    if table == "6":
        return Setup("2xA100", column, _TOKENS, gbps, share)
    return Setup("2xA100", "LongAlpaca-13B", _TOKENS, gbps, kv_scale=_number(column) / 16)


def _number(text: str) -> float:
    found = re.match(r"[\d.]+", text)
    if found is None:
        raise ValueError(f"no number in the label {text!r} of a published table")
    return float(found.group())
