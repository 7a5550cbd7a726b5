"""A comparison of looking ahead as tables and as one HTML page, made from its JSON result (schema
kvtier.compare.lookahead/1, docs/manual/json.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sgl_kvtier.console.table import Column, Table, format_share
from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.compare.figures import first_token_cdf, has_samples
from sgl_kvtier.lab.pages.compare.result import OURS, TIERS
from sgl_kvtier.lab.pages.plots import Series, lines
from sgl_kvtier.sizes import format_bytes

SCHEMA = "kvtier.compare.lookahead/1"
ORACLE = "oracle"
STOCK = "hicache-file"
_AIM_P50, _AIM_WASTED = 1.1, 0.1
_QUANTILES = ("p50", "p90", "p99")


def lookahead_tables(result: dict) -> list[Table]:
    """Tables that a comparison prints: time to first token in every cell, tiers of hits, bytes
    moved, and the gap to the oracle.
    """
    tables = [
        times_table(result),
        hits_table(result),
        moved_table(result),
        overlap_table(result),
        rounds_table(result),
    ]
    return [table for table in tables if table.rows]


def times_table(result: dict) -> Table:
    """Per cell and arm: time to first token, and how many times the oracle's that is."""
    rows = [
        {**place, **figures, "over": cell["over_oracle"].get(place["arm"], {})}
        for cell, place, figures in _each(result)
        if figures["requests"]
    ]
    columns = (
        *_PLACE,
        *(Column(f"ttft_ms.{q}", f"TTFT {q}", "ms", decimals=1) for q in _QUANTILES),
        *(Column(f"over.{q}", f"{q} / oracle", decimals=2) for q in _QUANTILES),
        *(
            Column(f"ttft_later_ms.{q}", f"later turns {q}", "ms", decimals=1)
            for q in ("p50", "p99")
        ),
        Column("tpot_ms.p50", "TPOT p50", "ms", decimals=1),
        Column("requests", "Requests"),
        Column("errors", "Errors"),
        Column("equal_tokens_fraction", "Equal output", format=format_share),
    )
    note = (
        "oracle: a device pool that holds everything. Later turns: all but the first of each session, of which nothing was cached. "
        f"Equal output: the tokens {html.reference_of(result)} answered first."
    )
    return Table("Time to first token", columns, rows, notes=(note,))


def hits_table(result: dict) -> Table:
    """Per cell and arm: where prompt tokens lay when their request was scheduled, as shares of all
    prompt tokens.
    """
    rows = []
    for _, place, figures in _each(result):
        if prompt := figures["prompt_tokens"]:
            hits = figures["hit_tokens_at_schedule"]
            shares: dict[str, Any] = {tier: hits.get(tier, 0) / prompt for tier in TIERS}
            shares["nowhere"] = max(0.0, 1 - sum(shares.values()))
            rows.append({**place, **figures, "share": shares})
    columns = (
        *_PLACE,
        *(
            Column(f"share.{tier}", tier.capitalize(), format=format_share)
            for tier in (*TIERS, "nowhere")
        ),
        Column("hit_tokens_counted_by", "Counted by"),
        Column("evicted_tokens", "Evicted", "tokens", decimals=0),
    )
    note = "Shares of all prompt tokens. Evicted: tokens that left the device pool."
    return Table("Where prompts' tokens lay when they were scheduled", columns, rows, notes=(note,))


def moved_table(result: dict) -> Table:
    """Per cell and arm with a storage tier: bytes moved ahead by link, wasted, and read for
    nothing.
    """
    rows = [
        {**place, **figures}
        for _, place, figures in _each(result)
        if figures["bytes"]["read"] or figures["moved_bytes"] or figures["bytes"]["written"]
    ]
    columns = (
        *_PLACE,
        Column("moved_bytes.storage-host", "Storage to host", format=format_bytes),
        Column("moved_bytes.host-device", "Host to device", format=format_bytes),
        Column("wasted_bytes", "Wasted", format=format_bytes),
        Column("wasted_fraction", "of moved", format=format_share),
        Column("surplus_read_bytes", "Read for nothing", format=format_bytes),
        Column("storage_read_bytes", "Read", format=format_bytes),
        Column("lookahead.victims", "Victims", decimals=0),
        Column("lookahead.drift", "Drift", decimals=0),
    )
    note = "Wasted: moved ahead and never used. Read for nothing: read from storage beyond what requests used or was moved ahead and used."
    return Table("Moved ahead of requests", columns, rows, notes=(note,))


def overlap_table(result: dict) -> Table:
    """Predictions per cell and arm that looks ahead: how often transfers were predicted to be
    hidden, and how often rightly.
    """
    rows = []
    for _, place, figures in _each(result):
        if found := figures["lookahead"].get("overlap"):
            shares = {
                "held": _part(found["held"], found["failed"]),
                "right": _part(found["held_right"], found["held_wrong"]),
                "failed_right": _part(found["failed_right"], found["failed_wrong"]),
            }
            rows.append({**place, "tests": found["held"] + found["failed"], "share": shares})
    columns = (
        *_PLACE,
        Column("tests", "Turns tested", decimals=0),
        Column("share.held", "Condition held", format=format_share),
        Column("share.right", "of these right", format=format_share),
        Column("share.failed_right", "Did not hold, rightly", format=format_share),
    )
    note = "Right: held, and all that was cached was on the device when the turn ran; did not hold, and something was missing then."
    return Table("Overlap condition", columns, rows, notes=(note,))


def rounds_table(result: dict) -> Table:
    """The median time to first token per cell, round and arm. Beside it is its ratio to stock's and
    to the oracle's of that round.
    """
    medians = {
        (id(cell), one["round"], place["arm"]): one["ttft_ms_p50"]
        for cell, place, figures in _each(result)
        for one in figures["rounds"]
    }
    rows = []
    for cell in result["cells"]:
        for number in dict.fromkeys(n for at, n, _ in medians if at == id(cell)):
            own = {arm: ms for (at, n, arm), ms in medians.items() if (at, n) == (id(cell), number)}
            for arm, ms in own.items():
                over = {to: ms / own[to] if ms and own.get(to) else None for to in (STOCK, ORACLE)}
                place = {name: cell[name] for name in ("oversubscription", "gap_s")}
                rows.append({**place, "round": number, "arm": arm, "ttft": ms, "over": over})
    columns = (
        *_PLACE,
        Column("round", "Round"),
        Column("ttft", "TTFT p50", "ms", decimals=1),
        Column(f"over.{STOCK}", "/ stock", decimals=2),
        Column(f"over.{ORACLE}", "/ oracle", decimals=2),
    )
    return Table(
        "Rounds",
        columns,
        rows,
        notes=("Ratios to the arms hicache-file (stock) and oracle of the same round.",),
    )


def lookahead_page(result: dict) -> str:
    """The whole page; figures the result does not have are left out or shown as missing, never as
    zero.
    """
    return html.result_page(
        result,
        "Looking ahead",
        f"{', '.join(result['arms'])} · {len(result['cells'])} cells",
        headline=html.statements_html(statements(result)),
        tables=lookahead_tables(result),
        figures=_figures(result) if has_samples(result) else None,
        losing=html.statements_html(losing(result)),
        configuration=_configuration(result),
    )


def statements(result: dict) -> list[tuple[str, bool]]:
    """Sentences on the outcome; True marks what is wrong or misses an aim."""
    found: list[tuple[str, bool]] = []
    for cell in result["cells"]:
        over = (cell["over_oracle"].get(OURS) or {}).get("p50")
        if over is not None:
            text = f"{_where(cell)}: median TTFT of {OURS} is {over:.2f} times the oracle's (aim: at most {_AIM_P50:g})."
            found.append((text, over > _AIM_P50))
    wasted = result["arms"].get(OURS, {}).get("wasted_fraction")
    if wasted is not None:
        text = f"Of what {OURS} moved ahead {format_share(wasted)} was never used."
        found.append((text, wasted > _AIM_WASTED))
    equal = html.equality(result)
    failed = [
        (f"{arm} failed: {one['failure'].splitlines()[0]}", True)
        for arm, one in result["arms"].items()
        if one["failure"]
    ]
    early = "Interrupted: figures are from what had been measured."
    ended = [(early, True)] if result.get("interrupted") else []
    return [*found, *([equal] if equal else []), *failed, *ended]


def losing(result: dict) -> list[tuple[str, bool]]:
    """Every cell and quantile in which another arm has a shorter time to first token than the full
    one. Arms that cannot evict are left out.
    """
    found = []
    for cell, place, one in _each(result):
        arm = place["arm"]
        mine = cell["arms"].get(OURS, {}).get("ttft_ms", {})
        for q in _QUANTILES:
            theirs, ours = one["ttft_ms"].get(q), mine.get(q)
            if arm not in (OURS, ORACLE) and theirs and ours and ours > theirs:
                text = f"{_where(cell)}, TTFT {q}: {OURS} {ours:.1f} ms, {arm} {theirs:.1f} ms."
                found.append((text, True))
    none = f"None: in no cell has another arm but the oracle a shorter time to first token than {OURS}."
    return found or [(none, False)]


def _part(one: float, other: float) -> float | None:
    return one / (one + other) if one + other else None


_PLACE = (
    Column("oversubscription", "Over", "times", decimals=1),
    Column("gap_s", "Pause", "s", decimals=1),
    Column("arm", "Arm"),
)


def _each(result: dict) -> Iterator[tuple[dict, dict[str, Any], Mapping[str, Any]]]:
    """Every arm of every cell: the cell, what names the row, and the arm's figures."""
    for cell in result["cells"]:
        for arm, figures in cell["arms"].items():
            place = {name: cell[name] for name in ("oversubscription", "gap_s")}
            yield cell, {**place, "arm": arm}, figures


def _where(cell: dict) -> str:
    return f"{cell['oversubscription']:g} times oversubscribed, pause {cell['gap_s']:g} s"


def _configuration(result: dict) -> str:
    settings = {k: v for k, v in result["settings"].items() if k != "arms"}
    arms = {
        name: f"{arm['about']}: {arm['policy'] or 'as recompute'}"
        for name, arm in result["settings"]["arms"].items()
    }
    pools = {_where(cell): cell["pools"] for cell in result["cells"]}
    return "\n".join(map(html.definitions_html, (settings, arms, pools)))


def _figures(result: dict) -> Iterator[tuple[str, str]]:
    yield first_token_cdf(result, "cells and rounds")
    for over in dict.fromkeys(cell["oversubscription"] for cell in result["cells"]):
        cells = [cell for cell in result["cells"] if cell["oversubscription"] == over]
        if len(cells) > 1:
            x = [cell["gap_s"] for cell in cells]
            series = [
                Series(arm, x, [cell["arms"][arm]["ttft_ms"].get("p50") for cell in cells])
                for arm in result["arms"]
            ]
            title = f"Time to first token by pause, {over:g} times oversubscribed"
            axes = ("pause between turns (s)", "TTFT p50 (ms)")
            yield lines(series, title, *axes, log_y=True), "Medians of each pause."
    last = result["cells"][-1]
    caption = f"{_where(last)}, first round, read from /metrics. Device: cached or in use; host has copies of what is on the device."
    for arm, readings in last["occupancy"].items():
        known = {tier: [one for one in readings if tier in one] for tier in TIERS}
        series = [
            Series(tier, [one["t_s"] for one in there], [one[tier] for one in there])
            for tier, there in known.items()
            if there
        ]
        if series and len(readings) > 1:
            axes = ("seconds since the first request", "tokens")
            yield lines(series, f"Tokens in each tier: {arm}", *axes), caption
