"""A comparison of looking ahead as one HTML page, made from its JSON result (schema
kvtier.compare.lookahead/1, docs/manual/json.md).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from sgl_kvtier.console.table import format_share
from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.compare import good_samples
from sgl_kvtier.lab.pages.figure import colours, plots_available
from sgl_kvtier.lab.pages.html import Section
from sgl_kvtier.lab.pages.lookahead_tables import ORACLE, OURS, TIERS, lookahead_tables
from sgl_kvtier.lab.pages.plots import Series, cdf, lines

_TIER_NAMES = {"device": "HBM", "host": "DRAM", "storage": "SSD"}
_AIM_P50, _AIM_WASTED = 1.1, 0.1


def lookahead_html(result: dict) -> str:
    """The whole page; figures the result does not have are left out or shown as missing, never as
    zero.
    """
    environment = result.get("environment") or {}
    colour = colours(result["arms"])
    tables = "\n".join(
        html.table_html(table, colour, emphasise=OURS) for table in lookahead_tables(result)
    )
    sections = [
        Section("headline", "Headline", html.statements_html(statements(result))),
        Section("tables", "Tables", tables),
        Section("plots", "Plots", _plots(result)),
        Section("losing-cells", "Losing cells", html.statements_html(losing(result))),
        Section("configuration", "Configuration", _configuration(result)),
        Section("environment", "Environment", html.definitions_html(environment)),
        Section(
            "repeat",
            "How to repeat",
            html.code_html(shlex.join(map(str, result.get("command") or []))),
        ),
    ]
    date = (
        str(environment.get("date", "date not recorded"))
        .replace("T", " ")
        .replace("+00:00", " UTC")
    )
    return html.page(
        "Looking ahead",
        f"{', '.join(result['arms'])} · {len(result['cells'])} cells · {date}",
        sections,
    )


def statements(result: dict) -> list[tuple[str, bool]]:
    """What came out, in sentences; True marks what is wrong or misses an aim."""
    found: list[tuple[str, bool]] = []
    for cell in result["cells"]:
        over = (cell["over_oracle"].get(OURS) or {}).get("p50")
        if over is not None:
            text = f"{_where(cell)}: median TTFT of {OURS} is {over:.2f} times the oracle's (aim: at most {_AIM_P50:g})."
            found.append((text, over > _AIM_P50))
    wasted = result["arms"].get(OURS, {}).get("wasted_fraction")
    if wasted is not None:
        found.append(
            (
                f"Of what {OURS} moved ahead {format_share(wasted)} was never used.",
                wasted > _AIM_WASTED,
            )
        )
    shares = {
        arm: one["equal_tokens_fraction"]
        for arm, one in result["arms"].items()
        if arm != "recompute"
    }
    unequal = [
        f"{arm} {format_share(share)}"
        for arm, share in shares.items()
        if share is not None and share < 1
    ]
    if unequal:
        found.append(
            (f"Not all outputs equal those of recompute. Equal: {', '.join(unequal)}.", True)
        )
    elif any(share is not None for share in shares.values()):
        found.append(
            ("Every compared output has the same tokens as recompute's, in all arms.", False)
        )
    for arm, one in result["arms"].items():
        if one["failure"]:
            found.append((f"{arm} failed: {one['failure'].splitlines()[0]}", True))
    if result.get("interrupted"):
        found.append(("Interrupted: figures are from what had been measured.", True))
    return found


def losing(result: dict) -> list[tuple[str, bool]]:
    """Every cell and quantile in which another arm that can evict has a shorter time to first token
    than the full one.
    """
    found = []
    for cell in result["cells"]:
        mine = cell["arms"].get(OURS, {}).get("ttft_ms", {})
        for arm, one in cell["arms"].items():
            for q in ("p50", "p90", "p99"):
                theirs, ours = one["ttft_ms"].get(q), mine.get(q)
                if arm not in (OURS, ORACLE) and theirs and ours and ours > theirs:
                    found.append(
                        (
                            f"{_where(cell)}, TTFT {q}: {OURS} {ours:.1f} ms, {arm} {theirs:.1f} ms.",
                            True,
                        )
                    )
    return found or [
        (
            f"None: in no cell has another arm but the oracle a shorter time to first token than {OURS}.",
            False,
        )
    ]


def _where(cell: dict) -> str:
    return f"{cell['oversubscription']:g} times oversubscribed, pause {cell['gap_s']:g} s"


def _configuration(result: dict) -> str:
    settings = {k: v for k, v in result["settings"].items() if k != "arms"}
    arms = {
        name: f"{arm['about']}: {arm['policy'] or 'as recompute'}"
        for name, arm in result["settings"]["arms"].items()
    }
    pools = {_where(cell): cell["pools"] for cell in result["cells"]}
    parts = [
        html.definitions_html(html_flat)
        for html_flat in (dict(html.flatten(settings)), arms, dict(html.flatten(pools)))
    ]
    return "\n".join(parts) + "".join(
        html.paragraph_html(note) for note in result.get("notes") or []
    )


def _plots(result: dict) -> str:
    if not plots_available():
        return html.no_plots_html()
    if not any(good_samples(result, arm) for arm in result["arms"]):
        return html.paragraph_html(
            "There are no samples to plot: no request ended without an error."
        )
    return html.plots_html(html.figure_html(svg, caption) for svg, caption in _figures(result))


def _figures(result: dict) -> Iterator[tuple[str, str]]:
    samples = {arm: [s.get("ttft_ms") for s in good_samples(result, arm)] for arm in result["arms"]}
    yield (
        cdf(samples, "Time to first token, all requests", "TTFT (ms), logarithmic"),
        "Share of all requests, over all cells and rounds, whose first token came within the time. Further left is better.",
    )
    for over in dict.fromkeys(cell["oversubscription"] for cell in result["cells"]):
        cells = [cell for cell in result["cells"] if cell["oversubscription"] == over]
        if len(cells) > 1:
            series = [
                Series(
                    arm,
                    [c["gap_s"] for c in cells],
                    [c["arms"][arm]["ttft_ms"].get("p50") for c in cells],
                )
                for arm in result["arms"]
            ]
            title = f"Time to first token by pause, {over:g} times oversubscribed"
            yield (
                lines(series, title, "pause between turns (s)", "TTFT p50 (ms)", log_y=True),
                "Medians of each pause.",
            )
    last = result["cells"][-1]
    for arm, readings in last["occupancy"].items():
        series = [
            Series(
                _TIER_NAMES[tier],
                [r["t_s"] for r in readings if tier in r],
                [r[tier] for r in readings if tier in r],
            )
            for tier in TIERS
            if any(tier in r for r in readings)
        ]
        if series and len(readings) > 1:
            yield (
                lines(
                    series,
                    f"Tokens in each tier: {arm}",
                    "seconds since the first request",
                    "tokens",
                ),
                f"{_where(last)}, first round, read from /metrics. HBM: cached or in use; DRAM has copies of what is in HBM.",
            )
