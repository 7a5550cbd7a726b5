"""CacheFlow's sections 2 and 3 in numbers: what its cost model implies, its equations run, and
where layers beat tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from sgl_kvtier.lab.papers.cacheflow.cells import THEIRS, cell
from sgl_kvtier.lab.papers.cacheflow.rig import (
    ONE,
    SCENARIOS,
    Place,
    Prompt,
    Rig,
    Stages,
    default,
    l_delta,
    load_s_per_token,
    parallel,
    rig,
    serve,
)
from sgl_kvtier.lab.papers.cacheflow.splits import layer_split, token_split
from sgl_kvtier.lab.sim.cells import Cell
from sgl_kvtier.lab.sim.costs import StepCost
from sgl_kvtier.lab.sim.hardware import load_model

# --- section 2: what the cost model must agree with -----------------------------------------------


def figure_1() -> Sequence[Cell]:
    """KV sizes, and recompute against I/O for one long prompt."""
    tokens, big = SCENARIOS["fig1"]["tokens"], SCENARIOS["fig1"]["big_model"]
    sizes = {name: load_model(name).kv_bytes_per_token for name in SCENARIOS["fig1"]["models"]}
    cells = [
        cell("1", f"{name} {tokens} tokens", "KV gigabytes", size * tokens / 1e9, "GB")
        for name, size in (*sizes.items(), (big["name"], big["kv_bytes_per_token"]))
    ]
    for name, size in sizes.items():
        place = default(model=name)
        long_s = _recompute_seconds(place, tokens)
        cells.append(cell("1", f"H100 {tokens} tokens", "recompute seconds", long_s, "s", name))
        for gbps, faster in ((80.0, True), (10.0, False)):
            word = "faster" if faster else "slower"
            holds = (tokens * size * 8 / (gbps * 1e9) < long_s) == faster
            cells.append(
                cell("1", f"{gbps:g} Gbps", f"I/O {word} than recompute", float(holds), "", name)
            )
        ratio = _recompute_seconds(place, 2000, 2048) / _recompute_seconds(place, 500, 2048)
        cells.append(
            cell(
                "1",
                "2000 tokens over 500 tokens",
                "recompute time ratio",
                ratio,
                "x",
                f"{name}, one step",
            )
        )
    return cells


def _recompute_seconds(place: Place, tokens: int, chunk_tokens: int | None = None) -> float:
    return (
        serve(rig(place), [Prompt(0.0, 0, tokens)], "vLLM", chunk_tokens=chunk_tokens)
        .requests[0]
        .ttft_s
    )


# --- Eq. 1 and 2 ----------------------------------------------------------------------------------


def equations() -> Sequence[Cell]:
    """T* and T*/S, run: a model whose compute costs the same everywhere, as the equations
    assume.
    """
    cells = []
    for name, ratio in SCENARIOS["eq"]["ratios"].items():
        seconds = _ideal_seconds(ratio, ONE)
        scene = SCENARIOS["eq"]
        compute_s = scene["tokens"] * scene["per_token_s"]
        least_s = compute_s * compute_s * ratio / (compute_s + compute_s * ratio)
        cells.append(cell("eq", f"Eq. 1 {name}", "time over T*", seconds / least_s))
    whole = _ideal_seconds(1.0, ONE)
    for name, count in SCENARIOS["eq"]["stages"].items():
        part = _ideal_seconds(1.0, parallel(count))
        cells.append(cell("eq", f"Eq. 2 {name} stages", "time over one stage", part / whole))
    return cells


def _ideal_seconds(ratio: float, stages: Stages) -> float:
    """One restoration where loading all takes `ratio` times computing all; small pages, so that the
    split is fine.
    """
    scene = SCENARIOS["eq"]
    shape = load_model("Qwen3-8B")
    io_s = scene["tokens"] * scene["per_token_s"] * ratio
    gbps = scene["tokens"] * shape.kv_bytes_per_token * 8e-9 / io_s
    base = rig(default(gbps=gbps, stages=stages))
    cost = StepCost(0.0, scene["per_token_s"] * stages.compute)
    ideal = Rig(
        base.hardware.with_route(next(iter(base.hardware.routes)), latency_s=0.0),
        base.model,
        cost,
        base.layers,
    )
    page, chunk = scene["page_tokens"], scene["chunk_tokens"]
    result = serve(
        ideal, [Prompt(0.0, scene["tokens"], 1)], THEIRS, page_tokens=page, chunk_tokens=chunk
    )
    return result.requests[0].ttft_s


# --- Figure 3: tokens or layers -------------------------------------------------------------------


def crossover(hardware: str, model: str, gbps: float) -> int | None:
    """L_delta in tokens."""
    found = l_delta(rig(Place(hardware, model, gbps)), SCENARIOS["engine"]["chunk_tokens"])
    return int(found) if math.isfinite(found) else None


def axis_seconds(
    hardware: str, model: str, gbps: float, tokens: int, chunk: int | None = None
) -> tuple[float, float]:
    """Seconds of a prefix restored by tokens, in chunks of `chunk`, and by layers."""
    place = rig(Place(hardware, model, gbps))
    load_s = tokens * load_s_per_token(place)
    chunk = chunk or SCENARIOS["engine"]["chunk_tokens"]
    by_token = token_split(place.cost, tokens, load_s, chunk, SCENARIOS["fig3"]["unit_tokens"])[1]
    return by_token, layer_split(place.cost, tokens, load_s, place.layers)[1]


def figure_3() -> Sequence[Cell]:
    """The crossover per machine, model and bandwidth. The paper's only number is "a few hundred
    tokens".
    """
    scene, cells = SCENARIOS["fig3"], []
    for hardware, model, gbps in itertools.product(
        scene["hardware"], scene["models"], scene["gbps"]
    ):
        tokens = crossover(hardware, model, gbps)
        ours = None if tokens is None else float(tokens)
        reading = "" if tokens is not None else f"none up to {scene['longest']} tokens"
        row, column = f"{model} on {hardware}", f"{gbps:g} Gbps"
        cells.append(Cell("cacheflow 3", row, column, None, ours, "tokens", reading=reading))
    return cells


def break_even() -> Sequence[Cell]:
    """What splitting by layers is worth over splitting by tokens, by length and size of chunk."""
    scene = SCENARIOS["map"]
    cells = []
    for model, gbps, tokens, chunk in itertools.product(
        scene["models"], scene["gbps"], scene["tokens"], scene["chunk_tokens"]
    ):
        by_token, by_layer = axis_seconds(scene["hardware"], model, gbps, tokens, chunk)
        row, column = f"{model}, {gbps:g} Gbps, {tokens} tokens", f"chunks of {chunk}"
        reading = "seconds by tokens over seconds by layers"
        cells.append(
            Cell("cacheflow map", row, column, None, by_token / by_layer, "x", reading=reading)
        )
    return cells
