"""What tables, plots and the sentence read from a comparison's result (kvtier.compare/1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = "kvtier.compare/1"
OURS = "kvtier"
STOCK = "hicache-file"
"""SGLang's own arm that has a storage tier."""
BASELINE = "recompute"
ORACLE = "oracle"
"""The arm whose device memory holds everything: what is left to be won, no opponent."""
TIERS = ("device", "host", "storage")
LATER = "ttft_later_ms"
"""Time to first token of the turns after a session's first, which every arm computes."""
METRICS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "end to end"}


def paced(result: dict) -> Mapping[str, Any] | None:
    """The result's part on a paced device; None where everything was computed."""
    found: Mapping[str, Any] | None = (result.get("device") or {}).get("paced")
    return found


def is_torn(arm: Mapping[str, Any]) -> bool:
    """Whether none of its rounds was complete, so that its pace is not known."""
    rounds = arm.get("rounds") or ()
    return bool(rounds) and not any(one["complete"] for one in rounds)


def arm_rows(result: dict) -> list[dict]:
    """The arms in their order, each as a row with its name under "arm"."""
    return [{"arm": name, **arm} for name, arm in result["arms"].items()]


def skipped_arms(result: dict) -> list[str]:
    """A line for every arm that was not tried, with the reason."""
    return [
        f"{name} was skipped: {arm['skipped']}."
        for name, arm in result["arms"].items()
        if arm.get("skipped")
    ]


def good_samples(result: dict, arm: str) -> list[dict]:
    """The samples of an arm that ended without an error."""
    return [s for s in result.get("samples") or [] if s.get("arm") == arm and not s.get("error")]


def later(samples: Sequence[dict]) -> list[dict]:
    """Those of the turns after a session's first."""
    return [sample for sample in samples if (sample.get("turn") or 0) > 1]


def later_times(result: dict, arm: str) -> Mapping[str, Any]:
    """p50, p90, p99, mean and n of an arm's time to first token of later turns, in ms; {} where it is
    not known.
    """
    found: Mapping[str, Any] = result["arms"][arm].get(LATER) or {}
    return found


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


def plural(count: int | None, noun: str) -> str:
    """The count with its noun: "1 round", "3 rounds"."""
    if count is None:
        return f"unknown number of {noun}s"
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def seconds(ms: float, *beside: float) -> str:
    """Milliseconds for people: seconds where it or a figure beside it is a second or more."""
    if max(ms, *beside, 0.0) < 1000:
        return f"{ms:.{0 if ms >= 100 else 1}f} ms"
    found = ms / 1000
    return f"{found:.{1 if found >= 10 else 2 if found >= 0.1 else 3}f} s"
