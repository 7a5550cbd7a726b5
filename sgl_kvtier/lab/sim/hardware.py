"""Machines and models as data: profiles in json with their sources. What steps cost and the pipes
follow from them; a planner learns its own model of costs, or is told one.

Where a paced device has a profile of a machine and a model, the simulator has the same file: its
times of steps, and its links to the device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab import profile
from sgl_kvtier.lab.profile import Profile
from sgl_kvtier.lab.sim.links import Pipe, Route
from sgl_kvtier.policy.learned.cost import CostModel
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span

# --- what steps cost ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """The contents of one engine step. `prefills` are token spans of prompts. `decodes` are running
    sequences with `kv_tokens` of context in all. `background` are prefill tokens of other users
    (Cake 5.1: the rest of the token budget). `passes` are (tokens, share of the layers) of prefixes
    that are computed by layers.
    """

    prefills: tuple[Span, ...] = ()
    decodes: int = 0
    kv_tokens: int = 0
    background: int = 0
    passes: tuple[tuple[int, float], ...] = ()

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of requests that are simulated."""
        return sum(map(len, self.prefills))


class Cost(Protocol):
    """Seconds of one step."""

    def seconds(self, batch: Batch) -> float:
        """How long the step takes with the machine to itself."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step, linear in its contents. There is a floor: the weights have to be read
    whatever the batch holds.

    fixed + max(floor, a * tokens) + b * sum n (start + n / 2) + c * kv tokens of decoding
    sequences, tokens being those of prefill, background and decode.
    """

    fixed_s: float
    per_token_s: float
    per_token_position_s: float = 0.0
    floor_s: float = 0.0
    per_kv_token_s: float = 0.0

    def seconds(self, batch: Batch) -> float:
        """How long the step takes with the machine to itself. A pass through some layers takes
        their share of one through all.
        """
        if batch.passes:
            return sum(
                share * self.seconds(Batch((Span(0, tokens),))) for tokens, share in batch.passes
            ) + (self.seconds(Batch(batch.prefills)) if batch.prefills else 0.0)
        tokens = batch.prefill_tokens + batch.background + batch.decodes
        pairs = sum(len(span) * (span.start + len(span) / 2) for span in batch.prefills)
        pairs += batch.background**2 / 2
        return (
            self.fixed_s
            + max(self.floor_s, self.per_token_s * tokens)
            + self.per_token_position_s * pairs
            + self.per_kv_token_s * batch.kv_tokens
        )


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Seconds of a step by a profile of measured operators, as a paced device takes them. Launches
    and the scheduler's own time are in none of them.

    Background tokens and passes by layers are of papers, which have other costs.
    """

    profile: Profile

    def seconds(self, batch: Batch) -> float:
        """How long the step takes with the machine to itself."""
        assert not batch.background and not batch.passes, "no profile has times of these"
        spans = [(len(span), span.start) for span in batch.prefills]
        return self.profile.mixed_seconds(spans, batch.decodes, batch.kv_tokens)


# --- machines and models --------------------------------------------------------------------------

STORAGE = "storage"
_PROFILES = Path(__file__).with_name("profiles")
_POSITIONS = (0, 4096, 16384, 65536)
"""In a prompt, at which the planner has seen chunks before."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Peak rates of a machine per second, and the shares of them that steps should reach."""

    flops: float
    hbm_bytes_per_s: float
    mfu: float
    attention_mfu: float
    hbm_efficiency: float
    step_overhead_s: float


@dataclass(frozen=True)
class Hardware:
    """A machine. `pipes` and `routes` carry the bytes. `measured` names the profile with the times
    of steps by model; `assumed` prices steps of the others, if it is there.
    """

    name: str
    hbm_bytes: int
    pipes: Mapping[str, Pipe]
    routes: Mapping[Link, Route]
    measured: Mapping[str, str] = field(default_factory=dict)
    assumed: Assumed | None = None
    sources: tuple[str, ...] = field(default=())

    def with_pipe(self, name: str, **changes: Any) -> Hardware:
        """The same machine with one pipe changed: `with_pipe("ssd_read", bytes_per_s=4e9)`."""
        pipes = {**self.pipes, name: dataclasses.replace(self.pipes[name], **changes)}
        return dataclasses.replace(self, pipes=pipes)

    def with_storage_alone(self, bytes_per_s: float, latency_s: float, depth: int) -> Hardware:
        """The same machine with one pipe, `STORAGE`, from storage to the device, as in papers."""
        return dataclasses.replace(
            self,
            pipes={STORAGE: Pipe(bytes_per_s)},
            routes={Link.STORAGE_TO_DEVICE: Route((STORAGE,), latency_s, depth)},
        )


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
    shared = _profile("hardware.json")
    machine = _pick(shared["machines"], name, "machine")
    pcie = {"bytes_per_s": machine["pcie_bytes_per_s"]}
    pipes = {"h2d": pcie, "d2h": pcie, **shared["pipes"]}
    routes = {
        Link(key): Route(tuple(value["pipes"]), value["latency_s"], value["depth"])
        for key, value in shared["routes"].items()
    }
    return Hardware(
        name=name,
        hbm_bytes=machine["hbm_bytes"],
        pipes={key: Pipe(**value) for key, value in pipes.items()},
        routes=routes,
        measured=machine.get("measured", {}),
        assumed=Assumed(**machine["assumed"]) if "assumed" in machine else None,
        sources=(*machine["sources"], *shared["sources"]),
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


def with_measured_links(hardware: Hardware, model: ModelShape) -> Hardware:
    """The machine with the links to the device that the model's measured profile has, if any."""
    if model.name not in hardware.measured:
        return hardware
    found = profile.read(hardware.measured[model.name])
    there = hardware.with_pipe("h2d", bytes_per_s=found.to_device_gbytes_per_s * 1e9)
    return there.with_pipe("d2h", bytes_per_s=found.to_host_gbytes_per_s * 1e9)


def step_cost(hardware: Hardware, model: ModelShape) -> Cost:
    """What steps of this model cost on this machine: as measured, else as assumed. Raises
    ConfigError where there is neither.
    """
    if model.name in hardware.measured:
        return MeasuredCost(profile.read(hardware.measured[model.name]))
    return assumed_step_cost(hardware, model)


def assumed_step_cost(hardware: Hardware, model: ModelShape) -> StepCost:
    """The step cost from peak rates and assumed shares of them, as the tables of papers have it.
    Raises ConfigError where the machine has none.

    It has matrix work per token, and attention per token and position. The weights, read once per
    step, are the floor. The KV of decoding sequences is read once each.
    """
    shares = hardware.assumed
    if shares is None:
        raise ConfigError(
            f"nothing says what steps of {model.name} cost on {hardware.name}. Measured there: "
            f"{', '.join(hardware.measured)}"
        )
    # QK^T and PV: 2 multiply-adds each per head, dimension and earlier token, in every layer.
    attention = 4 * model.layers * model.heads * model.head_dim
    bytes_per_s = shares.hbm_bytes_per_s * shares.hbm_efficiency
    return StepCost(
        fixed_s=shares.step_overhead_s,
        per_token_s=2 * model.params / (shares.flops * shares.mfu),
        per_token_position_s=attention / (shares.flops * shares.attention_mfu),
        floor_s=model.weight_bytes / bytes_per_s,
        per_kv_token_s=model.kv_bytes_per_token / bytes_per_s,
    )


def planner_profile(hardware: Hardware, cost: Cost, engine: EngineShape) -> dict[str, Any]:
    """The `profile` of `make_planner`: what a planner has learned of this machine in an earlier
    run, of chunks from a page to a step at `_POSITIONS`.
    """
    links = {
        link.value: min(hardware.pipes[name].bytes_per_s for name in route.pipes)
        for link, route in hardware.routes.items()
    }
    sizes = [engine.chunk_tokens]
    while sizes[0] > engine.page_tokens:
        sizes.insert(0, sizes[0] // 2)
    learned = CostModel()
    for start in _POSITIONS:
        for tokens in sizes:
            seconds = cost.seconds(Batch((Span(start, start + tokens),)))
            learned.saw(start, tokens, seconds)
    return {"prefill": learned.profile(), "links": links}


@cache
def _profile(file: str) -> Any:
    return json.loads((_PROFILES / file).read_text("utf-8"))


def _pick(table: dict[str, Any], name: str, what: str) -> Any:
    if name not in table:
        raise ConfigError(
            f"no {what} {name!r} in the simulator's profiles. There are: {', '.join(table)}"
        )
    return table[name]
