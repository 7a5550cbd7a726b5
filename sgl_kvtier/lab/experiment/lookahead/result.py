"""The result of `kvtier compare lookahead`: figures per cell and over all cells, and the distance
of each arm from the oracle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sgl_kvtier.lab.experiment.comparison import Cell, over_cells
from sgl_kvtier.lab.experiment.load import Load
from sgl_kvtier.lab.experiment.lookahead.arms import AHEAD, ORACLE, Pools
from sgl_kvtier.lab.experiment.measures import Round, arm_figures, left_out, ratios, sample_rows
from sgl_kvtier.lab.outside.replay import ReplayOptions
from sgl_kvtier.lab.pages.stats import summary

_UP = ("storage-host", "host-device", "storage-device")
_QUANTILES = ("p50", "p90", "p99")


def make_results(
    cells: Sequence[Cell], sizes: Mapping[float, Pools], load: Load, options: ReplayOptions
) -> dict[str, Any]:
    """The result of the cells, schema kvtier.compare.lookahead/1 (docs/manual/json.md). `sizes` are
    the pools of each oversubscription.
    """
    plan = cells[0].plan
    arms, setup = plan.arms, plan.setup
    rounds = [one for cell in cells for one in cell.outcome.rounds]
    rows = sample_rows(rounds)
    where = {one.number: cell for cell in cells for one in cell.outcome.rounds}
    for row in rows:
        row |= where[row["round"]].axes
    settings = {
        **asdict(replace(setup, variants={})),
        "arms": {name: asdict(variant) for name, variant in setup.variants.items()},
        "concurrency": options.concurrency,
        "most_output_tokens": options.most_output_tokens,
        "feedback": options.feedback,
        "cores": os.cpu_count(),
    }
    return {
        "workload": load.to_json(),
        "settings": settings,
        "rounds": plan.rounds,
        "cells": [_cell(cell, sizes[cell.axes["oversubscription"]], rows) for cell in cells],
        "arms": {arm: figures(arm, rounds, rows, cells) for arm in arms},
        "ratios": ratios(rounds, rows, arms),
        "samples": rows,
    }


def figures(
    arm: str, rounds: Sequence[Round], rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell]
) -> dict[str, Any]:
    """An arm's figures as in `kvtier compare`, with what was moved ahead for nothing and read for
    nothing.
    """
    found = arm_figures(arm, rounds, rows)
    later = (
        row["ttft_ms"]
        for row in rows
        if row["arm"] == arm and row["turn"] > 1 and row["error"] is None
    )
    found["ttft_later_ms"] = summary(later)
    moved = sum(found["moved_bytes"].get(link, 0.0) for link in _UP)
    found["wasted_fraction"] = (
        found["wasted_bytes"] / moved if moved and found["wasted_bytes"] is not None else None
    )
    found["storage_read_bytes"] = _read(found, cells[0].plan.setup.page_size)
    found["surplus_read_bytes"] = _surplus(found)
    found["failure"] = over_cells(cells, arm)["failure"]
    starts = [cell.outcome.start_s[arm] for cell in cells if arm in cell.outcome.start_s]
    found["server_start_s"] = max(starts, default=None)
    return found


def _read(found: Mapping[str, Any], page_tokens: int) -> float | None:
    """Bytes of KV cache read from storage, for whatever reason. The store's own count is used where
    it has one, else SGLang's.
    """
    per_token, pages = found["bytes_per_token"], found["store_pages_read"]
    if pages is None or not per_token:
        return None if found["bytes"]["read"] is None else float(found["bytes"]["read"])
    return float(pages * page_tokens * per_token)


def _surplus(found: Mapping[str, Any]) -> float | None:
    """Bytes read from storage that no request used: read twice, too late, or for no request."""
    per_token, read = found["bytes_per_token"], found["storage_read_bytes"]
    if not per_token or read is None:
        return None
    ahead = max(0.0, found["moved_bytes"].get("storage-host", 0.0) - (found["wasted_bytes"] or 0.0))
    return max(0.0, float(read) - found["cached_tokens"]["storage"] * per_token - ahead)


def _cell(cell: Cell, pool: Pools, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rounds, arms = cell.outcome.rounds, cell.plan.arms
    numbers = {one.number for one in rounds}
    own = [row for row in rows if row["round"] in numbers]
    found = {arm: figures(arm, rounds, own, [cell]) for arm in arms}
    oracle = found.get(ORACLE, {}).get("ttft_ms", {})
    return {
        **cell.axes,
        "pools": asdict(pool),
        "arms": found,
        "over_oracle": {
            arm: _over(one["ttft_ms"], oracle) for arm, one in found.items() if arm != ORACLE
        },
        "occupancy": {one.arm: one.occupancy for one in reversed(rounds) if one.occupancy},
        "commands": cell.outcome.commands,
    }


def _over(mine: Mapping[str, Any], oracle: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        q: mine[q] / oracle[q] if mine.get(q) is not None and oracle.get(q) else None
        for q in _QUANTILES
    }


def notes_of(cells: Sequence[Cell], arms: Sequence[str]) -> list[str]:
    """Notes that the rounds of these cells have to be read with."""
    rounds = [one for cell in cells for one in cell.outcome.rounds]
    notes = [f"{cell.name}: {note}" for cell in cells for note in dict.fromkeys(cell.outcome.notes)]
    for cell in cells:
        evicted = [
            one.counted("sglang:evicted_tokens_total")
            for one in cell.outcome.rounds
            if one.arm == ORACLE
        ]
        if tokens := sum(count or 0 for count in evicted):
            notes.append(
                f"{cell.name}: the oracle's device pool was too small after all: {tokens:.0f} tokens were evicted."
            )
    notes += left_out(rounds)
    for arm in arms:
        if arm.startswith(AHEAD) and any(one.arm == arm for one in rounds):
            found = arm_figures(arm, rounds, [])
            if found["hit_tokens_counted_by"] != "server":
                notes.append(
                    f"{arm}: its server counts nothing of looking ahead, so nothing shows that it did."
                )
            elif not any(found["moved_bytes"].values()):
                notes.append(f"{arm}: its server moved no page ahead.")
    return [*notes, *dict.fromkeys(text for cell in cells for text in cell.outcome.failed())]
