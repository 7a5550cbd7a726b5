"""Several simulated servers with one store that they share over one network, and a router that
sends some turns of a session to another server than the turn before.

Every server has its own memory, disk and planner. What one writes to its disk the others find over
the network. Reads of all servers share the network's bandwidth; writes go the other way and are
free. The same arguments give the same numbers to the bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.pages.stats import summary
from sgl_kvtier.lab.sim.experiment import Machine
from sgl_kvtier.lab.sim.hardware import Route, planner_profile, step_cost
from sgl_kvtier.lab.sim.links import Network, Pipe
from sgl_kvtier.lab.sim.memory import TierMemory
from sgl_kvtier.lab.sim.policies import Setting, policy
from sgl_kvtier.lab.sim.requests import RequestResult, SimRequest
from sgl_kvtier.lab.sim.run import Arrivals, Kernel, built, engine_shape
from sgl_kvtier.lab.sim.served import Served
from sgl_kvtier.policy.messages import Consulted
from sgl_kvtier.types import Link, PageKey, Tier

NETWORK = "network"
"""The pipe of all servers."""
_LATENCY_S = 2e-4
_DEPTH = 4
_BYTES_PER_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Chats:
    """The load of each server: sessions that start at random and take turns. A turn's prompt is
    what was there and `more_tokens`. Times are means of an exponential distribution, in seconds.
    """

    sessions: int = 4
    turns: int = 4
    first_tokens: int = 16384
    more_tokens: int = 4096
    output_tokens: int = 16
    start_every_s: float = 8.0
    gap_s: float = 8.0


@dataclass(frozen=True)
class Fleet:
    """Servers, and the network between them and the shared store. `moved` is the share of
    turns, but for each session's first, that go to another server than the one before. One server
    has another beside it that only takes moved turns.
    """

    servers: int
    moved: float
    gbps: float = 100.0
    seed: int = 0
    chats: Chats = field(default_factory=Chats)


@dataclass(frozen=True)
class Routed:
    """The requests of all sessions, the server of each, and those that were moved."""

    requests: list[SimRequest]
    server: dict[str, int]
    moved: dict[str, None]


def routed(fleet: Fleet, page_tokens: int) -> Routed:
    """Draws the load. The sessions of a smaller fleet are among those of a larger one."""
    found = Routed([], {}, {})
    places = max(2, fleet.servers)
    for home in range(fleet.servers):
        rng = random.Random(f"{fleet.seed}/{home}")
        start_s = 0.0
        for number in range(fleet.chats.sessions):
            start_s += rng.expovariate(1 / fleet.chats.start_every_s)
            _add_session(found, fleet, f"{home}.{number}", home, start_s, rng, places, page_tokens)
    return found


def _add_session(
    found: Routed,
    fleet: Fleet,
    session: str,
    home: int,
    start_s: float,
    rng: random.Random,
    places: int,
    page_tokens: int,
) -> None:
    chats, place, before = fleet.chats, home, None
    last = chats.first_tokens + chats.turns * chats.more_tokens
    names = [
        PageKey(f"{session}/{page}".encode().ljust(32, b"\0"))
        for page in range(last // page_tokens + 1)
    ]
    for turn in range(chats.turns):
        tokens = chats.first_tokens + turn * chats.more_tokens
        gap_s = rng.expovariate(1 / chats.gap_s) if turn else start_s
        moves, step = rng.random() < fleet.moved, rng.randrange(1, places)
        rid = f"{session}.{turn}"
        if turn and moves:
            place = (place + step) % places
            found.moved[rid] = None
        found.server[rid] = place
        found.requests.append(
            SimRequest(
                rid,
                gap_s,
                tokens,
                chats.output_tokens,
                keys=tuple(names[: tokens // page_tokens]),
                final_keys=tuple(names[: (tokens + chats.output_tokens) // page_tokens]),
                session=session,
                after=before,
            )
        )
        before = rid


class _Wires:
    """A server's own pipes, and the network behind it."""

    def __init__(self, own: Network, shared: Network) -> None:
        self._own = own
        self._shared = shared

    def open(
        self, pipes: tuple[str, ...], nbytes: int, done: Callable[..., object], latency_s: float
    ) -> object:
        """Begins a transfer (`Network.open`)."""
        network = self._shared if pipes == (NETWORK,) else self._own
        return network.open(pipes, nbytes, done, latency_s)


def run_fleet(
    fleet: Fleet,
    machine: Machine,
    name: str,
    config: PolicyConfig,
    on_finish: Callable[[SimRequest], None] | None = None,
) -> dict[str, Any]:
    """One policy on every server of a fleet, in numbers (`kvtier.sim.network/1`)."""
    hardware, model, spec = machine.parts()
    # The bus is far faster than a share of the network, so it is left out.
    routes = {link: Route((NETWORK,), _LATENCY_S, _DEPTH) for link in _OVER_NETWORK}
    hardware = replace(
        hardware,
        pipes={**hardware.pipes, NETWORK: Pipe(fleet.gbps * _BYTES_PER_GBIT)},
        routes={**hardware.routes, **routes},
    )
    chosen, shape = policy(name), engine_shape(spec, model)
    profile = planner_profile(hardware, step_cost(hardware, model), shape)
    server = chosen.server(spec)
    load = routed(fleet, machine.page_tokens)
    env = Kernel()
    network = Network(env, {NETWORK: hardware.pipes[NETWORK]})
    shared = TierMemory(Tier.REMOTE, None)
    engines = []
    for _ in range(max(2, fleet.servers)):
        planner = chosen.make(Setting(config, shape, profile, spec, load.requests))
        if chosen.served:
            planner = Served(cast(Consulted, planner), shape, server, config.min_restore_tokens)
        wires = _Wires(Network(env, hardware.pipes), network)
        engines.append(built(env, wires, planner, hardware, model, server, shared=shared))
    done = env.event()
    Arrivals(
        env,
        [one.server for one in engines],
        lambda request: engines[load.server[request.rid]].server,
        load.requests,
        done,
        on_finish,
    ).start()
    for one in engines:
        env.process(one.server.run())
    env.run(until=done)
    used = network.usage()[NETWORK]
    moved_bytes = sum(
        one.transfers.results[link].nbytes for one in engines for link in _OVER_NETWORK
    )
    results = [result for one in engines for result in one.server.results]
    return {
        "servers": fleet.servers,
        "moved": fleet.moved,
        "gbps": fleet.gbps,
        "seed": fleet.seed,
        "policy": name,
        "requests": len(results),
        "finished_s": env.now,
        "network_bytes": moved_bytes,
        "network_full": used.full_s / env.now,
        **_figures("ttft_s", results),
        **_figures("moved_ttft_s", [one for one in results if one.rid in load.moved]),
    }


_OVER_NETWORK = (Link.REMOTE_TO_HOST, Link.REMOTE_TO_DEVICE)


def _figures(name: str, results: Sequence[RequestResult]) -> dict[str, Any]:
    ttfts = [one.ttft_s for one in results]
    computed = sum(one.computed_tokens for one in results)
    return {name: summary(ttfts), f"{name.removesuffix('ttft_s')}computed_tokens": computed}
