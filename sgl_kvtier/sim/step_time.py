"""How long one step of the planner takes, on this machine's clock: `python -m sgl_kvtier.sim.step_time`.

A scheduler with many waiting requests and the map filled with so many pages. Between two steps, facts arrive as an engine
would report them: chunks start and end, loads land, pages come and go. Only `step` is timed, then facts and step together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import (
    ChunkDone,
    ChunkStarted,
    Fact,
    PagesPlaced,
    RequestArrived,
    RestoreOffered,
    StepDone,
    StepPlan,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.restore import EngineShape
from sgl_kvtier.report import Column, Table, percentile, print_table
from sgl_kvtier.types import PageKey, Span, Tier

_PAGE_TOKENS = 64
_PAGE_BYTES = 8 << 20
_STEP_S = 0.02
_LINK_BYTES_PER_S = 5e9
_PROFILE = {
    "prefill": {"fixed_s": 0.003, "per_token_s": 3e-5, "per_token_position_s": 1e-9},
    "links": {"ssd-hbm": _LINK_BYTES_PER_S, "ssd-dram": _LINK_BYTES_PER_S, "dram-hbm": 5e10},
}


class _Engine:
    """Just enough of an engine that the planner has something to decide in every step: loads land in the order asked, as
    fast as the link is, and each chunk granted runs in one step."""

    def __init__(self, requests: int, pages: int, known: int) -> None:
        shape = EngineShape(_PAGE_TOKENS, _PAGE_BYTES, 2048)
        self._planner = make_planner(PolicyConfig(map_pages=max(known, 1) * 2), shape, _PROFILE)
        self._now = 0.0
        self._waiting = [f"r{number}" for number in range(requests)]
        self._slot: str | None = None
        self._loads: list[tuple[float, TransferDone]] = []
        self._free_at = 0.0
        self._pages = pages
        self._next = 0
        self.facts: list[Fact] = []
        for start in range(0, known - requests * pages, 4096):
            keys = tuple(_key("other", place) for place in range(start, min(start + 4096, known - requests * pages)))
            self._planner.observe(PagesPlaced(keys, Tier.SSD, 0.0))
        for rid in self._waiting:
            self._arrive(rid)

    def _arrive(self, rid: str) -> None:
        keys = tuple(_key(rid, place) for place in range(self._pages))
        tokens = self._pages * _PAGE_TOKENS + 1
        self.facts.append(RequestArrived(rid, self._now, tokens, keys, rid))
        self.facts.append(PagesPlaced(keys, Tier.SSD, self._now))
        sources = ((Span(0, self._pages), Tier.SSD),)
        self.facts.append(RestoreOffered(rid, self._now, tokens, 0, self._pages, sources))

    def step(self) -> tuple[float, float]:
        """One step: microseconds of `step` alone, and with the facts before it."""
        self._now += _STEP_S
        while self._loads and self._loads[0][0] <= self._now:
            self.facts.append(self._loads.pop(0)[1])
        view = StepView(
            now=self._now,
            waiting=tuple(rid for rid in self._waiting if rid != self._slot),
            slot=self._slot,
            prefill_tokens=2048,
            decoding=64,
            free_pages={Tier.HBM: 4096, Tier.DRAM: 8192, Tier.SSD: 1 << 30},
        )
        facts, self.facts = self.facts, []
        began = time.perf_counter()
        for fact in facts:
            self._planner.observe(fact)
        observed = time.perf_counter()
        plan = self._planner.step(view)
        ended = time.perf_counter()
        self._carry_out(plan)
        return 1e6 * (ended - observed), 1e6 * (ended - began)

    def _carry_out(self, plan: StepPlan) -> None:
        for load in plan.loads:
            nbytes = len(load.span) * _PAGE_BYTES
            seconds = nbytes / _LINK_BYTES_PER_S
            self._free_at = max(self._free_at, self._now) + seconds
            done = TransferDone(load.rid, load.link, load.span, nbytes, seconds, self._free_at)
            self._loads.append((self._free_at, done))
        for compute in plan.computes[:1]:
            tokens = 2048 if compute.tokens is None else compute.tokens
            start = compute.splice.stop * _PAGE_TOKENS
            if tokens:
                self._slot = compute.rid
                span = Span(start, min(start + tokens, self._pages * _PAGE_TOKENS + 1))
                self.facts.append(ChunkStarted(compute.rid, span, self._now))
                self.facts.append(ChunkDone(compute.rid, span, _STEP_S, self._now + _STEP_S))
                if span.stop >= self._pages * _PAGE_TOKENS:
                    self._replace(compute.rid)
        self.facts.append(StepDone(_STEP_S, 2048, 64, self._now + _STEP_S))

    def _replace(self, rid: str) -> None:
        """Its prefix is whole: another request takes its place in the queue."""
        self._slot = None
        self._waiting.remove(rid)
        self._next += 1
        self._waiting.append(f"n{self._next}")
        self._arrive(self._waiting[-1])


def _key(name: str, place: int) -> PageKey:
    return PageKey(f"{name}/{place}".encode().ljust(32, b"."))


def measure(requests: int, pages: int, known: int, steps: int = 2000) -> dict[str, float | int | None]:
    """Microseconds per step after the first ones, which take in the offers."""
    engine = _Engine(requests, pages, known)
    for _ in range(20):
        engine.step()
    times = [engine.step() for _ in range(steps)]
    alone, whole = ([pair[place] for pair in times] for place in (0, 1))
    return {
        "requests": requests,
        "pages": pages,
        "known": known,
        "step_p50": percentile(alone, 50),
        "step_p99": percentile(alone, 99),
        "whole_p50": percentile(whole, 50),
        "whole_p99": percentile(whole, 99),
    }


def main(arguments: Sequence[str]) -> int:
    """Prints the table; the first argument is the number of steps."""
    steps = int(arguments[0]) if arguments else 2000
    rows = [measure(256, 256, known, steps) for known in (65_536, 100_000, 1_000_000)]
    rows += [measure(4, 256, known, steps) for known in (1_024, 10_000, 100_000, 1_000_000)]
    columns = [
        Column("requests", "waiting"),
        Column("pages", "pages each"),
        Column("known", "known pages"),
        Column("step_p50", "step p50", "us", 1),
        Column("step_p99", "step p99", "us", 1),
        Column("whole_p50", "with facts p50", "us", 1),
        Column("whole_p99", "with facts p99", "us", 1),
    ]
    print_table(Table(f"Planner step, {steps} steps each", columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
