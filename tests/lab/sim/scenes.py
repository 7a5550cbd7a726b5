"""Small machines and requests with numbers that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvtier.lab.sim.hardware import Hardware, ModelShape, StepCost
from sgl_kvtier.lab.sim.links import Pipe, Route
from sgl_kvtier.lab.sim.requests import SimRequest, SimResult
from sgl_kvtier.lab.sim.run import simulate
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.messages import Fact, Planner, StepPlan, StepView
from sgl_kvtier.types import Link, PageKey

PAGE = 16
MODEL = ModelShape("tiny", 1, 1, 1, 1, 1.0, 1.0, kv_bytes_per_token=1)
COST = StepCost(fixed_s=0.5, per_token_s=1 / 64)
"""A chunk of 32 tokens takes 1 s, one of 64 tokens 1.5 s."""


def machine(storage: float = 64.0, pcie: float = 1e9, depth: int = 1) -> Hardware:
    """Bytes are tokens; `storage` and `pcie` are bytes per second, latencies 0."""
    pipes = {"ssd_read": Pipe(storage), "ssd_write": Pipe(1e9), "h2d": Pipe(pcie), "d2h": Pipe(1e9)}
    routes = {
        Link.STORAGE_TO_HOST: Route(("ssd_read",), depth=depth),
        Link.HOST_TO_DEVICE: Route(("h2d",), depth=depth),
        Link.STORAGE_TO_DEVICE: Route(("ssd_read", "h2d"), depth=depth),
        Link.DEVICE_TO_HOST: Route(("d2h",)),
        Link.HOST_TO_STORAGE: Route(("ssd_write",)),
    }
    return Hardware("tiny", 1, pipes, routes)


def serve(planner: Planner, requests: Sequence[SimRequest], **spec: object) -> SimResult:
    """The tiny machine serving these requests; keyword arguments are of ServerSpec."""
    hardware = spec.pop("hardware", machine())
    assert isinstance(hardware, Hardware)
    settings: dict[str, object] = {"page_tokens": PAGE, "step_tokens": 32, **spec}
    return simulate(planner, hardware, MODEL, requests, server=ServerSpec(**settings), cost=COST)  # type: ignore[arg-type]


def keys(name: str, count: int) -> tuple[PageKey, ...]:
    """Keys of a chain of pages."""
    return tuple(PageKey(f"{name}{place}".encode().ljust(32, b".")) for place in range(count))


class Scripted:
    """A planner that says one prepared thing per step, and keeps what it was told."""

    def __init__(self, *plans: StepPlan) -> None:
        self.plans = list(plans)
        self.facts: list[Fact] = []
        self.views: list[StepView] = []

    def observe(self, fact: Fact) -> None:
        self.facts.append(fact)

    def step(self, view: StepView) -> StepPlan:
        self.views.append(view)
        return self.plans.pop(0) if self.plans else StepPlan()
