"""Cake (Jin et al., "Compute Or Load KV Cache? Why Not Both?", ICML 2025): the numbers it prints,
and those that its rule and ours give in the simulator.

How the paper is read:

- A printed pair `a\\b` is the speedup over I/O-only and over compute-only. Both have one
  denominator, so a/b is the ratio of the two baselines, whatever Cake itself does.
- Utilisation is a share of the token budget of a step. Others fill the rest, as deep in their
  prompts as this request, so a step lasts as long as a full one. The baselines' ratio in Table 3
  grows by 8 from 100 % to 12.5 %, hardly more.
- Loads of 128 tokens go one after the other. Each has a part that bandwidth does not explain.
- The restoration is timed (section 5.1: "the time of loading stored KV cache or computing new KV
  cache"), of a prefix that is cached whole. The step that yields the first token is left out.
- Compute-only computes it in whole chunks, I/O-only loads it; all runs have the same costs.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean, median

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.rules import Cake
from sgl_kvtier.lab.sim.cells import Agreement, Cell, Fitted, Tables
from sgl_kvtier.lab.sim.hardware import (
    Batch,
    Hardware,
    ModelShape,
    assumed_step_cost,
    load_hardware,
    load_model,
)
from sgl_kvtier.lab.sim.requests import SimRequest, SimResult
from sgl_kvtier.lab.sim.run import simulate
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import ChunkDone, Fact, Planner, TransferDone
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

# --- what the paper prints ------------------------------------------------------------------------

_PRINTED = {
    "3": r"""
Hardware Util | 7 Gbps | 25 Gbps | 32 Gbps | 56 Gbps | 100 Gbps
2xA100 12.5% | 1.87\2.18 | 1.25\5.06 | 1.18\6.12 | 1.09\9.54 | 1.04\15.27
2xA100 50% | 4.57\1.29 | 2.07\2.03 | 1.80\2.24 | 1.46\3.06 | 1.30\4.62
2xA100 87.5% | 7.22\1.15 | 2.75\1.53 | 2.36\1.67 | 1.83\2.17 | 1.50\3.02
2xA100 100% | 8.10\1.10 | 3.03\1.43 | 2.63\1.59 | 1.97\2.00 | 1.54\2.64
A100 12.5% | 1.57\2.85 | 1.14\7.22 | 1.10\8.95 | 1.03\14.06 | 1.02\23.59
A100 50% | 3.35\1.46 | 1.68\2.55 | 1.55\3.01 | 1.30\4.26 | 1.17\6.48
A100 87.5% | 5.05\1.26 | 2.18\1.88 | 1.90\2.10 | 1.56\2.91 | 1.30\4.07
A100 100% | 5.62\1.21 | 2.41\1.81 | 2.00\1.91 | 1.69\2.71 | 1.30\3.52
H100 12.5% | 1.74\2.40 | 1.21\5.80 | 1.13\6.90 | 1.08\11.08 | 1.05\18.24
H100 50% | 4.13\1.38 | 1.94\2.25 | 1.72\2.55 | 1.45\3.62 | 1.27\5.34
H100 87.5% | 6.23\1.17 | 2.53\1.66 | 2.23\1.86 | 1.74\2.44 | 1.50\3.54
H100 100% | 7.13\1.17 | 2.74\1.56 | 2.40\1.75 | 1.84\2.25 | 1.49\3.08
""",
    "4": r"""
ChunkSize BW | LongAlpaca-7B | LongAlpaca-13B
64 32Gbps | 1.47\3.47 | 1.47\3.55
128 32Gbps | 1.83\2.40 | 1.79\2.45
256 32Gbps | 2.06\2.09 | 1.96\2.20
512 32Gbps | 2.20\1.94 | 2.03\1.91
1024 32Gbps | 2.15\1.70 | 2.18\1.91
2048 32Gbps | 2.31\1.71 | 2.04\1.70
""",
    "5": r"""
Hardware BW Util | 4k Tokens | 8k Tokens | 12k Tokens | 16k Tokens
2xA100 7Gbps 12.5% | 2.02\1.83 | 1.97\1.95 | 1.94\2.09 | 1.87\2.18
2xA100 7Gbps 50% | 4.75\1.08 | 4.97\1.21 | 4.71\1.24 | 4.57\1.29
2xA100 7Gbps 87.5% | 7.31\1.00 | 7.49\1.06 | 7.61\1.15 | 7.22\1.15
2xA100 7Gbps 100% | 9.06\0.99 | 8.65\1.04 | 8.43\1.08 | 8.10\1.10
2xA100 32Gbps 12.5% | 1.13\4.41 | 1.19\5.17 | 1.19\5.68 | 1.18\6.12
2xA100 32Gbps 50% | 1.68\1.64 | 1.87\1.99 | 1.80\2.09 | 1.80\2.24
2xA100 32Gbps 87.5% | 2.47\1.45 | 2.45\1.52 | 2.49\1.66 | 2.36\1.67
2xA100 32Gbps 100% | 2.67\1.25 | 2.73\1.43 | 2.69\1.52 | 2.63\1.59
1xA100 7Gbps 12.5% | 1.62\2.30 | 1.59\2.47 | 1.58\2.67 | 1.57\2.85
1xA100 7Gbps 50% | 3.58\1.27 | 3.48\1.32 | 3.45\1.41 | 3.35\1.46
1xA100 7Gbps 87.5% | 5.36\1.12 | 5.18\1.15 | 5.17\1.21 | 5.05\1.26
1xA100 7Gbps 100% | 6.31\1.11 | 5.95\1.13 | 5.66\1.15 | 5.62\1.21
1xA100 32Gbps 12.5% | 1.04\6.37 | 1.06\7.20 | 1.08\8.04 | 1.10\8.95
1xA100 32Gbps 50% | 1.38\2.10 | 1.49\2.48 | 1.50\2.71 | 1.55\3.01
1xA100 32Gbps 87.5% | 1.83\1.65 | 1.93\1.87 | 1.91\1.97 | 1.90\2.10
1xA100 32Gbps 100% | 2.06\1.55 | 2.15\1.79 | 2.00\1.79 | 2.00\1.91
""",
    "6": r"""
Util BW | LongAlpaca-7B | LongAlpaca-13B | Llama3.1-8B | Llama3.1-70B
12.5% 7Gbps | 1.92\2.15 | 1.87\2.18 | 1.20\5.56 | 0.99\12.92
12.5% 32Gbps | 1.20\5.98 | 1.18\6.12 | 0.98\19.47 | 0.80\44.26
50% 7Gbps | 4.79\1.30 | 4.57\1.29 | 1.88\2.13 | 1.25\3.99
50% 32Gbps | 1.85\2.22 | 1.80\2.24 | 1.13\5.42 | 0.91\12.24
100% 7Gbps | 8.55\1.10 | 8.10\1.10 | 2.81\1.52 | 1.66\2.64
100% 32Gbps | 2.79\1.60 | 2.63\1.59 | 1.37\3.18 | 1.02\6.86
""",
    "7": r"""
BW | 16-bit | 8-bit | 3-bit
7Gbps | 8.10\1.10 | 4.63\1.22 | 2.39\1.63
25Gbps | 3.03\1.43 | 2.07\1.87 | 1.41\3.09
32Gbps | 2.63\1.59 | 1.85\2.12 | 1.37\3.73
56Gbps | 1.97\2.00 | 1.49\2.85 | 1.26\5.38
""",
}
"""Tables 3 to 7 (sections 5.2 to 5.6) as printed."""

_COLUMN = {"3": "BW", "4": "Model", "5": "Tokens", "6": "Model", "7": "Bits"}
"""What a table's columns are."""

_FINISH_S = {"default scheduling": 1.5, "adaptive scheduling": 1.19}
"""Section 5.8: when all requests of Figure 6 are done, in seconds."""

NULL_MODEL = {
    "3": Agreement(110, 0.015, 1.0),
    "4": Agreement(14, 0.035, 1.0),
    "5": Agreement(112, 0.036, 0.929),
    "6": Agreement(32, 0.014, 0.875),
    "7": Agreement(20, 0.021, 1.0),
    "all": Agreement(288, 0.022, 0.958),
}
"""What the print implies without any planner, by table: Eq. 1, loading times computing over their
sum, on each pair's own printed ratio. By `lab/papers/cake/command.py` at commit 171f7e0.
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """The set-up of a measurement; hardware and model have the paper's names.

    `share` is the utilisation: the share of a step's token budget that the restoring request gets.
    `kv_scale` is the stored size against 16 bit.
    """

    hardware: str
    model: str
    tokens: int
    gbps: float
    share: float = 1.0
    budget: int = 512
    kv_scale: float = 1.0

    @property
    def is_fitted(self) -> bool:
        """Whether the printed ratio of its two baselines gave the coefficients below."""
        known = self.model == "LongAlpaca-13B"
        if self.share < 1 or self.kv_scale < 1:
            return False
        if self.budget != 512:
            return self.budget in (128, 1024)
        if self.hardware == "H100":
            return self.gbps == 32
        if known:
            return self.tokens in (8192, 16384) and self.gbps in (7, 32)
        return self.hardware == "2xA100"


@dataclass(frozen=True, slots=True)
class Pair:
    """One printed pair with its place."""

    table: str
    row: str
    column: str
    over_io: float
    over_compute: float
    setup: Setup


def printed(table: str) -> Iterator[Pair]:
    """All pairs of one table, row by row."""
    lines = [
        [part.strip() for part in line.split("|")] for line in _PRINTED[table].strip().splitlines()
    ]
    (labels, *columns), rows = lines[0], lines[1:]
    for row, *cells in rows:
        named = dict(zip(labels.split(), row.split(), strict=True))
        for column, cell in zip(columns, cells, strict=True):
            over_io, over_compute = map(float, cell.split("\\"))
            setup = _setup(table, {**named, _COLUMN[table]: column})
            yield Pair(table, row, column, over_io, over_compute, setup)


def _setup(table: str, named: Mapping[str, str]) -> Setup:
    """A cell's set-up from its labels, with the caption's constants for the rest."""
    # Table 5's caption names 2xA100 alone; its rows say 1xA100 too, and those agree with Table 3's.
    hardware = named.get("Hardware", "A100" if table == "4" else "2xA100")
    return Setup(
        hardware.replace("1xA100", "A100"),
        named.get("Model", "LongAlpaca-13B"),
        # Section 5.2 says 16K: 32 chunks of 512.
        int(1024 * _number(named.get("Tokens", "16k"))),
        _number(named["BW"]),
        _number(named.get("Util", "100%")) / 100,
        int(named.get("ChunkSize", 512)),
        _number(named.get("Bits", "16-bit")) / 16,
    )


def _number(text: str) -> float:
    found = re.match(r"[\d.]+", text)
    assert found is not None, f"no number in the label {text!r} of a printed table"
    return float(found.group())


# --- what a step and a load cost ------------------------------------------------------------------

_GBPS = 2**30 / 8
"""Bytes per second of a Gbps: 62.4 ms for a chunk at 32 Gbps, as in Figure 4, are 4 GiB/s."""

# Fitted by `lab/papers/cake/fit.py` of commit 171f7e0, with this Gbps: least squares on the ratio
# I/O-only over compute-only of 19 of the 172 printed pairs, and on nothing else. Only ratios are
# printed, so another Gbps scales all of it and leaves speedups as they are. Compute-only takes
# chunks * fixed + a n + b n^2 / 2 seconds for n tokens, I/O-only bytes / bandwidth + loads * f.
# Of Table 5 at 100 % and 8k, 16k tokens: chunk cost and growth on A100 and 2xA100, f of
# LongAlpaca-13B. Of Table 6 at 100 %: chunk cost and f of the other models, whose growth follows
# from attention over matrix work. Of Table 3, H100 at 100 % and 32 Gbps: its chunk cost. Of Table 4
# at 128 and 1024 tokens: the part of a chunk's cost that does not depend on its tokens.
_LOAD_S = {
    "LongAlpaca-13B": 0.001178,
    "LongAlpaca-7B": 0.000515,
    "Llama3.1-8B": 0.0003327,
    "Llama3.1-70B": 0.001036,
}
"""Seconds of one load of 128 tokens that bandwidth does not explain."""
_CHUNK = {
    ("A100", "LongAlpaca-13B"): PrefillCost(0.01449, 0.0001151, 5.728e-09),
    ("A100", "LongAlpaca-7B"): PrefillCost(0.009606, 5.891e-05, 3.835e-09),
    ("2xA100", "LongAlpaca-13B"): PrefillCost(0.009126, 7.25e-05, 3.657e-09),
    ("2xA100", "LongAlpaca-7B"): PrefillCost(0.006343, 3.89e-05, 2.567e-09),
    ("2xA100", "Llama3.1-8B"): PrefillCost(0.005778, 4.59e-05, 2.403e-09),
    ("2xA100", "Llama3.1-70B"): PrefillCost(0.04796, 0.000381, 1.134e-08),
    ("H100", "LongAlpaca-13B"): PrefillCost(0.0111, 8.817e-05, 4.387e-09),
}
"""Seconds of a chunk: fixed, per token, per token and token before it."""
FITTED = Fitted(parameters=16, numbers=19)

_PROFILES = {"Llama3.1-8B": "Llama-3.1-8B", "Llama3.1-70B": "Llama-3.1-70B-FP8"}
"""The simulator's names of models where the paper has others."""
_PAGE_TOKENS = 64
"""12.5 % of a budget of 512, the smallest chunk of the tables."""
_LOAD_TOKENS = 128
"""Section 5.1."""
# Cake's fetching thread takes one chunk after the other; a horizon shorter than a step starts no
# more loads than a step needs.
_HORIZON_S = 0.02
_CACHED = "cached"
"""Name of the request that is restored."""


@dataclass(frozen=True, slots=True)
class SharedStep:
    """A step that others fill up: fixed + max(floor, a tokens) + b Σ tokens · position. All
    requests are at this request's position.
    """

    cost: PrefillCost
    floor_s: float

    def seconds(self, batch: Batch) -> float:
        """How long the step takes."""
        own = batch.prefill_tokens
        tokens = own + batch.background + batch.decodes
        pairs = sum(len(span) * (span.start + len(span) / 2) for span in batch.prefills)
        if own:
            pairs *= tokens / own
        work_s = max(self.floor_s, self.cost.per_token_s * tokens)
        return self.cost.fixed_s + work_s + self.cost.per_token_position_s * pairs


@dataclass(frozen=True, slots=True)
class Rig:
    """All that one set-up needs to run. `learned` is what a planner has seen of it before."""

    hardware: Hardware
    model: ModelShape
    spec: ServerSpec
    cost: SharedStep
    learned: PrefillCost
    load_bytes_per_s: float

    def planner(self, rule: str, restore: str = "auto", **changes: float) -> Planner:
        """The planner with the paper's rule, "cake", or with ours, "kvtier". Every length is
        restored, nothing is given up as late.
        """
        config = PolicyConfig(
            restore=restore, min_restore_tokens=0, load_tokens=_LOAD_TOKENS, load_deadline_s=60.0
        )
        page, model = self.spec.page_tokens, self.model
        chunk_tokens = int(self.spec.step_tokens * self.spec.share)
        engine = EngineShape(page, page * model.kv_bytes_per_token, chunk_tokens, model.layers)
        profile = {
            "prefill": dataclasses.asdict(self.learned),
            "links": {Link.STORAGE_TO_DEVICE.value: self.load_bytes_per_s},
        }
        rules = {"cake": Cake, "kvtier": Rules}[rule]
        return make_planner(config, engine, profile, rules(load_horizon_s=_HORIZON_S, **changes))

    def serve(self, planner: Planner, requests: Sequence[SimRequest]) -> SimResult:
        """One run."""
        return simulate(
            planner, self.hardware, self.model, requests, server=self.spec, cost=self.cost
        )


def rig(setup: Setup, page_tokens: int = _PAGE_TOKENS) -> Rig:
    """A set-up's machine: its profile with one link of this bandwidth that carries one load at a
    time.
    """
    machine = load_hardware(setup.hardware)
    model = load_model(_PROFILES.get(setup.model, setup.model))
    # The weights, read once per step, as assumed of the hardware; all else is fitted.
    cost = SharedStep(
        _CHUNK[setup.hardware, setup.model], assumed_step_cost(machine, model).floor_s
    )
    kv_bytes = round(model.kv_bytes_per_token * setup.kv_scale)
    bytes_per_s, load_bytes = setup.gbps * _GBPS, _LOAD_TOKENS * kv_bytes
    return Rig(
        machine.with_storage_alone(bytes_per_s, _LOAD_S[setup.model], depth=1),
        dataclasses.replace(model, kv_bytes_per_token=kv_bytes),
        ServerSpec(page_tokens, setup.budget, setup.share, mixed=True, write_down=False),
        cost,
        _learned(cost, setup),
        load_bytes / (load_bytes / bytes_per_s + _LOAD_S[setup.model]),
    )


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


# --- one restoration: Tables 3 to 7 ---------------------------------------------------------------


class Watch:
    """A planner that passes on what it hears, and notes the second at which the cached prefix is
    whole. Pages that truly came are counted, not those the planner believes in.
    """

    def __init__(self, planner: Planner, tokens: int) -> None:
        self._planner = planner
        self._missing = tokens
        self.restored_s = 0.0
        self.step = planner.step

    def observe(self, fact: Fact) -> None:
        """Takes a note and passes the fact on."""
        tokens = 0
        if isinstance(fact, ChunkDone):
            tokens = len(fact.tokens)
        elif isinstance(fact, TransferDone):
            tokens = len(fact.span) * _PAGE_TOKENS
        if tokens and self._missing > 0:
            self._missing -= tokens
            self.restored_s = fact.now
        self._planner.observe(fact)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds until the prefix is resident."""

    compute_s: float
    io_s: float
    cake_s: float
    kvtier_s: float

    def best(self, seconds: float) -> float:
        """How much faster this is than the better baseline."""
        return min(self.io_s, self.compute_s) / seconds


def cached_request(tokens: int, page_tokens: int = _PAGE_TOKENS) -> SimRequest:
    """A request whose first `tokens` tokens are stored; one more makes it a prompt."""
    return SimRequest(
        _CACHED, 0.0, tokens + 1, cached=((Span(0, tokens // page_tokens), Tier.STORAGE),)
    )


def restore_seconds(setup: Setup, rule: str, restore: str = "auto") -> float:
    """One run of one request: its whole prefix cached, one token behind it."""
    parts = rig(setup)
    watch = Watch(parts.planner(rule, restore), setup.tokens)
    parts.serve(watch, [cached_request(setup.tokens)])
    return watch.restored_s


@cache
def times(setup: Setup) -> Times:
    """Both baselines, the paper's rule, and ours."""
    return Times(
        compute_s=restore_seconds(setup, "cake", "compute"),
        io_s=restore_seconds(setup, "cake", "load"),
        cake_s=restore_seconds(setup, "cake"),
        kvtier_s=restore_seconds(setup, "kvtier"),
    )


CAKE, OURS = "cake's rule", "kvtier"
"""Readings of a cell: whose rule it is."""
_LABELS = ("over I/O", "over compute")


def table(name: str) -> Iterator[Cell]:
    """Every printed number of one table: the paper's rule beside the print, then ours, which is not
    printed.
    """
    for pair in printed(name):
        ours, given = times(pair.setup), (pair.over_io, pair.over_compute)
        alone = (ours.io_s, ours.compute_s)
        for reading, seconds in ((CAKE, ours.cake_s), (OURS, ours.kvtier_s)):
            for label, number, alone_s in zip(_LABELS, given, alone, strict=True):
                published = number if reading == CAKE else None
                column, speedup = f"{pair.column} {label}", round(alone_s / seconds, 4)
                place = (f"cake {name}", pair.row, column)
                yield Cell(*place, published, speedup, "x", pair.setup.is_fitted, reading)


def summary() -> list[Cell]:
    """Both rules over all pairs: against the better baseline, and against each other. Not
    printed.
    """
    setups = [pair.setup for name in _PRINTED for pair in printed(name)]
    ours = [times(setup) for setup in setups]
    rows = {
        "Cake's rule over the better baseline": [t.best(t.cake_s) for t in ours],
        "ours over the better baseline": [t.best(t.kvtier_s) for t in ours],
        "ours over Cake's rule": [t.cake_s / t.kvtier_s for t in ours],
    }
    return [
        Cell("cake summary", row, label, None, round(reduced(values), 4), "x")
        for row, values in rows.items()
        for label, reduced in (("least", min), ("median", median), ("most", max))
    ]


# --- Figure 6: one long cached request among short ones -------------------------------------------

# Section 5.8: 16K cached, 22 requests of 32 to 448 tokens. Not stated: model, hardware, bandwidth,
# arrivals, outputs. Taken: the model of Figure 5 on one A100, the SSD of Table 2, three bursts, one
# token of output.
_FIG6 = Setup("A100", "LongAlpaca-7B", 16384, 32.0)
_FIG6_PAGE, _SEEDS = 16, range(1, 9)
_BURSTS_S, _SHORT, _SHORT_TOKENS = (0.05, 0.25, 0.45), 22, (32, 448)


@cache
def burst_run(seed: int, rule: str, adaptive: bool) -> SimResult:
    """The cached request at 0, then short ones in bursts, with prefill of others before the
    restoration's or behind it.
    """
    rng = random.Random(seed)
    requests = [cached_request(_FIG6.tokens, _FIG6_PAGE)] + [
        SimRequest(
            f"short-{number:02d}",
            _BURSTS_S[number * len(_BURSTS_S) // _SHORT],
            rng.randint(*_SHORT_TOKENS),
        )
        for number in range(_SHORT)
    ]
    parts = rig(_FIG6, _FIG6_PAGE)
    # Cake's adaptive mode has no bound on how long a restoration yields.
    return parts.serve(parts.planner(rule, yields_to_fresh=adaptive, max_yields=10_000), requests)


def figure_6() -> Iterator[Cell]:
    """Mean over the seeds: until all are done, and the others' mean time to first token."""
    for rule in ("cake", "kvtier"):
        for adaptive, name in enumerate(_FINISH_S):
            runs = [burst_run(seed, rule, bool(adaptive)) for seed in _SEEDS]
            given = _FINISH_S[name] if rule == "cake" else None
            finish_s = round(fmean(run.finished_s for run in runs), 3)
            yield Cell("cake fig6", name, "finish", given, finish_s, "s", reading=rule)
            others = (r.ttft_s for run in runs for r in run.requests if r.rid != _CACHED)
            ttft_s = round(fmean(others), 3)
            yield Cell("cake fig6", name, "others TTFT", None, ttft_s, "s", reading=rule)


RESULTS = tuple(_PRINTED)
"""Tables that the agreement is of."""
TABLES: Tables = {
    **{name: partial(table, name) for name in _PRINTED},
    "summary": summary,
    "fig6": figure_6,
}
