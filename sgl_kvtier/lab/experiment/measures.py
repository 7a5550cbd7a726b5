"""From requests to figures: each arm's latencies, equality with recompute, tokens by tier, bytes,
rounds and ratios.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sgl_kvtier.lab.experiment.arms import BASELINE, OURS
from sgl_kvtier.lab.experiment.machine import CpuShare
from sgl_kvtier.lab.outside.client import Metrics
from sgl_kvtier.lab.outside.replay import Sample, milliseconds
from sgl_kvtier.lab.outside.server import Usage
from sgl_kvtier.lab.paced.pace import figures as pace_figures
from sgl_kvtier.lab.pages.stats import pair_ratios, percentile, summary
from sgl_kvtier.types import Link

TIERS = ("device", "host", "storage")
TIMES = ("ttft_ms", "tpot_ms", "e2e_ms")
_PAIRED = (
    *((name, "p50") for name in TIMES),
    ("ttft_ms", "mean"),
    ("ttft_ms", "p90"),
    ("e2e_ms", "mean"),
    *(("ttft_later_ms", figure) for figure in ("p50", "mean", "p99")),
)
"""Figures of a round's requests that ratios are taken of."""


@dataclass
class Round:
    """One arm's replay of the whole load: its requests, and the server's counters before and after."""

    arm: str
    number: int
    samples: list[Sample] = field(default_factory=list)
    before: Metrics = field(default_factory=lambda: Metrics({}))
    after: Metrics = field(default_factory=lambda: Metrics({}))
    wall_s: float = 0.0
    cpu: CpuShare | None = None
    usage: Usage | None = None
    disk_bytes: tuple[int, int] | None = None
    complete: bool = False
    began_s: float = 0.0
    """When its replay began, on the monotonic clock."""
    occupancy: list[dict[str, float]] = field(default_factory=list)
    """Tokens in each tier and bytes that storage moved, over time, where that was watched."""
    dilation: float = 1.0
    """Factor by which seconds of a paced device's server are longer."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """The lines that a paced device wrote of this round: steps, copies, loads (`lab.paced.pace`)."""

    def counted(self, name: str, **labels: str) -> float | None:
        """The growth of a server's counter in this round. A counter that is not there yet counts
        from 0.
        """
        after = self.after.total(name, **labels)
        slower = self.dilation if name.endswith("_seconds_total") else 1.0
        grown = (after or 0.0) - (self.before.total(name, **labels) or 0.0)
        return None if after is None else grown / slower


Reference = dict[tuple[str, int], tuple[int, ...] | str]


def reference_arm(rounds: Sequence[Round]) -> str:
    """The arm whose first answers the others are compared with: recompute.

    On a paced device without recompute it is the first arm, because answers follow from tokens
    alone.
    """
    if any(one.steps for one in rounds) and all(one.arm != BASELINE for one in rounds):
        return rounds[0].arm
    return BASELINE


def reference_outputs(rounds: Sequence[Round], arm: str | None = None) -> Reference:
    """The first answers of an arm, or of that of `reference_arm`, by session and turn."""
    found: Reference = {}
    arm = arm or reference_arm(rounds)
    for one in rounds:
        if one.arm == arm:
            for sample in _good(one.samples):
                found.setdefault((sample.session, sample.turn), sample.completion.answer)
    return found


def sample_rows(rounds: Sequence[Round], computed: Reference | None = None) -> list[dict[str, Any]]:
    """Every request as a flat row, with `equal` against `computed`, else against recompute's first
    answer.

    None where there is nothing to compare: a failed request, or the very answer the others are
    compared with.
    """
    reference = reference_outputs(rounds) if computed is None else computed
    first_arm = reference_arm(rounds) if computed is None else None
    used: set[tuple[str, int]] = set()
    rows = []
    for one in rounds:
        for sample in one.samples:
            key = (sample.session, sample.turn)
            row = sample.to_json(arm=one.arm, round=one.number)
            row["equal"] = None
            if sample.completion.error is None and key in reference:
                if one.arm == first_arm and key not in used:
                    used.add(key)
                else:
                    row["equal"] = sample.completion.answer == reference[key]
            rows.append(row)
    return rows


def complete_rows(
    rounds: Sequence[Round], rows: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Those of `rows` that are of complete rounds: all of them have the same requests."""
    whole = {(one.arm, one.number) for one in rounds if one.complete}
    return [row for row in rows if (row["arm"], row["round"]) in whole]


def arm_figures(
    arm: str, rounds: Sequence[Round], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """All figures of one arm over its rounds; `rows` are the rows of `sample_rows`, of all arms."""
    mine = [one for one in rounds if one.arm == arm]
    own = [row for row in rows if row["arm"] == arm]
    good = [row for row in own if row["error"] is None]
    compared = [row["equal"] for row in good if row["equal"] is not None]
    wall_s = sum(one.wall_s for one in mine)
    return {
        **{name: summary(row[name] for row in good) for name in TIMES},
        "ttft_later_ms": summary(row["ttft_ms"] for row in good if row["turn"] > 1),
        "token_gap_ms": summary(
            1000 * gap_s
            for one in mine
            for sample in _good(one.samples)
            for gap_s in sample.completion.token_gaps_s
        ),
        "equal_tokens_fraction": sum(compared) / len(compared) if compared else None,
        "compared_requests": len(compared),
        "cached_tokens": _tier_sums(good),
        "cached_tokens_check": _check_tiers(mine, good),
        "prompt_tokens": sum(row["prompt_tokens"] or 0 for row in good),
        "output_tokens": sum(row["output_tokens"] for row in good),
        "requests": len(own),
        "errors": len(own) - len(good),
        "error_messages": sorted({row["error"] for row in own if row["error"] is not None})[:5],
        "throughput_tokens_per_s": sum(row["output_tokens"] for row in good) / wall_s
        if wall_s
        else None,
        "bytes": _storage_bytes(mine),
        "restore": _restorations(mine),
        **_ahead(mine, good),
        "disk_bytes": _disk_bytes(mine),
        **_pace(mine),
        "rounds": [_round_row(one) for one in mine],
    }


def within_bound(arm: str, rounds: Sequence[Round], bound_ms: float) -> float | None:
    """An arm's requests per second of wall time whose first token came within `bound_ms`: its
    goodput. None where no time passed.
    """
    mine = [one for one in rounds if one.arm == arm]
    wall_s = sum(one.wall_s for one in mine)
    times = [s.completion.ttft_s for one in mine for s in _good(one.samples)]
    in_time = sum(time_s is not None and 1000 * time_s <= bound_ms for time_s in times)
    return in_time / wall_s if wall_s else None


SUSTAINED_QUANTILE = 95.0


def sustained(
    loads: Sequence[tuple[float, Sequence[Mapping[str, Any]]]], arm: str, bounds_ms: Sequence[float]
) -> list[dict[str, Any]]:
    """For each bound the largest load that an arm sustains: at it, and at every smaller one, no
    request failed and the 95th percentile of the time to first token is within the bound. None
    where that is not so at the smallest. `loads` has each load with its rows of complete rounds,
    rising.
    """
    found = []
    for bound_ms in bounds_ms:
        most: float | None = None
        for load, rows in loads:
            own = [row for row in rows if row["arm"] == arm]
            late_ms = percentile((row["ttft_ms"] for row in own), SUSTAINED_QUANTILE)
            if late_ms is None or late_ms > bound_ms or any(row["error"] for row in own):
                break
            most = load
        found.append({"ttft_p95_ms": bound_ms, "load": most})
    return found


def ratios(
    rounds: Sequence[Round], rows: Sequence[Mapping[str, Any]], arms: Sequence[str]
) -> dict[str, Any]:
    """Our arm's rounds over each other arm's, round by round, so that a slow round cancels out.

    Medians of a round's requests are under the metric's name, other figures of it beside them. A
    round that is not complete has other requests in it than its partner, so it makes no pair.
    """
    if OURS not in arms:
        return {}
    figures = {(one.arm, one.number): _round_figures(one, rows) for one in rounds if one.complete}
    numbers = sorted({number for _, number in figures})

    def pair(other: str, metric: str) -> dict[str, float | int | None]:
        ours, theirs = (
            [figures.get((arm, number), {}).get(metric) for number in numbers]
            for arm in (OURS, other)
        )
        return pair_ratios(ours, theirs)

    metrics = dict.fromkeys(metric for found in figures.values() for metric in found)
    return {
        f"{OURS}/{other}": {metric: pair(other, metric) for metric in metrics}
        for other in arms
        if other != OURS
    }


def _round_figures(one: Round, rows: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """What ratios are taken of: figures of one round."""
    good = [
        row
        for row in rows
        if (row["arm"], row["round"], row["error"]) == (one.arm, one.number, None)
    ]
    later = [row for row in good if row["turn"] > 1]
    found: dict[str, float | None] = {}
    for name, figure in _PAIRED:
        over = later if name == "ttft_later_ms" else good
        values = summary(row[name.replace("_later", "")] for row in over)
        found[name if figure == "p50" else f"{name}_{figure}"] = values[figure]
    output_tokens = sum(row["output_tokens"] for row in good)
    found["wall_s"] = one.wall_s or None
    found["throughput_tokens_per_s"] = output_tokens / one.wall_s if one.wall_s else None
    return found


def left_out(rounds: Iterable[Round]) -> list[str]:
    """A note on rounds that are in an arm's own figures but in no ratio; none where all are
    complete.
    """
    names = [
        f"round {one.number} of {one.arm}" for one in rounds if not one.complete and one.samples
    ]
    return [f"Not complete, and so in no ratio: {', '.join(names)}."] if names else []


def _good(samples: Iterable[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.completion.error is None]


def _tier_sums(rows: Iterable[Mapping[str, Any]]) -> dict[str, int | None]:
    """Cached tokens by tier; None where no response says of which tier they are."""
    cached = [row["cached"] for row in rows if row["cached"] is not None]
    sums = {tier: sum(one[tier] for one in cached) for tier in TIERS}
    untold = not any(sums.values()) and any(one["total"] for one in cached)
    return dict.fromkeys(TIERS) if untold or not cached else {**sums}


def _check_tiers(rounds: Sequence[Round], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether the tiers of each response add up to its total, and what the server's own counters
    say beside.
    """
    cached = [row["cached"] for row in rows if row["cached"] is not None]
    off = sum(sum(one[tier] for tier in TIERS) != one["total"] for one in cached)
    counted = {
        tier: _total(rounds, "sglang:prefill_effective_tokens_total", mode=f"{tier}_hit")
        for tier in TIERS
    }
    return {
        "requests_whose_tiers_do_not_sum": off,
        "requests_checked": len(cached),
        "server_counters": counted,
    }


def _storage_bytes(rounds: Sequence[Round]) -> dict[str, int | None]:
    """Bytes written to storage and read from it: kvtier's own counts, or else SGLang's counts of
    tokens times its own bytes per token. SGLang also counts tokens that storage had already. None
    where the server counts nothing at all.
    """
    own = {name: _total(rounds, f"kvtier:{name}_bytes_total") for name in ("read", "written")}
    if own["written"] is not None:
        return {name: round(nbytes or 0) for name, nbytes in own.items()}
    read = _total(rounds, "sglang:prefetched_tokens_total")
    written = _total(rounds, "sglang:backuped_tokens_total")
    if read is None and written is None and any(one.after.to_json() for one in rounds):
        return {"read": 0, "written": 0}
    per_token = _bytes_per_token(rounds)
    if per_token is None:
        return {"read": None, "written": None}
    return {"read": round((read or 0) * per_token), "written": round((written or 0) * per_token)}


def _bytes_per_token(rounds: Sequence[Round]) -> float | None:
    """Bytes of KV cache per token, by the server's own counts of its writes to host memory."""
    tokens = _total(rounds, "sglang:hicache_backup_tokens_total")
    nbytes = _total(rounds, "sglang:hicache_backup_bytes_total")
    return nbytes / tokens if tokens and nbytes is not None else None


_RESTORE = {
    "started": "started_total",
    "met": "ended_total",
    "declined": "declined_total",
    "computed_tokens": "computed_tokens_total",
    "loaded_tokens": "loaded_tokens_total",
    "jumps": "jumps_total",
    "parks": "parks_total",
    "parked_s": "parked_seconds_total",
    "meeting_wait_s": "meeting_wait_seconds_total",
    "restoring_s": "restoring_seconds_total",
    "lost_pages": "lost_pages_total",
    "unused_pages": "unused_pages_total",
    "loaded_bytes": "loaded_bytes_total",
    "planner_failures": "planner_failures_total",
}
"""Figures of `arms.<name>.restore`, by the counter of the server they are the growth of
(docs/manual/operate.md).
"""


def _restorations(rounds: Sequence[Round]) -> dict[str, float | None] | None:
    """The server's own counters of restorations; None for a server that exports none."""
    if _total(rounds, "kvtier:restore_computed_tokens_total") is None:
        return None
    # Every rank does the same restorations, so one is asked.
    first = {"tp_rank": "0", "pp_rank": "0"}
    met = {"how": "met"}
    found: dict[str, float | None] = {
        name: _total(rounds, f"kvtier:restore_{counter}", **first, **(met if name == "met" else {}))
        or 0.0
        for name, counter in _RESTORE.items()
    }
    restored = (found["computed_tokens"] or 0) + (found["loaded_tokens"] or 0)
    found["computed_fraction"] = (found["computed_tokens"] or 0) / restored if restored else None
    return found


def _ahead(rounds: Sequence[Round], good: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The server's counters of lookahead. Where it counts nothing, hits are those of the responses."""
    first = {"tp_rank": "0", "pp_rank": "0"}
    moved = {
        link.value: _total(rounds, "kvtier:lookahead_moved_bytes_total", **first, link=link.value)
        for link in Link
    }
    hits = {
        tier: _total(rounds, "kvtier:lookahead_hit_tokens_total", **first, tier=tier)
        for tier in TIERS
    }
    counted = any(value is not None for value in hits.values())
    return {
        "wasted_bytes": _total(rounds, "kvtier:lookahead_wasted_bytes_total", **first),
        "moved_bytes": {link: value for link, value in moved.items() if value is not None},
        "hit_tokens_at_schedule": {tier: value or 0 for tier, value in hits.items()}
        if counted
        else _tier_sums(good),
        "hit_tokens_counted_by": "server" if counted else "responses",
        "lookahead": {
            **{
                name: _total(rounds, f"kvtier:lookahead_{name}_total", **first)
                for name in ("victims", "drift")
            },
            "hints": _total(rounds, "kvtier:lookahead_hints_total"),
            "overlap": _overlap(rounds, first),
        },
        "evicted_tokens": _total(rounds, "sglang:evicted_tokens_total"),
        "store_pages_read": _total(rounds, "kvtier:pages_read_total", **first),
        "bytes_per_token": _bytes_per_token(rounds),
    }


def _pace(rounds: Sequence[Round]) -> dict[str, Any]:
    """How well a paced device kept pace; nothing for another device."""
    lines = [line for one in rounds for line in one.steps]
    steps = any("step" in line for line in lines)
    return {"pace": pace_figures(lines, rounds[0].dilation)} if steps else {}


def _overlap(rounds: Sequence[Round], rank: Mapping[str, str]) -> dict[str, float] | None:
    """How often transfers were predicted to be hidden, and how often that was right; None where
    nothing was predicted.
    """
    found = {
        name: _total(rounds, "kvtier:lookahead_overlap_total", **rank, result=name) or 0.0
        for name in _OVERLAP
    }
    return found if found["held"] + found["failed"] else None


_OVERLAP = ("held", "failed", "held_right", "held_wrong", "failed_right", "failed_wrong")


def _disk_bytes(rounds: Sequence[Round]) -> dict[str, int | None]:
    known = [one.disk_bytes for one in rounds if one.disk_bytes is not None]
    if not known:
        return {"read": None, "written": None}
    return {"read": sum(one[0] for one in known), "written": sum(one[1] for one in known)}


def _total(rounds: Sequence[Round], name: str, **labels: str) -> float | None:
    counted = [value for one in rounds if (value := one.counted(name, **labels)) is not None]
    return sum(counted) if counted else None


def _round_row(one: Round) -> dict[str, Any]:
    good = _good(one.samples)
    return {
        "round": one.number,
        "complete": one.complete,
        "wall_s": one.wall_s,
        "requests": len(one.samples),
        "ttft_ms_p50": percentile((milliseconds(sample.completion.ttft_s) for sample in good), 50),
        "cpu": None if one.cpu is None else asdict(one.cpu),
        "server": None if one.usage is None else asdict(one.usage),
    }
