"""A comparison as tables, made from its JSON result (kvtier.compare/1): one for the terminal, and
all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sgl_kvtier.console.table import Column, Table
from sgl_kvtier.lab.pages.compare.result import (
    LATER,
    METRICS,
    TIERS,
    arm_rows,
    good_samples,
    later_times,
    paced,
    prompt_parts,
    skipped_arms,
)
from sgl_kvtier.lab.pages.listing import ARM, Listing, Row, ms, share
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
    """What a comparison prints: one table, and with another client how far both agree."""
    return [*OUTCOME.tables(result), *AGREEMENT.tables(result)]


def detail_tables(result: dict) -> list[Table]:
    """Tables behind the printed one."""
    found = [table for one in DETAILS for table in one.tables(result)]
    return [*found, *RATIOS.tables(result)]


def compare_tables(result: dict) -> list[Table]:
    """All tables: the printed one, then those behind it."""
    return [*main_tables(result), *detail_tables(result)]


def _unit(result: dict) -> tuple[str, int, int]:
    """What times of the outcome are in, its decimals, and its milliseconds."""
    slowest = max((_turn_times(result, arm)["mean"] or 0 for arm in result["arms"]), default=0)
    return ("s", 2, 1000) if slowest >= 1000 else ("ms", 1, 1)


def _outcome_columns(result: dict) -> list[Column]:
    unit, decimals, _ = _unit(result)
    titles = {"p50": "p50", "p99": "p99", "mean": "mean", "first": "First turns mean"}
    return [
        ARM,
        *(Column(f"times.{name}", title, unit, decimals) for name, title in titles.items()),
        Column("throughput_tokens_per_s", "Output", "tokens/s", decimals=1),
        Column("shares", "Computed / stored"),
        Column("errors", "Errors"),
        share("equal_tokens_fraction", "Equal"),
    ]


def _outcome(result: dict) -> Iterator[Row]:
    *_, size = _unit(result)
    for row in arm_rows(result):
        found = _turn_times(result, row["arm"])
        times = {name: None if value is None else value / size for name, value in found.items()}
        yield {**row, "times": times, "shares": _shares(result, row["arm"])}


OUTCOME = Listing(
    "Time to first token of later turns",
    _outcome_columns,
    _outcome,
    lambda result: [_FIRST_TURNS, *skipped_arms(result)],
)


_AGREED = {
    "ttft_ms.mean": ("TTFT mean", "ms"),
    "ttft_ms.p50": ("TTFT p50", "ms"),
    "ttft_ms.p99": ("TTFT p99", "ms"),
    "e2e_ms.mean": ("end to end mean", "ms"),
    "throughput_tokens_per_s": ("output", "tokens/s"),
}


def _agreement(result: dict) -> Iterator[Row]:
    for row in (result.get("harness") or {}).get("agreement") or []:
        name, unit = _AGREED[row["figure"]]
        yield {**row, "name": f"{name} ({unit})"}


AGREEMENT = Listing(
    "The same load by another client and by our own",
    [
        ARM,
        Column("name", "Figure"),
        Column("harness", "Other client", decimals=1),
        Column("own", "Own client", decimals=1),
        Column("ratio", "Other / own", decimals=3),
    ],
    _agreement,
)


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


def _sources(result: dict) -> Iterator[Row]:
    scale = (paced(result) or {}).get("bytes_scale") or 1.0
    for row in arm_rows(result):
        moved = {
            name: None if nbytes is None else nbytes * scale
            for name, nbytes in (row.get("bytes") or {}).items()
        }
        computed = prompt_parts(result, str(row["arm"]))["computed"]
        yield {**row, "computed": computed, "bytes": moved}


def _restored(result: dict) -> list[Row]:
    rows = [row for row in arm_rows(result) if row.get("restore")]
    return rows if any(row["restore"].get("started") for row in rows) else []


def _ratios(result: dict) -> list[Row]:
    return [
        {"pair": pair.replace("/", " / "), "metric": _RATIOS.get(metric, metric), **ratio}
        for pair, metrics in (result.get("ratios") or {}).items()
        for metric, ratio in metrics.items()
    ]


DETAILS = (
    Listing(
        "Time to first token of all turns",
        (
            ARM,
            *(ms(f"ttft_ms.{q}", f"TTFT {q}") for q in _QUANTILES),
            *(Column("requests", "Requests"), Column("errors", "Errors")),
            share("equal_tokens_fraction", "Equal output"),
        ),
        arm_rows,
    ),
    Listing(
        "Time to first token of later turns, in full",
        (
            ARM,
            *(ms(f"{LATER}.{q}", f"TTFT {q}") for q in (*_QUANTILES, "mean")),
            Column(f"{LATER}.n", "Requests"),
        ),
        arm_rows,
    ),
    Listing(
        "Time per output token, end to end, throughput",
        (
            ARM,
            *(ms(f"tpot_ms.{q}", f"TPOT {q}") for q in _QUANTILES),
            ms("token_gap_ms.p99", "Gap p99", 0),
            *(ms(f"e2e_ms.{q}", f"E2E {q}", 0) for q in _QUANTILES),
            Column("throughput_tokens_per_s", "Output", "tokens/s", decimals=1),
        ),
        arm_rows,
    ),
    Listing(
        "Where the prompts' tokens came from",
        (
            ARM,
            *(Column(f"cached_tokens.{tier}", tier.capitalize(), "tokens") for tier in TIERS),
            Column("computed", "Computed", "tokens"),
            Column("bytes.read", "Read", format=format_bytes),
            Column("bytes.written", "Written", format=format_bytes),
        ),
        _sources,
        lambda result: [
            "Device, host and storage are tokens served from cache (SGLang's L1, L2, L3); read and written are storage.",
            *(
                []
                if paced(result) is None
                else ["Bytes are those of the modelled machine; the result has those moved here."]
            ),
        ],
    ),
    Listing(
        "Pace of the device",
        (
            *(ARM, share("pace.overrun", "Time lost"), share("pace.overrun_p50", "per step p50")),
            *(share("pace.overrun_p99", "p99"), Column("pace.steps", "Steps")),
            Column("pace.scheduler_ms_per_step", "Scheduler", "ms/step", decimals=2),
            Column("pace.tick_ms_per_step", "Our tick", "ms/step", decimals=2),
            Column("pace.checked_tokens", "Tokens checked"),
            Column("pace.mismatches", "Wrong"),
        ),
        lambda result: arm_rows(result) if paced(result) is not None else [],
    ),
    Listing(
        "Prefixes computed and loaded at once",
        (
            ARM,
            Column("restore.started", "Offers answered", decimals=0),
            Column("restore.met", "Restored", decimals=0),
            Column("restore.computed_tokens", "Computed", "tokens", decimals=0),
            Column("restore.loaded_tokens", "Loaded", "tokens", decimals=0),
            share("restore.computed_fraction", "Met at"),
            Column("restore.meeting_wait_s", "Waited at the meeting", "s", decimals=2),
            Column("restore.lost_pages", "Lost", "pages", decimals=0),
            Column("restore.unused_pages", "Loaded for nothing", "pages", decimals=0),
            Column("restore.declined", "SGLang's own way", decimals=0),
        ),
        _restored,
        [
            "Met at: tokens computed over all tokens restored. Counters of the server, docs/manual/operate.md."
        ],
    ),
)
"""Behind the printed table: latency, the sources of the prompts' tokens, pace, restorations.
"""

RATIOS = Listing(
    "Paired ratios",
    (
        *(Column("pair", "Arms"), Column("metric", "Metric")),
        Column("median", "Median", "ratio", decimals=3),
        Column("p25", "p25", decimals=3),
        Column("p75", "p75", decimals=3),
        Column("n", "Rounds"),
    ),
    _ratios,
    [
        "Below 1 the first configuration is faster. Taken round by round, so that what slows a whole round cancels out."
    ],
)
