"""`kvtier report`: a result that a comparison wrote, drawn again as tables and as its page; and the
data behind a page of docs/results, all of its grids.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

from sgl_kvtier.console import Column, Table, check_target, print_statement, print_table, write_text
from sgl_kvtier.console.table import format_value
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab.pages import html, kinds, plots
from sgl_kvtier.lab.pages.compare.page import compare_page
from sgl_kvtier.lab.pages.compare.result import SCHEMA as COMPARE
from sgl_kvtier.lab.pages.compare.sentence import sentence
from sgl_kvtier.lab.pages.compare.tables import compare_tables
from sgl_kvtier.outside import parse_json, read_bounded

GRIDS = "grids"
"""What takes the place of a schema in the data of docs/results."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "file",
        type=Path,
        help="what --json of kvtier compare, compare restore or compare remote wrote, also compressed "
        "(.gz), or a file of docs/results/data",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write one self-contained page with tables and plots"
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="write the plot that a file of docs/results/data describes"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the tables and notes, and writes page and plot. Raises KVTierError."""
    for target in filter(None, (args.html, args.svg)):
        check_target(target)
    result = read_result(args.file)
    tables_of, page_of = KINDS[result["schema"]]
    if args.svg is not None and "plot" not in result:
        raise KVTierError(f"{args.file} describes no plot: omit --svg, or use --html")
    try:
        tables = tables_of(result)
        said = sentence(result) if result["schema"] == COMPARE else None
        page = None if args.html is None else page_of(result)
        drawn = None if args.svg is None else grids_plot(result)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise KVTierError(
            f"{args.file}: not a whole {result['schema']} result ({type(error).__name__}: {error!s:.100}). "
            "Give the file that --json wrote"
        ) from error
    shown = sys.stderr if "-" in (args.html, args.svg) else sys.stdout
    if said is not None:
        print_statement(*said, shown)
    for table in tables:
        print_table(table, shown)
        print(file=shown)
    for note in result.get("notes") or []:
        print(note, file=shown)
    if page is not None:
        write_text(page, args.html)
    if drawn is not None:
        write_text(drawn, args.svg)
    return 0


def grid_tables(data: dict[str, Any]) -> list[Table]:
    """Each grid of a page's data."""
    return [
        Table(
            name,
            [Column(column, column) for column in grid["columns"]],
            [dict(zip(grid["columns"], row, strict=True)) for row in grid["rows"]],
            notes=tuple(filter(None, (grid.get("about"), grid.get("command")))),
        )
        for name, grid in data["grids"].items()
    ]


def grids_plot(data: dict[str, Any]) -> str:
    """The plot that `plot` of a page's data describes, from all grids that have its columns; `where`
    leaves rows out.

    With `y`: it over `x`, a curve for each value of the columns `by`; `x` may be ratios such as 1/4.
    Without: `x` of each row, named by `by`, with whiskers from the column `low` to `high`.
    """
    plot = data["plot"]
    needed = [plot[name] for name in ("x", "y", "low", "high") if name in plot]
    points: dict[tuple[Any, ...], list[list[float]]] = {}
    for table in grid_tables(data):
        if not {*needed, *plot["by"]} <= {column.name for column in table.columns}:
            continue
        for row in table.rows:
            if all(row.get(column) == value for column, value in plot.get("where", {}).items()):
                point = [float(Fraction(str(row[column]))) for column in needed]
                points.setdefault(tuple(row[column] for column in plot["by"]), []).append(point)
    if "y" in plot:
        curves = [
            _series(name, *zip(*sorted(found), strict=True))
            for name, found in sorted(points.items())
        ]
        log_x = bool(plot.get("log_x"))
        return plots.lines(curves, plot["title"], plot["x"], plot["y"], log_x=log_x)
    rows = []
    for name, found in points.items():
        x, *whiskers = zip(*found, strict=True)
        rows.append(_series(name, x, x, *whiskers))
    return plots.ratios(rows, plot["title"], plot["x"])


def _series(name: tuple[Any, ...], *numbers: Any) -> plots.Series:
    shown = (f"{part:g}" if isinstance(part, float) else format_value(part) for part in name)
    return plots.Series(", ".join(shown), *numbers)


def grids_page(data: dict[str, Any]) -> str:
    """A self-contained page: the plot if there is one, then every grid with its command."""
    tables = [html.table_html(table) for table in grid_tables(data)]
    sections = [html.Section("grids", "Tables", "\n".join(tables))]
    if "plot" in data:
        body = html.no_plots_html()
        if html.plots_available():
            body = html.figure_html(grids_plot(data), data["plot"]["title"])
        sections.insert(0, html.Section("plot", "Plot", body))
    title = data.get("title") or f"Figures of docs/results/{data['page']}"
    return html.page(title, data.get("about", "Every table with its command"), sections)


def read_result(path: Path) -> dict[str, Any]:
    """A result of one of `KINDS`, perhaps compressed. Raises KVTierError on any other file."""
    try:
        text = path.read_bytes()
        result = parse_json(gzip.decompress(text) if path.suffix == ".gz" else text)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise KVTierError(f"{path} is not compressed by gzip: {error!s:.100}") from error
    except OSError as error:
        raise KVTierError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise KVTierError(f"{path} is not JSON: {error!s:.100}") from error
    known = isinstance(result, dict)
    schema = result.get("schema") if known else None
    if known and schema is None and isinstance(result.get("page"), str) and "grids" in result:
        return {**result, "schema": GRIDS, "title": _heading(path, result["page"])}
    if not isinstance(schema, str) or schema not in KINDS or schema == GRIDS:
        there = ", ".join(name for name in KINDS if name != GRIDS)
        raise KVTierError(
            f"{path}: no result that can be drawn. Its schema must be one of: {there}"
        )
    return result


def _heading(data: Path, page: str) -> str | None:
    """The heading of the page that has this data, which lies in the folder above; None without."""
    try:
        text = read_bounded(data.resolve().parent.parent / Path(page).name)
    except (OSError, ValueError):
        return None
    heads = (line[2:].replace("`", "") for line in text.splitlines() if line.startswith("# "))
    return next(heads, None)


KINDS = {
    COMPARE: (compare_tables, compare_page),
    **{schema: (kind.tables, kind.page) for schema, kind in kinds.KINDS.items()},
    GRIDS: (grid_tables, grids_page),
}
"""How the result of each schema is shown."""
