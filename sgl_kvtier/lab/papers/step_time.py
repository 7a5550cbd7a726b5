"""The time of one planner step on this machine's clock, or what its map takes of memory: `python -m
sgl_kvtier.lab.papers.step_time [STEPS | memory [PAGES]]`.

The scene is a scheduler with many waiting requests and a map filled with a given number of pages.
Between two steps, facts arrive as an engine would report them: chunks start and end, loads land,
pages come and go. Only `step` is timed, then facts and step together. CPU time is the planner's own
need. Wall-clock time beyond it was spent by other programs.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import psutil

from sgl_kvtier.console import Column, Table, print_table
from sgl_kvtier.lab.pages.stats import percentile
from sgl_kvtier.lab.sim.policies import AHEAD
from sgl_kvtier.policy.messages import (
    ChunkDone,
    ChunkStarted,
    Evict,
    Fact,
    Move,
    PagesDropped,
    PagesPlaced,
    Planner,
    RequestArrived,
    RequestFinished,
    RestoreOffered,
    StepDone,
    StepPlan,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, PageKey, Span, Tier

_PAGE_TOKENS = 64
_PAGE_BYTES = 8 << 20
_STEP_S = 0.02
_STEP_TOKENS = 2048
_HBM_PAGES, _DRAM_PAGES = 4096, 8192
_LINK_BYTES_PER_S = 5e9
_PROFILE = {
    "prefill": {"fixed_s": 0.003, "per_token_s": 3e-5, "per_token_position_s": 1e-9},
    "links": {
        "storage-device": _LINK_BYTES_PER_S,
        "storage-host": _LINK_BYTES_PER_S,
        "host-device": 5e10,
    },
    "restore": {"own_s": 0.0},
}


class Scene:
    """Requests wait for the engine, `pages` each, all of them on the SSD, and are restored.

    It is just enough of an engine that the planner has something to decide in every step. Loads
    land in the order asked, as fast as the link is, and each chunk granted runs in one step. A
    request that ends is followed by another.
    """

    _new_tokens = 1

    def __init__(self, requests: int, pages: int, known: int) -> None:
        self.config = replace(AHEAD, map_pages=max(known, 1) * 2)
        self.engine = EngineShape(_PAGE_TOKENS, _PAGE_BYTES, _STEP_TOKENS)
        self.profile = _PROFILE
        self.planner: Planner = make_planner(self.config, self.engine, _PROFILE)
        self.facts: list[Fact] = []
        """The facts since the last step."""
        self._now = 0.0
        self._waiting = [f"r{number}" for number in range(requests)]
        self._slot: str | None = None
        self._landing: list[tuple[float, Fact]] = []
        self._free_at = 0.0
        self._pages = pages
        self._next = 0
        for start in range(0, known - requests * pages, 4096):
            keys = tuple(
                _key("other", place)
                for place in range(start, min(start + 4096, known - requests * pages))
            )
            self.planner.observe(PagesPlaced(keys, Tier.STORAGE, 0.0))
        for rid in self._waiting:
            self._arrive(rid)

    def step(self) -> tuple[float, float, float]:
        """One step: microseconds of `step` alone, of CPU time for it, and with the facts before
        it.
        """
        self._now += _STEP_S
        while self._landing and self._landing[0][0] <= self._now:
            self._landed(self._landing.pop(0)[1])
        view = StepView(
            now=self._now,
            waiting=tuple(rid for rid in self._waiting if rid != self._slot),
            slot=self._slot,
            prefill_tokens=_STEP_TOKENS,
            decoding=64,
            free_pages=self._free(),
        )
        facts, self.facts = self.facts, []
        began = time.perf_counter_ns()
        for fact in facts:
            self.planner.observe(fact)
        cpu, observed = time.thread_time_ns(), time.perf_counter_ns()
        plan = self.planner.step(view)
        ended, spent = time.perf_counter_ns(), time.thread_time_ns() - cpu
        self._carry_out(plan)
        return (ended - observed) / 1e3, spent / 1e3, (ended - began) / 1e3

    def _arrive(self, rid: str) -> None:
        keys = self._keys(rid)
        tokens = self._pages * _PAGE_TOKENS + self._new_tokens
        self.facts.append(RequestArrived(rid, self._now, tokens, keys, rid))
        self.facts.append(PagesPlaced(keys, Tier.STORAGE, self._now))
        self._offer(rid, tokens)

    def _offer(self, rid: str, tokens: int) -> None:
        self.facts.append(
            RestoreOffered(
                rid, self._now, tokens, 0, self._pages, ((Span(0, self._pages), Tier.STORAGE),)
            )
        )

    def _keys(self, rid: str) -> tuple[PageKey, ...]:
        return tuple(_key(rid, place) for place in range(self._pages))

    def _free(self) -> dict[Tier, int]:
        return {Tier.DEVICE: _HBM_PAGES, Tier.HOST: _DRAM_PAGES, Tier.STORAGE: 1 << 30}

    def _landed(self, fact: Fact) -> None:
        self.facts.append(fact)

    def _carry_out(self, plan: StepPlan) -> None:
        for load in plan.loads:
            nbytes = len(load.span) * _PAGE_BYTES
            seconds = nbytes / _LINK_BYTES_PER_S
            self._free_at = max(self._free_at, self._now) + seconds
            done = TransferDone(load.rid, load.link, load.span, nbytes, seconds, self._free_at)
            self._landing.append((self._free_at, done))
        for compute in plan.computes[:1]:
            tokens = _STEP_TOKENS if compute.tokens is None else compute.tokens
            start = compute.splice.stop * _PAGE_TOKENS
            if tokens:
                self._run(
                    compute.rid, Span(start, min(start + tokens, self._pages * _PAGE_TOKENS + 1))
                )
        self.facts.append(StepDone(_STEP_S, _STEP_TOKENS, 64, self._now + _STEP_S))

    def _run(self, rid: str, tokens: Span) -> None:
        self._slot = rid
        self.facts.append(ChunkStarted(rid, tokens, self._now))
        self.facts.append(ChunkDone(rid, tokens, _STEP_S, self._now + _STEP_S))
        if tokens.stop >= self._pages * _PAGE_TOKENS:
            self._replace(rid)

    def _replace(self, rid: str) -> None:
        """Its prefix is whole: another request takes its place in the queue."""
        self._slot = None
        self._waiting.remove(rid)
        self._next += 1
        self._waiting.append(f"n{self._next}")
        self._arrive(self._waiting[-1])


class AheadScene(Scene):
    """The same queue where nothing is restored.

    Lookahead brings pages to DRAM and HBM before each turn, and other pages are evicted. The engine
    itself reads the pages that are still missing. Each request has enough new tokens besides that
    it runs for four steps. A request that ends leaves a session behind that lookahead expects back.
    """

    def __init__(self, requests: int, pages: int, known: int) -> None:
        self._held: dict[Tier, dict[PageKey, None]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        self._most = {Tier.DEVICE: _HBM_PAGES, Tier.HOST: _DRAM_PAGES}
        self._chunks = 0
        super().__init__(requests, pages, known)

    _new_tokens = 4 * _STEP_TOKENS

    def _offer(self, rid: str, tokens: int) -> None:
        """Nothing is offered."""

    def _free(self) -> dict[Tier, int]:
        # All of it may be claimed: every page there can be evicted.
        return {**self._most, Tier.STORAGE: 1 << 30}

    def _landed(self, fact: Fact) -> None:
        self.facts.append(fact)
        if isinstance(fact, PagesPlaced):
            self._place(fact.keys, fact.tier)

    def _place(self, keys: tuple[PageKey, ...], tier: Tier) -> None:
        held = self._held[tier]
        held.update(dict.fromkeys(keys))
        leaving = tuple(
            key for key, _ in zip(list(held), range(len(held) - self._most[tier]), strict=False)
        )
        if leaving:
            self._drop(leaving, tier)

    def _drop(self, keys: tuple[PageKey, ...], tier: Tier) -> None:
        for key in keys:
            self._held[tier].pop(key, None)
        self.facts.append(PagesDropped(keys, tier, self._now))

    def _carry_out(self, plan: StepPlan) -> None:
        for eviction in plan.evictions:
            self._evict(eviction, plan.moves)
        for move in plan.moves:
            rate = _LINK_BYTES_PER_S if move.source is Tier.STORAGE else 10 * _LINK_BYTES_PER_S
            nbytes = len(move.keys) * _PAGE_BYTES
            self._free_at = max(self._free_at, self._now) + nbytes / rate
            link = Link.STORAGE_TO_HOST if move.target is Tier.HOST else Link.HOST_TO_DEVICE
            done = TransferDone("", link, Span(0, 0), nbytes, nbytes / rate, self._free_at)
            self._landing.append((self._free_at, done))
            self._landing.append(
                (self._free_at, PagesPlaced(move.keys, move.target, self._free_at))
            )
        rid, start = self._waiting[0], self._pages * _PAGE_TOKENS + self._chunks * _STEP_TOKENS
        lacking = tuple(key for key in self._keys(rid) if key not in self._held[Tier.DEVICE])
        if lacking:
            self._landed(PagesPlaced(lacking, Tier.DEVICE, self._now))
        self._chunks += 1
        self._run(rid, Span(start, start + _STEP_TOKENS))
        self.facts.append(StepDone(_STEP_S, _STEP_TOKENS, 64, self._now + _STEP_S))

    def _run(self, rid: str, tokens: Span) -> None:
        self._slot = rid
        self.facts.append(ChunkStarted(rid, tokens, self._now))
        self.facts.append(ChunkDone(rid, tokens, _STEP_S, self._now + _STEP_S))
        if self._chunks == 4:
            self._replace(rid)

    def _evict(self, eviction: Evict, moves: tuple[Move, ...]) -> None:
        """As many as are needed for what is moved, the first named first."""
        coming = (
            sum(len(move.keys) for move in moves if move.target is eviction.tier)
            + _STEP_TOKENS // _PAGE_TOKENS
        )
        short = len(self._held[eviction.tier]) + coming - self._most[eviction.tier]
        keys = tuple(key for key in eviction.keys if key in self._held[eviction.tier])[
            : max(0, short)
        ]
        if keys:
            self._drop(keys, eviction.tier)

    def _replace(self, rid: str) -> None:
        self._chunks = 0
        self.facts.append(RequestFinished(rid, self._now + _STEP_S, keys=self._keys(rid)))
        super()._replace(rid)


def _key(name: str, place: int) -> PageKey:
    return PageKey(f"{name}/{place}".encode().ljust(32, b"."))


def measure(scene: Scene, steps: int = 2000) -> dict[str, float]:
    """Microseconds per step after the first ones, which take in the offers."""
    for _ in range(20):
        scene.step()
    times = [scene.step() for _ in range(steps)]
    names = ("step", "cpu", "whole")
    return {
        f"{name}_p{share}": percentile([each[place] for each in times], share) or 0.0
        for place, name in enumerate(names)
        for share in (50, 99)
    }


_SESSION_PAGES = 1024


def memory(pages: int, kind: str) -> int:
    """Bytes that a planner takes for this number of pages, with their keys: by what the process
    grows.

    `kind`: `stored` pages are in storage alone. Those of `sessions` are on the device and in
    storage, and belong to idle sessions that are expected back.
    """
    gc.collect()
    before = psutil.Process().memory_info().rss
    engine = EngineShape(_PAGE_TOKENS, _PAGE_BYTES, _STEP_TOKENS)
    planner = make_planner(replace(AHEAD, map_pages=2 * pages), engine, _PROFILE)
    for number in range(pages // _SESSION_PAGES):
        rid = f"s{number}"
        keys = tuple(_key(rid, place) for place in range(_SESSION_PAGES))
        if kind == "sessions":
            tokens = _SESSION_PAGES * _PAGE_TOKENS
            planner.observe(RequestArrived(rid, 0.0, tokens, keys, rid))
            planner.observe(PagesPlaced(keys, Tier.DEVICE, 0.0))
        planner.observe(PagesPlaced(keys, Tier.STORAGE, 0.0))
        if kind == "sessions":
            planner.observe(RequestFinished(rid, 1.0, keys=keys))
    planner.step(StepView(2.0, free_pages={Tier.DEVICE: 0, Tier.HOST: 0, Tier.STORAGE: 1 << 30}))
    gc.collect()
    return psutil.Process().memory_info().rss - before


def _print_memory(pages: int) -> int:
    rows = []
    for kind in ("stored", "sessions"):
        # each in a process of its own: what one has freed the next would take for nothing
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            nbytes = pool.submit(memory, pages, kind).result()
        rows.append({"kind": kind, "pages": pages, "mib": nbytes / 2**20, "each": nbytes / pages})
    columns = [
        Column("kind", "Pages"),
        Column("pages", "Known"),
        Column("mib", "Memory", "MiB", 0),
        Column("each", "Each", "bytes", 0),
    ]
    print_table(Table("Map and planner", columns, rows))
    return 0


def main(arguments: Sequence[str]) -> int:
    """Prints the table; the first argument is the number of steps."""
    if arguments[:1] == ["memory"]:
        return _print_memory(int(arguments[1]) if len(arguments) > 1 else 1_000_000)
    steps = int(arguments[0]) if arguments else 2000
    sizes = [(256, known) for known in (65_536, 100_000, 1_000_000)] + [
        (4, known) for known in (1_024, 10_000, 100_000, 1_000_000)
    ]
    kinds = {"restoring": (Scene, sizes), "looking ahead": (AheadScene, sizes[:3])}
    rows = []
    for kind, (scene, places) in kinds.items():
        for requests, known in places:
            sizes_of_it = {"kind": kind, "requests": requests, "pages": 256, "known": known}
            rows.append({**sizes_of_it, **measure(scene(requests, 256, known), steps)})
    columns = [
        Column("kind", "scene"),
        Column("requests", "waiting"),
        Column("pages", "pages each"),
        Column("known", "known pages"),
        Column("step_p50", "step p50", "us", 1),
        Column("step_p99", "step p99", "us", 1),
        Column("cpu_p50", "CPU p50", "us", 1),
        Column("cpu_p99", "CPU p99", "us", 1),
        Column("whole_p50", "with facts p50", "us", 1),
        Column("whole_p99", "with facts p99", "us", 1),
    ]
    print_table(Table(f"Planner step, {steps} steps each", columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
