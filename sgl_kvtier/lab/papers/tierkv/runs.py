"""Runs of TierKV's experiments by reading, policy and level, model or workload; points of tables
are kept per process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from sgl_kvtier.lab.papers.tierkv.honest import HonestPager
from sgl_kvtier.lab.papers.tierkv.load import Load, Request, arrivals
from sgl_kvtier.lab.papers.tierkv.machine import Pager, Run, Server, simulate
from sgl_kvtier.lab.papers.tierkv.measures import Measures, measure, over_seeds
from sgl_kvtier.lab.papers.tierkv.placed import PackingPager, StaticPager
from sgl_kvtier.lab.papers.tierkv.printed import PrintedPager
from sgl_kvtier.lab.papers.tierkv.setup import Setup, load_setup

PRINTED, HONEST = "printed", "honest"
"""The two readings: the accounting that gives the printed numbers, and the one in which bytes obey
the link.
"""


@cache
def requests_of(load: Load, seed: int) -> Sequence[Request]:
    """The arrivals of a load, drawn once."""
    return arrivals(load, seed)


def run_printed(
    setup: Setup, server: Server, load: Load, policy: str, seed: int, lookahead_steps: int = 1
) -> Run:
    """One run in the reading "printed"."""
    pager = PrintedPager(server, policy, setup.share(policy), lookahead_steps)
    return simulate(server, requests_of(load, seed), pager)


def run_honest(server: Server, load: Load, policy: str, seed: int, lookahead_steps: int = 1) -> Run:
    """One run in the reading "honest"."""
    return simulate(server, requests_of(load, seed), honest_pager(server, policy, lookahead_steps))


def honest_pager(server: Server, policy: str, lookahead_steps: int = 1) -> Pager:
    """The pager of the reading "honest", by the names of Table 5."""
    if policy == "Static":
        return StaticPager(server)
    if policy == "Oracle":
        return PackingPager(server)
    return HonestPager(server, policy, lookahead_steps)


def printed_measures(
    setup: Setup, server: Server, load: Load, policy: str, lookahead_steps: int = 1
) -> Measures:
    """The mean over the seeds, in the reading "printed"."""
    return over_seeds(
        setup.seeds,
        lambda seed: run_printed(setup, server, load, policy, seed, lookahead_steps),
        server.kv_bytes_per_token,
    )


@cache
def sweep(reading: str, policy: str, level: float) -> Measures:
    """A point of Tables 5 to 7."""
    setup = load_setup()
    server, load = setup.sweep_server(level), setup.sweep_load()
    if reading == PRINTED:
        return printed_measures(setup, server, load, policy)
    return over_seeds(
        setup.seeds, lambda seed: run_honest(server, load, policy, seed), server.kv_bytes_per_token
    )


@cache
def column(
    policy: str, model: str, hbm_bytes: float | None = None, workload: str | None = None
) -> Measures:
    """A cell of Table 4 or Fig. 5 in the reading "printed", with the column's own HBM or
    another.
    """
    setup = load_setup()
    server = setup.column_server(model, hbm_bytes)
    run = column_run(setup, server, setup.column_load(workload), policy)
    return measure(run, server.kv_bytes_per_token)


def column_run(
    setup: Setup, server: Server, load: Load, policy: str, lookahead_steps: int = 1
) -> Run:
    """One seed: thousands of requests that keep the batch full leave nothing to average."""
    return run_printed(setup, server, load, policy, setup.seeds[0], lookahead_steps)


@cache
def column_honest(policy: str, model: str, hbm_bytes: float, lookahead_steps: int = 1) -> Measures:
    """A cell of Table 4 in the reading "honest". Fewer requests: it takes longer, and varies
    less.
    """
    setup = load_setup()
    server = setup.column_server(model, hbm_bytes)
    load = replace(setup.column_load(), requests=setup.assumed["column_requests_honest"])
    run = run_honest(server, load, policy, setup.seeds[0], lookahead_steps)
    return measure(run, server.kv_bytes_per_token)


def burst_run(setup: Setup) -> Run:
    """Fig. 7: Prefetch at 3.0x, more arrivals for a while, in the reading "printed"."""
    return run_printed(
        setup, setup.sweep_server(3.0), setup.burst_load(), "Prefetch", setup.seeds[0]
    )
