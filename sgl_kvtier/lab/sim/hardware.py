"""Machines and models as data: profiles in json with their sources. The step cost and the pipes
follow from them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.sim.costs import StepCost
from sgl_kvtier.lab.sim.links import Pipe
from sgl_kvtier.types import Link

_PROFILES = Path(__file__).with_name("profiles")


@dataclass(frozen=True, slots=True)
class Route:
    """How a Link is carried: over which pipes, with which latency per transfer, and how many
    transfers at a time.
    """

    pipes: tuple[str, ...]
    latency_s: float = 0.0
    depth: int = 1


@dataclass(frozen=True)
class Hardware:
    """A machine. `pipes` and `routes` carry the bytes; the rest prices compute. All sizes in bytes
    and per second.
    """

    name: str
    flops: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    mfu: float
    attention_mfu: float
    hbm_efficiency: float
    step_overhead_s: float
    pipes: Mapping[str, Pipe]
    routes: Mapping[Link, Route]
    sources: tuple[str, ...] = field(default=())

    def with_pipe(self, name: str, **changes: Any) -> Hardware:
        """The same machine with one pipe changed: `with_pipe("ssd_read", bytes_per_s=4e9)`."""
        pipes = {**self.pipes, name: dataclasses.replace(self.pipes[name], **changes)}
        return dataclasses.replace(self, pipes=pipes)

    def with_route(self, link: Link, **changes: Any) -> Hardware:
        """The same machine with one link carried otherwise."""
        routes = {**self.routes, link: dataclasses.replace(self.routes[link], **changes)}
        return dataclasses.replace(self, routes=routes)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures of a model that price its steps and its KV. `params` are those used per token,
    `weight_bytes` the bytes a step reads.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    params: float
    weight_bytes: float
    kv_bytes_per_token: int
    source: str = ""


def load_hardware(name: str) -> Hardware:
    """The machine of this name in profiles/hardware.json. Raises ConfigError naming what there
    is.
    """
    machine = _pick(_profile("hardware.json")["machines"], name, "machine")
    pipes = {key: Pipe(**value) for key, value in machine["pipes"].items()}
    routes = {
        Link(key): Route(tuple(value["pipes"]), value["latency_s"], value["depth"])
        for key, value in machine["routes"].items()
    }
    plain = {
        key: machine[key]
        for key in ("flops", "hbm_bytes", "hbm_bytes_per_s", "mfu", "attention_mfu")
    }
    return Hardware(
        name=name,
        **plain,
        hbm_efficiency=machine["hbm_efficiency"],
        step_overhead_s=machine["step_overhead_s"],
        pipes=pipes,
        routes=routes,
        sources=tuple(machine["sources"]),
    )


def load_model(name: str) -> ModelShape:
    """The model of this name in profiles/models.json. Raises ConfigError naming what there is."""
    return ModelShape(name=name, **_pick(_profile("models.json")["models"], name, "model"))


def known_hardware() -> list[str]:
    """Names of all machines."""
    return list(_profile("hardware.json")["machines"])


def known_models() -> list[str]:
    """Names of all models."""
    return list(_profile("models.json")["models"])


def step_cost(hardware: Hardware, model: ModelShape) -> StepCost:
    """The step cost from peak rates and the profile's shares of them.

    It has matrix work per token, and attention per token and position. The weights, read once per
    step, are the floor. The KV of decoding sequences is read once each.
    """
    per_token_s = 2 * model.params / (hardware.flops * hardware.mfu)
    # QK^T and PV: 2 multiply-adds each per head, dimension and earlier token, in every layer.
    attention = 4 * model.layers * model.heads * model.head_dim
    bytes_per_s = hardware.hbm_bytes_per_s * hardware.hbm_efficiency
    return StepCost(
        fixed_s=hardware.step_overhead_s,
        per_token_s=per_token_s,
        per_token_position_s=attention / (hardware.flops * hardware.attention_mfu),
        floor_s=model.weight_bytes / bytes_per_s,
        per_kv_token_s=model.kv_bytes_per_token / bytes_per_s,
    )


def planner_profile(hardware: Hardware, cost: StepCost) -> dict[str, Any]:
    """The `profile` of `make_planner`: a planner could have learned it of this machine in an
    earlier run.
    """
    links = {
        link.value: min(hardware.pipes[name].bytes_per_s for name in route.pipes)
        for link, route in hardware.routes.items()
    }
    prefill = cost.prefill()
    return {
        "prefill": {
            "fixed_s": prefill.fixed_s,
            "per_token_s": prefill.per_token_s,
            "per_token_position_s": prefill.per_token_position_s,
        },
        "links": links,
    }


@cache
def _profile(file: str) -> Any:
    return json.loads((_PROFILES / file).read_text("utf-8"))


def _pick(table: dict[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise ConfigError(
            f"no {what} {name!r} in the simulator's profiles. There are: {', '.join(table)}"
        )
    return table[name]
