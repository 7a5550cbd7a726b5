"""Turns to figures: schema kvtier.compare.remote/1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgl_kvtier.lab.experiment.arms import BASELINE, MOONCAKE
from sgl_kvtier.lab.experiment.remote.arms import REMOTE, REMOTE_ARMS
from sgl_kvtier.lab.experiment.remote.turns import WARM, Cell, Moved, MovedLog
from sgl_kvtier.lab.outside.replay import milliseconds
from sgl_kvtier.lab.pages.stats import pair_ratios, percentile, summary

FULL_SPEED, BALANCED, QUARTER, NEVER = 1 / 1.10, 1.7, 1.2, 0.97
"""Aims, as times as fast as others: at full speed than stock's Mooncake; where loading takes as
long as computing than both; at 1/4 and 4 than the better; anywhere.
"""


def remote_results(
    log: MovedLog, arms: Sequence[str], cells: Sequence[tuple[Cell, float]]
) -> dict[str, Any]:
    """The cells, with what was aimed at and not reached."""
    reference = answers(log)
    rows = [_cell(log, cell, gbps, arms, reference) for cell, gbps in cells]
    missed = [text for row in rows for text in _missed(row)]
    return {
        "scale": [
            {"length": one.length, "compute_ms": 1000 * one.compute_s, "bytes": one.prefix_bytes}
            for one in log.scales
        ],
        "cells": rows,
        "summary": {
            "equal_tokens_fraction": _least(rows, "equal_tokens_fraction"),
            "errors": sum(arm["errors"] for row in rows for arm in row["arms"].values()),
            "missed": missed,
        },
        "turns": [_row(one, reference) for one in log.turns],
    }


def answers(log: MovedLog) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """What every answer is compared with: recompute's, by place; without that arm the first."""
    found: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for one in sorted(log.turns, key=lambda one: one.arm != BASELINE):
        if one.error is None:
            found.setdefault(one.place, one.output_ids)
    return found


def _cell(
    log: MovedLog,
    cell: Cell,
    gbps: float,
    arms: Sequence[str],
    reference: Mapping[tuple[Any, ...], tuple[int, ...]],
) -> dict[str, Any]:
    turns = [one for one in log.turns if one.cell == cell.name]
    figures = {arm: _arm([one for one in turns if one.arm == arm], reference) for arm in arms}
    return {
        "gbps": gbps,
        "load_over_compute": cell.load_over_compute,
        "arms": figures,
        "ratios": {f"{arm}/{REMOTE}": _ratio(turns, arm) for arm in arms if arm != REMOTE in arms},
        "vs_better": _vs_better(figures),
    }


def _arm(
    turns: Sequence[Moved], reference: Mapping[tuple[Any, ...], tuple[int, ...]]
) -> dict[str, Any]:
    counting = [one for one in turns if one.moved and one.session >= WARM]
    good = [one for one in counting if one.error is None]
    compared = [one.output_ids == reference[one.place] for one in turns if one.place in reference]
    cached = [one.cached for one in good if one.cached is not None]
    return {
        "ttft_ms": summary(milliseconds(one.ttft_s) for one in good),
        "equal_tokens_fraction": sum(compared) / len(compared) if compared else None,
        "compared": len(compared),
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "cached_tokens": {
            tier: sum(getattr(one, tier) for one in cached)
            for tier in ("device", "host", "storage", "total")
        },
        "remote_bytes": sum(one.remote_bytes for one in good),
        "lost_fraction": percentile(
            (one.lost_s / one.ttft_s for one in good if one.lost_s is not None and one.ttft_s), 50
        ),
        "foreign_cores": percentile((one.foreign_cores for one in counting), 50),
        "errors": sum(one.error is not None for one in turns),
        "error_messages": sorted({one.error for one in turns if one.error is not None})[:5],
    }


def _ratio(turns: Sequence[Moved], arm: str) -> dict[str, Any]:
    """Another arm's time to first token over kvtier-remote's, turn by turn: above 1 ours is
    shorter.
    """
    by_place = {
        (one.arm, one.place): one.ttft_s
        for one in turns
        if one.moved and one.session >= WARM and one.error is None
    }
    places = sorted({place for _, place in by_place})
    theirs, ours = ([by_place.get((name, p)) for p in places] for name in (arm, REMOTE))
    return pair_ratios(theirs, ours)


def _vs_better(figures: Mapping[str, Mapping[str, Any]]) -> float | None:
    """How many times as fast as the better of recompute and stock's Mooncake kvtier-remote is."""
    ours = figures.get(REMOTE, {}).get("ttft_ms", {}).get("p50")
    others = [figures[arm]["ttft_ms"]["p50"] for arm in (BASELINE, MOONCAKE) if arm in figures]
    known = [one for one in others if one is not None]
    return min(known) / ours if ours and known else None


def _missed(row: Mapping[str, Any]) -> list[str]:
    """What a cell was aimed at and did not reach, by medians of moved turns."""
    ratio = row["load_over_compute"]
    where = f"{row['gbps']:.3g} Gbit/s" if row["gbps"] else "full speed"
    times = {arm: one["ttft_ms"]["p50"] for arm, one in row["arms"].items()}
    ours = times.get(REMOTE)
    if not ours:
        return []
    found: list[tuple[float | None, float, str]] = [
        (row["vs_better"], NEVER, "the better of recompute and stock's Mooncake")
    ]
    if ratio is None and not row["gbps"] and times.get(MOONCAKE):
        found.append((times[MOONCAKE] / ours, FULL_SPEED, "stock's Mooncake"))
    if ratio == 1:
        pairs = ((arm, times.get(arm)) for arm in (BASELINE, MOONCAKE))
        found += [(one / ours, BALANCED, arm) for arm, one in pairs if one]
    if ratio in (0.25, 4):
        found.append((row["vs_better"], QUARTER, "the better of recompute and stock's Mooncake"))
    return [
        f"{where}: {value:.2f} times as fast as {what}, the aim is {aim:.3g}"
        for value, aim, what in found
        if value is not None and value < aim
    ]


def _least(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    known = [arm[key] for row in rows for arm in row["arms"].values() if arm[key] is not None]
    return min(known, default=None)


def _row(one: Moved, reference: Mapping[tuple[Any, ...], tuple[int, ...]]) -> dict[str, Any]:
    names = ("arm", "round", "cell", "session", "number", "server", "moved", "gbps", "error")
    return {
        **{name: getattr(one, name) for name in names},
        "counts": one.moved and one.session >= WARM,
        "prompt_tokens": one.prompt_tokens,
        "ttft_ms": milliseconds(one.ttft_s),
        "cached_tokens": None if one.cached is None else one.cached.total,
        "remote_bytes": one.remote_bytes,
        "foreign_cores": one.foreign_cores,
        "equal": one.output_ids == reference.get(one.place) if one.error is None else False,
    }


def about_arms(arms: Sequence[str]) -> dict[str, str]:
    """What each is, in words."""
    return {arm: REMOTE_ARMS[arm].about for arm in arms}
