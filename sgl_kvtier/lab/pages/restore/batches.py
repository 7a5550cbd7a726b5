"""Batches of restorations as tables and as one HTML page, made from their JSON result (schema
kvtier.restore.batches/1, docs/manual/json.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_kvtier.console.table import Column, Table, format_share
from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.compare.result import OURS
from sgl_kvtier.lab.pages.plots import Series, lines
from sgl_kvtier.lab.pages.restore.grid import cells_page, pace_table

SCHEMA = "kvtier.restore.batches/1"
_COMPARED = (
    ("mean TTFT", "ms", lambda one: one["ttft_ms"]["mean"]),
    ("makespan", "s", lambda one: one["makespan_s"]),
    ("largest gap between tokens", "ms", lambda one: one["token_gap_ms"]["max"]),
)
"""Measures that the losing cells are looked for in."""


def batch_tables(result: dict) -> list[Table]:
    """Every size and arm; ours over each other arm; what the planner answered."""
    tables = (
        [times_table(result), ratios_table(result), answers_table(result)]
        if result.get("cells")
        else []
    )
    tables += [pace_table(result)] if result.get("pace") else []
    return [html.marked(table, result) for table in tables]


def times_table(result: dict) -> Table:
    """Per size and arm: time to first token, makespan, what was computed and how busy both
    resources were, and gaps between tokens of requests beside. Of streams the longest time too.
    """
    streams = any(cell["poisson"] is not None for cell in result["cells"])
    longest = (Column("ttft_ms.max", "longest", "ms", decimals=0),) if streams else ()
    columns = (
        *_place(),
        Column("ttft_ms.mean", "TTFT mean", "ms", decimals=0),
        Column("ttft_ms.p50", "p50", "ms", decimals=0),
        Column("ttft_ms.p99", "p99", "ms", decimals=0),
        *longest,
        Column("makespan_s", "Makespan", "s", decimals=2),
        Column("computed_tokens", "Computed", "tokens"),
        Column("link_busy_fraction", "Link busy", format=format_share),
        Column("compute_busy_fraction", "Compute busy", format=format_share),
        Column("token_gap_ms.p99", "Gap p99", "ms", decimals=0),
        Column("token_gap_ms.max", "Gap largest", "ms", decimals=0),
        Column("equal_tokens_fraction", "Equal tokens", format=format_share),
        Column("errors", "Failed"),
    )
    return Table(
        "Several restorations at once", columns, _rows(result), notes=tuple(_verdict(result))
    )


def ratios_table(result: dict) -> Table:
    """Per size: ours over each other arm, round by round."""
    rows = [
        {**cell, "arm": name.removeprefix(f"{OURS}/"), **found}
        for cell in result["cells"]
        for name, found in cell["ratios"].items()
    ]
    columns = (
        *_place("Over"),
        Column("ttft_ms_mean.median", "TTFT mean", decimals=3),
        Column("ttft_ms_mean.p25", "p25", decimals=3),
        Column("ttft_ms_mean.p75", "p75", decimals=3),
        Column("makespan_s.median", "Makespan", decimals=3),
        Column("makespan_s.n", "Rounds"),
    )
    return Table(f"{OURS} over the others, round by round", columns, rows)


def answers_table(result: dict) -> Table:
    """How many prefixes the planner took or left, by mode and reason."""
    rows = [
        {**cell, "arm": arm, "answer": answer, "count": int(count)}
        for cell in result["cells"]
        for arm, one in cell["arms"].items()
        for answer, count in sorted(one["answers"].items())
    ]
    columns = (*_place(), Column("answer", "Answer"), Column("count", "Prefixes"))
    return Table("What the planner answered", columns, rows)


def batch_page(result: dict) -> str:
    """The whole page; figures the result does not have are left out."""
    return cells_page(
        result,
        "Several restorations at once",
        headline=statements(result),
        tables=batch_tables(result),
        figures=_figures(result),
        worse=losing(result),
    )


def statements(result: dict) -> list[tuple[str, bool]]:
    """Sentences on the outcome; True marks what is wrong."""
    found: list[tuple[str, bool]] = []
    for cell in result.get("cells") or []:
        ratio = cell["vs_best_paper"]["ttft_ms_mean"]
        if ratio is not None:
            text = f"{_where(cell)}: {OURS}'s mean TTFT is {ratio:.2f} of the better of the papers' rules."
            found.append((text, False))
    if result.get("cells"):
        found += [(f"Missed: {text}.", True) for text in result["summary"]["missed"]]
        equal = result["summary"]["equal_tokens"]
        text = f"{'Every' if equal else 'Not every'} answer has the tokens of the prompt computed alone."
        found.append((text, not equal))
    if result.get("interrupted"):
        found.append(("Interrupted: figures are from what had been measured.", True))
    return found


def losing(result: dict) -> list[tuple[str, bool]]:
    """Every cell and measure in which another arm does better than ours."""
    found = []
    for cell in result.get("cells") or []:
        mine = cell["arms"].get(OURS)
        for arm, one in cell["arms"].items():
            for label, unit, figure in _COMPARED:
                ours, theirs = (None if of is None else figure(of) for of in (mine, one))
                if ours is not None and theirs is not None and ours > theirs:
                    numbers = f"{OURS} {_amount(ours, unit)}, {arm} {_amount(theirs, unit)}"
                    found.append((f"{_where(cell)}, {label}: {numbers}.", True))
    return found or [(f"None: in no cell is another arm better than {OURS}.", False)]


def _place(arm: str = "Arm") -> tuple[Column, ...]:
    return (
        Column("at_once", "At once"),
        Column("load_over_compute", "Load / compute", decimals=2),
        Column("arm", arm),
    )


def _rows(result: dict) -> list[dict]:
    return [
        {**cell, "arm": arm, **one} for cell in result["cells"] for arm, one in cell["arms"].items()
    ]


def _verdict(result: dict) -> Iterator[str]:
    for cell in result["cells"]:
        over = cell["vs_best_paper"]
        if over["ttft_ms_mean"] is not None and over["makespan_s"] is not None:
            yield (
                f"{_where(cell)}: {OURS} over the better of the papers' rules: mean TTFT {over['ttft_ms_mean']:.3f}, makespan "
                f"{over['makespan_s']:.3f}."
            )
        for arm, found in cell["vs_variants"].items():
            mean, longest = (found[f"ttft_ms_{name}"] for name in ("mean", "max"))
            if mean is not None and longest is not None:
                yield f"{_where(cell)}: {OURS} over {arm}: mean TTFT {mean:.3f}, longest {longest:.3f}."
    for text in result["summary"]["missed"]:
        yield f"Missed: {text}."


def _where(cell: dict) -> str:
    stream = "" if cell["poisson"] is None else f" as a stream of load {cell['poisson']:g}"
    ratio = cell["load_over_compute"]
    return f"{cell['at_once']} at once{stream}" + (
        "" if ratio == 1 else f", load/compute {ratio:g}"
    )


def _amount(value: float, unit: str) -> str:
    return f"{value:.2f} s" if unit == "s" else f"{value:.0f} ms"


def _figures(result: dict) -> Iterator[tuple[str, str]]:
    places = dict.fromkeys(
        (cell["model"], cell["load_over_compute"], cell["poisson"]) for cell in result["cells"]
    )
    for place in places:
        cells = [
            cell
            for cell in result["cells"]
            if (cell["model"], cell["load_over_compute"], cell["poisson"]) == place
        ]
        where = f"{place[0]}, load over compute {place[1]:g}{html.paced_mark(result)}"
        for label, unit, figure in _COMPARED:
            series = [_series(cells, arm, figure) for arm in result["arms"]]
            title = f"{label[0].upper()}{label[1:]}, {where}"
            axes = ("restorations at once", f"{label} ({unit})")
            yield (
                lines(series, title, *axes, whole_x=True),
                "A line for each arm, a point for each size of a batch.",
            )


def _series(cells: list[dict], arm: str, figure: Any) -> Series:
    there = [cell for cell in cells if arm in cell["arms"]]
    return Series(
        arm, [cell["at_once"] for cell in there], [figure(cell["arms"][arm]) for cell in there]
    )
