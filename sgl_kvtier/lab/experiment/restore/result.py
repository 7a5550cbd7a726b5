"""The whole result of a restoration bench (schema kvtier.restore/1, docs/manual/json.md), and
whether it met its aims.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_kvtier.console import envelope
from sgl_kvtier.lab.experiment.restore.arms import RESTORE_ARMS
from sgl_kvtier.lab.experiment.restore.cells import LOGPROB_TOLERANCE, cells, curves
from sgl_kvtier.lab.experiment.restore.grid import SLOW
from sgl_kvtier.lab.experiment.restore.log import RestoreLog
from sgl_kvtier.lab.pages.stats import percentile

SCHEMA = "kvtier.restore/1"

NEVER_SLOWER, OPTIMAL_MEDIAN, OPTIMAL_EACH = 0.97, 0.95, 0.90
BALANCED, HALF = 1.85, 1.4
"""Aims: against the better of one resource everywhere; share of T_opt, median and each cell with
the ratio in [1/4, 4]; speedup over both resources at balance, and at half and double.
"""


def make_result(
    log: RestoreLog,
    settings: Mapping[str, Any],
    *,
    interrupted: bool,
    notes: Sequence[str],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything a table, a page or a reader needs. `extra`: further parts, by key."""
    rows, measured = cells(log), curves(log)
    summary = summary_of(rows, log.fluctuations, measured)
    results = {
        "settings": dict(settings),
        "arms": {arm: RESTORE_ARMS[arm].about for row in rows for arm in row["ttft_ms"]},
        "cells": rows,
        "summary": summary,
        "curves": measured,
        "interrupted": interrupted,
        "trials": [dataclasses.asdict(trial) for trial in log.trials],
        "notes": [*standard_notes(settings), *notes, *_failures(log, summary["errors"])],
        **extra,
    }
    return envelope(SCHEMA, ["kvtier", *sys.argv[1:]], results)


def summary_of(
    rows: Sequence[Mapping[str, Any]],
    fluctuating: Sequence[Mapping[str, Any]] = (),
    measured: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The figures of all cells together, and the cells that missed an aim. Failures and equality
    are also those of the cells that fluctuated, and failures those of the `measured` curves.
    """
    middle = [row for row in rows if 0.25 <= row["load_over_compute"] <= 4]
    every = [*rows, *fluctuating]
    return {
        "cells": len(rows),
        "worst_speedup_vs_best_single": min(_known(rows, "speedup_vs_best_single"), default=None),
        "median_bound_fraction": percentile(_known(middle, "bound_fraction"), 50),
        "worst_bound_fraction": min(_known(middle, "bound_fraction"), default=None),
        "median_link_bound_fraction": percentile(_known(middle, "link_bound_fraction"), 50),
        "errors": sum(sum(row["errors"].values()) for row in every)
        + sum(curve["errors"] for curve in measured),
        "equal_tokens": all(row["equal_tokens_fraction"] == 1.0 for row in every)
        if every
        else None,
        "equal_logprobs": all(row["equal_logprobs_fraction"] == 1.0 for row in every)
        if every
        else None,
        "missed": [text for row in rows for text in _missed(row)],
    }


def is_sound(summary: Mapping[str, Any]) -> bool:
    """Nothing failed, and every answer that was compared has the tokens and log-probs of the
    computed one.
    """
    return (
        not summary["errors"]
        and summary["equal_tokens"] is not False
        and summary["equal_logprobs"] is not False
    )


def _missed(row: Mapping[str, Any]) -> list[str]:
    where = f"{row['model']} {row['length']} tokens, load/compute {row['load_over_compute']:g}"
    single, bound = row["speedup_vs_best_single"], row["bound_fraction"]
    both = min(
        (
            value
            for key in ("speedup_vs_load", "speedup_vs_compute")
            if (value := row[key]) is not None
        ),
        default=None,
    )
    aims = [(single, NEVER_SLOWER, "of the better of one resource")]
    if 0.25 <= row["load_over_compute"] <= 4:
        aims.append((bound, OPTIMAL_EACH, "of T_opt"))
    if row["load_over_compute"] == 1:
        aims.append((both, BALANCED, "times as fast as either resource alone"))
    if row["load_over_compute"] in (0.5, 2):
        aims.append((both, HALF, "times as fast as either resource alone"))
    return [
        f"{where}: {value:.3f} {what}, the aim is {aim:g}"
        for value, aim, what in aims
        if value is not None and value < aim
    ]


def _known(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row[key] is not None]


def _failures(log: RestoreLog, count: int) -> list[str]:
    if not count:
        return []
    messages = "; ".join(
        sorted({trial.error for trial in log.trials if trial.error is not None})[:3]
    )
    return [
        f"{count} requests failed; they count as answers that are not equal. Of one that was made again, by a run that went on from "
        f"the log, only the last attempt counts. {messages}"
    ]


def standard_notes(settings: Mapping[str, Any]) -> list[str]:
    """What has to be known of every such result."""
    notes = [
        "All arms run in one server process; between two requests its device and host caches are emptied and it is waited for "
        "until it does nothing. Every second round goes backwards. Figures are medians.",
        "T_opt: the best split of the prefix on the compute curve measured in the same run (linear between its points), the "
        "loading taken as linear, no interference, then what a prompt takes whose prefix is in device memory. T* = Tc Tl / (Tc "
        "+ Tl) takes all tokens to cost the same, so that more than 100 % of it is possible.",
        "T_link: the same with loading as fast as the bandwidth that was set allows, and no more behind it than loading alone leaves. "
        "T_opt's loading is measured, so that what SGLang does while it loads (copies in host memory, waiting for the next look) is in it.",
        "The best single way (`speedup_vs_best_single`) is the better of computing and SGLang's own load, and our engine's load where "
        "the arm load_kvtier was measured.",
        "An arm that estimates the bandwidth restores once before it is measured in a cell; `first_ttft_ms` is that restoration, which "
        "expects the bandwidth of the cell before.",
        f"Equality: tokens, and log-probs to {LOGPROB_TOLERANCE:g}, against computing the whole prompt. Attempts that were disturbed and "
        "made again (`discarded` in `trials`) are compared as well; their times count for nothing.",
    ]
    if settings.get("slow_rounds") is not None:
        notes.append(
            f"An arm that takes more than {SLOW:g} times the best of its cell was measured in the first {settings['slow_rounds']} "
            "rounds only; `rounds` of each cell says how often each arm was."
        )
    return notes
