"""A comparison as tables, made from its JSON result (docs/manual/json.md): one for the terminal, and
all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sgl_kvtier.console.table import Column, Table, format_share
from sgl_kvtier.lab.pages.compare.result import (
    LATER,
    METRICS,
    OURS,
    TIERS,
    arm_rows,
    good_samples,
    later_times,
    paced,
    prompt_parts,
    seconds,
    skipped_arms,
)
from sgl_kvtier.lab.pages.stats import summary
from sgl_kvtier.sizes import format_bytes

_RATIOS = {
    **{metric: f"{name}, median" for metric, name in METRICS.items()},
    "ttft_ms_mean": "TTFT, mean",
    "ttft_ms_p90": "TTFT, p90",
    "e2e_ms_mean": "end to end, mean",
    LATER: "TTFT of later turns, median",
    f"{LATER}_mean": "TTFT of later turns, mean",
    f"{LATER}_p99": "TTFT of later turns, p99",
    "wall_s": "time of the round",
    "throughput_tokens_per_s": "output tokens/s (above 1: more)",
}
_FIRST_TURNS = (
    "Later turns: all but a session's first, of which no cache has anything. Stored: prompt tokens "
    "that came from storage."
)
_QUANTILES = ("p50", "p90", "p99")


def main_tables(result: dict) -> list[Table]:
    """The one table that a comparison prints."""
    return [_marked(outcome_table(result), result)]


def compare_tables(result: dict) -> list[Table]:
    """All tables: the printed one, then those behind it."""
    return [*main_tables(result), *detail_tables(result)]


def detail_tables(result: dict) -> list[Table]:
    """Tables behind the printed one: latency, pace, the sources of the prompts' tokens, and the
    paired ratios.
    """
    tables = [
        first_token_table(result),
        later_table(result),
        pace_table(result),
        tokens_table(result),
    ]
    if any(arm.get("bound") for arm in result["arms"].values()):
        tables.append(bound_table(result))
    if paced(result) is not None:
        tables.append(device_table(result))
    if any((arm.get("restore") or {}).get("started") for arm in result["arms"].values()):
        tables.append(restore_table(result))
    tables += [
        declined_table(arm["declined"], f"Offers of {name} left to SGLang, in hindsight")
        for name, arm in result["arms"].items()
        if arm.get("declined")
    ]
    tables += [ratio_table(result)] if result.get("ratios") else []
    return [_marked(table, result) for table in tables]


def outcome_table(result: dict) -> Table:
    """Per arm: time to first token of later turns and of first ones, throughput, how much of the prompts
    was computed and came from storage, errors, equality.
    """
    times = {arm: _turn_times(result, arm) for arm in result["arms"]}
    slowest = max((found["mean"] or 0 for found in times.values()), default=0)
    unit, decimals, size = ("s", 2, 1000) if slowest >= 1000 else ("ms", 1, 1)
    rows = []
    for row in arm_rows(result):
        found = times[row["arm"]]
        in_unit = {name: None if ms is None else ms / size for name, ms in found.items()}
        rows.append({**row, "times": in_unit, "shares": _shares(result, row["arm"])})
    columns = (
        Column("arm", "Arm"),
        Column("times.p50", "p50", unit, decimals=decimals),
        Column("times.p99", "p99", unit, decimals=decimals),
        Column("times.mean", "mean", unit, decimals=decimals),
        Column("times.first", "First turns mean", unit, decimals=decimals),
        Column("throughput_tokens_per_s", "Output", "tokens/s", decimals=1),
        Column("shares", "Computed / stored"),
        Column("errors", "Errors"),
        Column("equal_tokens_fraction", "Equal", format=format_share),
    )
    notes = (_FIRST_TURNS, *_least(result), *skipped_arms(result))
    return Table("Time to first token of later turns", columns, rows, notes)


def _least(result: dict) -> list[str]:
    """A line on the least time there is for what our arm was asked; none where it is not known."""
    arm = result["arms"].get(OURS) or {}
    bound, mean = arm.get("bound") or {}, later_times(result, OURS)["mean"] if arm else None
    least = bound.get("ttft_later_ms")
    if not least or mean is None:
        return []
    on_demand, round_s = bound["ttft_later_on_demand_ms"], bound["wall_s"] / bound["makespan_s"]
    return [
        f"Least for what {OURS} was asked: {seconds(least)} on average with nothing left to move or wait for, "
        f"{seconds(on_demand)} where nothing is moved ahead: it took {mean / least:.1f} and "
        f"{mean / on_demand:.1f} times that, and {round_s:.2f} times the least of a whole round."
    ]


def bound_table(result: dict) -> Table:
    """Per arm of a paced device: later turns and a whole round beside the least time that links and
    device allow.
    """
    rows = []
    for row in arm_rows(result):
        bound, mean = row.get("bound") or {}, later_times(result, str(row["arm"])).get("mean")
        ratios = {
            "alone": _over(mean, bound.get("ttft_later_ms")),
            "demand": _over(mean, bound.get("ttft_later_on_demand_ms")),
            "round": _over(bound.get("wall_s"), bound.get("makespan_s")),
        }
        rows.append({**row, "mean": mean, "over": ratios})
    columns = (
        Column("arm", "Arm"),
        Column("mean", "Later turns, mean", "ms", decimals=1),
        Column("bound.ttft_later_ms", "Least", "ms", decimals=1),
        Column("over.alone", "times", decimals=2),
        Column("bound.ttft_later_on_demand_ms", "Nothing ahead", "ms", decimals=1),
        Column("over.demand", "times", decimals=2),
        Column("bound.wall_s", "Round", "s", decimals=1),
        Column("bound.makespan_s", "Least", "s", decimals=1),
        Column("over.round", "times", decimals=2),
    )
    note = (
        "Least: a request alone, with all it reuses on the device. Nothing ahead: what no device pool of this size "
        "can have kept is computed and loaded at its turn. Both without a queue (sgl_kvtier/lab/paced/bound.py)."
    )
    return Table("Beside the least time there is", columns, rows, notes=(note,))


def _over(value: float | None, least: float | None) -> float | None:
    return value / least if value is not None and least else None


def _turn_times(result: dict, arm: str) -> Mapping[str, float | None]:
    """In ms: p50, p99 and mean of an arm's later turns, and the mean of its first ones."""
    first = [s.get("ttft_ms") for s in good_samples(result, arm) if s.get("turn") == 1]
    later = later_times(result, arm)
    return {
        **{name: later.get(name) for name in ("p50", "p99", "mean")},
        "first": summary(first)["mean"],
    }


def _shares(result: dict, arm: str) -> str | None:
    """ "23 % / 41 %": of an arm's prompt tokens those that were computed, and those from storage."""
    parts = prompt_parts(result, arm)
    total = sum(value or 0 for value in parts.values())
    if not total:
        return None
    return " / ".join(_whole((parts[name] or 0) / total) for name in ("computed", "storage"))


def _whole(share: float) -> str:
    """In whole per cent; all and none only where it is exactly that."""
    if 0 < share < 0.01 or 0.99 < share < 1:
        return "< 1 %" if share < 0.5 else "> 99 %"
    return f"{100 * share:.0f} %"


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
        *(Column(f"{LATER}.{q}", f"TTFT {q}", "ms", decimals=1) for q in _QUANTILES),
        Column(f"{LATER}.mean", "TTFT mean", "ms", decimals=1),
        Column(f"{LATER}.n", "Requests"),
    )
    rows = [{**row, LATER: later_times(result, str(row["arm"]))} for row in arm_rows(result)]
    return Table("Time to first token of later turns, in full", columns, rows)


def device_table(result: dict) -> Table:
    """Per arm: how well the paced device kept pace, and what its checks found."""
    columns = (
        Column("arm", "Arm"),
        Column("pace.overrun", "Time lost", format=format_share),
        Column("pace.overrun_p50", "per step p50", format=format_share),
        Column("pace.overrun_p99", "p99", format=format_share),
        Column("pace.steps", "Steps"),
        Column("pace.scheduler_ms_per_step", "Scheduler", "ms/step", decimals=2),
        Column("pace.tick_ms_per_step", "Our tick", "ms/step", decimals=2),
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
        *(Column(f"ttft_ms.{q}", f"TTFT {q}", "ms", decimals=1) for q in _QUANTILES),
        Column("requests", "Requests"),
        Column("errors", "Errors"),
        Column("equal_tokens_fraction", "Equal output", format=format_share),
    )
    return Table("Time to first token of all turns", columns, arm_rows(result))


def pace_table(result: dict) -> Table:
    """Per arm: time per output token, gaps between tokens, time to the end of a request, tokens per
    second.
    """
    columns = (
        Column("arm", "Arm"),
        *(Column(f"tpot_ms.{q}", f"TPOT {q}", "ms", decimals=1) for q in _QUANTILES),
        Column("token_gap_ms.p99", "Gap p99", "ms", decimals=0),
        *(Column(f"e2e_ms.{q}", f"E2E {q}", "ms", decimals=0) for q in _QUANTILES),
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


def declined_table(reasons: Mapping[str, Mapping], title: str = "") -> Table:
    """Per reason: offers that were left to SGLang's own way, and whether that was right in
    hindsight.
    """
    columns = (
        Column("reason", "Why"),
        Column("offers", "Offers"),
        Column("requests", "Requests"),
        Column("right_fraction", "Right", format=format_share),
        Column("promised_ms", "Restoring, predicted", "ms", decimals=0),
        Column("took_ms", "Took", "ms", decimals=0),
    )
    rows = [{"reason": reason, **found} for reason, found in reasons.items()]
    note = (
        "Right: the prompt was computed no later than restoring was predicted to. Where there was no room, or SGLang had "
        "to wait for host memory, so had a restoration: there it says what room would have been worth."
    )
    return Table(title or "Offers left to SGLang, in hindsight", columns, rows, notes=(note,))


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
