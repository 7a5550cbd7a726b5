"""Runs of TierKV's experiments by policy, and by level or model; each is kept for the process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from sgl_kvtier.lab.papers.tierkv.honest import HonestPager
from sgl_kvtier.lab.papers.tierkv.load import Load, Request, arrivals
from sgl_kvtier.lab.papers.tierkv.machine import Pager, Run, Server, simulate
from sgl_kvtier.lab.papers.tierkv.measures import Measures, mean_of, measure
from sgl_kvtier.lab.papers.tierkv.placed import OneBlockPager, PackingPager, StaticPager
from sgl_kvtier.lab.papers.tierkv.setup import load_setup


@cache
def requests_of(load: Load, seed: int) -> Sequence[Request]:
    """The arrivals of a load, drawn once."""
    return arrivals(load, seed)


def run(server: Server, load: Load, policy: str, seed: int, lookahead_steps: int = 1) -> Run:
    """One run."""
    return simulate(server, requests_of(load, seed), pager_of(server, policy, lookahead_steps))


def pager_of(server: Server, policy: str, lookahead_steps: int = 1) -> Pager:
    """The pager of a policy, by the names of Table 5."""
    if policy == "Static":
        return StaticPager(server)
    if policy == "Oracle":
        return PackingPager(server)
    return HonestPager(server, policy, lookahead_steps)


@cache
def sweep(policy: str, level: float) -> Measures:
    """A point of Tables 5 to 7: the mean over the seeds."""
    setup = load_setup()
    server, load = setup.sweep_server(level), setup.sweep_load()
    runs = [run(server, load, policy, seed) for seed in setup.seeds]
    return mean_of([measure(one) for one in runs])


@cache
def accounted(policy: str, level: float) -> Measures:
    """The same point in the accounting that charges a fault one block."""
    setup = load_setup()
    server, load = setup.sweep_server(level), setup.sweep_load()
    share, lanes = setup.fitted["shares"][policy], setup.printed["link_lanes"]
    runs = [
        simulate(server, requests_of(load, seed), OneBlockPager(server, share, lanes))
        for seed in setup.seeds
    ]
    return mean_of([measure(one) for one in runs])


@cache
def column(policy: str, model: str, lookahead_steps: int = 1) -> Measures:
    """A cell of Table 4, with the HBM of 3x. One seed: while the batch is always full, hundreds of
    requests leave nothing to average.
    """
    setup = load_setup()
    server = setup.column_server(model)
    found = run(server, setup.column_load(), policy, setup.seeds[0], lookahead_steps)
    return measure(found)
