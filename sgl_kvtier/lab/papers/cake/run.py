"""One set-up of Cake's in the simulator: both baselines, the rule of the paper, and ours.

How the paper is read:

- Utilisation is a share of the token budget of a step. Others fill the rest, as deep in their
  prompts as this request, so a step lasts as long as a full one. The baselines' ratio in Table 3
  grows by 8 from 100 % to 12.5 %, hardly more.
- Loads of 128 tokens go one after the other; each has a part that bandwidth does not explain
  (`load_fixed_s`).
- The restoration is timed (section 5.1), of a prefix that is cached whole.
- Compute-only computes it in whole chunks, I/O-only loads it; all three runs have the same costs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.papers.cake.fit import LOAD_TOKENS, coefficients, shape
from sgl_kvtier.lab.papers.cake.grid import Setup
from sgl_kvtier.lab.papers.cake.watch import Watch
from sgl_kvtier.lab.rules import Cake
from sgl_kvtier.lab.sim.costs import Batch
from sgl_kvtier.lab.sim.hardware import Hardware, ModelShape, assumed_step_cost, load_hardware
from sgl_kvtier.lab.sim.links import Pipe
from sgl_kvtier.lab.sim.requests import SimRequest
from sgl_kvtier.lab.sim.run import simulate
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

PAGE_TOKENS = 64
"""12.5 % of a budget of 512, the smallest chunk of the tables."""

# Cake's fetching thread takes one chunk after the other; a horizon shorter than a step starts no
# more loads than a step needs.
_HORIZON_S = 0.02
_PATIENCE_S = 60.0

STORAGE = "storage"
CACHED = "cached"
"""Names of the one pipe, and of the request that is restored."""


@dataclass(frozen=True, slots=True)
class SharedStep:
    """A step that others fill up: fixed + max(floor, a tokens) + b Σ tokens · position. All
    requests are at this request's position.

    `filled_to` are the tokens that every step with prefill holds at least, of any request.
    """

    cost: PrefillCost
    floor_s: float
    filled_to: int = 0

    def seconds(self, batch: Batch) -> float:
        """How long the step takes."""
        own = batch.prefill_tokens
        tokens = own + batch.background + batch.decodes
        pairs = sum(len(span) * (span.start + len(span) / 2) for span in batch.prefills)
        if own:
            tokens = max(tokens, self.filled_to)
            pairs *= tokens / own
        work_s = max(self.floor_s, self.cost.per_token_s * tokens)
        return self.cost.fixed_s + work_s + self.cost.per_token_position_s * pairs


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds until the prefix is resident."""

    compute_s: float
    io_s: float
    cake_s: float
    kvtier_s: float


@dataclass(frozen=True, slots=True)
class Rig:
    """All that one set-up needs to run. `profile` is what a planner has learned of it before."""

    hardware: Hardware
    model: ModelShape
    engine: EngineShape
    cost: SharedStep
    profile: dict[str, dict[str, float]]


def rig(setup: Setup, page_tokens: int = PAGE_TOKENS) -> Rig:
    """A set-up's machine: its profile with one link of this bandwidth that carries one load at a
    time.
    """
    known, fixed_s = coefficients(), coefficients().load_fixed_s[setup.model]
    profile, model = load_hardware(setup.hardware), shape(setup.model)
    # The weights, read once per step, as assumed of the hardware; all else is fitted.
    floor_s = assumed_step_cost(profile, model).floor_s
    cost = SharedStep(known.cost(setup.hardware, setup.model), floor_s)
    route = dataclasses.replace(
        profile.routes[Link.STORAGE_TO_DEVICE], pipes=(STORAGE,), latency_s=fixed_s, depth=1
    )
    stored = dataclasses.replace(
        model, kv_bytes_per_token=round(model.kv_bytes_per_token * setup.kv_scale)
    )
    load_bytes = LOAD_TOKENS * stored.kv_bytes_per_token
    load_s = load_bytes * 8 / (setup.gbps * 1e9) + fixed_s
    return Rig(
        hardware=dataclasses.replace(
            profile,
            pipes={STORAGE: Pipe(setup.gbps * 1e9 / 8)},
            routes={Link.STORAGE_TO_DEVICE: route},
        ),
        model=stored,
        engine=EngineShape(
            page_tokens,
            page_tokens * stored.kv_bytes_per_token,
            int(setup.budget * setup.share),
            stored.layers,
        ),
        cost=cost,
        profile={
            "prefill": dataclasses.asdict(_learned(cost, setup)),
            "links": {Link.STORAGE_TO_DEVICE.value: load_bytes / load_s},
        },
    )


def restore_seconds(setup: Setup, rule: str, restore: str = "auto") -> float:
    """One run of one request: its whole prefix cached, one token behind it."""
    parts = rig(setup)
    watch = Watch(planner_of(parts, rule, policy(restore)), PAGE_TOKENS, {CACHED: setup.tokens})
    server = ServerSpec(
        page_tokens=PAGE_TOKENS,
        step_tokens=setup.budget,
        share=setup.share,
        mixed=True,
        write_down=False,
    )
    simulate(
        watch,
        parts.hardware,
        parts.model,
        [cached_request(setup.tokens)],
        server=server,
        cost=parts.cost,
    )
    return watch.restored_s[CACHED]


def cached_request(tokens: int, page_tokens: int = PAGE_TOKENS) -> SimRequest:
    """A request whose first `tokens` tokens are stored; one more makes it a prompt."""
    return SimRequest(
        CACHED, 0.0, tokens + 1, cached=((Span(0, tokens // page_tokens), Tier.STORAGE),)
    )


def policy(restore: str = "auto") -> PolicyConfig:
    """The settings here: every length is restored, nothing is given up as late."""
    return PolicyConfig(
        restore=restore, min_restore_tokens=0, load_tokens=LOAD_TOKENS, load_deadline_s=_PATIENCE_S
    )


def planner_of(
    parts: Rig,
    rule: str,
    config: PolicyConfig,
    yields_to_fresh: bool = True,
    max_yields: int = Rules.max_yields,
) -> Planner:
    """The planner with the paper's rule, "cake", or with ours, "kvtier"."""
    rules = {"cake": Cake, "kvtier": Rules}[rule]
    made = rules(load_horizon_s=_HORIZON_S, yields_to_fresh=yields_to_fresh, max_yields=max_yields)
    return make_planner(config, parts.engine, parts.profile, made)


@cache
def times(setup: Setup) -> Times:
    """Both baselines, the paper's rule, and ours."""
    return Times(
        compute_s=restore_seconds(setup, "cake", "compute"),
        io_s=restore_seconds(setup, "cake", "load"),
        cake_s=restore_seconds(setup, "cake"),
        kvtier_s=restore_seconds(setup, "kvtier"),
    )


def least_seconds(setup: Setup) -> float:
    """T_opt in seconds: the split into tokens of any size, with both ends ending together. Compute
    is as cheap as whole chunks make it.
    """
    parts = rig(setup)
    cost, chunk = _learned(parts.cost, setup), parts.engine.chunk_tokens
    load_s = (
        parts.engine.page_bytes / PAGE_TOKENS / parts.profile["links"][Link.STORAGE_TO_DEVICE.value]
    )

    def compute_s(tokens: float) -> float:
        return cost.fixed_s * tokens / chunk + cost.work_seconds(0, tokens)

    low, high = 0.0, float(setup.tokens)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if compute_s(middle) < (setup.tokens - middle) * load_s
            else (low, middle)
        )
    return compute_s(high)


def _learned(truth: SharedStep, setup: Setup) -> PrefillCost:
    """The cost that a planner has learned under the same load. Others take the tokens of a step
    that this request leaves. So a chunk is no cheaper for being short: all their work counts as
    fixed.
    """
    cost, full_s = truth.cost, max(truth.floor_s, truth.cost.per_token_s * setup.budget)
    if setup.share < 1:
        return PrefillCost(cost.fixed_s + full_s, 0.0, cost.per_token_position_s / setup.share)
    below_floor_s = full_s - cost.per_token_s * setup.budget
    return PrefillCost(cost.fixed_s + below_floor_s, cost.per_token_s, cost.per_token_position_s)
