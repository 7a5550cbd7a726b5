"""Machines, workloads and arms of CacheFlow's experiments. What the paper leaves open is in
cacheflow.json.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.papers.cacheflow.axes import TwoAxes
from sgl_kvtier.lab.papers.cacheflow.splits import crossover_tokens
from sgl_kvtier.lab.rules import CacheFlow, Cake, LongestFirst, ShortestFirst
from sgl_kvtier.lab.sim.baselines import RecomputeOnly
from sgl_kvtier.lab.sim.costs import StepCost
from sgl_kvtier.lab.sim.hardware import (
    Hardware,
    ModelShape,
    assumed_step_cost,
    load_hardware,
    load_model,
)
from sgl_kvtier.lab.sim.links import Pipe
from sgl_kvtier.lab.sim.requests import ByLayers, SimRequest, SimResult
from sgl_kvtier.lab.sim.run import simulate
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.lab.workload.catalogue import trace_files
from sgl_kvtier.lab.workload.encoder import ByteEncoder, PromptTokens
from sgl_kvtier.lab.workload.session import Context
from sgl_kvtier.lab.workload.source import load_sessions
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import Planner
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

SCENARIOS: dict[str, Any] = json.loads(
    Path(__file__).with_name("cacheflow.json").read_text("utf-8")
)

SEEDS: tuple[int, ...] = tuple(SCENARIOS["seeds"])
"""Of every draw of requests."""

BY_TOKENS = "CacheFlow by tokens"
"""CacheFlow without its split by layers."""
ARMS = ("vLLM", "LMCache", "Cake", "CacheFlow", BY_TOKENS, "kvtier")
SINGLE = ("vLLM", "LMCache")
"""Those that use one resource. SGLang's HiCache is not among the arms: with all pages in one remote
tier it is load-only.
"""

ORDERS = {"longest": LongestFirst, "shortest": ShortestFirst}
"""Variants of ours that load for another request first: arms "kvtier, longest first", ..."""

STORAGE = "storage"

_HORIZON_S = 0.02
"""Seconds ahead for which loads of the papers' rules are started: little more than a step. Their
loaders take one chunk after the other.
"""
_VOCABULARY = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Rig:
    """One server: its machine with one link, the model, and what steps cost."""

    hardware: Hardware
    model: ModelShape
    cost: StepCost
    layers: int
    """Of one stage."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: tokens of its stored prefix and of what is new."""

    arrival_s: float
    prefix: int
    new: int


@dataclass(frozen=True, slots=True)
class Stages:
    """A pipeline of `count` stages, seen from one of them, since all do the same. `compute` and
    `bytes`: what of the model's work and KV falls to this stage while the others do theirs.
    """

    count: int = 1
    compute: float = 1.0
    bytes: float = 1.0


ONE = Stages()


def parallel(count: int) -> Stages:
    """Every stage restores its own layers by itself (section 3.2)."""
    return Stages(count, 1 / count, 1 / count)


def sequential(count: int) -> Stages:
    """A chunk passes the stages one after the other. Each stage loads its own layers over a link of
    its own.
    """
    return Stages(count, 1.0, 1 / count)


@dataclass(frozen=True, slots=True)
class Place:
    """Where something runs. `weight_scale`: bytes of the weights against 16 bit."""

    hardware: str
    model: str
    gbps: float
    stages: Stages = ONE
    weight_scale: float = 1.0


def default(**changes: Any) -> Place:
    """Section 4.1's default, or a change of it."""
    scene = SCENARIOS["default"]
    return dataclasses.replace(Place(scene["hardware"], scene["model"], scene["gbps"]), **changes)


def rig(place: Place) -> Rig:
    """Profiles with one link to storage. A step's fixed part does not become less with fewer layers
    per stage.
    """
    machine, shape = load_hardware(place.hardware), load_model(place.model)
    whole, engine, stages = assumed_step_cost(machine, shape), SCENARIOS["engine"], place.stages
    cost = dataclasses.replace(
        whole,
        per_token_s=whole.per_token_s * stages.compute,
        per_token_position_s=whole.per_token_position_s * stages.compute,
        floor_s=whole.floor_s * stages.compute * place.weight_scale,
    )
    route = dataclasses.replace(
        machine.routes[Link.STORAGE_TO_DEVICE],
        pipes=(STORAGE,),
        latency_s=engine["load_latency_s"],
        depth=engine["load_depth"],
    )
    return Rig(
        dataclasses.replace(
            machine,
            pipes={STORAGE: Pipe(place.gbps * 1e9 / 8)},
            routes={Link.STORAGE_TO_DEVICE: route},
        ),
        dataclasses.replace(
            shape, kv_bytes_per_token=round(shape.kv_bytes_per_token * stages.bytes)
        ),
        cost,
        shape.layers // stages.count,
    )


def learned(cost: StepCost, chunk_tokens: int) -> PrefillCost:
    """A planner's knowledge of these steps: whole chunks cost their true time. The floor, where it
    is above, counts as fixed.
    """
    below_s = max(0.0, cost.floor_s - cost.per_token_s * chunk_tokens)
    return PrefillCost(cost.fixed_s + below_s, cost.per_token_s, cost.per_token_position_s)


def planner_of(arm: str, rig_: Rig, page_tokens: int, chunk_tokens: int) -> Planner:
    """The arm's planner: a baseline, or the real one by the arm's rule."""
    if arm == "vLLM":
        return RecomputeOnly()
    engine = EngineShape(
        page_tokens, page_tokens * rig_.model.kv_bytes_per_token, chunk_tokens, rig_.model.layers
    )
    profile = {
        "prefill": dataclasses.asdict(learned(rig_.cost, chunk_tokens)),
        "links": {Link.STORAGE_TO_DEVICE.value: rig_.hardware.pipes[STORAGE].bytes_per_s},
    }
    named: dict[str, type[Rules]] = {"Cake": Cake, "CacheFlow": CacheFlow, BY_TOKENS: CacheFlow}
    named |= {f"kvtier, {order} first": rules for order, rules in ORDERS.items()}
    rules = named.get(arm, Rules)
    config = PolicyConfig(
        restore="load" if arm == "LMCache" else "auto",
        min_restore_tokens=0,
        load_tokens=max(SCENARIOS["engine"]["load_tokens"], page_tokens),
        load_deadline_s=60.0,
    )
    return make_planner(config, engine, profile, rules(load_horizon_s=_HORIZON_S))


def serve(
    rig_: Rig,
    prompts: Sequence[Prompt],
    arm: str,
    *,
    page_tokens: int | None = None,
    chunk_tokens: int | None = None,
) -> SimResult:
    """One run; every request yields one token."""
    page = page_tokens or SCENARIOS["engine"]["page_tokens"]
    chunk = chunk_tokens or SCENARIOS["engine"]["chunk_tokens"]
    threshold = l_delta(rig_, chunk) if arm == "CacheFlow" else 0
    requests = [
        _request(f"r{number:03d}", prompt, page, rig_, threshold)
        for number, prompt in enumerate(prompts)
    ]
    server = ServerSpec(page_tokens=page, step_tokens=chunk, mixed=True, write_down=False)
    planner = planner_of(arm, rig_, page, chunk)
    if any(one.by_layers for one in requests):
        token_s = load_s_per_token(rig_)
        planner = TwoAxes(planner, requests, page, rig_.cost, token_s, _HORIZON_S)
    return simulate(planner, rig_.hardware, rig_.model, requests, server=server, cost=rig_.cost)


def _request(rid: str, prompt: Prompt, page: int, rig_: Rig, threshold: float) -> SimRequest:
    """A prompt whose prefix is restored by layers where it is shorter than the threshold."""
    prefix, new = prompt.prefix // page * page, max(1, prompt.new)
    own = ByLayers(prefix, rig_.layers) if page <= prefix < threshold else None
    units = prefix // page if own is None else own.layers
    cached = ((Span(0, units), Tier.STORAGE),) if units else ()
    return SimRequest(rid, prompt.arrival_s, units * page + new, cached=cached, by_layers=own)


def load_s_per_token(rig_: Rig) -> float:
    """Seconds that a token's KV takes over the link."""
    return rig_.model.kv_bytes_per_token / rig_.hardware.pipes[STORAGE].bytes_per_s


@cache
def _l_delta(cost: StepCost, token_s: float, layers: int, chunk: int) -> float:
    scene = SCENARIOS["fig3"]
    found = crossover_tokens(cost, token_s, layers, chunk, scene["unit_tokens"], scene["longest"])
    return math.inf if found is None else found


def l_delta(rig_: Rig, chunk: int) -> float:
    """The tokens from which on a prefix is restored by tokens, as CacheFlow profiles it."""
    return _l_delta(rig_.cost, load_s_per_token(rig_), rig_.layers, chunk)


# --- workloads ------------------------------------------------------------------------------------


@cache
def lengths(workload: str) -> tuple[tuple[int, int], ...]:
    """(prefix, new) tokens of many requests of a workload; of traces, those of all calls but first
    ones.
    """
    scene = SCENARIOS["workloads"][workload]
    if "trace" in scene:
        if scene["trace"] not in trace_files():
            raise TraceError(
                f"lengths of {workload} come from the trace {scene['trace']}, which was not found: "
                "put its file into ../shared/traces (docs/manual/workloads.md says where it is "
                "published). No other sessions take its place, since the cells would differ"
            )
        return _lengths_in(str(scene["trace"]), scene["sessions"])
    rng = random.Random(0)
    drawn = (
        rng.lognormvariate(0, scene["prefix_sigma"]) * scene["prefix_median"] for _ in range(2000)
    )
    return tuple((min(int(prefix), scene["most"]), scene["new_tokens"]) for prefix in drawn)


def sample(workload: str, count: int, seed: int) -> list[tuple[int, int]]:
    """`count` of the workload's pairs of lengths, drawn at random."""
    return random.Random(seed).choices(lengths(workload), k=count)


def poisson(workload: str, rig_: Rig, seed: int) -> list[Prompt]:
    """Requests that arrive at random, at the stated load of a server that recomputes everything."""
    scene = SCENARIOS["arrivals"]
    drawn = sample(workload, scene["requests"], seed)
    chunk = SCENARIOS["engine"]["chunk_tokens"]
    price = learned(rig_.cost, chunk)
    per_s = scene["load"] / fmean(
        price.range_seconds(0, prefix + new, chunk) for prefix, new in drawn
    )
    rng, now, prompts = random.Random(seed), 0.0, []
    for prefix, new in drawn:
        now += rng.expovariate(per_s)
        prompts.append(Prompt(now, prefix, new))
    return prompts


def _lengths_in(sessions_of: str, sessions: int) -> tuple[tuple[int, int], ...]:
    encoder = ByteEncoder(_VOCABULARY)
    calls = []
    for session in load_sessions(sessions_of, limit=sessions, encoder=encoder).sessions:
        tokens = PromptTokens(encoder)
        for _, prompt in Context(session).calls():
            same = tokens.show(prompt)
            if same:
                calls.append((same, len(tokens) - same))
    return tuple(calls)
