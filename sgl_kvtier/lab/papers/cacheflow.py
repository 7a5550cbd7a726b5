"""CacheFlow (arXiv 2604.25080): the numbers it prints, and those that its rule and ours give in the
simulator.

The paper prints ratios in its text, no tables, and few conditions. Machines and models are the
simulator's profiles with assumed step times; nothing is fitted. What the paper leaves open stands
beside the experiment. Compute is first come, first served in all arms, as in vLLM and SGLang. The
arms differ in what is loaded, and when. SGLang's HiCache is not among them: with all pages in one
remote tier it is loading alone.

Not simulated: boundary activations (taken as present), and several requests' fronts in one step
(Algorithm 1, line 11). Where L_delta's formula would give a length at which both ways load
everything, it is passed over.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import fmean

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.rules import CacheFlow
from sgl_kvtier.lab.sim.baselines import RecomputeOnly
from sgl_kvtier.lab.sim.cells import Agreement, Cell, Fitted, Tables
from sgl_kvtier.lab.sim.hardware import (
    STORAGE,
    Batch,
    Hardware,
    ModelShape,
    StepCost,
    assumed_step_cost,
    load_hardware,
    load_model,
)
from sgl_kvtier.lab.sim.requests import ByLayers, SimRequest, SimResult
from sgl_kvtier.lab.sim.run import simulate
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.lab.workload.catalogue import default_folder, trace_files
from sgl_kvtier.lab.workload.encoder import PromptTokens, wide_encoder
from sgl_kvtier.lab.workload.session import Context
from sgl_kvtier.lab.workload.source import load_sessions
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import (
    ChunkStarted,
    Compute,
    Fact,
    Load,
    Mode,
    PagesLost,
    Planner,
    RequestFinished,
    RestoreOffered,
    RestoreStart,
    StepPlan,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

# --- what the paper prints ------------------------------------------------------------------------

_SPEEDUP = "TTFT speedup"
_PRINTED: Mapping[tuple[str, str, str], tuple[float, float]] = {
    # Section 4.2 and Figure 4: "a 1.1x-1.7x reduction in TTFT compared to existing advances".
    ("4", "WildChat", _SPEEDUP): (1.1, 1.7),
    ("4", "LMSys-Chat", _SPEEDUP): (1.1, 1.7),
    ("4", "SWE-Bench", _SPEEDUP): (1.1, 1.7),
    # Section 4.2 and Figure 5.
    ("5", "LMCache", "GPU busy share"): (0.10, 0.10),
    ("5", "vLLM", "GPU busy share"): (0.91, 0.91),
    ("5", "CacheFlow", "GPU busy share"): (0.88, 0.88),
    ("5", "CacheFlow", "I/O busy share"): (0.78, 0.78),
    # Section 4.3 and Figure 6: "from 6K to 30K ... widens from 1.1x to 1.7x".
    ("6", "6K tokens", _SPEEDUP): (1.1, 1.1),
    ("6", "30K tokens", _SPEEDUP): (1.7, 1.7),
    # Section 4.3 and Figure 7 (ablation): "0.21 s to 0.29 s (a 38% increase)"; the paper has two
    # Figures 7. "CacheFlow still outperforms vLLM by 24%".
    ("7", "two stages with 3D", "restoration seconds"): (0.21, 0.21),
    ("7", "two stages without 3D", "restoration seconds"): (0.29, 0.29),
    ("7", "without 3D over 3D", "ratio"): (1.38, 1.38),
    ("7", "vLLM over without 3D", "ratio"): (1.24, 1.32),
    # Section 4.3 and Figure 7 (bandwidths).
    ("7b", "H100 SWE-Bench 40 Gbps", _SPEEDUP): (1.7, 1.7),
    ("7b", "H100 SWE-Bench 80 Gbps", _SPEEDUP): (1.5, 1.5),
    # Section 4.3 and Figure 8.
    ("8", "2xL40S SWE-Bench 10 Gbps", _SPEEDUP): (1.6, 1.6),
    ("8", "A100 SWE-Bench 10 Gbps", _SPEEDUP): (1.5, 1.5),
    # Section 4.3 and Figure 9: "1.6x-2.6x across batch sizes", "more pronounced with a larger one".
    ("9", "batch 2", _SPEEDUP): (1.6, 1.6),
    ("9", "batch 4", _SPEEDUP): (1.6, 2.6),
    ("9", "batch 8", _SPEEDUP): (2.6, 2.6),
}
"""(figure, row, column) to the least and the most that the text says."""

FITTED = Fitted(parameters=0, numbers=0)
NULL_MODEL = {
    "4": Agreement(3, 0.0, 1.0),
    "6": Agreement(2, 0.169, 0.5),
    "7b": Agreement(2, 0.202, 0.0),
    "8": Agreement(2, 0.143, 0.5),
    "9": Agreement(3, 0.069, 0.667),
    "all": Agreement(12, 0.08, 0.583),
}
"""Eq. 1 on the ratio of the simulated vLLM and LMCache, without any planner, by figure. By
`lab/papers/cacheflow/cells.py` at commit 171f7e0.
"""

THEIRS, OURS = "CacheFlow", "kvtier"
SINGLE = ("vLLM", "LMCache")
"""Arms that use one resource."""
SEEDS = (1, 2, 3, 4, 5, 6)
"""Of every draw of requests."""


def _cell(
    table: str,
    row: str,
    column: str,
    ours: float,
    unit: str = "x",
    reading: str = "",
    each: Sequence[float] = (),
) -> Cell:
    """Ours beside what is printed for it, if anything is. Where the paper gives a range, the end of
    it nearer to ours counts, or ours inside it. `each` are the values of single draws.
    """
    low, high = _PRINTED.get((table, row, column), (None, None))
    published = None
    if low is not None and high is not None:
        published = round(min(max(ours, low), high), 4)
        if low < high:
            reading = "; ".join(filter(None, (f"printed {low:g} to {high:g}", reading)))
    spread = (round(min(each), 4), round(max(each), 4)) if len(each) > 1 else None
    name = f"cacheflow {table}"
    return Cell(name, row, column, published, round(ours, 4), unit, False, reading, spread)


def _ratio(
    table: str, row: str, column: str, over: Sequence[float], under: Sequence[float], reading: str
) -> Cell:
    """Mean seconds over mean seconds, and the same in each draw."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    return _cell(table, row, column, fmean(over) / fmean(under), reading=reading, each=each)


# --- machines -------------------------------------------------------------------------------------

_PAGE_TOKENS, _CHUNK_TOKENS, _LOAD_TOKENS = 64, 512, 128
"""Chunks: section 3.1. Loads: Cake section 5.1."""
_LOAD_LATENCY_S, _LOAD_DEPTH = 1e-4, 4
_GBPS = 10.0
"""Section 4.1: the default."""
_HORIZON_S = 0.02
"""Seconds ahead for which loads of the papers' rules are started: little more than a step. Their
loaders take one chunk after the other.
"""


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
    """Where something runs; the defaults are section 4.1's. `weight_scale`: bytes of the weights
    against 16 bit.
    """

    hardware: str = "H100"
    model: str = "Qwen3-8B"
    gbps: float = _GBPS
    stages: Stages = ONE
    weight_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Rig:
    """One server: its machine with one link, the model, what steps cost, and the layers of one
    stage.
    """

    hardware: Hardware
    model: ModelShape
    cost: StepCost
    layers: int

    @property
    def token_s(self) -> float:
        """Seconds that a token's KV takes over the link."""
        return self.model.kv_bytes_per_token / self.hardware.pipes[STORAGE].bytes_per_s


def rig(place: Place) -> Rig:
    """Profiles with one link to storage. A step's fixed part does not become less with fewer layers
    per stage.
    """
    machine, shape, stages = load_hardware(place.hardware), load_model(place.model), place.stages
    whole = assumed_step_cost(machine, shape)
    cost = dataclasses.replace(
        whole,
        per_token_s=whole.per_token_s * stages.compute,
        per_token_position_s=whole.per_token_position_s * stages.compute,
        floor_s=whole.floor_s * stages.compute * place.weight_scale,
    )
    return Rig(
        machine.with_storage_alone(place.gbps * 1e9 / 8, _LOAD_LATENCY_S, _LOAD_DEPTH),
        dataclasses.replace(
            shape, kv_bytes_per_token=round(shape.kv_bytes_per_token * stages.bytes)
        ),
        cost,
        shape.layers // stages.count,
    )


def _learned(cost: StepCost, chunk_tokens: int) -> PrefillCost:
    """A planner's knowledge of these steps: whole chunks cost their true time. The floor, where it
    is above, counts as fixed.
    """
    below_s = max(0.0, cost.floor_s - cost.per_token_s * chunk_tokens)
    return PrefillCost(cost.fixed_s + below_s, cost.per_token_s, cost.per_token_position_s)


def _planner(arm: str, rig_: Rig, page_tokens: int, chunk_tokens: int) -> Planner:
    """The arm's planner: a baseline, or the real one by the arm's rule."""
    if arm == "vLLM":
        return RecomputeOnly()
    engine = EngineShape(
        page_tokens, page_tokens * rig_.model.kv_bytes_per_token, chunk_tokens, rig_.model.layers
    )
    profile = {
        "prefill": dataclasses.asdict(_learned(rig_.cost, chunk_tokens)),
        "links": {Link.STORAGE_TO_DEVICE.value: rig_.hardware.pipes[STORAGE].bytes_per_s},
    }
    config = PolicyConfig(
        restore="load" if arm == "LMCache" else "auto",
        min_restore_tokens=0,
        load_tokens=max(_LOAD_TOKENS, page_tokens),
        load_deadline_s=60.0,
    )
    rules = CacheFlow if arm == THEIRS else Rules
    return make_planner(config, engine, profile, rules(load_horizon_s=_HORIZON_S))


# --- the choice between tokens and layers (section 3.1) -------------------------------------------

_UNIT_TOKENS, _LONGEST = 64, 32768


def layer_split(cost: StepCost, tokens: int, load_s: float, layers: int) -> tuple[int, float]:
    """Layer-wise restoration: layers below the cut are computed, the rest loaded from the top down.
    The cut and its seconds.

    Section 3.1 takes one pass over all tokens. So a prefix pays a step's fixed part and the reading
    of weights once, and only in proportion to the layers it computes.
    """
    compute_s = cost.seconds(Batch((Span(0, tokens),)))
    times = [
        max(cut / layers * compute_s, (layers - cut) / layers * load_s) for cut in range(layers + 1)
    ]
    return times.index(min(times)), min(times)


def token_seconds(cost: StepCost, tokens: int, load_s: float, chunk: int) -> float:
    """Seconds of token-wise restoration at the best split into whole units."""
    return min(
        max(chunks_seconds(cost, computed, chunk), load_s * (tokens - computed) / tokens)
        for computed in (*range(0, tokens, _UNIT_TOKENS), tokens)
    )


@lru_cache(maxsize=1 << 16)
def chunks_seconds(cost: StepCost, tokens: int, chunk: int) -> float:
    """Seconds of computing the first `tokens`, chunk by chunk."""
    if tokens <= 0:
        return 0.0
    start = (tokens - 1) // chunk * chunk
    return chunks_seconds(cost, start, chunk) + cost.seconds(Batch((Span(start, tokens),)))


@cache
def _l_delta(cost: StepCost, token_s: float, layers: int, chunk: int) -> float:
    for tokens in range(_UNIT_TOKENS, _LONGEST + 1, _UNIT_TOKENS):
        load_s = tokens * token_s
        cut, by_layer_s = layer_split(cost, tokens, load_s, layers)
        if cut and token_seconds(cost, tokens, load_s, chunk) <= by_layer_s:
            return tokens
    return math.inf


def l_delta(rig_: Rig, chunk: int = _CHUNK_TOKENS) -> float:
    """The tokens from which on a prefix is restored by tokens, as CacheFlow profiles it: the
    shortest for which that is no slower than by layers.
    """
    return _l_delta(rig_.cost, rig_.token_s, rig_.layers, chunk)


_NEVER_S = 1e9
"""A deadline nothing is late for."""
_STEPS_COVERED = 1.5
"""Loads are handed out for this many times the step that begins: the next ones come after it."""


@dataclass(slots=True)
class _Left:
    """What one request has left to restore, in units: layers, or pages of tokens."""

    tokens_each: float
    front: int
    back: int
    landed: int = 0

    @property
    def tokens(self) -> float:
        """Tokens that are neither computed nor taken by a load, in all layers."""
        return (self.back - self.front) * self.tokens_each


class TwoAxes:
    """Algorithm 1: prefixes from L_delta on are restored by tokens, by `inner`. Shorter ones, which
    `by_layers` names, are restored here: the forward pointer computes layer after layer for all
    tokens, the I/O pointer loads from the top layer down, and each layer is taken once. The link
    goes to the request with most tokens left to restore, whichever way it is split (line 7).
    """

    def __init__(
        self, inner: Planner, requests: Sequence[SimRequest], page_tokens: int, rig_: Rig
    ) -> None:
        self._inner = inner
        self._by_layers = {one.rid: one.by_layers for one in requests if one.by_layers is not None}
        self._new = {one.rid: one.prompt_tokens for one in requests}
        for rid, own in self._by_layers.items():
            self._new[rid] -= own.layers * page_tokens
        self._page_tokens = page_tokens
        self._cost = rig_.cost
        self._token_s = rig_.token_s
        self._layers: dict[str, _Left] = {}
        self._tokens: dict[str, _Left] = {}
        self._offered: list[str] = []
        self._loaded_at = 0.0

    def observe(self, fact: Fact) -> None:
        """Facts about requests that are restored by layers stay here."""
        rid = getattr(fact, "rid", "")
        own = self._by_layers.get(rid)
        if own is None:
            self._inner.observe(fact)
            self._note_tokens(rid, fact)
        elif isinstance(fact, RestoreOffered):
            self._layers[rid] = _Left(own.tokens / own.layers, 0, own.layers)
            self._offered.append(rid)
        elif isinstance(fact, TransferDone):
            self._layers[rid].landed += len(fact.span)
        elif isinstance(fact, ChunkStarted) and rid in self._layers:
            self._layers[rid].front = fact.tokens.stop // self._page_tokens
            if self._layers[rid].front >= own.layers:
                del self._layers[rid]
        assert own is None or not isinstance(fact, PagesLost), "this link loses nothing"

    def _note_tokens(self, rid: str, fact: Fact) -> None:
        if isinstance(fact, RestoreOffered):
            self._tokens[rid] = _Left(self._page_tokens, fact.resident, fact.pages)
        left = self._tokens.get(rid)
        if left is not None and isinstance(fact, ChunkStarted):
            left.front = fact.tokens.stop // self._page_tokens
        if left is not None and (isinstance(fact, RequestFinished) or left.front >= left.back):
            del self._tokens[rid]

    def step(self, view: StepView) -> StepPlan:
        """Both plans: one request computes, the link goes to the longest first."""
        mine = self._next_to_compute(view)
        compute = None if mine is None else self._compute(mine)
        if compute is None:
            inner = self._inner.step(view)
        else:
            # What computes now is as good as fresh: it is before all that `inner` restores.
            own = self._by_layers[compute.rid]
            tokens = own.tokens // own.layers if compute.tokens else self._new[compute.rid]
            fresh = view.fresh_tokens + tokens
            inner = self._inner.step(dataclasses.replace(view, slot_open=False, fresh_tokens=fresh))
        for load in inner.loads:
            if load.rid in self._tokens:
                self._tokens[load.rid].back = load.span.start
        starts = tuple(RestoreStart(rid, Mode.BOTH, "by layers") for rid in self._offered)
        self._offered = []
        computes = inner.computes if compute is None else (compute,)
        loads = self._loads(view.now, self._step_s(computes, view), mine)
        longest = max((left.tokens for left in self._tokens.values()), default=0.0)
        first = any(self._layers[load.rid].tokens >= longest for load in loads)
        return dataclasses.replace(
            inner,
            starts=inner.starts + starts,
            loads=loads + inner.loads if first else inner.loads + loads,
            computes=computes,
        )

    def _next_to_compute(self, view: StepView) -> str | None:
        """The request by layers whose turn it is; None while another's is."""
        if view.slot is not None:
            return view.slot if view.slot in self._layers else None
        if not view.slot_open:
            return None
        rids = (rid for rid in view.waiting if rid in self._layers or rid in self._tokens)
        first = next(rids, None)
        return first if first in self._layers else None

    def _compute(self, rid: str) -> Compute:
        """The next layer, or nothing while the rest is being loaded; in the end the rest of the
        prompt.
        """
        left, layers = self._layers[rid], self._by_layers[rid].layers
        if left.front < left.back:
            return Compute(rid, Span(left.front, left.front), self._page_tokens)
        if left.landed == layers - left.back:
            return Compute(rid, Span(left.front, layers), None)
        return Compute(rid, Span(left.front, left.front), 0)

    def _step_s(self, computes: Sequence[Compute], view: StepView) -> float:
        """Seconds of the step that begins."""
        seconds = 0.0
        for one in computes:
            own, start = self._by_layers.get(one.rid), one.splice.stop * self._page_tokens
            tokens = min(view.prefill_tokens, one.tokens or self._new[one.rid])
            if own is None or one.tokens is None:
                start = start if own is None else own.tokens
                seconds += self._cost.seconds(Batch((Span(start, start + tokens),)))
            elif one.tokens:
                seconds += self._layer_s(one.rid)
        return seconds

    def _layer_s(self, rid: str) -> float:
        own = self._by_layers[rid]
        return self._cost.seconds(Batch(passes=((own.tokens, 1 / own.layers),)))

    def _computed_first(self, rid: str, busy_s: float) -> bool:
        """Whether compute ends the last layer left before a load would, which has the link after
        `busy_s` seconds.
        """
        left = self._layers[rid]
        compute_s = (left.back - left.front) * self._layer_s(rid)
        return compute_s < busy_s + left.tokens_each * self._token_s

    def _loads(self, now: float, step_s: float, computing: str | None) -> tuple[Load, ...]:
        """Layers from the top down, of the request with most left, as far as the horizon goes. The
        layer that is computed next is left to compute, and so are those it reaches before a load.
        """
        found = []
        self._loaded_at = max(self._loaded_at, now)
        while self._loaded_at - now < max(_HORIZON_S, _STEPS_COVERED * step_s):
            open_ = [
                rid
                for rid, left in self._layers.items()
                if left.back - left.front > 1
                and (rid != computing or not self._computed_first(rid, self._loaded_at - now))
            ]
            if not open_:
                break
            rid = max(open_, key=lambda one: self._layers[one].tokens)
            left = self._layers[rid]
            left.back -= 1
            span = Span(left.back, left.back + 1)
            found.append(Load(rid, span, Tier.STORAGE, Link.STORAGE_TO_DEVICE, _NEVER_S))
            self._loaded_at += left.tokens_each * self._token_s
        return tuple(found)


# --- one run --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: tokens of its stored prefix and of what is new."""

    arrival_s: float
    prefix: int
    new: int


def serve(
    rig_: Rig,
    prompts: Sequence[Prompt],
    arm: str,
    *,
    page_tokens: int = _PAGE_TOKENS,
    chunk_tokens: int = _CHUNK_TOKENS,
) -> SimResult:
    """One run; every request yields one token."""
    threshold = l_delta(rig_, chunk_tokens) if arm == THEIRS else 0
    requests = [
        _request(f"r{number:03d}", prompt, page_tokens, rig_, threshold)
        for number, prompt in enumerate(prompts)
    ]
    planner = _planner(arm, rig_, page_tokens, chunk_tokens)
    if any(one.by_layers for one in requests):
        planner = TwoAxes(planner, requests, page_tokens, rig_)
    server = ServerSpec(
        page_tokens=page_tokens, step_tokens=chunk_tokens, mixed=True, write_down=False
    )
    return simulate(planner, rig_.hardware, rig_.model, requests, server=server, cost=rig_.cost)


def _request(rid: str, prompt: Prompt, page: int, rig_: Rig, threshold: float) -> SimRequest:
    """A prompt whose prefix is restored by layers where it is shorter than the threshold."""
    prefix, new = prompt.prefix // page * page, max(1, prompt.new)
    own = ByLayers(prefix, rig_.layers) if page <= prefix < threshold else None
    units = prefix // page if own is None else own.layers
    cached = ((Span(0, units), Tier.STORAGE),) if units else ()
    return SimRequest(rid, prompt.arrival_s, units * page + new, cached=cached, by_layers=own)


# --- workloads ------------------------------------------------------------------------------------

_SWE, _TRACE, _SESSIONS = "SWE-Bench", "swe_mini_deepseek", 24
"""Recorded sessions: a call's prefix is what it shares with the call before it."""
_DRAWN = {"LMSys-Chat": (6000, 200), "WildChat": (3000, 300)}
"""Median prefix and new tokens, assumed. LMSYS-Chat-1M itself averages 2 turns of about 70 and 215
tokens, but Figure 1a and section 4.2 speak of long contexts, WildChat's being shorter.
"""
_SIGMA, _MOST_PREFIX = 0.9, 30000
_POISSON, _LOAD = 48, 0.5
"""Requests of a draw that arrive at random, and what of a server that recomputes everything they
take: assumed.
"""


@cache
def lengths(workload: str) -> tuple[tuple[int, int], ...]:
    """(prefix, new) tokens of many requests of a workload; of traces, those of all calls but first
    ones. Raises TraceError where the trace is missing.
    """
    if workload != _SWE:
        middle, new = _DRAWN[workload]
        rng = random.Random(0)
        drawn = (rng.lognormvariate(0, _SIGMA) * middle for _ in range(2000))
        return tuple((min(int(prefix), _MOST_PREFIX), new) for prefix in drawn)
    if _TRACE not in trace_files():
        raise TraceError(
            f"lengths of {workload} come from the trace {_TRACE}, which was not found: put its "
            f"file into {default_folder()} (docs/manual/workloads.md says where it is published). "
            "No other sessions take its place, since the cells would differ"
        )
    encoder = wide_encoder()
    calls = []
    for session in load_sessions(_TRACE, limit=_SESSIONS, encoder=encoder).sessions:
        tokens = PromptTokens(encoder)
        for _, prompt in Context(session).calls():
            same = tokens.show(prompt)
            if same:
                calls.append((same, len(tokens) - same))
    return tuple(calls)


def sample(workload: str, count: int, seed: int) -> list[Prompt]:
    """`count` of the workload's pairs of lengths, drawn at random, all there at once."""
    drawn = random.Random(seed).choices(lengths(workload), k=count)
    return [Prompt(0.0, *one) for one in drawn]


def poisson(workload: str, rig_: Rig, seed: int) -> list[Prompt]:
    """Requests that arrive at random, at the stated load."""
    drawn, price = sample(workload, _POISSON, seed), _learned(rig_.cost, _CHUNK_TOKENS)
    per_s = _LOAD / fmean(
        price.range_seconds(0, one.prefix + one.new, _CHUNK_TOKENS) for one in drawn
    )
    rng, now, prompts = random.Random(seed), 0.0, []
    for one in drawn:
        now += rng.expovariate(per_s)
        prompts.append(dataclasses.replace(one, arrival_s=now))
    return prompts


# --- section 4: end to end ------------------------------------------------------------------------


def _under_load(table: str, row: str, place: Place, workload: str) -> Iterator[Cell]:
    """Requests that arrive at random: CacheFlow over the better single resource, and ours over
    CacheFlow.
    """
    rig_ = rig(place)
    draws = [poisson(workload, rig_, seed) for seed in SEEDS]
    seconds = {
        arm: [fmean(serve(rig_, prompts, arm).ttfts()) for prompts in draws]
        for arm in (*SINGLE, THEIRS, OURS)
    }
    best = min((seconds[arm] for arm in SINGLE), key=fmean)
    reading = "CacheFlow over the better of vLLM and LMCache"
    yield _ratio(table, row, _SPEEDUP, best, seconds[THEIRS], reading)
    yield _ratio(table, row, "ours over CacheFlow", seconds[THEIRS], seconds[OURS], OURS)


def _alone(place: Place, workload: str, requests: int, arm: str) -> list[float]:
    """Mean seconds of each draw. Its requests come one at a time, so that none waits."""
    rig_ = rig(place)
    return [
        fmean(serve(rig_, [one], arm).ttfts()[0] for one in sample(workload, requests, seed))
        for seed in SEEDS
    ]


def figure_4() -> Iterator[Cell]:
    """Three workloads on the default machine."""
    for name in (_SWE, *_DRAWN):
        yield from _under_load("4", name, Place(), name)


def figure_5() -> Iterator[Cell]:
    """Busy shares while a batch of 16 SWE-Bench prefixes is restored."""
    for arm in ("LMCache", "vLLM", THEIRS):
        runs = [serve(rig(Place()), sample(_SWE, 16, seed), arm) for seed in SEEDS]
        shares = {
            "GPU busy share": [run.compute_busy_s / run.finished_s for run in runs],
            "I/O busy share": [run.pipes[STORAGE][1] / run.finished_s for run in runs],
        }
        for name, each in shares.items():
            yield _cell("5", arm, name, fmean(each), "", each=each)


def figure_6() -> Iterator[Cell]:
    """One request of each length; over vLLM, as the text compares."""
    for tokens in (6016, 30016):
        vllm, theirs, ours = (
            serve(rig(Place()), [Prompt(0.0, tokens, 64)], arm).ttfts()
            for arm in ("vLLM", THEIRS, OURS)
        )
        row = f"{tokens // 1000}K tokens"
        yield _ratio("6", row, _SPEEDUP, vllm, theirs, "CacheFlow over vLLM")
        yield _ratio("6", row, "ours over CacheFlow", theirs, ours, OURS)


def ablation() -> Iterator[Cell]:
    """Two pipeline stages that restore each by itself, or one after the other. Each stage has a
    link of its own. Not stated: model, hardware, workload, whether the stages share a link.
    """
    workload = "LMSys-Chat"
    with_3d, without, recompute = (
        _alone(Place(stages=stages), workload, 24, arm)
        for stages, arm in ((parallel(2), THEIRS), (sequential(2), THEIRS), (sequential(2), "vLLM"))
    )
    reading = f"{workload}-like lengths, one at a time"
    for row, each in {"two stages with 3D": with_3d, "two stages without 3D": without}.items():
        yield _cell("7", row, "restoration seconds", fmean(each), "s", reading, each)
    yield _ratio("7", "without 3D over 3D", "ratio", without, with_3d, reading)
    yield _ratio("7", "vLLM over without 3D", "ratio", recompute, without, reading)


def bandwidths() -> Iterator[Cell]:
    """SWE-Bench at 40 and 80 Gbps."""
    for gbps in (40.0, 80.0):
        yield from _under_load("7b", f"H100 {_SWE} {gbps:g} Gbps", Place(gbps=gbps), _SWE)


def figure_8() -> Iterator[Cell]:
    """SWE-Bench on other machines. 61 GB of 16-bit weights do not fit an A100 of 40 GB, so they
    have 8 bits there; two L40S are two stages.
    """
    model = "Qwen3-30B-A3B"
    places = {
        "2xL40S": Place("L40S", model, stages=parallel(2)),
        "A100": Place("A100", model, weight_scale=0.5),
    }
    for name, place in places.items():
        yield from _under_load("8", f"{name} {_SWE} 10 Gbps", place, _SWE)


def figure_9() -> Iterator[Cell]:
    """Batches whose requests arrive together; the printed range beside the speedup over vLLM."""
    rig_ = rig(Place("L40S", "Llama-3.1-8B"))
    for batch in (2, 4, 8):
        row, drawn = f"batch {batch}", [sample(_SWE, batch, seed) for seed in SEEDS]
        vllm, theirs, ours = (
            [fmean(serve(rig_, prompts, arm).ttfts()) for prompts in drawn]
            for arm in ("vLLM", THEIRS, OURS)
        )
        yield _ratio("9", row, _SPEEDUP, vllm, theirs, "CacheFlow over vLLM")
        yield _ratio("9", row, "ours over CacheFlow", theirs, ours, OURS)


TABLES: Tables = {
    "4": figure_4,
    "5": figure_5,
    "6": figure_6,
    "7": ablation,
    "7b": bandwidths,
    "8": figure_8,
    "9": figure_9,
}
RESULTS = tuple(TABLES)
"""Figures that the agreement is of."""
