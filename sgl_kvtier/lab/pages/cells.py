"""Results in cells (what was varied) with the figures of each arm, as tables, sentences and one HTML
page. `Kind` says what is particular to results of one schema; all of them are in `kinds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvtier.console.table import Column, Table
from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.compare.figures import has_samples
from sgl_kvtier.lab.pages.compare.result import OURS, is_torn
from sgl_kvtier.lab.pages.listing import (
    ARM,
    Listing,
    Measure,
    Row,
    Statement,
    arm_rows,
    as_arms,
    share,
    worse,
)
from sgl_kvtier.lab.pages.plots import Series, lines

Plot = tuple[str, str]
"""An SVG element and its caption."""


@dataclass(frozen=True)
class Kind:
    """How results of one schema are shown. `where` names a cell; `ours` is compared with all other
    arms but `bounds`. `said` are sentences on the outcome beside those that all kinds have.
    """

    schema: str
    title: str
    where: Callable[[Row], str]
    listings: Sequence[Listing]
    compared: Sequence[Measure]
    plots: Callable[[dict], Iterable[Plot]]
    said: Callable[[dict], Iterable[Statement]] = lambda _: ()
    ours: str = OURS
    bounds: Sequence[str] = ()

    def tables(self, result: dict) -> list[Table]:
        """The tables that have rows."""
        return [table for one in (*self.listings, _PACE) for table in one.tables(result)]

    def page(self, result: dict) -> str:
        """The whole page; figures that the result does not have are shown as missing, never as 0."""
        cells = result.get("cells") or []
        settings, workload = (dict(result.get(name) or {}) for name in ("settings", "workload"))
        workload.pop("rows", None)
        about = {name: one for name, one in result["arms"].items() if isinstance(one, str)}
        measured = bool(cells) and ("samples" not in result or has_samples(result))
        return html.result_page(
            result,
            self.title + html.paced_mark(result),
            f"{', '.join(result['arms'])} · {len(cells)} cells",
            headline=html.statements_html(self.statements(result)),
            tables=self.tables(result),
            figures=self.plots(result) if measured else None,
            losing=html.statements_html(self.losing(result)),
            configuration="\n".join(
                map(html.definitions_html, filter(None, (workload, settings, about)))
            ),
        )

    def statements(self, result: dict) -> list[Statement]:
        """Sentences on the outcome."""
        found = [*_lost_pace(self, result), *self.said(result)] if result.get("cells") else []
        found += [*_equality(result), *_failures(result)]
        if result.get("interrupted"):
            found.append(("Interrupted: figures are from what had been measured.", True))
        return found

    def losing(self, result: dict) -> list[Statement]:
        """Every cell and measure in which another arm does better than ours."""
        return worse(result.get("cells") or [], self.where, self.compared, self.ours, self.bounds)


def grouped(result: dict, *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """The cells by what they have in common."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for cell in result["cells"]:
        found.setdefault(tuple(cell[name] for name in names), []).append(cell)
    return found


def curves(
    cells: Sequence[Row], arms: Iterable[str], x: str, path: str, band: Sequence[str] = ()
) -> list[Series]:
    """A curve for each arm that has values: a figure of it over what was varied, with a band."""
    xs = [cell[x] for cell in cells]
    found = []
    for arm in arms:
        there = [as_arms(cell).get(arm) or {} for cell in cells]
        y, low, high = (
            [Measure("", one).of(figures) for figures in there] if one else []
            for one in (path, *(band or ("", "")))
        )
        found += [Series(arm, xs, y, low, high)] if any(y) else []
    return found


def over(
    result: dict,
    measure: Measure,
    x: tuple[str, str],
    *,
    by: Sequence[str] = (),
    where: Callable[[Row], str] = lambda _: "",
    **scales: bool,
) -> Iterator[Plot]:
    """A plot of a measure over what was varied, `x`: its key and its title. One for every value of
    `by` that has several cells.
    """
    for cells in grouped(result, *by).values():
        series = curves(cells, result["arms"], x[0], measure.path)
        if len(cells) > 1 and series:
            place = where(cells[0])
            title = f"{measure.label}{place and ', '}{place}{html.paced_mark(result)}"
            y = f"{measure.label} ({measure.unit or 'more is better'})"
            yield (
                lines(series, title, x[1], y, **scales),
                "A line for each configuration, a point for each cell.",
            )


_PACE = Listing(
    "Pace of the device until the first token",
    (
        ARM,
        share("overrun", "Time lost"),
        share("overrun_p99", "per step p99"),
        Column("steps", "Steps"),
        Column("load_wait_s", "Waited for pages", "s", decimals=2),
        Column("checked_tokens", "Tokens checked"),
        Column("mismatches", "Wrong"),
    ),
    lambda result: [{"arm": arm, **figures} for arm, figures in result.get("pace", {}).items()],
)


def _lost_pace(kind: Kind, result: dict) -> list[Statement]:
    if not html.paced_mark(result):
        return []
    lost = [
        f"{row['arm']} at {kind.where(row['cell'])}"
        for row in (arm_rows(result) if "arms" in result["cells"][0] else ())
        if row.get("requests")
        and not is_torn(row)
        and (row.get("pace") or {}).get("valid") is not True
    ]
    return [(f"The paced device did not keep pace: {', '.join(lost)}.", True)] if lost else []


def _equality(result: dict) -> list[Statement]:
    """Of arms whose figures over all cells are there; else of the summary."""
    arms = result["arms"].values()
    if arms and all(isinstance(one, Mapping) for one in arms):
        return list(filter(None, [html.equality(result)]))
    summary = result.get("summary") or {}
    equal = summary.get("equal_tokens", summary.get("equal_tokens_fraction"))
    text = "answer has the tokens that computing the whole prompt gave"
    return (
        [] if equal is None else [(f"{'Every' if equal == 1 else 'Not every'} {text}.", equal != 1)]
    )


def _failures(result: dict) -> list[Statement]:
    arms = {name: one for name, one in result["arms"].items() if isinstance(one, Mapping)}
    ended = [
        f"{name} failed: {one['failure'].splitlines()[0]}"
        for name, one in arms.items()
        if one.get("failure")
    ]
    failed = [
        f"Requests failed: {one['errors']:,} in {name}."
        for name, one in arms.items()
        if one.get("errors")
    ]
    return [(text, True) for text in (*ended, *failed)]
