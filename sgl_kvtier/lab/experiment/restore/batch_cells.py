"""From batches to the result of a run (schema kvtier.restore.batches/1, docs/manual/json.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sgl_kvtier.lab.experiment.restore.arms import BATCH_ARMS, BY_ARRIVAL, OURS, PAPERS, STALL_ANY
from sgl_kvtier.lab.experiment.restore.cells import LOGPROB_TOLERANCE, difference
from sgl_kvtier.lab.experiment.restore.log import GRID, RestoreLog
from sgl_kvtier.lab.experiment.restore.trial import DISCARDED, Batch, Trial
from sgl_kvtier.lab.outside.replay import milliseconds
from sgl_kvtier.lab.pages.stats import pair_ratios, percentile, summary

MEAN_AIMS = {2: 0.90, 4: 0.85, 8: 0.75}
"""The aims for our mean time to first token over that of the better of the papers' rules, by the
size of the batch.
"""
MAKESPAN_AIM = 1.03
"""The same for the makespan, at most."""
STREAM_AIMS = {"ttft_ms_mean": 0.88, "ttft_ms_max": 1.25}
"""The aims for our mean time to first token, and for the longest one, over those of the order of
arrival, where requests arrive at random.
"""
_NAMES = {
    "ttft_ms_mean": "mean time to first token",
    "ttft_ms_max": "longest time to first token",
    "makespan_s": "makespan",
}


def batch_results(log: RestoreLog) -> dict[str, Any]:
    """Everything a table, a page or a reader needs, beside the settings."""
    rows = cells(log)
    return {
        "arms": {arm: BATCH_ARMS[arm].about for row in rows for arm in row["arms"]},
        "cells": rows,
        "summary": summary_of(rows),
        "scales": [
            {
                "model": one.model,
                "length": one.length,
                "prefix_bytes": one.prefix_bytes,
                "compute_ms": milliseconds(one.compute_s),
            }
            for one in log.scales
        ],
        "trials": [_row(log, one) for one in log.batches if one.kind in (GRID, DISCARDED)],
    }


def cells(log: RestoreLog) -> list[dict[str, Any]]:
    """One row per model, size, load and ratio that has batches, in the order of measuring."""
    places = dict.fromkeys(
        (one.model, one.at_once, one.poisson, one.load_over_compute)
        for one in log.batches
        if one.kind == GRID
    )
    return [
        _cell(
            log,
            [
                one
                for one in log.batches
                if (one.model, one.at_once, one.poisson, one.load_over_compute) == place
                and one.kind in (GRID, DISCARDED)
            ],
        )
        for place in sorted(places, key=lambda place: (place[0], place[2] or 0, place[3], place[1]))
    ]


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all cells together, and what missed its aim."""
    arms = [arm for row in rows for arm in row["arms"].values()]
    return {
        "cells": len(rows),
        "errors": sum(arm["errors"] for arm in arms),
        "equal_tokens": _all_equal(arms, "equal_tokens_fraction"),
        "equal_logprobs": _all_equal(arms, "equal_logprobs_fraction"),
        "missed": [text for row in rows for text in _missed(row)],
    }


def equality(log: RestoreLog, batches: Iterable[Batch]) -> dict[str, float | None]:
    """Shares of the requests with the tokens and log-probs that computing each alone gave, and of
    those beside with the tokens of the first ones beside. A request that failed has neither.
    """
    requests = [pair for one in batches for pair in _compared(log, one)]
    beside = [same for one in batches for same in _beside(log, one)]
    tokens = [_same_tokens(one, wanted) for one, wanted in requests]
    gaps = [difference(one.logprobs, wanted.logprobs) for one, wanted in requests]
    return {
        "equal_tokens_fraction": _share(tokens),
        "equal_logprobs_fraction": _share(
            [
                same and gap is not None and gap <= LOGPROB_TOLERANCE
                for same, gap in zip(tokens, gaps, strict=True)
            ]
        ),
        "beside_equal_fraction": _share(beside),
    }


def _cell(log: RestoreLog, batches: Sequence[Batch]) -> dict[str, Any]:
    first = batches[0]
    arms = {
        arm: [one for one in batches if one.arm == arm]
        for arm in dict.fromkeys(one.arm for one in batches)
    }
    figures = {arm: _arm(log, made) for arm, made in arms.items()}
    counting = [one for one in batches if one.kind == GRID]
    return {
        "model": first.model,
        "at_once": first.at_once,
        "poisson": first.poisson,
        "load_over_compute": first.load_over_compute,
        "read_gbps": first.gbps,
        "lengths": sorted({one.prompt_tokens for b in batches for one in b.requests}),
        "arms": figures,
        "ratios": _ratios({arm: _last(made) for arm, made in arms.items()}),
        "vs_best_paper": _vs_best_paper(figures),
        "vs_variants": _vs_variants(figures),
        "foreign_cores": max(
            (one.foreign_cores for one in counting if one.foreign_cores is not None), default=None
        ),
        "slowness": max((one.slowness for one in counting), default=None),
        "repeated": sum(one.repeats for one in counting),
    }


def _arm(log: RestoreLog, made: Sequence[Batch]) -> dict[str, Any]:
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
        "ttft_ms": {**summary(ttft_ms), "max": max(ttft_ms, default=None)},
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
        **equality(log, [*last, *(one for one in made if one.kind == DISCARDED)]),
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


def _ratios(arms: Mapping[str, Mapping[int, Batch]]) -> dict[str, Any]:
    """Our batches over each other arm's, round by round."""
    if OURS not in arms:
        return {}
    return {
        f"{OURS}/{arm}": {
            name: pair_ratios(
                *([figure(theirs.get(n)) for n in arms[OURS]] for theirs in (arms[OURS], made))
            )
            for name, figure in (("ttft_ms_mean", _mean_ms), ("makespan_s", _makespan))
        }
        for arm, made in arms.items()
        if arm != OURS
    }


def _mean_ms(one: Batch | None) -> float | None:
    if one is None or one.error is not None:
        return None
    return _mean(_times_ms(one))


def _times_ms(one: Batch) -> list[float]:
    return [ms for r in one.requests if (ms := milliseconds(r.ttft_s)) is not None]


def _makespan(one: Batch | None) -> float | None:
    return None if one is None or one.error is not None else one.makespan_s


def _vs_best_paper(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Our mean time to first token, and makespan, over the least of the papers' rules."""
    ours = figures.get(OURS)
    papers = [figures[arm] for arm in PAPERS if arm in figures]

    def over(figure: Any) -> float | None:
        least = min((v for one in papers if (v := figure(one)) is not None), default=None)
        mine = None if ours is None else figure(ours)
        return mine / least if mine is not None and least else None

    return {
        "ttft_ms_mean": over(lambda one: one["ttft_ms"]["mean"]),
        "makespan_s": over(lambda one: one["makespan_s"]),
    }


def _vs_variants(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Our mean and longest time to first token over those of ours without the planner's order of
    the queue, and without a bound of the gaps.
    """
    there = [arm for arm in (BY_ARRIVAL, STALL_ANY) if OURS in figures and arm in figures]

    def over(arm: str, figure: str) -> float | None:
        mine, theirs = (figures[name]["ttft_ms"][figure] for name in (OURS, arm))
        return mine / theirs if mine is not None and theirs else None

    return {arm: {f"ttft_ms_{name}": over(arm, name) for name in ("mean", "max")} for arm in there}


def _missed(row: Mapping[str, Any]) -> list[str]:
    if row["load_over_compute"] != 1:
        return []
    where = f"{row['at_once']} at once"
    if row["poisson"] is None:
        mean_aim = MEAN_AIMS.get(row["at_once"])
        aims: Mapping[str, float | None] = {"ttft_ms_mean": mean_aim, "makespan_s": MAKESPAN_AIM}
        found, whose = row["vs_best_paper"], f"the better of {' and '.join(PAPERS)}"
    else:
        where += f" as a stream of load {row['poisson']:g}"
        aims, found, whose = STREAM_AIMS, row["vs_variants"].get(BY_ARRIVAL, {}), BY_ARRIVAL
    return [
        f"{where}: {_NAMES[name]} {over:.3f} of {whose}, the aim is {aim:g}"
        for name, aim in aims.items()
        if aim is not None and (over := found.get(name)) is not None and over > aim
    ]


def _compared(log: RestoreLog, one: Batch) -> list[tuple[Trial, Trial]]:
    reference = log.reference(one)
    return [] if reference is None else list(zip(one.requests, reference.requests, strict=True))


def _same_tokens(one: Trial, wanted: Trial) -> bool:
    return one.error is None and one.output_ids == wanted.output_ids


def _beside(log: RestoreLog, one: Batch) -> list[bool]:
    """Whether each request beside said the same as in the first batch, as far as both went."""
    same = (b.decoded for b in log.batches if b.model == one.model and b.error is None)
    first = next(filter(None, same), ())
    return [
        mine[: len(theirs)] == theirs[: len(mine)]
        for mine, theirs in zip(one.decoded, first, strict=False)
    ]


def _row(log: RestoreLog, one: Batch) -> dict[str, Any]:
    compared = _compared(log, one)
    equal = [_same_tokens(*pair) for pair in compared] if compared else [None for _ in one.requests]
    return {
        **{
            name: getattr(one, name)
            for name in (
                *("kind", "arm", "round", "at_once", "poisson", "load_over_compute", "gbps"),
                *("makespan_s", "computing_s", "read_bytes", "answers", "lost_s", "foreign_cores"),
                *("slowness", "repeats", "error"),
            )
        },
        "requests": [
            {
                "prompt_tokens": r.prompt_tokens,
                "ttft_ms": milliseconds(r.ttft_s),
                "cached_tokens": None if r.cached is None else r.cached.total,
                "equal": same,
            }
            for r, same in zip(one.requests, equal, strict=True)
        ],
    }


def _all_equal(arms: Sequence[Mapping[str, Any]], key: str) -> bool | None:
    known = [arm[key] for arm in arms if arm[key] is not None]
    return all(value == 1.0 for value in known) if known else None


def _share(same: Sequence[bool]) -> float | None:
    return sum(same) / len(same) if same else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
