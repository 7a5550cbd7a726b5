"""A simulation for people: tables, and one HTML page with distributions, the two pointers over time
and what tiers hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgl_kvtier.console import Column, Table, format_bytes
from sgl_kvtier.lab.pages import html as page
from sgl_kvtier.lab.pages.figure import plots_available
from sgl_kvtier.lab.pages.html import Section
from sgl_kvtier.lab.pages.plots import Series, cdf, lines
from sgl_kvtier.lab.sim.cells import Cell
from sgl_kvtier.lab.sim.requests import SimResult
from sgl_kvtier.types import PLACES, Tier

_SHOWN_REQUESTS = 4
_MOST_POINTS = 400
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


def sim_html(
    setup: Mapping[str, Any],
    outcomes: Sequence[Mapping[str, Any]],
    results: Mapping[str, SimResult],
    environment: Mapping[str, Any],
) -> str:
    """The whole page. Without matplotlib it has everything but the plots."""
    sections = [
        Section(
            "results",
            "Results",
            page.table_html(policies_table(outcomes, "Policies"), emphasise="kvtier"),
        ),
        Section("distributions", "Time to first token", _distributions(results)),
        Section("pointers", "Two pointers over time", _pointers(results)),
        Section("occupancy", "What the tiers hold", _occupancy(results)),
        Section("setup", "What was simulated", page.definitions_html(setup)),
        Section("environment", "Environment", page.definitions_html(environment)),
    ]
    return page.page("Simulation", ", ".join(results), sections)


def _distributions(results: Mapping[str, SimResult]) -> str:
    if not plots_available():
        return page.no_plots_html()
    samples = {name: [1e3 * value for value in result.ttfts()] for name, result in results.items()}
    plot = cdf(samples, "Time to first token", "milliseconds")
    return page.plots_html(
        [page.figure_html(plot, "Share of requests with their first token by then.")]
    )


def _pointers(results: Mapping[str, SimResult]) -> str:
    """The restorations with most tokens: the front computed, the back loaded, until they meet."""
    if not plots_available():
        return page.no_plots_html()
    figures = []
    for name, result in results.items():
        paths: dict[str, list[tuple[float, int, int]]] = {}
        for at, rid, front, back in result.timeline.pointers:
            paths.setdefault(rid, []).append((at, front, back))
        longest = sorted(paths, key=lambda rid: (-max(back for _, _, back in paths[rid]), rid))
        for rid in longest[:_SHOWN_REQUESTS]:
            path = _thinned(paths[rid])
            began = path[0][0]
            since = [1e3 * (point[0] - began) for point in path]
            series = [
                Series("front: computed below", since, [float(point[1]) for point in path]),
                Series("back: loaded above", since, [float(point[2]) for point in path]),
            ]
            plot = lines(series, f"{name}: {rid}", "milliseconds since it was offered", "tokens")
            figures.append(page.figure_html(plot, f"Request {rid} under {name}."))
    return (
        page.plots_html(figures)
        if figures
        else page.paragraph_html("No policy restored anything in two parts.")
    )


def _occupancy(results: Mapping[str, SimResult]) -> str:
    if not plots_available():
        return page.no_plots_html()
    figures = []
    for name, result in results.items():
        points = _thinned(result.timeline.occupancy)
        series = [
            Series(
                PLACES[tier],
                [at for at, _ in points],
                [float(used.get(tier, 0)) for _, used in points],
            )
            for tier in (Tier.DEVICE, Tier.HOST, Tier.STORAGE)
        ]
        plot = lines(series, f"{name}: pages in use", "seconds", "pages")
        figures.append(page.figure_html(plot, f"Pages each tier holds under {name}."))
    return page.plots_html(figures)


def _thinned(points: Sequence[Any]) -> list[Any]:
    if len(points) <= _MOST_POINTS:
        return list(points)
    return [points[round(i * (len(points) - 1) / (_MOST_POINTS - 1))] for i in range(_MOST_POINTS)]
