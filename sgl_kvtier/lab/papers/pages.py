"""How far the printed numbers of the three papers agree with ours, and their rules beside ours: the
tables of docs/results/papers.md.

`python -m sgl_kvtier.lab.papers.pages docs/results` replaces the text between the page's markers.
The text around them is written by hand. `kvtier sim paper NAME` prints every cell.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from sgl_kvtier.console import progress
from sgl_kvtier.console.document import write_text
from sgl_kvtier.console.table import Column, Row, Table, to_markdown
from sgl_kvtier.lab.papers import batches, cacheflow, cake, tierkv
from sgl_kvtier.lab.papers.traces_page import put
from sgl_kvtier.lab.sim.cells import agreement

PAPERS = {
    "Cake (ICML 2025), Tables 3 to 7": cake,
    "CacheFlow (arXiv 2604.25080), Figures 4 to 9": cacheflow,
    "TierKV, Tables 4 to 7 and Figure 6": tierkv,
}
_AT_ONCE = 4

_COLUMNS = (
    Column("paper", "Paper"),
    Column("cells", "Predicted cells"),
    Column("share", "Within 15 %", "% of cells", 1),
    Column("median", "Median deviation", "%", 1),
    Column("null_cells", "Null model's cells"),
    Column("null_share", "Null model within 15 %", "% of cells", 1),
    Column("null_median", "Its median deviation", "%", 1),
)


def _row(name: str, paper: ModuleType) -> Row:
    """TierKV's machine is the one whose bytes obey the link."""
    ours = agreement([cell for table in paper.RESULTS for cell in paper.TABLES[table]()])
    null = paper.NULL_MODEL["all"]
    return {
        "paper": name,
        "cells": ours.predicted,
        "share": _percent(ours.within_15_percent),
        "median": _percent(ours.median_abs_deviation),
        "null_cells": null.predicted,
        "null_share": _percent(null.within_15_percent),
        "null_median": _percent(null.median_abs_deviation),
    }


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def main(folder: str) -> None:
    """Rewrites the page of this folder. Raises TraceError where a trace or a marker is missing."""
    page, rows = Path(folder) / "papers.md", []
    with progress("papers", len(PAPERS) + 1, "tables") as bar:
        for name, paper in PAPERS.items():
            rows.append(_row(name, paper))
            bar.advance()
        several = batches.table(list(batches.batches(_AT_ONCE)), _AT_ONCE)
        bar.advance()
    text = put(page.read_text("utf-8"), "agreement", to_markdown(Table("", _COLUMNS, rows)))
    write_text(put(text, "batches", to_markdown(several)), str(page))


if __name__ == "__main__":
    main(sys.argv[1])
