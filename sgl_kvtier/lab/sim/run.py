"""One simulation from end to end: requests in, results out. The same arguments give the same result
to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import simpy

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.sim.hands import Hands
from sgl_kvtier.lab.sim.hardware import Cost, Hardware, ModelShape, step_cost
from sgl_kvtier.lab.sim.links import Network, Transfers
from sgl_kvtier.lab.sim.requests import SimRequest, SimResult
from sgl_kvtier.lab.sim.server import Server, ServerSpec
from sgl_kvtier.policy.messages import Planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import PageKey, Tier


def simulate(
    planner: Planner,
    hardware: Hardware,
    model: ModelShape,
    requests: Sequence[SimRequest],
    *,
    server: ServerSpec | None = None,
    cost: Cost | None = None,
    on_finish: Callable[[SimRequest], None] | None = None,
    victims: Callable[[int], Iterable[PageKey]] | None = None,
) -> SimResult:
    """Runs `requests` to their last token and returns the result of each.

    `cost` is the true cost of steps (None: the cost the hardware's profile gives for the model).
    `on_finish` is called for each request that ends, for progress. `victims` gives the order in
    which pages leave the device (None: the least recently used first). Raises ConfigError when a
    request could never run. Raises AssertionError when the planner contradicts itself or leaves a
    request waiting for ever.
    """
    spec = server or ServerSpec()
    _check_fits(requests, spec)
    env = Kernel()
    network = Network(env, hardware.pipes)
    page_bytes = spec.page_tokens * model.kv_bytes_per_token
    transfers = Transfers(env, network, hardware.routes, page_bytes)
    capacities = {
        Tier.DEVICE: spec.device_pages,
        Tier.HOST: spec.host_pages,
        Tier.STORAGE: spec.storage_pages,
    }
    hands = Hands(
        env,
        transfers,
        capacities,
        spec.page_tokens,
        page_bytes,
        staged=spec.staged,
        write_down=spec.write_down,
    )
    hands.caches.device.victims = victims
    engine = Server(env, planner, spec, cost or step_cost(hardware, model), hands)
    done = env.event()
    _put_on_the_clock(env, engine, requests, done, on_finish)
    env.process(engine.run())
    if requests:
        env.run(until=done)
    hands.caches.finish()
    return SimResult(
        requests=engine.results,
        links=transfers.results,
        pipes={name: (usage.nbytes, usage.busy_s) for name, usage in network.usage().items()},
        finished_s=env.now,
        compute_busy_s=engine.compute_busy_s,
        steps=engine.steps,
        events=env.events,
        gaps_s=engine.gaps_s,
    )


def engine_shape(server: ServerSpec, model: ModelShape) -> EngineShape:
    """The shape of the engine that a planner is told."""
    return EngineShape(
        page_tokens=server.page_tokens,
        page_bytes=server.page_tokens * model.kv_bytes_per_token,
        chunk_tokens=server.step_tokens,
        layers=model.layers,
        staged=server.staged,
    )


def _check_fits(requests: Sequence[SimRequest], spec: ServerSpec) -> None:
    longest = max(
        requests, key=lambda request: request.prompt_tokens + request.output_tokens, default=None
    )
    if longest is None or spec.device_pages is None:
        return
    tokens = longest.prompt_tokens + longest.output_tokens
    if -(-tokens // spec.page_tokens) > spec.device_pages:
        raise ConfigError(
            f"request {longest.rid} takes {tokens} tokens, but the device holds "
            f"{spec.device_pages * spec.page_tokens}: give it more, or cut sessions "
            "before prompts that long"
        )


class Kernel(simpy.Environment):
    """simpy's event loop, counting."""

    def __init__(self) -> None:
        super().__init__()
        self.events = 0

    def step(self) -> None:
        self.events += 1
        super().step()


def _put_on_the_clock(
    env: simpy.Environment,
    engine: Server,
    requests: Sequence[SimRequest],
    done: simpy.Event,
    on_finish: Callable[[SimRequest], None] | None,
) -> None:
    """Gives requests to the server when their time has come, those that wait for another when it
    has ended. `done` succeeds when all have.
    """
    known = {request.rid for request in requests}
    assert len(known) == len(requests), "two requests have the same id"
    followers: dict[str, list[SimRequest]] = {}
    left = len(requests)

    def arrives(request: SimRequest) -> None:
        timer = env.timeout(request.arrival_s)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: engine.submit(request))

    def finished(request: SimRequest) -> None:
        nonlocal left
        for follower in followers.pop(request.rid, ()):
            arrives(follower)
        if on_finish is not None:
            on_finish(request)
        left -= 1
        if not left:
            done.succeed()

    engine.on_finish = finished
    for request in requests:
        if request.after is None:
            arrives(request)
        else:
            assert request.after in known, (
                f"{request.rid} waits for {request.after}, which is not there"
            )
            followers.setdefault(request.after, []).append(request)
