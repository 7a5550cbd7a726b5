"""The tables of a comparison of looking ahead, made from its JSON result (schema
kvtier.compare.lookahead/1, docs/manual/json.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_kvtier.console.table import Column, Table, format_share
from sgl_kvtier.sizes import format_bytes

OURS = "kvtier"
ORACLE = "oracle"
STOCK = "hicache-file"
TIERS = ("device", "host", "storage")
_QUANTILES = ("p50", "p90", "p99")


def lookahead_tables(result: dict) -> list[Table]:
    """What a comparison prints: time to first token in every cell, where hits lay, what was moved,
    and the gap to the oracle.
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
    rows = []
    for cell in result["cells"]:
        for arm, figures in cell["arms"].items():
            if figures["requests"]:
                over = cell["over_oracle"].get(arm, {})
                rows.append({**_place(cell), "arm": arm, **figures, "over": over})
    columns = (
        *_PLACE,
        Column("arm", "Arm"),
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
        "Equal output: the tokens recompute answered first."
    )
    return Table("Time to first token", columns, rows, notes=(note,))


def hits_table(result: dict) -> Table:
    """Per cell and arm: where prompt tokens lay when their request was scheduled, as shares of all
    prompt tokens.
    """
    rows = []
    for cell in result["cells"]:
        for arm, figures in cell["arms"].items():
            prompt = figures["prompt_tokens"]
            if not prompt:
                continue
            hits = figures["hit_tokens_at_schedule"]
            shares: dict[str, Any] = {tier: hits.get(tier, 0) / prompt for tier in TIERS}
            shares["nowhere"] = max(0.0, 1 - sum(shares.values()))
            by = figures["hit_tokens_counted_by"]
            rows.append(
                {
                    **_place(cell),
                    "arm": arm,
                    "share": shares,
                    "by": by,
                    "evicted": figures["evicted_tokens"],
                }
            )
    columns = (
        *_PLACE,
        Column("arm", "Arm"),
        *(
            Column(f"share.{tier}", tier.capitalize(), format=format_share)
            for tier in (*TIERS, "nowhere")
        ),
        Column("by", "Counted by"),
        Column("evicted", "Evicted", "tokens", decimals=0),
    )
    note = "Shares of all prompt tokens. Evicted: tokens that left the device pool."
    return Table("Where prompts' tokens lay when they were scheduled", columns, rows, notes=(note,))


def moved_table(result: dict) -> Table:
    """Per cell and arm with a storage tier: bytes moved ahead by link, wasted, and read for
    nothing.
    """
    rows = []
    for cell in result["cells"]:
        for arm, figures in cell["arms"].items():
            if figures["bytes"]["read"] or figures["moved_bytes"] or figures["bytes"]["written"]:
                rows.append({**_place(cell), "arm": arm, **figures})
    columns = (
        *_PLACE,
        Column("arm", "Arm"),
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
    """Per cell and arm that looks ahead: how often transfers were predicted to be hidden, and how
    often that was right.
    """
    rows = []
    for cell in result["cells"]:
        for arm, figures in cell["arms"].items():
            found = figures["lookahead"].get("overlap")
            if found:
                held, failed = (
                    found["held_right"] + found["held_wrong"],
                    found["failed_right"] + found["failed_wrong"],
                )
                shares = {
                    "held": _part(found["held"], found["failed"]),
                    "right": _part(found["held_right"], held - found["held_right"]),
                }
                shares["failed_right"] = _part(
                    found["failed_right"], failed - found["failed_right"]
                )
                rows.append(
                    {
                        **_place(cell),
                        "arm": arm,
                        "tests": found["held"] + found["failed"],
                        "share": shares,
                    }
                )
    columns = (
        *_PLACE,
        Column("arm", "Arm"),
        Column("tests", "Turns tested", decimals=0),
        Column("share.held", "Condition held", format=format_share),
        Column("share.right", "of these right", format=format_share),
        Column("share.failed_right", "Did not hold, rightly", format=format_share),
    )
    note = "Right: held, and all that was cached was on the device when the turn ran; did not hold, and something was missing then."
    return Table("Overlap condition", columns, rows, notes=(note,))


def rounds_table(result: dict) -> Table:
    """Per cell, round and arm: the median time to first token, and how many times stock's and the
    oracle's of that round it is.
    """
    rows = []
    for cell in result["cells"]:
        numbers = dict.fromkeys(
            one["round"] for figures in cell["arms"].values() for one in figures["rounds"]
        )
        for number in numbers:
            median = {
                arm: one["ttft_ms_p50"]
                for arm, figures in cell["arms"].items()
                for one in figures["rounds"]
                if one["round"] == number
            }
            for arm, value in median.items():
                over = {
                    to: value / median[to] if value and median.get(to) else None
                    for to in (STOCK, ORACLE)
                }
                rows.append(
                    {**_place(cell), "round": number, "arm": arm, "ttft": value, "over": over}
                )
    columns = (
        *_PLACE,
        Column("round", "Round"),
        Column("arm", "Arm"),
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


def _part(one: float, other: float) -> float | None:
    return one / (one + other) if one + other else None


_PLACE = (
    Column("oversubscription", "Over", "times", decimals=1),
    Column("gap_s", "Pause", "s", decimals=1),
)


def _place(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {"oversubscription": cell["oversubscription"], "gap_s": cell["gap_s"]}
