"""A comparison as one HTML page, made from its JSON result (schema kvtier.compare/1,
docs/manual/json.md).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from sgl_kvtier.console.table import Column, Table, format_share, format_value
from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.compare import (
    OURS,
    TIERS,
    compare_tables,
    good_samples,
    grouped,
    losing_cells,
    paced,
    prompt_parts,
)
from sgl_kvtier.lab.pages.figure import colours, plots_available
from sgl_kvtier.lab.pages.html import Section
from sgl_kvtier.lab.pages.plots import Series, cdf, intervals, lines, stacked_bars
from sgl_kvtier.lab.pages.stats import percentile

MAIN_PAIR = (OURS, "hicache-file")
"""The comparison the page opens with: the two arms that have a storage tier."""


def compare_html(result: dict) -> str:
    """The whole page. Figures that the result does not have are left out or shown as missing, never
    as zero.

    Without matplotlib the page has everything but the plots, and a line that says how to get them.
    """
    environment = result.get("environment") or {}
    sections = [
        Section("headline", "Headline", _headline(result)),
        Section("configuration", "Configuration", _configuration(result)),
        Section("tables", "Tables", _tables(result)),
        Section("plots", "Plots", _plots(result)),
        Section("losing-cells", "Losing cells", _losing(result)),
        Section("environment", "Environment", html.definitions_html(environment)),
        Section("repeat", "How to repeat", _repeat(result)),
    ]
    arms = ", ".join(result["arms"])
    date = (
        str(environment.get("date", "date not recorded"))
        .replace("T", " ")
        .replace("+00:00", " UTC")
    )
    subtitle = f"{arms} · {_plural(result.get('rounds'), 'round')} · {date}"
    device = paced(result)
    how = "" if device is None else f" (paced {device['profile']}, not computed)"
    return html.page("Comparison of KV-cache tiers" + how, subtitle, sections)


def _headline(result: dict) -> str:
    return html.statements_html(_statements(result)) + _tiles(result)


def _statements(result: dict) -> list[tuple[str, bool]]:
    found = [_main_ratio(result), _storage_share(result), _equality(result), _failures(result)]
    return [statement for statement in found if statement]


def _main_ratio(result: dict) -> tuple[str, bool] | None:
    first, second = MAIN_PAIR
    pair = (result.get("ratios") or {}).get(f"{first}/{second}", {})
    ratio, mean = pair.get("ttft_ms") or {}, (pair.get("ttft_ms_mean") or {}).get("median")
    if ratio.get("median") is None:
        return None
    low, high = ratio.get("p25"), ratio.get("p75")
    n = ratio.get("n") or 0
    text = f"Time to first token of {first} is {ratio['median']:.2f} times that of {second}"
    if low is None or high is None or n < 2:
        return f"{text}, from one round only: no statement about noise is possible.", False
    text += f" (median of {_plural(n, 'paired round')}; middle half {low:.2f} to {high:.2f})"
    text += "" if mean is None else f", its mean {mean:.2f} times"
    if low <= 1 <= high:
        return f"{text}: no difference beyond the noise between rounds.", False
    return f"{text}: {first} is {'faster' if high < 1 else 'slower'}.", low > 1


def _storage_share(result: dict) -> tuple[str, bool] | None:
    shares = []
    for arm in MAIN_PAIR:
        parts = prompt_parts(result, arm) if arm in result["arms"] else {}
        total = sum(value or 0 for value in parts.values())
        if total and parts.get("storage") is not None:
            shares.append(f"{arm} {format_share((parts['storage'] or 0) / total)}")
    return (f"Prompt tokens restored from storage: {', '.join(shares)}.", False) if shares else None


def _equality(result: dict) -> tuple[str, bool] | None:
    known = {
        a: arm.get("equal_tokens_fraction") for a, arm in result["arms"].items() if a != "recompute"
    }
    known = {arm: share for arm, share in known.items() if share is not None}
    unequal = {arm: share for arm, share in known.items() if share < 1}
    if unequal:
        shares = ", ".join(f"{arm} {format_share(share)}" for arm, share in unequal.items())
        return f"Not all outputs equal those of recompute. Equal: {shares}.", True
    if known:
        return "Every compared output has the same tokens as recompute's, in all arms.", False
    return None


def _failures(result: dict) -> tuple[str, bool] | None:
    errors = {name: arm["errors"] for name, arm in result["arms"].items() if arm.get("errors")}
    if errors:
        return "Requests failed: " + ", ".join(
            f"{count:,} in {arm}" for arm, count in errors.items()
        ) + ".", True
    if all(arm.get("errors") == 0 for arm in result["arms"].values()):
        total = sum(arm.get("requests") or 0 for arm in result["arms"].values())
        return f"None of the {total:,} requests failed.", False
    return None


def _tiles(result: dict) -> str:
    colour = colours(result["arms"])
    tiles = []
    for name, arm in result["arms"].items():
        ttft = arm.get("ttft_ms") or {}
        tiles.append(
            f'<div class="tile"><div class="name">{html.swatch(colour[name])}{html.escape(name)}</div>'
            f'<div class="value">{html.escape(format_value(ttft.get("p50"), 0))} <small>ms</small></div>'
            f'<div class="under">median TTFT; p99 {html.escape(format_value(ttft.get("p99"), 0))} ms</div></div>'
        )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _configuration(result: dict) -> str:
    workload = dict(result.get("workload") or {})
    rows = workload.pop("rows", None)
    body = f"<h3>Workload</h3>\n{html.definitions_html(workload)}"
    if isinstance(rows, list) and rows and all(isinstance(row, Mapping) for row in rows):
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = [Column(name, name.replace("_", " ").capitalize()) for name in names]
        body += html.table_html(Table("What is replayed", columns, rows))
    elif rows not in (None, []):
        body += html.definitions_html({"rows": rows})
    body += f"<h3>Settings</h3>\n{html.definitions_html(result.get('settings') or {})}"
    notes = result.get("notes") or []
    if notes:
        body += "<h3>Notes</h3>\n" + "".join(html.paragraph_html(note) for note in notes)
    return body


def _tables(result: dict) -> str:
    colour = colours(result["arms"])
    return "\n".join(
        html.table_html(table, colour, emphasise=OURS) for table in compare_tables(result)
    )


def _losing(result: dict) -> str:
    table, compared = losing_cells(result)
    if not compared:
        return html.paragraph_html(
            f"Nothing to compare: there is no arm {OURS} beside another with measurements."
        )
    if not table.rows:
        return html.paragraph_html(
            f"None: {OURS} is at least as good as every other arm in everything compared ({_plural(compared, 'cell')})."
        )
    text = (
        f"{OURS} does worse than another arm in {len(table.rows)} of the {compared} cells compared: each percentile of each "
        "metric and the throughput against each other arm, and the median TTFT of each turn against the best arm there. "
        "No margin for noise is taken off; the last column tells in how many rounds the cell was lost."
    )
    return html.paragraph_html(text) + "\n" + html.table_html(table, emphasise="")


def _repeat(result: dict) -> str:
    command = shlex.join(str(word) for word in result.get("command") or [])
    return html.code_html(command) + html.paragraph_html(
        "The same command on a quiet machine of the same kind. The figures of this page, with every single request, are in "
        "the command's --json output."
    )


def _plots(result: dict) -> str:
    if not plots_available():
        return html.no_plots_html()
    if not any(good_samples(result, arm) for arm in result["arms"]):
        return html.paragraph_html(
            "There are no samples to plot: no request ended without an error."
        )
    return html.plots_html(
        html.figure_html(svg, caption)
        for svg, caption in (_cdf(result), _by_turn(result), _tokens(result), _by_round(result))
    )


def _cdf(result: dict) -> tuple[str, str]:
    samples = {arm: [s.get("ttft_ms") for s in good_samples(result, arm)] for arm in result["arms"]}
    caption = "Share of all requests, over all rounds, whose first token came within the time. Further left is better."
    return cdf(samples, "Time to first token, all requests", "TTFT (ms), logarithmic"), caption


def _by_turn(result: dict) -> tuple[str, str]:
    series = _series(result, "turn")
    caption = "Median of each turn of the sessions; the band holds the middle half of the requests."
    return lines(series, "Time to first token by turn", "turn", "TTFT (ms)", whole_x=True), caption


def _tokens(result: dict) -> tuple[str, str]:
    bars = {arm: prompt_parts(result, arm) for arm in result["arms"]}
    caption = f"Prompt tokens of all requests: served from {', '.join(TIERS)}, or computed. Shares are of the arm's own total."
    return stacked_bars(bars, "Where the prompts' tokens came from", "prompt tokens"), caption


def _by_round(result: dict) -> tuple[str, str]:
    series = _series(result, "round")
    caption = (
        "Median and middle half of each round: how much the machine's noise moves the figures."
    )
    return intervals(series, "Time to first token by round", "round", "TTFT (ms)"), caption


def _series(result: dict, key: str) -> list[Series]:
    series = []
    for arm in result["arms"]:
        groups = grouped(good_samples(result, arm), key, "ttft_ms")
        low, middle, high = (
            [percentile(values, q) for values in groups.values()] for q in (25, 50, 75)
        )
        series.append(Series(arm, list(groups), middle, low, high))
    return series


def _plural(count: int | None, noun: str) -> str:
    if count is None:
        return f"unknown number of {noun}s"
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
