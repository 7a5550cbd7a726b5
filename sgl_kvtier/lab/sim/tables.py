"""Simulations and papers for people: tables of policies, of draws and of a paper's cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgl_kvtier.console import Column, Table, format_bytes
from sgl_kvtier.lab.sim.cells import Cell

_NAMES = ("policy", "n")
_RESTORED = (
    "Restored: requests whose prefix the planner restores; the engine loads the others by itself. "
    "Moved up: storage to host, host to device and storage to device."
)
_NOTES = (
    "Moved up: storage to host, host to device and storage to device. Wasted: loaded and never "
    "used by the request it was for, or prefetched and dropped or left without a hit.",
)


def policies_table(outcomes: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row per policy."""
    columns = [
        Column("policy", "policy"),
        *(Column(f"ttft_s.{key}", f"TTFT {key}", "s", 3) for key in ("p50", "p90", "p99", "mean")),
        Column("finished_s", "end", "s", 1),
        Column("computed_tokens", "computed tokens", decimals=0),
        Column("loaded_tokens", "loaded tokens", decimals=0),
        Column("moved_up_bytes", "moved up", format=format_bytes),
        Column("wasted_up_bytes", "of it wasted", format=format_bytes),
    ]
    return Table(title, columns, outcomes, _NOTES)


def draws_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row per policy: medians over several draws, and the range of the mean."""
    shown = [
        {
            "policy": row["policy"],
            "range": f"{row['ttft_s.mean']['least']:.2f} to {row['ttft_s.mean']['most']:.2f}",
            **{key.replace(".", " "): row[key]["median"] for key in row if key not in _NAMES},
        }
        for row in rows
    ]
    columns = [
        Column("policy", "policy"),
        Column("ttft_s mean", "TTFT mean", "s", 2),
        Column("range", "least to most (s)"),
        Column("ttft_s p50", "TTFT p50", "s", 2),
        Column("ttft_s p99", "TTFT p99", "s", 2),
        Column("computed_tokens", "computed tokens", decimals=0),
        Column("restored", "restored", decimals=0),
        Column("moved_up_bytes", "moved up", format=format_bytes),
    ]
    draws = rows[0]["n"] if rows else 0
    note = f"Each number is the median of {draws} draws; the range is that of their means."
    return Table(title, columns, shown, (note, _RESTORED))


def cells_table(cells: Sequence[Cell], title: str) -> Table:
    """Paper, ours, deviation; one row per cell."""
    rows = [
        {
            "table": cell.table,
            "row": cell.row,
            "column": cell.column,
            "published": cell.published,
            "ours": cell.ours,
            "spread": None if cell.spread is None else "{:.2f} to {:.2f}".format(*cell.spread),
            "deviation": None if cell.deviation is None else 100 * cell.deviation,
            "note": ", ".join(
                text for text in (cell.unit, "fitted" if cell.fitted else "", cell.reading) if text
            ),
        }
        for cell in cells
    ]
    columns = [
        Column("table", "table"),
        Column("row", "row"),
        Column("column", "column"),
        Column("published", "paper"),
        Column("ours", "ours"),
        Column("spread", "by draw"),
        Column("deviation", "deviation", "%", 1),
        Column("note", "note"),
    ]
    return Table(title, columns, rows)
