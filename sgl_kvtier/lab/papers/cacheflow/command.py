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
from sgl_kvtier.lab.papers.cacheflow.cells import OURS, THEIRS, cell, null, speedups
from sgl_kvtier.lab.papers.cacheflow.rig import (
    ARMS,
    ONE,
    ORDERS,
    SCENARIOS,
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
def ttfts(place: Place, workload: str) -> Mapping[str, tuple[float, ...]]:
    """Seconds to first token of every request per arm, over all seeds, requests arriving at
    random.
    """
    rig_ = rig(place)
    runs = [poisson(workload, rig_, seed) for seed in SCENARIOS["arrivals"]["seeds"]]
    return {
        arm: tuple(ttft for prompts in runs for ttft in serve(rig_, prompts, arm).ttfts())
        for arm in ARMS
    }


def loaded(table: str, row: str, place: Place, workload: str) -> list[Cell]:
    """The arms' means, and how far CacheFlow's P90 is below that of the better single resource."""
    seconds = ttfts(place, workload)
    cells = speedups(table, row, {arm: fmean(values) for arm, values in seconds.items()})
    tail = {arm: sorted(values)[int(0.9 * len(values))] for arm, values in seconds.items()}
    best = min(tail[arm] for arm in SINGLE)
    return [*cells, cell(table, row, "P90 over best single", best / tail[THEIRS], reading=THEIRS)]


# --- section 4: end to end ------------------------------------------------------------------------


def figure_4() -> Sequence[Cell]:
    """Three workloads on the default machine."""
    return [c for name in SCENARIOS["workloads"] for c in loaded("4", name, default(), name)]


def figure_5() -> Sequence[Cell]:
    """Busy shares while a batch of SWE-Bench prefixes is restored."""
    prompts = [Prompt(0.0, *one) for one in sample("SWE-Bench", 16, 1)]
    cells = []
    for arm in ("LMCache", "vLLM", THEIRS, OURS):
        result = serve(rig(default()), prompts, arm)
        io_share = result.pipes[STORAGE][1] / result.finished_s
        cells.append(
            cell("5", arm, "GPU busy share", result.compute_busy_s / result.finished_s, "")
        )
        cells.append(cell("5", arm, "I/O busy share", io_share, ""))
    return cells


def figure_6() -> Sequence[Cell]:
    """One request of each length; over vLLM, as the text compares."""
    scene, cells = SCENARIOS["fig6"], []
    for tokens in scene["tokens"]:
        seconds = {
            arm: serve(rig(default()), [Prompt(0.0, tokens, scene["new_tokens"])], arm).ttfts()[0]
            for arm in ARMS
        }
        row = f"{tokens // 1000}K tokens"
        cells.append(
            cell(
                "6",
                row,
                "TTFT speedup",
                seconds["vLLM"] / seconds[THEIRS],
                reading="CacheFlow over vLLM",
            )
        )
        cells.append(null("6", row, seconds, "vLLM"))
        cells.append(
            cell(
                "6",
                row,
                "over LMCache",
                seconds["LMCache"] / seconds[THEIRS],
                reading="CacheFlow over LMCache",
            )
        )
        cells.append(
            cell("6", row, "ours over CacheFlow", seconds[THEIRS] / seconds[OURS], reading=OURS)
        )
    return cells


def ablation() -> Sequence[Cell]:
    """Two pipeline stages that restore each by itself, or one after the other. Each stage has a
    link of its own.
    """
    scene = SCENARIOS["ablation"]
    place = default(hardware=scene["hardware"], model=scene["model"])
    prompts = [
        Prompt(0.0, *one) for one in sample(scene["workload"], scene["requests"], scene["seed"])
    ]
    count = scene["stages"]

    def mean(stages: Stages, arm: str) -> float:
        # One at a time: what is compared is the latency of a restoration, not queueing.
        return fmean(
            serve(rig(dataclasses.replace(place, stages=stages)), [prompt], arm).ttfts()[0]
            for prompt in prompts
        )

    with_3d, without = mean(parallel(count), THEIRS), mean(sequential(count), THEIRS)
    recompute = mean(sequential(count), "vLLM")
    reading = f"{scene['workload']}-like lengths, one at a time"
    return [
        cell("7", "two stages with 3D", "restoration seconds", with_3d, "s", reading),
        cell("7", "two stages without 3D", "restoration seconds", without, "s", reading),
        cell("7", "without 3D over 3D", "ratio", without / with_3d, "x", reading),
        cell("7", "vLLM over without 3D", "ratio", recompute / without, "x", reading),
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
        alone = [Prompt(0.0, *one) for one in sample("SWE-Bench", scene["alone"], 1)]
        seconds = {
            arm: fmean(serve(rig(place), [prompt], arm).ttfts()[0] for prompt in alone)
            for arm in ARMS
        }
        cells += speedups("8", f"{name} SWE-Bench 10 Gbps, one at a time", seconds)
    return cells


def figure_9() -> Sequence[Cell]:
    """Batches whose requests arrive together; the printed range beside the speedup over vLLM."""
    cells = []
    for batch in SCENARIOS["fig9"]["batches"]:
        runs, row = batch_runs(batch), f"batch {batch}"
        seconds = {arm: fmean(t for run in mine for t in run) for arm, mine in runs.items()}
        last = {arm: fmean(max(run) for run in mine) for arm, mine in runs.items()}
        cells.append(
            cell(
                "9",
                row,
                "TTFT speedup",
                seconds["vLLM"] / seconds[THEIRS],
                reading="CacheFlow over vLLM",
            )
        )
        cells += [
            one
            for one in speedups("9", row, seconds)
            if one.column not in ("TTFT speedup", "over vLLM")
        ]
        cells.append(null("9", row, seconds, "vLLM"))
        cells.append(
            cell(
                "9",
                row,
                "last request, over Cake",
                last["Cake"] / last[THEIRS],
                reading="CacheFlow over Cake",
            )
        )
        for order in ORDERS:
            arm = f"{OURS}, {order} first"
            cells.append(
                cell(
                    "9",
                    row,
                    f"ours over I/O {order} first",
                    seconds[arm] / seconds[OURS],
                    reading="kvtier",
                )
            )
    return cells


@cache
def batch_runs(batch: int) -> Mapping[str, tuple[tuple[float, ...], ...]]:
    """Seconds to first token of every request, per arm and seed."""
    scene = SCENARIOS["fig9"]
    place = rig(default(hardware=scene["hardware"], model=scene["model"]))
    drawn = [
        [Prompt(0.0, *one) for one in sample(scene["workload"], batch, seed)]
        for seed in scene["seeds"]
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
