"""CacheFlow's sections 2 and 3 in numbers: what its cost model implies, its equations run, and
where layers beat tokens.
"""

from __future__ import annotations

import itertools
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
    learned,
    parallel,
    rig,
    serve,
)
from sgl_kvtier.lab.papers.cacheflow.splits import crossover_tokens, layer_split, token_split
from sgl_kvtier.lab.sim.cells import Cell
from sgl_kvtier.lab.sim.costs import StepCost
from sgl_kvtier.lab.sim.hardware import load_model
from sgl_kvtier.policy.learned.cost import PrefillCost

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
        base.hardware.with_route(next(iter(base.hardware.routes)), latency_s=0.0), base.model, cost
    )
    page, chunk = scene["page_tokens"], scene["chunk_tokens"]
    result = serve(
        ideal, [Prompt(0.0, scene["tokens"], 1)], THEIRS, page_tokens=page, chunk_tokens=chunk
    )
    return result.requests[0].ttft_s


# --- Figure 3: tokens or layers -------------------------------------------------------------------


def crossover(hardware: str, model: str, gbps: float) -> int | None:
    """L_delta: from this many tokens on splitting by tokens is no slower
    than by layers.
    """
    scene, engine = SCENARIOS["fig3"], SCENARIOS["engine"]
    shape = load_model(model)
    return crossover_tokens(
        axis_cost(hardware, model),
        shape.kv_bytes_per_token * 8 / (gbps * 1e9),
        shape.layers,
        engine["chunk_tokens"],
        scene["unit_tokens"],
        scene["longest"],
    )


def axis_cost(hardware: str, model: str) -> PrefillCost:
    """The price of a chunk for both ways of splitting."""
    return learned(rig(Place(hardware, model, 1.0)).cost, SCENARIOS["engine"]["chunk_tokens"])


def axis_seconds(hardware: str, model: str, gbps: float, tokens: int) -> tuple[float, float]:
    """Seconds of a prefix restored by tokens and by layers."""
    shape, cost, engine = load_model(model), axis_cost(hardware, model), SCENARIOS["engine"]
    load_s = tokens * shape.kv_bytes_per_token * 8 / (gbps * 1e9)
    unit = SCENARIOS["fig3"]["unit_tokens"]
    by_token = token_split(cost, tokens, load_s, engine["chunk_tokens"], unit)[1]
    return by_token, layer_split(cost, tokens, load_s, shape.layers)[1]


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
