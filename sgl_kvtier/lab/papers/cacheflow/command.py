"""CacheFlow's section 4 from the simulator: its rule, the baselines, and ours on the same machines
and requests.

Compute is first come, first served in all arms, as in vLLM and SGLang. The arms differ in what is
loaded, and when. cacheflow.json says what the paper leaves open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean

from sgl_kvtier.lab.papers.cacheflow import model as cacheflow_model
from sgl_kvtier.lab.papers.cacheflow.cells import OURS, THEIRS, cell, null, ratio, speedups
from sgl_kvtier.lab.papers.cacheflow.rig import (
    ARMS,
    ONE,
    ORDERS,
    SCENARIOS,
    SEEDS,
    SINGLE,
    STORAGE,
    Place,
    Prompt,
    Stages,
    default,
    parallel,
    poisson,
    rig,
    sample,
    sequential,
    serve,
)
from sgl_kvtier.lab.sim.cells import Cell, Fitted, Tables


@cache
def ttfts(place: Place, workload: str) -> Mapping[str, tuple[tuple[float, ...], ...]]:
    """Seconds to first token of every request, per arm and draw, requests arriving at random."""
    rig_ = rig(place)
    draws = [poisson(workload, rig_, seed) for seed in SEEDS]
    return {
        arm: tuple(tuple(serve(rig_, prompts, arm).ttfts()) for prompts in draws) for arm in ARMS
    }


def loaded(table: str, row: str, place: Place, workload: str) -> list[Cell]:
    """The arms' means, and how far CacheFlow's P90 is below that of the better single resource."""
    runs = ttfts(place, workload)
    cells = speedups(table, row, {arm: [fmean(run) for run in mine] for arm, mine in runs.items()})
    tail = {arm: _p90([t for run in mine for t in run]) for arm, mine in runs.items()}
    best = min(SINGLE, key=lambda arm: tail[arm])
    each = [_p90(a) / _p90(b) for a, b in zip(runs[best], runs[THEIRS], strict=True)]
    name, value = "P90 over best single", tail[best] / tail[THEIRS]
    return [*cells, cell(table, row, name, value, reading=THEIRS, each=each)]


def _p90(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.9 * len(seconds))]


# --- section 4: end to end ------------------------------------------------------------------------


def figure_4() -> Sequence[Cell]:
    """Three workloads on the default machine."""
    return [c for name in SCENARIOS["workloads"] for c in loaded("4", name, default(), name)]


def figure_5() -> Sequence[Cell]:
    """Busy shares while a batch of SWE-Bench prefixes is restored."""
    batches = [
        [Prompt(0.0, *one) for one in sample("SWE-Bench", SCENARIOS["fig5"]["requests"], seed)]
        for seed in SEEDS
    ]
    cells = []
    for arm in ("LMCache", "vLLM", THEIRS, OURS):
        runs = [serve(rig(default()), prompts, arm) for prompts in batches]
        shares = {
            "GPU busy share": [run.compute_busy_s / run.finished_s for run in runs],
            "I/O busy share": [run.pipes[STORAGE][1] / run.finished_s for run in runs],
        }
        cells += [cell("5", arm, name, fmean(each), "", each=each) for name, each in shares.items()]
    return cells


def figure_6() -> Sequence[Cell]:
    """One request of each length; over vLLM, as the text compares."""
    scene, cells = SCENARIOS["fig6"], []
    for tokens in scene["tokens"]:
        prompt = Prompt(0.0, tokens, scene["new_tokens"])
        seconds = {arm: serve(rig(default()), [prompt], arm).ttfts() for arm in ARMS}
        theirs, row = seconds[THEIRS], f"{tokens // 1000}K tokens"
        cells += [
            ratio("6", row, "TTFT speedup", seconds["vLLM"], theirs, "CacheFlow over vLLM"),
            null("6", row, seconds, "vLLM"),
            ratio("6", row, "over LMCache", seconds["LMCache"], theirs, "CacheFlow over LMCache"),
            ratio("6", row, "ours over CacheFlow", theirs, seconds[OURS], OURS),
        ]
    return cells


def ablation() -> Sequence[Cell]:
    """Two pipeline stages that restore each by itself, or one after the other. Each stage has a
    link of its own.
    """
    scene = SCENARIOS["ablation"]
    place = default(hardware=scene["hardware"], model=scene["model"])
    count = scene["stages"]

    def means(stages: Stages, arm: str) -> list[float]:
        return _alone(
            dataclasses.replace(place, stages=stages), scene["workload"], scene["requests"], arm
        )

    with_3d, without = means(parallel(count), THEIRS), means(sequential(count), THEIRS)
    recompute = means(sequential(count), "vLLM")
    reading = f"{scene['workload']}-like lengths, one at a time"
    seconds = {"two stages with 3D": with_3d, "two stages without 3D": without}
    return [
        *(
            cell("7", row, "restoration seconds", fmean(each), "s", reading, each)
            for row, each in seconds.items()
        ),
        ratio("7", "without 3D over 3D", "ratio", without, with_3d, reading),
        ratio("7", "vLLM over without 3D", "ratio", recompute, without, reading),
    ]


def _alone(place: Place, workload: str, requests: int, arm: str) -> list[float]:
    """Mean seconds of each draw. Its requests come one at a time, so that none waits."""
    return [
        fmean(
            serve(rig(place), [Prompt(0.0, *one)], arm).ttfts()[0]
            for one in sample(workload, requests, seed)
        )
        for seed in SEEDS
    ]


def bandwidths() -> Sequence[Cell]:
    """SWE-Bench at 40 and 80 Gbps."""
    scene, cells = SCENARIOS["bandwidths"], []
    for gbps in scene["gbps"]:
        place = Place(scene["hardware"], scene["model"], gbps)
        cells += loaded("7b", f"H100 {scene['workload']} {gbps:g} Gbps", place, scene["workload"])
    return cells


def figure_8() -> Sequence[Cell]:
    """SWE-Bench on other machines, under load and one request at a time."""
    cells = []
    for name, scene in SCENARIOS["fig8"].items():
        place = Place(
            scene["hardware"],
            scene["model"],
            SCENARIOS["default"]["gbps"],
            parallel(scene["stages"]) if scene["stages"] > 1 else ONE,
            scene["weight_scale"],
        )
        cells += loaded("8", f"{name} SWE-Bench 10 Gbps", place, "SWE-Bench")
        seconds = {arm: _alone(place, "SWE-Bench", scene["alone"], arm) for arm in ARMS}
        cells += speedups("8", f"{name} SWE-Bench 10 Gbps, one at a time", seconds)
    return cells


def figure_9() -> Sequence[Cell]:
    """Batches whose requests arrive together; the printed range beside the speedup over vLLM."""
    cells = []
    for batch in SCENARIOS["fig9"]["batches"]:
        runs, row = batch_runs(batch), f"batch {batch}"
        seconds = {arm: [fmean(run) for run in mine] for arm, mine in runs.items()}
        last = {arm: [max(run) for run in mine] for arm, mine in runs.items()}
        theirs = seconds[THEIRS]
        cells += [
            ratio("9", row, "TTFT speedup", seconds["vLLM"], theirs, "CacheFlow over vLLM"),
            *(
                one
                for one in speedups("9", row, seconds)
                if one.column not in ("TTFT speedup", "over vLLM")
            ),
            null("9", row, seconds, "vLLM"),
            ratio(
                "9", row, "last request, over Cake", last["Cake"], last[THEIRS],
                "CacheFlow over Cake",
            ),
        ]  # fmt: skip
        for order in ORDERS:
            other = seconds[f"{OURS}, {order} first"]
            cells.append(
                ratio("9", row, f"ours over I/O {order} first", other, seconds[OURS], OURS)
            )
    return cells


@cache
def batch_runs(batch: int) -> Mapping[str, tuple[tuple[float, ...], ...]]:
    """Seconds to first token of every request, per arm and seed."""
    scene = SCENARIOS["fig9"]
    place = rig(default(hardware=scene["hardware"], model=scene["model"]))
    drawn = [
        [Prompt(0.0, *one) for one in sample(scene["workload"], batch, seed)] for seed in SEEDS
    ]
    arms = (*ARMS, *(f"{OURS}, {order} first" for order in ORDERS))
    return {
        arm: tuple(tuple(serve(place, prompts, arm).ttfts()) for prompts in drawn) for arm in arms
    }


FITTED = Fitted(parameters=0, numbers=0)

TABLES: Tables = {
    "1": cacheflow_model.figure_1,
    "eq": cacheflow_model.equations,
    "3": cacheflow_model.figure_3,
    "map": cacheflow_model.break_even,
    "4": figure_4,
    "5": figure_5,
    "6": figure_6,
    "7": ablation,
    "7b": bandwidths,
    "8": figure_8,
    "9": figure_9,
}
