"""TierKV's printed numbers beside ours, as markdown for docs/results/papers/tierkv.md.

`python -m sgl_kvtier.lab.papers.tierkv.page docs/results/papers` replaces the text between the
page's markers and writes the plots. The text around the markers is written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sgl_kvtier.console.document import write_text
from sgl_kvtier.console.table import Column, Row, Table, to_markdown
from sgl_kvtier.lab.pages.plots import Series, lines, save_plot
from sgl_kvtier.lab.papers.parts import CELL, contradictions, replaced, rows
from sgl_kvtier.lab.papers.tierkv.command import FITTED, TABLES
from sgl_kvtier.lab.papers.tierkv.runs import sweep
from sgl_kvtier.lab.papers.tierkv.setup import LEVELS, POLICIES, printed_table
from sgl_kvtier.lab.sim.cells import Cell, agreement

_TITLES = {
    "4": "Table 4, mean TPOT by model at 3x (ms)",
    "5": "Table 5, mean TPOT (ms)",
    "6": "Table 6, P95 TPOT (ms)",
    "7": "Table 7, throughput (tokens/s)",
}
_LEVEL = "oversubscription (HBM is 80 GB over this)"


def markdown() -> str:
    """How well the cells agree, every cell, what paging costs, and where the paper contradicts
    itself.
    """
    cells = {name: table() for name, table in TABLES.items()}
    parts = [_agreement(cells)]
    parts += [_pivot(title, cells[name]) for name, title in _TITLES.items()]
    parts += [_cost(), Table("Figure 6", CELL[:-1], rows(cells["fig6"])), contradictions("tierkv")]
    return "\n".join(to_markdown(part) for part in parts)


def main(folder: str) -> None:
    """Rewrites tierkv.md and its plots in this folder."""
    path = Path(folder) / "tierkv.md"
    write_text(replaced(path.read_text("utf-8"), markdown()), str(path))
    save_plot(token_times(), str(Path(folder) / "tierkv-token-times.svg"))
    save_plot(throughput(), str(Path(folder) / "tierkv-throughput.svg"))


def token_times() -> str:
    """Mean TPOT of three policies, simulated and as printed; the others lie between LRU and
    Prefetch.
    """
    published, series = printed_table("5"), []
    for policy in ("LRU", "Prefetch", "Oracle"):
        simulated = [sweep(policy, level).tpot_ms for level in LEVELS]
        printed = [published[str(level), policy] for level in LEVELS]
        series += [Series(policy, LEVELS, simulated), Series(f"{policy}, print", LEVELS, printed)]
    title = "Mean TPOT when bytes obey the link, and as printed"
    return lines(series, title, _LEVEL, "mean TPOT (ms)", log_y=True)


def throughput() -> str:
    """Throughput of all policies."""
    series = [
        Series(policy, LEVELS, [sweep(policy, level).tokens_per_s for level in LEVELS])
        for policy in POLICIES
    ]
    return lines(series, "Throughput when bytes obey the link", _LEVEL, "tokens/s", log_y=True)


def _agreement(cells: Mapping[str, Sequence[Cell]]) -> Table:
    """By what a fault is charged, and of the null model."""
    every = [one for some in cells.values() for one in some]
    found: list[Row] = []
    for reading in dict.fromkeys(one.reading for one in every):
        mine = [one for one in every if one.reading == reading]
        tables = list(dict.fromkeys(one.table for one in mine))
        found += [
            _agreement_row(reading, name, [one for one in mine if name in ("all", one.table)])
            for name in (*tables, "all")
        ]
    columns = (
        Column("reading", "charged"),
        Column("table", "table"),
        Column("fitted", "fitted cells"),
        Column("predicted", "predicted cells"),
        Column("share", "within 15 %"),
        Column("median", "median absolute deviation"),
    )
    note = (
        "Null model: each policy's stall over LRU's in one printed row, times LRU's printed stall "
        "in every other; no machine, load or policy. Fitted cells, for it those that it is given, "
        f"are left out. In all {FITTED.parameters} quantities were fitted to {FITTED.numbers} "
        "printed numbers."
    )
    return Table("Agreement", columns, found, (note,))


def _agreement_row(reading: str, name: str, cells: Sequence[Cell]) -> Row:
    seen = agreement(cells)
    share, off = seen["within_15_percent"], seen["median_abs_deviation"]
    return {
        "reading": reading,
        "table": name.replace("fig", "Figure ") if name.startswith("fig") else name,
        "fitted": sum(one.fitted for one in cells),
        "predicted": seen["predicted"],
        "share": None if share is None else f"{100 * share:.1f} %",
        "median": None if off is None else f"{100 * off:.1f} %",
    }


def _pivot(title: str, cells: Sequence[Cell]) -> Table:
    """A table laid out as in the paper; each cell is "paper / ours"."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    found: dict[str, dict[str, object]] = {}
    for cell in cells:
        digits = 0 if cell.unit == "tokens/s" else 2
        text = f"{cell.published:.{digits}f} / {cell.ours:.{digits}f}"
        found.setdefault(cell.row, {"row": cell.row})[cell.column] = text
    heads = (Column("row", ""), *(Column(name, name) for name in columns))
    return Table(title, heads, list(found.values()))


def _cost() -> Table:
    """The results besides TPOT."""
    found = [
        {
            "level": f"{level}x",
            "policy": policy,
            "tpot": seen.tpot_ms,
            "hits": 100 * seen.hit_share,
            "moved": (seen.demand_gb + seen.ahead_gb) / 1e3,
            "rate": seen.tokens_per_s,
            "wait": seen.wait_ms / 1e3,
        }
        for level in LEVELS[1:]
        for policy in POLICIES
        for seen in (sweep(policy, level),)
    ]
    columns = (
        Column("level", ""),
        Column("policy", "policy"),
        Column("tpot", "mean TPOT", "ms", 1),
        Column("hits", "of the batch's KV in HBM", "%", 1),
        Column("moved", "moved to HBM", "TB", 0),
        Column("rate", "throughput", "tokens/s", 0),
        Column("wait", "mean wait before the first step", "s", 1),
    )
    return Table("What the policies cost when bytes obey the link", columns, found)


if __name__ == "__main__":
    main(sys.argv[1])
