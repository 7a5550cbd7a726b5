"""From trials to the result of a restoration's grid (schema kvtier.restore/1).

It has medians per arm, speedups, shares of the bound, equality with recomputing, and which aims
were met.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sgl_kvtier.lab.experiment.restore.arms import COMPUTE, LOAD, OURS, RESTORE_ARMS, SINGLES
from sgl_kvtier.lab.experiment.restore.bound import (
    ComputeCurve,
    optimal,
    optimal_of_link,
    request_seconds,
    t_star,
)
from sgl_kvtier.lab.experiment.restore.log import (
    CURVE,
    FIRST,
    GRID,
    PAGE,
    PRIME,
    RESIDENT,
    WARM,
    RestoreLog,
    Scale,
    seconds,
)
from sgl_kvtier.lab.experiment.restore.trial import DISCARDED, Attempt, Trial
from sgl_kvtier.lab.outside.replay import milliseconds
from sgl_kvtier.lab.paced import pace
from sgl_kvtier.lab.pages.stats import percentile

LOGPROB_TOLERANCE = 1e-3
"""Largest difference of log-probs called equal: float32 with other chunk borders moves them by less
than 1e-4.
"""


NEVER_SLOWER, OPTIMAL_EACH = 0.97, 0.90
BALANCED, HALF = 1.85, 1.4
"""The aims. First, against the better of one resource everywhere. Then the share of T_opt of
each cell with the ratio in [1/4, 4]. Then the speedup over both resources where loading takes as
long as computing, and half and twice as long.
"""


def results_of(log: RestoreLog) -> dict[str, Any]:
    """Everything a table, a page or a reader needs, beside the settings."""
    rows, measured = cells(log), curves(log)
    return {
        "arms": {arm: RESTORE_ARMS[arm].about for row in rows for arm in row["ttft_ms"]},
        "cells": rows,
        "summary": summary_of(rows, measured),
        "curves": measured,
        "trials": [_row(trial) for trial in log.trials],
    }


def pace_of(attempts: Iterable[Attempt], dilation: float) -> dict[str, dict[str, Any]]:
    """How well a paced device kept pace until the first token, by arm: in the attempts that count.
    Wrong keys and values count in all.
    """
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for trial in attempts:
        counts = trial.kind not in (WARM, DISCARDED, PRIME)
        found = [row for row in trial.steps if counts or "mismatch" in row]
        if counts or found:
            rows.setdefault(trial.arm, []).extend(found)
    return {arm: pace.figures(steps, dilation) for arm, steps in rows.items()}


def _row(trial: Trial) -> dict[str, Any]:
    row = dataclasses.asdict(dataclasses.replace(trial, steps=()))
    del row["steps"]
    return row


def cells(log: RestoreLog) -> list[dict[str, Any]]:
    """One row per model, length and target ratio that has trials, failed ones too, in the order of
    measuring.
    """
    rows = []
    for scale in log.scales:
        trials = _made(log, scale, GRID)
        for ratio in sorted(
            {t.load_over_compute for t in trials if t.load_over_compute is not None}
        ):
            rows.append(
                _cell(log, scale, ratio, [t for t in trials if t.load_over_compute == ratio])
            )
    return rows


def curve_of(log: RestoreLog, scale: Scale) -> ComputeCurve:
    """The measured compute curve of a length."""
    trials = log.of(scale.model, scale.length, CURVE)
    points = {t.prompt_tokens for t in trials}
    middle = {n: percentile(seconds(t for t in trials if t.prompt_tokens == n), 50) for n in points}
    page = log.of(scale.model, scale.length, PAGE)
    steps = [t.tpot_s for t in page if t.tpot_s is not None]
    request = request_seconds(seconds(page), steps)
    return ComputeCurve({n: value for n, value in middle.items() if value is not None}, request)


def resident_seconds(log: RestoreLog, scale: Scale) -> float:
    """Time to first token when the whole prefix is in device memory; 0 where it was not measured."""
    return percentile(seconds(log.of(scale.model, scale.length, RESIDENT)), 50) or 0.0


def curves(log: RestoreLog) -> list[dict[str, Any]]:
    """Per length the compute curve and what else T_opt is made of."""
    rows = []
    for scale in log.scales:
        curve = curve_of(log, scale)
        rows.append(
            {
                "model": scale.model,
                "length": scale.length,
                "prefix_bytes": scale.prefix_bytes,
                "balanced_gbps": scale.gbps(1.0),
                "request_ms": milliseconds(curve.request_s),
                "resident_ms": milliseconds(resident_seconds(log, scale)),
                "errors": sum(
                    len(log.failed(scale.model, scale.length, kind))
                    for kind in (CURVE, RESIDENT, PAGE)
                ),
                "points": [
                    {"tokens": n, "ttft_ms": milliseconds(s)}
                    for n, s in sorted(curve.first_token_s.items())
                ],
            }
        )
    return rows


def summary_of(
    rows: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The figures of all cells together, and the cells that missed an aim. Failures are also those
    of the `measured` curves.
    """
    middle = [row for row in rows if 0.25 <= row["load_over_compute"] <= 4]
    return {
        "cells": len(rows),
        "worst_speedup_vs_best_single": min(_known(rows, "speedup_vs_best_single"), default=None),
        "median_bound_fraction": percentile(_known(middle, "bound_fraction"), 50),
        "worst_bound_fraction": min(_known(middle, "bound_fraction"), default=None),
        "median_link_bound_fraction": percentile(_known(middle, "link_bound_fraction"), 50),
        "errors": sum(sum(row["errors"].values()) for row in rows)
        + sum(curve["errors"] for curve in measured),
        "equal_tokens": all(row["equal_tokens_fraction"] == 1.0 for row in rows) if rows else None,
        "equal_logprobs": all(row["equal_logprobs_fraction"] == 1.0 for row in rows)
        if rows
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


def _cell(log: RestoreLog, scale: Scale, ratio: float, trials: Sequence[Trial]) -> dict[str, Any]:
    good = [t for t in trials if t.error is None]
    arms = list(dict.fromkeys(t.arm for t in trials))
    times = {arm: seconds(t for t in trials if t.arm == arm) for arm in arms}
    middle = {arm: percentile(values, 50) for arm, values in times.items()}
    ours, compute, load = middle.get(OURS), middle.get(COMPUTE), middle.get(LOAD)
    single = min((value for arm in SINGLES if (value := middle.get(arm)) is not None), default=None)
    first = [t for t in _made(log, scale, FIRST) if t.load_over_compute == ratio]
    discarded = [
        t for t in log.of(scale.model, scale.length, DISCARDED) if t.load_over_compute == ratio
    ]
    loaded = {arm: _loaded(good, arm) for arm in arms}
    return {
        "model": scale.model,
        "length": scale.length,
        "load_over_compute": ratio,
        "measured_load_over_compute": _over(load, compute),
        "read_gbps": trials[0].gbps,
        "ttft_ms": {arm: milliseconds(value) for arm, value in middle.items()},
        "ttft_ms_low": {
            arm: milliseconds(min(values, default=None)) for arm, values in times.items()
        },
        "ttft_ms_high": {
            arm: milliseconds(max(values, default=None)) for arm, values in times.items()
        },
        "first_ttft_ms": {
            arm: milliseconds(percentile(seconds(t for t in first if t.arm == arm), 50))
            for arm in arms
        },
        "rounds": {arm: len(values) for arm, values in times.items()},
        "speedup_vs_load": _over(load, ours),
        "speedup_vs_compute": _over(compute, ours),
        "speedup_vs_best_single": _over(single, ours),
        **_bounds(log, scale, trials[0].gbps, {} if loaded.get(LOAD) == 0 else middle),
        "loaded_tokens": loaded,
        **equality(log, scale, [*trials, *first, *discarded]),
        "errors": errors_by_arm([*trials, *first]),
        "foreign_cores": max(
            (t.foreign_cores for t in good if t.foreign_cores is not None), default=None
        ),
        "slowness": max((t.slowness for t in good), default=None),
        "repeated": sum(t.repeats for t in trials),
    }


def failures(attempts: Iterable[Attempt], count: int) -> list[str]:
    """A note on the requests that failed."""
    if not count:
        return []
    messages = sorted({one.error for one in attempts if one.error is not None})[:3]
    return [
        f"{count} requests failed; they count as answers that are not equal. Of one that was made again, by a run that went on from "
        f"the log, only the last attempt counts. {'; '.join(messages)}"
    ]


def errors_by_arm(trials: Iterable[Trial]) -> dict[str, int]:
    """How many of these failed, for every arm among them."""
    failed: Counter[str] = Counter()
    for trial in trials:
        failed[trial.arm] += trial.error is not None
    return dict(failed)


def _made(log: RestoreLog, scale: Scale, kind: str) -> list[Trial]:
    return [*log.of(scale.model, scale.length, kind), *log.failed(scale.model, scale.length, kind)]


def _bounds(
    log: RestoreLog, scale: Scale, gbps: float, middle: dict[str, float | None]
) -> dict[str, Any]:
    """T_opt, T_link and T* of a cell, and our share of each."""
    bound = link = star = split = None
    ours, compute, load = middle.get(OURS), middle.get(COMPUTE), middle.get(LOAD)
    curve, resident = curve_of(log, scale), resident_seconds(log, scale)
    if compute and load:
        star = t_star(compute, load)
        if curve.first_token_s:
            best = optimal(scale.length, scale.page, curve, load, resident)
            bound, split = best.seconds, best.computed_tokens
        if curve.first_token_s and gbps:
            link = optimal_of_link(
                scale.length, scale.page, curve, load, resident, scale.link_s(gbps)
            ).seconds
    return {
        "bound_ms": milliseconds(bound),
        "bound_fraction": _over(bound, ours),
        "above_bound_ms": None if ours is None or bound is None else milliseconds(ours - bound),
        "link_bound_ms": milliseconds(link),
        "link_bound_fraction": _over(link, ours),
        "tstar_ms": milliseconds(star),
        "tstar_fraction": _over(star, ours),
        "best_computed_tokens": split,
    }


def equality(log: RestoreLog, scale: Scale, trials: Sequence[Trial]) -> dict[str, Any]:
    """How many of these trials have the tokens, and log-probs, that computing the whole prompt gave
    when it was stored. One that failed has neither.
    """
    references = log.of(scale.model, scale.length, PRIME)
    if not references:
        return {
            "equal_tokens_fraction": None,
            "equal_logprobs_fraction": None,
            "logprob_difference": None,
            "compared": 0,
        }
    wanted = references[0]
    compared = [
        t for t in trials if t.error is None and len(t.output_ids) == len(wanted.output_ids)
    ]
    differences = [difference(t.logprobs, wanted.logprobs) for t in compared]
    known = [d for d in differences if d is not None]
    return {
        "equal_tokens_fraction": _share(
            sum(t.output_ids == wanted.output_ids for t in compared), len(trials)
        ),
        "equal_logprobs_fraction": _share(sum(d <= LOGPROB_TOLERANCE for d in known), len(trials)),
        "logprob_difference": max(known, default=None),
        "compared": len(trials),
    }


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The largest difference of two answers' log-probs; None where they cannot be compared."""
    if not ours or len(ours) != len(theirs):
        return None
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def _loaded(trials: Sequence[Trial], arm: str) -> float | None:
    return percentile(
        (t.cached.storage + t.cached.host for t in trials if t.arm == arm and t.cached is not None),
        50,
    )


def _over(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


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
