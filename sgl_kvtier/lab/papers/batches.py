"""Several stored prefixes restored at once, by the papers' rules and by ours, in virtual time.

All rules run with the papers' chunks of 512 tokens and with 8,192, and with the queue in the order
drawn and in the order of length, so that none has an order that another lacks. The papers' rules
load as their loaders do, one load after the other. They do not bound how long requests that decode
stand still; ours does. All restore every prefix from both ends: ours by default leaves some to
loading, for the sake of those that decode.

Steps take what a paced H100 takes with Llama-3.1-8B. The link loads the mix of prefixes as fast as
the device computes it in chunks of that size. All prefixes of a batch are asked for at one instant,
beside four requests that decode.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, cast

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.console import Column, Table
from sgl_kvtier.lab.profile import read
from sgl_kvtier.lab.rules import ByArrival, CacheFlow, Cake
from sgl_kvtier.lab.sim.baselines import Served
from sgl_kvtier.lab.sim.hardware import Batch, Hardware, MeasuredCost, ModelShape, planner_profile
from sgl_kvtier.lab.sim.links import Pipe, Route
from sgl_kvtier.lab.sim.requests import SimRequest
from sgl_kvtier.lab.sim.run import engine_shape, simulate
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.messages import Consulted, Fact, StepDone
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link, Span, Tier

CHUNKS = (512, 8192)
DRAWN, BY_LENGTH = "drawn", "by length"
OURS, UNBOUNDED = "kvtier", "kvtier, gaps unbounded"
SEEDS = range(1, 9)

_STALL_MS = PolicyConfig().max_stall_ms
RULES: dict[str, tuple[Callable[[], Rules], float]] = {
    # Loads are handed out for little more than a step ahead. Cake's loader takes one after the
    # other; with kvtier's 0.3 s compute would wait for loads that it has claimed too early.
    "cake": (partial(Cake, load_horizon_s=0.02), 0.0),
    "cacheflow": (partial(CacheFlow, load_horizon_s=0.02), 0.0),
    UNBOUNDED: (ByArrival, 0.0),
    OURS: (ByArrival, _STALL_MS),
}
"""Each computes requests in the order in which they come. With it `policy.max_stall_ms`, 0 for no
bound: the papers' rules do not bound the gaps of those that decode.
"""

_DEVICE, _PAGE = "h100-llama8b", 64
_LENGTHS = range(4096, 32769, 4096)
_DECODERS, _DECODED = 4, 1024
_BATCH_AT_S = 1.0
"""When a batch is asked for: those that decode beside have begun."""


class _Watched(Served):
    """Notes when requests that decode had a token."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tokens_at = [_BATCH_AT_S]

    def observe(self, fact: Fact) -> None:
        """Takes a note and passes the fact on."""
        if isinstance(fact, StepDone) and fact.decode_tokens and fact.now >= _BATCH_AT_S:
            self.tokens_at.append(fact.now)
        super().observe(fact)


class Bench:
    """A server that computes chunks of this size, and a link as fast."""

    def __init__(self, chunk_tokens: int) -> None:
        profile = read(_DEVICE)
        self._cost = MeasuredCost(profile)
        self._model = ModelShape(
            profile.name, profile.layers, 1, 1, 1, 0.0, 0.0, profile.kv_bytes_per_token
        )
        self._spec = ServerSpec(_PAGE, chunk_tokens, mixed=True, write_down=False, consulted=True)
        computing_s = sum(
            self._cost.seconds(Batch((Span(start, min(start + chunk_tokens, length + _PAGE)),)))
            for length in _LENGTHS
            for start in range(0, length + _PAGE, chunk_tokens)
        )
        self.link_bytes_per_s = sum(_LENGTHS) * profile.kv_bytes_per_token / computing_s
        storage, pcie = Pipe(self.link_bytes_per_s), Pipe(profile.to_device_gbytes_per_s * 1e9)
        self._hardware = Hardware(
            profile.name,
            0,
            {"storage": storage, "pcie": pcie},
            {
                Link.STORAGE_TO_DEVICE: Route(("storage", "pcie"), 1e-4, 4),
                Link.STORAGE_TO_HOST: Route(("storage",), 1e-4, 4),
                Link.HOST_TO_DEVICE: Route(("pcie",), 1e-4),
            },
        )

    def batch(self, rule: str, prefixes: Sequence[int]) -> dict[str, float]:
        """One batch by one rule. Seconds count from its arrival."""
        requests = [
            SimRequest(f"beside {number}", 0.0, 2 * _PAGE, _DECODED) for number in range(_DECODERS)
        ] + [
            SimRequest(
                f"r{place}",
                _BATCH_AT_S,
                length + _PAGE,
                cached=((Span(0, length // _PAGE), Tier.STORAGE),),
            )
            for place, length in enumerate(prefixes)
        ]
        rules, stall_ms = RULES[rule]
        config = PolicyConfig(restore="both", prefetch="off", max_stall_ms=stall_ms)
        shape = engine_shape(self._spec, self._model)
        learned = planner_profile(self._hardware, self._cost, shape)
        planner = make_planner(config, shape, learned, rules())
        watched = _Watched(cast(Consulted, planner), shape, self._spec, config.min_restore_tokens)
        result = simulate(
            watched, self._hardware, self._model, requests, server=self._spec, cost=self._cost
        )
        restored = [one for one in result.requests if not one.rid.startswith("beside")]
        ends = [one.ttft_s for one in restored]
        gaps = [
            after - before
            for before, after in itertools.pairwise(watched.tokens_at)
            if before < _BATCH_AT_S + max(ends)
        ]
        return {"ttft_s": fmean(ends), "makespan_s": max(ends), "gap_s": max(gaps)}


def drawn(at_once: int, seed: int) -> list[int]:
    """The prefixes of a batch in tokens, in the order in which they are asked for."""
    return random.Random(seed).choices(_LENGTHS, k=at_once)


def batches(at_once: int) -> Iterator[dict[str, Any]]:
    """Every batch by every rule: chunk sizes, orders and seeds."""
    for chunk_tokens in CHUNKS:
        bench = Bench(chunk_tokens)
        for order, rule, seed in itertools.product((DRAWN, BY_LENGTH), RULES, SEEDS):
            prefixes = drawn(at_once, seed)
            if order == BY_LENGTH:
                prefixes.sort()
            where = {"chunk_tokens": chunk_tokens, "order": order, "rule": rule, "seed": seed}
            yield {**where, **bench.batch(rule, prefixes)}


def table(found: Sequence[Mapping[str, Any]], at_once: int) -> Table:
    """One row per chunk size, order and rule: means over the seeds, and time to first token over
    that of ours with the range of single seeds.
    """
    by_place: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in found:
        by_place.setdefault((one["chunk_tokens"], one["order"], one["rule"]), []).append(one)
    rows = []
    for (chunk, order, rule), mine in by_place.items():
        ours = by_place[chunk, order, OURS]
        each = [a["ttft_s"] / b["ttft_s"] for a, b in zip(mine, ours, strict=True)]
        rows.append(
            {
                "chunk": chunk,
                "order": order,
                "rule": rule,
                "ttft": 1e3 * fmean(one["ttft_s"] for one in mine),
                "over": fmean(a["ttft_s"] for a in mine) / fmean(b["ttft_s"] for b in ours),
                "range": f"{min(each):.2f} to {max(each):.2f}",
                "makespan": fmean(one["makespan_s"] for one in mine),
                "gap": 1e3 * max(one["gap_s"] for one in mine),
            }
        )
    columns = (
        Column("chunk", "chunk", "tokens", 0),
        Column("order", "queue order"),
        Column("rule", "rule"),
        Column("ttft", "mean TTFT", "ms", 0),
        Column("over", "over kvtier's", decimals=2),
        Column("range", "by seed"),
        Column("makespan", "makespan", "s", 2),
        Column("gap", "longest gap", "ms", 0),
    )
    note = (
        f"{at_once} prefixes of {_LENGTHS[0]} to {_LENGTHS[-1]} tokens at once, {len(SEEDS)} "
        f"seeds, {_DEVICE}. Below 1: sooner than kvtier. Longest gap: between two tokens of the "
        f"{_DECODERS} requests that decode beside."
    )
    return Table("Several restorations at once, same queue order", columns, rows, (note,))
