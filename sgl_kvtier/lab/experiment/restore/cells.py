"""From what was measured to the result of a run: one prefix at a time (schema kvtier.restore/1) or
several (kvtier.restore.batches/1, both in docs/manual/json.md).

A cell has the figures of its arms and equality with computing each prompt alone; one prefix at a
time also speed-ups and shares of the bound.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sgl_kvtier.lab.experiment.restore.arms import (
    BATCH_ARMS,
    COMPUTE,
    LOAD,
    OURS,
    RESTORE_ARMS,
    SINGLES,
)
from sgl_kvtier.lab.experiment.restore.bound import ComputeCurve, optimal, request_seconds
from sgl_kvtier.lab.experiment.restore.trial import (
    CURVE,
    DISCARDED,
    FIRST,
    GRID,
    PAGE,
    PRIME,
    RESIDENT,
    WARM,
    Attempt,
    Batch,
    RestoreLog,
    Scale,
    Trial,
    seconds,
)
from sgl_kvtier.lab.outside.replay import milliseconds
from sgl_kvtier.lab.paced import pace
from sgl_kvtier.lab.pages.stats import pair_ratios, percentile, summary

LOGPROB_TOLERANCE = 1e-3
"""Largest difference of log-probs called equal: float32 with other chunk borders moves them by less
than 1e-4.
"""


def is_sound(summary: Mapping[str, Any]) -> bool:
    """Nothing failed, and every answer that was compared has the tokens and log-probs of the
    computed one.
    """
    return (
        not summary["errors"]
        and summary["equal_tokens"] is not False
        and summary["equal_logprobs"] is not False
    )


def failures(attempts: Iterable[Attempt], count: int) -> list[str]:
    """A note on the requests that failed."""
    if not count:
        return []
    messages = sorted({one.error for one in attempts if one.error is not None})[:3]
    return [
        f"{count} requests failed; they count as answers that are not equal. Of one that was made again, by a run that went on from "
        f"the log, only the last attempt counts. {'; '.join(messages)}"
    ]


def pace_of(attempts: Iterable[Attempt], dilation: float) -> dict[str, dict[str, Any]]:
    """How well a paced device kept pace until the first token, by arm: in the attempts that count.
    Wrong keys and values count in all.
    """
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for one in attempts:
        counts = one.kind not in (WARM, DISCARDED, PRIME)
        found = [row for row in one.steps if counts or "mismatch" in row]
        if counts or found:
            rows.setdefault(one.arm, []).extend(found)
    return {arm: pace.figures(steps, dilation) for arm, steps in rows.items()}


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The largest difference of two answers' log-probs; None where they cannot be compared."""
    if not ours or len(ours) != len(theirs):
        return None
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def _compare(pairs: Iterable[tuple[Trial, Trial]]) -> tuple[list[bool], list[bool], float | None]:
    """Of answers and those they are compared with: which have the same tokens, which the same
    log-probs, and the largest difference of these. One that failed has neither.
    """
    tokens, logprobs, differences = [], [], []
    for one, wanted in pairs:
        gap = None if one.error else difference(one.logprobs, wanted.logprobs)
        tokens.append(one.error is None and one.output_ids == wanted.output_ids)
        logprobs.append(gap is not None and gap <= LOGPROB_TOLERANCE)
        differences += [] if gap is None else [gap]
    return tokens, logprobs, max(differences, default=None)


# One prefix at a time


def results_of(log: RestoreLog) -> dict[str, Any]:
    """Everything a table, a page or a reader needs, beside the settings."""
    rows, measured = cells(log), curves(log)
    return {
        "arms": {arm: RESTORE_ARMS[arm].about for row in rows for arm in row["ttft_ms"]},
        "cells": rows,
        "summary": summary_of(rows, measured),
        "curves": measured,
        "trials": [_trial_row(trial) for trial in log.trials],
    }


def _trial_row(trial: Trial) -> dict[str, Any]:
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
        ratios = {t.load_over_compute for t in trials if t.load_over_compute is not None}
        rows += [_cell(log, scale, ratio, trials) for ratio in sorted(ratios)]
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
        failed = [log.failed(scale.model, scale.length, kind) for kind in (CURVE, RESIDENT, PAGE)]
        rows.append(
            {
                "model": scale.model,
                "length": scale.length,
                "prefix_bytes": scale.prefix_bytes,
                "balanced_gbps": scale.gbps(1.0),
                "request_ms": milliseconds(curve.request_s),
                "resident_ms": milliseconds(resident_seconds(log, scale)),
                "errors": sum(map(len, failed)),
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
    """The figures of all cells together. Failures are also those of the `measured` curves."""
    middle = [row for row in rows if 0.25 <= row["load_over_compute"] <= 4]
    failed = sum(sum(row["errors"].values()) for row in rows)
    return {
        "cells": len(rows),
        "worst_speedup_vs_best_single": min(_known(rows, "speedup_vs_best_single"), default=None),
        "median_bound_fraction": percentile(_known(middle, "bound_fraction"), 50),
        "worst_bound_fraction": min(_known(middle, "bound_fraction"), default=None),
        "errors": failed + sum(curve["errors"] for curve in measured),
        **{
            f"equal_{what}": all(row[f"equal_{what}_fraction"] == 1.0 for row in rows)
            if rows
            else None
            for what in ("tokens", "logprobs")
        },
    }


def _cell(log: RestoreLog, scale: Scale, ratio: float, made: Sequence[Trial]) -> dict[str, Any]:
    def of_cell(trials: Iterable[Trial]) -> list[Trial]:
        return [t for t in trials if t.load_over_compute == ratio]

    def by_arm(figure: Callable[[list[float]], Any], trials: Sequence[Trial]) -> dict[str, Any]:
        return {arm: figure(seconds(t for t in trials if t.arm == arm)) for arm in arms}

    trials, first = of_cell(made), of_cell(_made(log, scale, FIRST))
    discarded = of_cell(log.of(scale.model, scale.length, DISCARDED))
    good = [t for t in trials if t.error is None]
    arms = list(dict.fromkeys(t.arm for t in trials))
    middle = by_arm(_median, trials)
    ours, compute, load = middle.get(OURS), middle.get(COMPUTE), middle.get(LOAD)
    single = min((value for arm in SINGLES if (value := middle.get(arm)) is not None), default=None)
    loaded = {arm: _loaded(good, arm) for arm in arms}
    return {
        "model": scale.model,
        "length": scale.length,
        "load_over_compute": ratio,
        "measured_load_over_compute": _over(load, compute),
        "read_gbps": trials[0].gbps,
        "ttft_ms": {arm: milliseconds(value) for arm, value in middle.items()},
        "ttft_ms_low": by_arm(lambda times: milliseconds(min(times, default=None)), trials),
        "ttft_ms_high": by_arm(lambda times: milliseconds(max(times, default=None)), trials),
        "first_ttft_ms": by_arm(lambda times: milliseconds(_median(times)), first),
        "rounds": by_arm(len, trials),
        "speedup_vs_load": _over(load, ours),
        "speedup_vs_compute": _over(compute, ours),
        "speedup_vs_best_single": _over(single, ours),
        **_bounds(log, scale, {} if loaded.get(LOAD) == 0 else middle),
        "loaded_tokens": loaded,
        **_equality_of(log, scale, [*trials, *first, *discarded]),
        "errors": errors_by_arm([*trials, *first]),
        **_disturbed(good),
        "repeated": sum(t.repeats for t in trials),
    }


def errors_by_arm(trials: Iterable[Trial]) -> dict[str, int]:
    """How many of these failed, for every arm among them."""
    failed: Counter[str] = Counter()
    for trial in trials:
        failed[trial.arm] += trial.error is not None
    return dict(failed)


def _made(log: RestoreLog, scale: Scale, kind: str) -> list[Trial]:
    return [*log.of(scale.model, scale.length, kind), *log.failed(scale.model, scale.length, kind)]


def _bounds(log: RestoreLog, scale: Scale, middle: dict[str, float | None]) -> dict[str, Any]:
    """T_opt of a cell, and our share of it."""
    bound = split = None
    compute, load = middle.get(COMPUTE), middle.get(LOAD)
    curve = curve_of(log, scale)
    if compute and load and curve.first_token_s:
        best = optimal(scale.length, scale.page, curve, load, resident_seconds(log, scale))
        bound, split = best.seconds, best.computed_tokens
    return {
        "bound_ms": milliseconds(bound),
        "bound_fraction": _over(bound, middle.get(OURS)),
        "best_computed_tokens": split,
    }


def _equality_of(log: RestoreLog, scale: Scale, trials: Sequence[Trial]) -> dict[str, Any]:
    """How many of these trials have the tokens, and log-probs, that computing the whole prompt gave
    when it was stored.
    """
    references = log.of(scale.model, scale.length, PRIME)
    pairs = [(trial, references[0]) for trial in trials] if references else []
    tokens, logprobs, most = _compare(pairs)
    return {
        "equal_tokens_fraction": _share(tokens),
        "equal_logprobs_fraction": _share(logprobs),
        "logprob_difference": most,
        "compared": len(pairs),
    }


def _loaded(trials: Sequence[Trial], arm: str) -> float | None:
    return percentile(
        (t.cached.storage + t.cached.host for t in trials if t.arm == arm and t.cached is not None),
        50,
    )


# Several prefixes at once


def batch_results(log: RestoreLog) -> dict[str, Any]:
    """Everything a table, a page or a reader needs, beside the settings."""
    rows = _batch_cells(log)
    arms = [arm for row in rows for arm in row["arms"].values()]
    return {
        "arms": {arm: BATCH_ARMS[arm].about for row in rows for arm in row["arms"]},
        "cells": rows,
        "summary": {
            "cells": len(rows),
            "errors": sum(arm["errors"] for arm in arms),
            "equal_tokens": _all_equal(arms, "equal_tokens_fraction"),
            "equal_logprobs": _all_equal(arms, "equal_logprobs_fraction"),
        },
        "scales": [
            {
                "model": one.model,
                "length": one.length,
                "prefix_bytes": one.prefix_bytes,
                "compute_ms": milliseconds(one.compute_s),
            }
            for one in log.scales
        ],
        "trials": [_batch_row(log, one) for one in log.batches if one.kind in (GRID, DISCARDED)],
    }


def _batch_cells(log: RestoreLog) -> list[dict[str, Any]]:
    """One row per model, size, load and ratio that has batches, in the order of measuring."""
    found: dict[tuple[Any, ...], list[Batch]] = {}
    for one in log.batches:
        if one.kind in (GRID, DISCARDED):
            place = (one.model, one.load_over_compute, one.at_once)
            found.setdefault(place, []).append(one)
    cells = [found[place] for place in sorted(found)]
    return [_batch_cell(log, made) for made in cells if any(one.kind == GRID for one in made)]


def _batch_cell(log: RestoreLog, batches: Sequence[Batch]) -> dict[str, Any]:
    first = batches[0]
    arms = {
        arm: [one for one in batches if one.arm == arm]
        for arm in dict.fromkeys(one.arm for one in batches)
    }
    figures = {arm: _batch_arm(log, made) for arm, made in arms.items()}
    counting = [one for one in batches if one.kind == GRID]
    ours = _last(arms.get(OURS, ()))
    return {
        "model": first.model,
        "at_once": first.at_once,
        "load_over_compute": first.load_over_compute,
        "read_gbps": first.gbps,
        "lengths": sorted({one.prompt_tokens for b in batches for one in b.requests}),
        "arms": figures,
        "ratios": {
            f"{OURS}/{arm}": _ratios(ours, _last(made))
            for arm, made in arms.items()
            if arm != OURS and OURS in arms
        },
        **_disturbed(counting),
        "repeated": sum(one.repeats for one in counting),
    }


def _batch_arm(log: RestoreLog, made: Sequence[Batch]) -> dict[str, Any]:
    last = list(_last(made).values())
    good = [one for one in last if one.error is None]
    gaps = [gap for one in good for gap in one.gaps_s]
    took_s = sum(one.makespan_s or 0.0 for one in good)
    moved_s = sum(one.read_bytes * 8e-9 / one.gbps for one in good if one.gbps)
    computing = [one.computing_s for one in good if one.computing_s is not None]
    ttft_ms = [ms for one in good for ms in _times_ms(one)]
    answers: Counter[str] = Counter()
    for one in last:
        answers.update(one.answers)
    return {
        "ttft_ms": summary(ttft_ms),
        "makespan_s": percentile((one.makespan_s for one in good), 50),
        "prompt_tokens": _mean([sum(r.prompt_tokens for r in one.requests) for one in good]),
        "computed_tokens": _mean([_computed(one) for one in good]),
        "link_busy_fraction": moved_s / took_s if took_s else None,
        "compute_busy_fraction": sum(computing) / took_s if took_s and computing else None,
        "token_gap_ms": {
            "p50": milliseconds(percentile(gaps, 50)),
            "p99": milliseconds(percentile(gaps, 99)),
            "max": milliseconds(max(gaps, default=None)),
            "n": len(gaps),
        },
        **_batch_equality(log, [*last, *(one for one in made if one.kind == DISCARDED)]),
        "answers": dict(answers),
        "rounds": len(good),
        "errors": sum(one.error is not None for one in last),
        "error_messages": sorted({one.error for one in last if one.error is not None})[:5],
    }


def _last(made: Iterable[Batch]) -> dict[int, Batch]:
    """The batch of each round that counts: of one that failed, the last attempt."""
    return {one.round: one for one in made if one.kind == GRID}


def _computed(one: Batch) -> int:
    return sum(r.prompt_tokens - (r.cached.total if r.cached else 0) for r in one.requests)


def _ratios(ours: Mapping[int, Batch], theirs: Mapping[int, Batch]) -> dict[str, Any]:
    """Our batches over another arm's, round by round."""
    return {
        name: pair_ratios(*([figure(made.get(n)) for n in ours] for made in (ours, theirs)))
        for name, figure in (("ttft_ms_mean", _mean_ms), ("makespan_s", _makespan))
    }


def _mean_ms(one: Batch | None) -> float | None:
    return None if one is None or one.error is not None else _mean(_times_ms(one))


def _times_ms(one: Batch) -> list[float]:
    return [ms for r in one.requests if (ms := milliseconds(r.ttft_s)) is not None]


def _makespan(one: Batch | None) -> float | None:
    return None if one is None or one.error is not None else one.makespan_s


def _batch_equality(log: RestoreLog, batches: Sequence[Batch]) -> dict[str, float | None]:
    """Shares of the requests with the tokens, and with these and the log-probs, that computing each
    alone gave, and of those beside with the tokens of the first ones beside.
    """
    tokens, logprobs, _ = _compare(pair for one in batches for pair in _compared(log, one))
    return {
        "equal_tokens_fraction": _share(tokens),
        "equal_logprobs_fraction": _share(list(map(all, zip(tokens, logprobs, strict=True)))),
        "beside_equal_fraction": _share([same for one in batches for same in _beside(log, one)]),
    }


def _compared(log: RestoreLog, one: Batch) -> list[tuple[Trial, Trial]]:
    reference = log.reference(one)
    return [] if reference is None else list(zip(one.requests, reference.requests, strict=True))


def _beside(log: RestoreLog, one: Batch) -> list[bool]:
    """Whether each request beside said the same as in the first batch, as far as both went."""
    same = (b.decoded for b in log.batches if b.model == one.model and b.error is None)
    first = next(filter(None, same), ())
    return [
        mine[: len(theirs)] == theirs[: len(mine)]
        for mine, theirs in zip(one.decoded, first, strict=False)
    ]


def _batch_row(log: RestoreLog, one: Batch) -> dict[str, Any]:
    equal, _, _ = _compare(_compared(log, one))
    names = (
        *("kind", "arm", "round", "at_once", "load_over_compute", "gbps"),
        *("makespan_s", "computing_s", "read_bytes", "answers", "lost_s", "foreign_cores"),
        *("slowness", "repeats", "error"),
    )
    return {
        **{name: getattr(one, name) for name in names},
        "requests": [
            {
                "prompt_tokens": r.prompt_tokens,
                "ttft_ms": milliseconds(r.ttft_s),
                "cached_tokens": None if r.cached is None else r.cached.total,
                "equal": same,
            }
            for r, same in itertools.zip_longest(one.requests, equal)
        ],
    }


def _disturbed(counting: Sequence[Attempt]) -> dict[str, float | None]:
    cores = (one.foreign_cores for one in counting if one.foreign_cores is not None)
    return {
        "foreign_cores": max(cores, default=None),
        "slowness": max((one.slowness for one in counting), default=None),
    }


def _all_equal(arms: Sequence[Mapping[str, Any]], key: str) -> bool | None:
    known = _known(arms, key)
    return all(value == 1.0 for value in known) if known else None


def _known(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row[key] is not None]


def _over(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _share(same: Sequence[bool]) -> float | None:
    return sum(same) / len(same) if same else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: Iterable[float]) -> float | None:
    return percentile(values, 50)
