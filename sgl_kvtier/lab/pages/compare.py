"""A comparison as tables and as one HTML page, made from its JSON result (schema kvtier.compare/1,
docs/manual/json.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sgl_kvtier.console.table import Column, Table, format_share, format_value
from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.figure import colours
from sgl_kvtier.lab.pages.plots import Series, cdf, intervals, lines, stacked_bars
from sgl_kvtier.lab.pages.stats import percentile
from sgl_kvtier.sizes import format_bytes

SCHEMA = "kvtier.compare/1"
OURS = "kvtier"
MAIN_PAIR = (OURS, "hicache-file")
"""The comparison the page opens with: the two arms that have a storage tier."""

METRICS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "end to end"}
_RATIOS = {
    **{metric: f"{name}, median" for metric, name in METRICS.items()},
    "ttft_ms_mean": "TTFT, mean",
    "ttft_ms_p90": "TTFT, p90",
    "e2e_ms_mean": "end to end, mean",
}
TIERS = ("device", "host", "storage")
_QUANTILES = (("p50", 50), ("p90", 90), ("p99", 99))


def compare_tables(result: dict) -> list[Table]:
    """Tables that a comparison prints: latency, pace, the sources of the prompts' tokens, and the
    paired ratios.
    """
    tables = [
        first_token_table(result),
        later_table(result),
        pace_table(result),
        tokens_table(result),
    ]
    if paced(result) is not None:
        tables.append(device_table(result))
    if any((arm.get("restore") or {}).get("started") for arm in result["arms"].values()):
        tables.append(restore_table(result))
    tables += [ratio_table(result)] if result.get("ratios") else []
    return [_marked(table, result) for table in tables]


def paced(result: dict) -> Mapping[str, Any] | None:
    """The result's part on a paced device; None where everything was computed."""
    found: Mapping[str, Any] | None = (result.get("device") or {}).get("paced")
    return found


def _marked(table: Table, result: dict) -> Table:
    device = paced(result)
    if device is None:
        return table
    title = f"{table.title} (paced {device['profile']}, not computed)"
    return dataclasses.replace(table, title=title)


def later_table(result: dict) -> Table:
    """Per arm: time to first token of the turns after a session's first, which every arm computes."""
    columns = (
        Column("arm", "Arm"),
        *(Column(f"ttft_later_ms.{q}", f"TTFT {q}", "ms", decimals=1) for q, _ in _QUANTILES),
        Column("ttft_later_ms.mean", "TTFT mean", "ms", decimals=1),
        Column("ttft_later_ms.n", "Requests"),
    )
    return Table("Time to first token of later turns", columns, arm_rows(result))


def device_table(result: dict) -> Table:
    """Per arm: how well the paced device kept pace, and what its checks found."""
    columns = (
        Column("arm", "Arm"),
        Column("pace.overrun", "Time lost", format=format_share),
        Column("pace.overrun_p50", "per step p50", format=format_share),
        Column("pace.overrun_p99", "p99", format=format_share),
        Column("pace.steps", "Steps"),
        Column("pace.scheduler_ms_per_step", "Scheduler", "ms/step", decimals=2),
        Column("pace.checked_tokens", "Tokens checked"),
        Column("pace.mismatches", "Wrong"),
    )
    return Table("Pace of the device", columns, arm_rows(result))


def first_token_table(result: dict) -> Table:
    """Per arm: time to first token, requests, errors, and the share of outputs equal to
    recompute's.
    """
    columns = (
        Column("arm", "Arm"),
        *(Column(f"ttft_ms.{q}", f"TTFT {q}", "ms", decimals=1) for q, _ in _QUANTILES),
        Column("requests", "Requests"),
        Column("errors", "Errors"),
        Column("equal_tokens_fraction", "Equal output", format=format_share),
    )
    return Table("Time to first token", columns, arm_rows(result))


def pace_table(result: dict) -> Table:
    """Per arm: time per output token, time to the end of a request, tokens per second."""
    columns = (
        Column("arm", "Arm"),
        *(Column(f"tpot_ms.{q}", f"TPOT {q}", "ms", decimals=1) for q, _ in _QUANTILES),
        *(Column(f"e2e_ms.{q}", f"E2E {q}", "ms", decimals=0) for q, _ in _QUANTILES),
        Column("throughput_tokens_per_s", "Output", "tokens/s", decimals=1),
    )
    return Table("Time per output token, end to end, throughput", columns, arm_rows(result))


def tokens_table(result: dict) -> Table:
    """Per arm: prompt tokens by where they came from, and the bytes the storage tier moved."""
    rows = []
    for row in arm_rows(result):
        computed = prompt_parts(result, str(row["arm"]))["computed"]
        rows.append({**row, "computed": computed})
    columns = (
        Column("arm", "Arm"),
        *(Column(f"cached_tokens.{tier}", tier.capitalize(), "tokens") for tier in TIERS),
        Column("computed", "Computed", "tokens"),
        Column("bytes.read", "Read", format=format_bytes),
        Column("bytes.written", "Written", format=format_bytes),
    )
    note = "Device, host and storage are tokens served from cache (SGLang's L1, L2, L3); read and written are storage."
    return Table("Where the prompts' tokens came from", columns, rows, notes=(note,))


def restore_table(result: dict) -> Table:
    """Per arm whose server restores prefixes by computing and loading at once: what its own
    counters say about that.
    """
    columns = (
        Column("arm", "Arm"),
        Column("restore.started", "Offers answered", decimals=0),
        Column("restore.met", "Restored", decimals=0),
        Column("restore.computed_tokens", "Computed", "tokens", decimals=0),
        Column("restore.loaded_tokens", "Loaded", "tokens", decimals=0),
        Column("restore.computed_fraction", "Met at", format=format_share),
        Column("restore.meeting_wait_s", "Waited at the meeting", "s", decimals=2),
        Column("restore.lost_pages", "Lost", "pages", decimals=0),
        Column("restore.unused_pages", "Loaded for nothing", "pages", decimals=0),
        Column("restore.declined", "SGLang's own way", decimals=0),
    )
    rows = [row for row in arm_rows(result) if row.get("restore")]
    note = "Met at: tokens computed over all tokens restored. Counters of the server, docs/manual/operate.md."
    return Table("Prefixes computed and loaded at once", columns, rows, notes=(note,))


def ratio_table(result: dict) -> Table:
    """Per pair of arms and metric: the ratio of their rounds' medians, means or 90th percentiles,
    round by round.
    """
    rows = [
        {"pair": pair.replace("/", " / "), "metric": _RATIOS.get(metric, metric), **ratio}
        for pair, metrics in result["ratios"].items()
        for metric, ratio in metrics.items()
    ]
    columns = (
        Column("pair", "Arms"),
        Column("metric", "Metric"),
        Column("median", "Median", "ratio", decimals=3),
        Column("p25", "p25", decimals=3),
        Column("p75", "p75", decimals=3),
        Column("n", "Rounds"),
    )
    note = "Below 1 the first arm is faster. Taken round by round, so that what slows a whole round cancels out."
    return Table("Paired ratios", columns, rows, notes=(note,))


def overhead_tables(result: dict) -> list[Table]:
    """Tables that `kvtier bench restore-overhead` prints: times where nothing is restored, and
    ratios.
    """
    columns = (
        Column("arm", "Arm"),
        Column("tpot_ms", "TPOT", "ms", decimals=2),
        Column("ttft_ms", "TTFT", "ms", decimals=1),
        Column("cached_tokens", "Cached", "tokens"),
    )
    return [Table("Nothing to restore", columns, arm_rows(result)), ratio_table(result)]


def compare_page(result: dict) -> str:
    """The whole page. Figures that the result does not have are left out or shown as missing, never
    as zero.

    Without matplotlib the page has everything but the plots, and a line that says how to get them.
    """
    found = [_main_ratio(result), _storage_share(result), html.equality(result), _failures(result)]
    headline = html.statements_html([statement for statement in found if statement])
    subtitle = f"{', '.join(result['arms'])} · {_plural(result.get('rounds'), 'round')}"
    device = paced(result)
    how = "" if device is None else f" (paced {device['profile']}, not computed)"
    return html.result_page(
        result,
        "Comparison of KV-cache tiers" + how,
        subtitle,
        headline=headline + _tiles(result),
        tables=compare_tables(result),
        figures=_figures(result) if has_samples(result) else None,
        losing=_losing(result),
        configuration=_configuration(result),
    )


def losing_cells(result: dict) -> tuple[Table, int]:
    """Every cell in which kvtier does worse than another arm, worst first, and the number of cells
    compared.

    Cells are each percentile of each metric and the throughput against each other arm. The median
    TTFT of each turn is compared with the arm that is best there. No margin for noise is taken off;
    "rounds lost" helps to judge.
    """
    others = [arm for arm in result["arms"] if arm != OURS]
    cells: list[dict] = []
    if OURS in result["arms"]:
        for other in others:
            cells += _overall_cells(result, other)
        cells += _turn_cells(result, others)
    lost = sorted((cell for cell in cells if cell["ratio"] > 1), key=lambda cell: -cell["ratio"])
    columns = (
        Column("cell", "Measure"),
        Column("other", "Against"),
        Column("ours", OURS, decimals=1),
        Column("theirs", "other arm", decimals=1),
        Column("unit", "Unit"),
        Column("ratio", "Worse by", "factor", decimals=3),
        Column("rounds", "Rounds lost"),
    )
    return Table("", columns, lost), len(cells)


def arm_rows(result: dict) -> list[dict]:
    """The arms in their order, each as a row with its name under "arm"."""
    return [{"arm": name, **arm} for name, arm in result["arms"].items()]


def good_samples(result: dict, arm: str) -> list[dict]:
    """The samples of an arm that ended without an error."""
    return [s for s in result.get("samples") or [] if s.get("arm") == arm and not s.get("error")]


def prompt_parts(result: dict, arm: str) -> dict[str, float | None]:
    """An arm's prompt tokens by where they came from: the tiers, and computed. None where the
    samples do not tell.
    """
    samples = [
        s
        for s in good_samples(result, arm)
        if s.get("prompt_tokens") is not None and s.get("cached")
    ]
    if not samples:
        return dict.fromkeys((*TIERS, "computed"))
    parts: dict[str, float | None] = {
        t: sum(s["cached"].get(t) or 0 for s in samples) for t in TIERS
    }
    cached = sum(value or 0 for value in parts.values())
    return {**parts, "computed": sum(s["prompt_tokens"] for s in samples) - cached}


def grouped(samples: Sequence[Mapping], key: str, metric: str) -> dict:
    """The metric's values by the samples' `key` (round, turn), in rising order of the key."""
    groups: dict = {}
    for sample in samples:
        if sample.get(key) is not None and sample.get(metric) is not None:
            groups.setdefault(sample[key], []).append(sample[metric])
    return dict(sorted(groups.items()))


def _overall_cells(result: dict, other: str) -> list[dict]:
    ours, theirs = result["arms"][OURS], result["arms"][other]
    mine, others = good_samples(result, OURS), good_samples(result, other)
    cells = []
    for metric, name in METRICS.items():
        for label, q in _QUANTILES:
            a, b = (arm.get(metric, {}).get(label) for arm in (ours, theirs))
            rounds = _rounds_lost(mine, others, metric, lambda values, q=q: percentile(values, q))  # type: ignore[misc]
            cells.append(_cell(f"{name} {label}", other, a, b, "ms", rounds))
    a, b = (arm.get("throughput_tokens_per_s") for arm in (ours, theirs))
    cells.append(_cell("throughput", other, a, b, "tokens/s", None, more_is_better=True))
    return [cell for cell in cells if cell]


def _turn_cells(result: dict, others: Sequence[str]) -> list[dict]:
    turns = {arm: grouped(good_samples(result, arm), "turn", "ttft_ms") for arm in (OURS, *others)}
    cells = []
    for turn, values in turns[OURS].items():
        rivals = {arm: percentile(turns[arm][turn], 50) for arm in others if turn in turns[arm]}
        if not rivals:
            continue
        best = min(rivals, key=lambda arm: rivals[arm] or 0)
        mine, theirs = (
            [s for s in good_samples(result, a) if s.get("turn") == turn] for a in (OURS, best)
        )
        rounds = _rounds_lost(mine, theirs, "ttft_ms", lambda found: percentile(found, 50))
        cells.append(
            _cell(
                f"TTFT p50, turn {turn}", best, percentile(values, 50), rivals[best], "ms", rounds
            )
        )
    return [cell for cell in cells if cell]


def _cell(
    name: str,
    other: str,
    ours: float | None,
    theirs: float | None,
    unit: str,
    rounds: str | None,
    *,
    more_is_better: bool = False,
) -> dict:
    if not ours or not theirs:
        return {}
    ratio = theirs / ours if more_is_better else ours / theirs
    return {
        "cell": name, "other": other, "ours": ours, "theirs": theirs, "unit": unit, "ratio": ratio, "rounds": rounds
    }  # fmt: skip


def _rounds_lost(
    ours: Sequence[Mapping],
    theirs: Sequence[Mapping],
    metric: str,
    of: Callable[[list[float]], float | None],
) -> str | None:
    """ "2 of 3": rounds in which our figure is the larger one, of those in which both arms have
    one.
    """
    mine, other = grouped(ours, "round", metric), grouped(theirs, "round", metric)
    both = [number for number in mine if number in other]
    lost = sum((of(mine[number]) or 0) > (of(other[number]) or 0) for number in both)
    return f"{lost} of {len(both)}" if both else None


def has_samples(result: dict) -> bool:
    """Whether a request of some arm ended without an error."""
    return any(good_samples(result, arm) for arm in result["arms"])


def first_token_cdf(result: dict, over: str) -> tuple[str, str]:
    """The distribution of times to first token, as a plot and its caption; `over` says of what."""
    samples = {arm: [s.get("ttft_ms") for s in good_samples(result, arm)] for arm in result["arms"]}
    caption = f"Share of all requests, over all {over}, whose first token came within the time. Further left is better."
    return cdf(samples, "Time to first token, all requests", "TTFT (ms), logarithmic"), caption


def _main_ratio(result: dict) -> tuple[str, bool] | None:
    first, second = MAIN_PAIR
    if paced(result) is not None and any(
        (arm.get("pace") or {}).get("valid") is not True for arm in result["arms"].values()
    ):
        return "The paced device did not keep pace: nothing can be said (see the notes).", True
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
    return f"{body}<h3>Settings</h3>\n{html.definitions_html(result.get('settings') or {})}"


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


def _figures(result: dict) -> Iterator[tuple[str, str]]:
    yield first_token_cdf(result, "rounds")
    title, axis = "Time to first token by", "TTFT (ms)"
    caption = "Median of each turn of the sessions; the band holds the middle half of the requests."
    yield lines(_series(result, "turn"), f"{title} turn", "turn", axis, whole_x=True), caption
    bars = {arm: prompt_parts(result, arm) for arm in result["arms"]}
    caption = f"Prompt tokens of all requests: served from {', '.join(TIERS)}, or computed. Shares are of the arm's own total."
    yield stacked_bars(bars, "Where the prompts' tokens came from", "prompt tokens"), caption
    caption = (
        "Median and middle half of each round: how much the machine's noise moves the figures."
    )
    yield intervals(_series(result, "round"), f"{title} round", "round", axis), caption


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
