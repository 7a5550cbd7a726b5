"""Cake's Figures 4, 5 and 6 from the simulator. The paper prints curves; of Figure 6 also two
numbers.

What the figures leave open (seeds, periods, arrivals, for Figure 6 even model and bandwidth) is in
figures.json.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from sgl_kvtier.lab.papers.cake.grid import PUBLISHED, Setup
from sgl_kvtier.lab.papers.cake.run import (
    CACHED,
    STORAGE,
    Rig,
    cached_request,
    planner_of,
    policy,
    rig,
)
from sgl_kvtier.lab.papers.cake.watch import Watch
from sgl_kvtier.lab.sim.cells import Cell
from sgl_kvtier.lab.sim.links import Pipe
from sgl_kvtier.lab.sim.requests import SimRequest, SimResult
from sgl_kvtier.lab.sim.run import simulate
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.messages import Fact, Planner, StepPlan, StepView
from sgl_kvtier.types import Tier

SCENARIOS: dict[str, Any] = json.loads(Path(__file__).with_name("figures.json").read_text("utf-8"))

RULES = ("cake", "kvtier")

Wrap = Callable[[Planner], Planner]


def watched(
    parts: Rig,
    planner: Planner,
    requests: Sequence[SimRequest],
    wrap: Wrap | None = None,
    record: bool = False,
) -> tuple[Watch, SimResult]:
    """One run; `wrap` puts something between the planner and the server."""
    page_tokens = parts.engine.page_tokens
    prefixes = {CACHED: next(r.prompt_tokens for r in requests if r.rid == CACHED) - 1}
    watch = Watch(wrap(planner) if wrap else planner, page_tokens, prefixes)
    server = ServerSpec(
        page_tokens=page_tokens, step_tokens=parts.engine.chunk_tokens, mixed=True, write_down=False
    )
    result = simulate(
        watch, parts.hardware, parts.model, requests, server=server, cost=parts.cost, record=record
    )
    return watch, result


# --- Figure 4: what a chunk costs, by its index ---------------------------------------------------


@cache
def chunk_seconds(hardware: str) -> tuple[float, ...]:
    """Seconds of each chunk of one long prompt, computed alone."""
    scene = SCENARIOS["fig4"]
    parts = rig(Setup(hardware, scene["model"], scene["tokens"], gbps=1.0))
    planner = planner_of(parts, "cake", policy("compute"))
    watch, _ = watched(parts, planner, [cached_request(scene["tokens"])])
    return tuple(
        chunk.seconds for chunk in watch.chunks if len(chunk.tokens) == parts.engine.chunk_tokens
    )


def figure_4() -> Sequence[Cell]:
    """First and last chunk; the figure has no numbers."""
    cells = []
    for hardware in SCENARIOS["fig4"]["hardware"]:
        seconds = chunk_seconds(hardware)
        for index in (0, len(seconds) - 1):
            ours = round(seconds[index] * 1e3, 2)
            cells.append(Cell("cake fig4", hardware, f"chunk {index}", None, ours, "ms"))
    return cells


# --- Figure 5: budget and bandwidth that fluctuate ------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fluctuation:
    """One pair of random traces: a token budget per period, and bytes per second with the second
    each holds from.
    """

    budgets: tuple[int, ...]
    rates: tuple[tuple[float, float], ...]

    def loaded_bytes(self, now: float) -> float:
        """The bytes the link can have carried by then."""
        ends = [since for since, _ in self.rates[1:]] + [float("inf")]
        spans = zip(self.rates, ends, strict=True)
        return sum(rate * (min(now, end) - since) for (since, rate), end in spans if since < now)


@cache
def fluctuation(seed: int) -> Fluctuation:
    """Uniform samples, the same for every planner. A budget below one page is one page."""
    scene, rng = SCENARIOS["fig5"], random.Random(seed)
    page = scene["page_tokens"]
    budgets = tuple(
        max(page, rng.randint(0, scene["budget"]) // page * page) for _ in range(scene["samples"])
    )
    period_s, most = scene["bandwidth_period_s"], scene["most_gbps"] * 1e9 / 8
    rates = [(i * period_s, rng.uniform(0, most)) for i in range(scene["samples"])]
    return Fluctuation(budgets, tuple(rates))


class Budgeted:
    """A planner that sees another token budget every `period_s`, and with `loads` False no room for
    anything loaded.
    """

    def __init__(
        self, planner: Planner, budgets: Sequence[int], period_s: float, loads: bool
    ) -> None:
        self._planner = planner
        self._budgets = budgets
        self._period_s = period_s
        self._loads = loads

    def observe(self, fact: Fact) -> None:
        """Passes it on."""
        self._planner.observe(fact)

    def step(self, view: StepView) -> StepPlan:
        """The plan for what is there."""
        free = view.free_pages if self._loads else {**view.free_pages, Tier.DEVICE: 0}
        budget = self._budgets[int(view.now / self._period_s)]
        return self._planner.step(dataclasses.replace(view, prefill_tokens=budget, free_pages=free))


@cache
def fluctuating_rig(seed: int) -> Rig:
    """The machine under one pair of traces, where others fill every step."""
    scene = SCENARIOS["fig5"]
    setup = Setup(scene["hardware"], scene["model"], scene["tokens"], scene["most_gbps"] / 2)
    parts = rig(setup, scene["page_tokens"])
    pipe = Pipe(scene["most_gbps"] * 1e9 / 16, trace=fluctuation(seed).rates)
    return dataclasses.replace(
        parts,
        hardware=dataclasses.replace(parts.hardware, pipes={STORAGE: pipe}),
        cost=dataclasses.replace(parts.cost, filled_to=scene["budget"]),
        # Learned before: steps of which this request had half, and an average link.
        profile=rig(dataclasses.replace(setup, share=0.5)).profile,
    )


@cache
def fluctuating_run(seed: int, rule: str, only: str = "") -> tuple[float, SimResult]:
    """Seconds until the prefix is resident. `only`: "compute" or "load" for the baselines."""
    scene, budgets = SCENARIOS["fig5"], fluctuation(seed).budgets
    parts = fluctuating_rig(seed)
    planner = planner_of(parts, rule, policy("load" if only == "load" else "both"))
    request = cached_request(scene["tokens"], scene["page_tokens"])
    watch, result = watched(
        parts,
        planner,
        [request],
        lambda planner: Budgeted(planner, budgets, scene["budget_period_s"], only != "compute"),
        record=True,
    )
    return watch.restored_s[CACHED], result


def least_seconds(seed: int) -> float:
    """A lower bound in seconds: no schedule is faster, even one that knows the future.

    It is the first instant by which the tokens that could be computed and those that could be
    loaded make up the prefix. Every budget and every byte is used until then.
    """
    scene, traces, parts = SCENARIOS["fig5"], fluctuation(seed), fluctuating_rig(seed)
    cost, full, now, front = parts.cost.cost, scene["budget"], 0.0, 0
    while True:
        budget = traces.budgets[int(now / scene["budget_period_s"])]
        seconds = (
            cost.chunk_seconds(front, full) + cost.per_token_position_s * full * (budget - full) / 2
        )
        for part in range(1, 101):
            at = now + seconds * part / 100
            loaded = traces.loaded_bytes(at) / parts.model.kv_bytes_per_token
            if front + budget * part / 100 + loaded >= scene["tokens"]:
                return at
        now, front = now + seconds, front + budget


def figure_5() -> Sequence[Cell]:
    """Mean over the seeds: restoration time over the least possible one. The figure has no
    numbers.
    """
    seeds = SCENARIOS["fig5"]["seeds"]
    least = [least_seconds(seed) for seed in seeds]
    arms = {
        "compute only": [fluctuating_run(seed, "cake", "compute")[0] for seed in seeds],
        "I/O only": [fluctuating_run(seed, "cake", "load")[0] for seed in seeds],
        **{rule: [fluctuating_run(seed, rule)[0] for seed in seeds] for rule in RULES},
    }
    cells = []
    for name, seconds in arms.items():
        over = [mine / bound for mine, bound in zip(seconds, least, strict=True)]
        cells.append(Cell("cake fig5", name, "seconds", None, round(fmean(seconds), 3), "s"))
        cells.append(
            Cell("cake fig5", name, "over the least possible", None, round(fmean(over), 3), "x")
        )
    return cells


# --- Figure 6: one long cached request among short ones -------------------------------------------


def burst(seed: int) -> list[SimRequest]:
    """The cached request at 0, then short ones in bursts; lengths are uniform."""
    scene, rng = SCENARIOS["fig6"], random.Random(seed)
    short = [
        SimRequest(
            f"short-{number:02d}",
            scene["bursts_s"][number * len(scene["bursts_s"]) // scene["requests"]],
            rng.randint(scene["least_tokens"], scene["most_tokens"]),
        )
        for number in range(scene["requests"])
    ]
    return [cached_request(scene["tokens"], scene["page_tokens"]), *short]


@cache
def burst_run(seed: int, rule: str, adaptive: bool) -> tuple[Watch, SimResult]:
    """All of it, with prefill of others before the restoration's or behind it."""
    scene = SCENARIOS["fig6"]
    setup = Setup(scene["hardware"], scene["model"], scene["tokens"], scene["gbps"])
    # Cake's adaptive mode has no bound on how long a restoration yields.
    parts = rig(setup, scene["page_tokens"])
    return watched(parts, planner_of(parts, rule, policy(), adaptive, 10_000), burst(seed))


def figure_6() -> Sequence[Cell]:
    """Mean over the seeds: until all are done, and the others' mean time to first token."""
    scene, cells = SCENARIOS["fig6"], []
    with (PUBLISHED / "cake_fig6.csv").open(newline="", encoding="utf-8") as file:
        printed = {row["row"]: float(row["finish seconds"]) for row in csv.DictReader(file)}
    for rule in RULES:
        for adaptive, name in ((False, "default scheduling"), (True, "adaptive scheduling")):
            runs = [burst_run(seed, rule, adaptive)[1] for seed in scene["seeds"]]
            finish_s = fmean(run.finished_s for run in runs)
            short_s = fmean(r.ttft_s for run in runs for r in run.requests if r.rid != CACHED)
            published = printed[name] if rule == "cake" else None
            cells.append(
                Cell("cake fig6", name, "finish", published, round(finish_s, 3), "s", reading=rule)
            )
            cells.append(
                Cell("cake fig6", name, "others TTFT", None, round(short_s, 3), "s", reading=rule)
            )
    return cells
