"""A comparison at rising load as a table and as one HTML page, made from its JSON result (schema
kvtier.sweep/1, docs/manual/json.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from sgl_kvtier.console.table import Column, Table
from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.compare.figures import first_token_cdf, has_samples
from sgl_kvtier.lab.pages.compare.result import OURS, STOCK, paced, skipped_arms
from sgl_kvtier.lab.pages.plots import Series, lines

SCHEMA = "kvtier.sweep/1"
_LOADS = {"concurrency": "at a time", "rate": "a second"}
_COMPARED = (
    ("TTFT p50", "ms", ("ttft_ms", "p50")),
    ("TTFT p99", "ms", ("ttft_ms", "p99")),
    ("output tokens/s", "", ("throughput_tokens_per_s",)),
    ("requests/s in time", "", ("goodput_requests_per_s",)),
)
"""Measures that the losing cells are looked for in; of the last two more is better."""


def sweep_tables(result: dict) -> list[Table]:
    """The one table that a sweep prints: every load and arm."""
    columns = (
        Column("load", "Sessions", _LOADS[load_of(result)]),
        Column("arm", "Arm"),
        Column("ttft_ms.p50", "TTFT p50", "ms", decimals=1),
        Column("ttft_ms.p99", "TTFT p99", "ms", decimals=1),
        Column("ttft_later_ms.p50", "later p50", "ms", decimals=1),
        Column("throughput_tokens_per_s", "Output", "tokens/s", decimals=1),
        Column("goodput_requests_per_s", "In time", "requests/s", decimals=2),
        Column("errors", "Errors"),
    )
    rows = [{"load": f"{load:g}", "arm": arm, **figures} for load, arm, figures in _each(result)]
    bound = result["settings"]["ttft_bound_ms"]
    note = f"In time: requests whose first token came within {bound:g} ms. Later: without each session's first."
    table = Table(
        "Throughput and time to first token", columns, rows, notes=(note, *skipped_arms(result))
    )
    device = paced(result)
    if device is None:
        return [table]
    title = f"{table.title} (paced {device['profile']}, not computed)"
    return [dataclasses.replace(table, title=title)]


def sweep_page(result: dict) -> str:
    """The whole page; figures the result does not have are shown as missing, never as zero."""
    device = paced(result)
    how = "" if device is None else f" (paced {device['profile']}, not computed)"
    return html.result_page(
        result,
        "Throughput and time to first token" + how,
        f"{', '.join(result['arms'])} · {load_of(result)} {', '.join(_names(result))}",
        headline=html.statements_html(statements(result)),
        tables=sweep_tables(result),
        figures=_figures(result) if has_samples(result) else None,
        losing=html.statements_html(losing(result)),
        configuration=_configuration(result),
    )


def statements(result: dict) -> list[tuple[str, bool]]:
    """Sentences on the outcome; True marks what is wrong."""
    found: list[tuple[str, bool]] = []
    for cell, name in zip(result["cells"], _names(result), strict=True):
        mine, theirs = (cell["arms"].get(arm, {}) for arm in (OURS, STOCK))
        pairs = [
            (label, _figure(mine, path), _figure(theirs, path)) for label, _, path in _COMPARED
        ]
        said = [f"{label} {a / b:.2f} times" for label, a, b in pairs if a is not None and b]
        if said:
            where = f"{load_of(result)} {name}"
            found.append((f"{where}, {OURS} over {STOCK}: {', '.join(said)}.", False))
    lost = [
        f"{arm} at {load_of(result)} {load:g}"
        for load, arm, one in _each(result)
        if paced(result) is not None
        and one.get("throughput_tokens_per_s") is not None
        and (one.get("pace") or {}).get("valid") is not True
    ]
    if lost:
        found.insert(0, (f"The paced device did not keep pace: {', '.join(lost)}.", True))
    equal = html.equality(result)
    errors = {arm: one["errors"] for arm, one in result["arms"].items() if one.get("errors")}
    failed = [(f"Requests failed: {count:,} in {arm}.", True) for arm, count in errors.items()]
    return [*found, *([equal] if equal else []), *failed]


def losing(result: dict) -> list[tuple[str, bool]]:
    """Every load and measure in which another arm does better than ours."""
    found = []
    for cell, name in zip(result["cells"], _names(result), strict=True):
        for arm, one in cell["arms"].items():
            for label, unit, path in _COMPARED:
                mine, theirs = (_figure(of, path) for of in (cell["arms"].get(OURS, {}), one))
                if arm == OURS or mine is None or theirs is None:
                    continue
                if (mine > theirs) if unit else (mine < theirs):
                    where = f"{load_of(result)} {name}, {label}"
                    numbers = f"{OURS} {mine:.2f} {unit}, {arm} {theirs:.2f} {unit}"
                    found.append((" ".join(f"{where}: {numbers}".split()) + ".", True))
    none = f"None: at no load does another arm have a shorter time to first token or more throughput than {OURS}."
    return found or [(none, False)]


def pareto(result: dict, quantile: str) -> str:
    """Throughput against a quantile of the time to first token: a line for each arm, a point for
    each load. Further right and further down is better.
    """
    shown = {"concurrency": "×{:g}", "rate": "{:g}/s"}[load_of(result)]
    series = []
    for arm in result["arms"]:
        points = [
            (one["throughput_tokens_per_s"], one["ttft_ms"].get(quantile), shown.format(load))
            for load, of, one in _each(result)
            if of == arm and one.get("throughput_tokens_per_s") is not None
        ]
        if points:
            x, y, labels = zip(*points, strict=True)
            series.append(Series(arm, x, y, labels=labels))
    title = f"Throughput and time to first token, {quantile}"
    axes = ("output tokens per second", f"TTFT {quantile} (ms), logarithmic")
    return lines(series, title, *axes, log_y=True)


def load_of(result: dict) -> str:
    """What changes from cell to cell: concurrency or rate."""
    return next(name for name in _LOADS if name in result["cells"][0])


def _figures(result: dict) -> Iterator[tuple[str, str]]:
    what = f"sessions {_LOADS[load_of(result)]}"
    for quantile in ("p50", "p99"):
        caption = f"A point for each load, labelled with its {what}. Further right and further down is better."
        yield pareto(result, quantile), caption
    yield first_token_cdf(result, "loads and rounds")


def _each(result: dict) -> Iterator[tuple[float, str, Mapping[str, Any]]]:
    """Every arm of every load: the load, the arm, its figures there."""
    name = load_of(result)
    for cell in result["cells"]:
        for arm, figures in cell["arms"].items():
            yield cell[name], arm, figures


def _names(result: dict) -> list[str]:
    return [f"{cell[load_of(result)]:g}" for cell in result["cells"]]


def _figure(figures: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = figures
    for name in path:
        value = (value or {}).get(name)
    return None if value is None else float(value)


def _configuration(result: dict) -> str:
    workload = {k: v for k, v in (result.get("workload") or {}).items() if k != "rows"}
    parts = (workload, result.get("settings") or {})
    return "\n".join(map(html.definitions_html, parts))
