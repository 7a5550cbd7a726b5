"""Planners by the names `kvtier sim --policy` takes, and how the simulated server treats each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.rules import CacheFlow, Cake
from sgl_kvtier.lab.sim.baselines import RecomputeOnly, StockHiCache
from sgl_kvtier.lab.sim.oracle import Oracle
from sgl_kvtier.lab.sim.requests import SimRequest
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.messages import Consulted, Planner
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.shape import EngineShape


def settled(config: PolicyConfig) -> PolicyConfig:
    """The settings as a server on one NVIDIA GPU follows them: lookahead that is left at auto is on
    where it restores.
    """
    ahead = config.restore != "off"
    if config.prefetch == "auto":
        config = dataclasses.replace(config, prefetch="on" if ahead else "off")
    if config.eviction == "auto":
        config = dataclasses.replace(config, eviction="next-use" if ahead else "lru")
    return config


AHEAD = settled(PolicyConfig())
"""The simulated settings where no kvtier.json says otherwise."""


@dataclass(frozen=True)
class Setting:
    """The surroundings a planner is made for: the settings of kvtier.json, the engine, and the
    profile of earlier runs. The requests to come are for the oracle alone.
    """

    config: PolicyConfig
    engine: EngineShape
    profile: Mapping[str, Any]
    server: ServerSpec
    requests: Sequence[SimRequest]


@dataclass(frozen=True)
class Policy:
    """One name's planner. `fetches_to_host`: it is offered restorations at once, not when the
    device can take the request.
    """

    about: str
    make: Callable[[Setting], Planner]
    fetches_to_host: bool = False
    served: bool = False
    """The planner is asked what a server asks it, and has the engine's own loads beside it
    (`baselines.Served`).
    """
    unbounded_device: bool = False
    """Nothing is ever evicted from the device: a bound that no policy can pass on this load."""

    def server(self, spec: ServerSpec) -> ServerSpec:
        """The server as this policy meets it."""
        device_pages = None if self.unbounded_device else spec.device_pages
        return dataclasses.replace(
            spec, fetches=self.fetches_to_host, device_pages=device_pages, consulted=self.served
        )


def policy(name: str) -> Policy:
    """The policy of this name. Raises ConfigError naming what there is."""
    if name not in POLICIES:
        raise ConfigError(f"no policy {name!r}. There are: {', '.join(POLICIES)}")
    return POLICIES[name]


def named(rule: type) -> str:
    """A class as kvtier.json names it."""
    return f"{rule.__module__}:{rule.__qualname__}"


def _rule(**changes: Any) -> Callable[[Setting], Planner]:
    def make(setting: Setting) -> Planner:
        config = dataclasses.replace(setting.config, **changes)
        if (
            config.restore == "off"
        ):  # the default of servers; SGLang's own way has policies of its own here
            config = dataclasses.replace(config, restore="auto")
        return make_planner(config, setting.engine, setting.profile)

    return make


def _oracle(setting: Setting) -> Planner:
    # Its own foresight takes the place of the planner's lookahead.
    inner = cast(Consulted, _rule(prefetch="off")(setting))
    return Oracle(inner, setting.requests, setting.server.device_pages, setting.server.host_pages)


_PAPER: Mapping[str, Any] = {
    "restore": "auto",
    "prefetch": "off",
    "eviction": "lru",
    "sessions": False,
}
"""Neither paper looks ahead; their engines evict by last use."""

POLICIES: Mapping[str, Policy] = {
    "kvtier": Policy("the planner as kvtier.json sets it", _rule(), served=True),
    "restore": Policy(
        "the same without lookahead: restoration alone", _rule(prefetch="off"), served=True
    ),
    "cake": Policy(
        "Cake's rule: split always, whole chunks, arrival order; no lookahead",
        _rule(rules=named(Cake), **_PAPER),
        served=True,
    ),
    "cacheflow": Policy(
        "CacheFlow's rule: Cake's with I/O for the longest first",
        _rule(rules=named(CacheFlow), **_PAPER),
        served=True,
    ),
    "load": Policy("loads all there is, computes nothing of it", _rule(rules="", restore="load")),
    "recompute": Policy("computes whatever is not on the device", lambda _: RecomputeOnly()),
    "stock": Policy(
        "SGLang's HiCache, prefetch policy timeout",
        lambda setting: StockHiCache(setting.engine),
        fetches_to_host=True,
    ),
    "oracle": Policy(
        "kvtier told who comes next: prefetch before arrival, eviction by next use",
        _oracle,
        served=True,
    ),
    "unbounded": Policy(
        "a device that never fills: what no policy can beat",
        _rule(prefetch="off"),
        unbounded_device=True,
    ),
}
