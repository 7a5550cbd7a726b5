"""TierKV's decode-paging server in virtual time: continuous batching whose KV may lie below HBM
while it is decoded.

SGLang has no such page fault: the KV of running requests is in HBM as a whole. The machine exists
to see what the paper's numbers need. Every running request gains one token per step and every step
needs the KV of all of them. Prefill is not modelled, as the paper does not: a request's context is
there when it is admitted. Steps between two changes are taken together, at most one block's worth
at a time. A Pager decides which requests are paged, and what that costs.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import simpy

from sgl_kvtier.lab.papers.tierkv.load import Request
from sgl_kvtier.lab.sim.links import Network, Pipe, Usage

PCIE = "pcie"


@dataclass(frozen=True, slots=True)
class Server:
    """Bytes, seconds, tokens. A step of n requests computes for `step_s + n * step_s_per_request`.
    `link_*` is DRAM to HBM.
    """

    kv_bytes_per_token: int
    step_s: float
    step_s_per_request: float
    hbm_bytes: float
    dram_bytes: float
    most_running: int
    link_bytes_per_s: float
    link_latency_s: float
    schedule_s: float
    block_tokens: int = 16

    @property
    def hbm_tokens(self) -> int:
        """Tokens whose KV fits into HBM."""
        return int(self.hbm_bytes / self.kv_bytes_per_token)

    @property
    def block_bytes(self) -> int:
        """Size of one block."""
        return self.block_tokens * self.kv_bytes_per_token

    def compute_s(self, running: int) -> float:
        """Compute time of one step."""
        return self.step_s + running * self.step_s_per_request


@dataclass(slots=True)
class Running:
    """A request in the batch. `ends_at` counts the server's steps."""

    request: Request
    admitted_s: float
    began_at: int
    ends_at: int

    def tokens(self, step: int) -> int:
        """Its KV before this step."""
        return self.request.context + step - self.began_at


@dataclass(slots=True)
class Batch:
    """The running requests, by rid in the order of admission, and their KV tokens together before
    step `step`.
    """

    running: dict[int, Running] = field(default_factory=dict)
    tokens: int = 0
    step: int = 0

    def __len__(self) -> int:
        return len(self.running)


@dataclass(frozen=True, slots=True)
class Paging:
    """The cost of paging in one step. `demand_bytes` cross the link while no request computes,
    `ahead_bytes` while the step computes. `wasted_bytes`, part of those, are never used.
    `hit_share`: of the batch's KV in HBM. `stall_s`: charged beside, for no bytes.
    """

    demand_bytes: float = 0.0
    ahead_bytes: float = 0.0
    wasted_bytes: float = 0.0
    hit_share: float = 1.0
    stall_s: float = 0.0


class Pager(Protocol):
    """Decides what lies in HBM, and says what a step costs for it."""

    def admits(self, request: Request, batch: Batch) -> bool:
        """May it join the batch now? An empty batch takes any request."""

    def started(self, request: Request, batch: Batch) -> None:
        """It has joined."""

    def ended(self, running: Running, batch: Batch) -> None:
        """It has left."""

    def step(self, batch: Batch, compute_s: float) -> Paging:
        """The cost of the next step's paging; asked whenever the batch has changed, and once per
        block of steps.
        """


@dataclass(frozen=True, slots=True)
class Steps:
    """`count` equal steps, each of `seconds`; `tokens` is the KV of the batch before the first."""

    start_s: float
    seconds: float
    count: int
    running: int
    tokens: int
    paging: Paging


@dataclass(frozen=True, slots=True)
class Finished:
    """One request's times."""

    rid: str | int
    arrived_s: float
    admitted_s: float
    ended_s: float
    generated: int

    @property
    def decode_s(self) -> float:
        """From the first step to the last."""
        return self.ended_s - self.admitted_s


@dataclass(slots=True)
class Run:
    """The record of a run."""

    steps: list[Steps] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    end_s: float = 0.0
    link: Usage = field(default_factory=Usage)


def simulate(server: Server, requests: Sequence[Request], pager: Pager) -> Run:
    """Serves all requests; deterministic. `requests` are in order of arrival."""
    env = simpy.Environment()
    machine = _Machine(env, server, requests, pager)
    env.run(until=env.process(machine.serve()))
    return machine.result()


class _Machine:
    def __init__(
        self, env: simpy.Environment, server: Server, requests: Sequence[Request], pager: Pager
    ) -> None:
        self._env = env
        self._server = server
        self._network = Network(env, {PCIE: Pipe(server.link_bytes_per_s)})
        self._coming = deque(requests)
        self._pager = pager
        self._batch = Batch()
        self._ends: list[tuple[int, int]] = []
        self._run = Run()

    def result(self) -> Run:
        self._run.end_s = self._env.now
        self._run.link = self._network.usage()[PCIE]
        return self._run

    def serve(self) -> Generator[simpy.Event, Any, None]:
        while self._coming or self._batch:
            self._admit()
            if not self._batch:
                yield self._env.timeout(self._coming[0].arrival_s - self._env.now)
                continue
            compute_s = self._server.compute_s(len(self._batch))
            paging = self._pager.step(self._batch, compute_s)
            count = self._count(self._expected_s(compute_s, paging))
            start_s = self._env.now
            yield from self._carry_out(compute_s, paging, count)
            seconds = (self._env.now - start_s) / count
            self._run.steps.append(
                Steps(start_s, seconds, count, len(self._batch), self._batch.tokens, paging)
            )
            self._batch.tokens += count * len(self._batch)
            self._batch.step += count
            self._retire()

    def _admit(self) -> None:
        batch, coming = self._batch, self._coming
        while (
            coming
            and coming[0].arrival_s <= self._env.now
            and len(batch) < self._server.most_running
        ):
            if batch and not self._pager.admits(coming[0], batch):
                return
            request = coming.popleft()
            ends_at = batch.step + request.generate
            batch.running[request.rid] = Running(request, self._env.now, batch.step, ends_at)
            batch.tokens += request.context
            heapq.heappush(self._ends, (ends_at, request.rid))
            self._pager.started(request, batch)

    def _retire(self) -> None:
        while self._ends and self._ends[0][0] <= self._batch.step:
            _, rid = heapq.heappop(self._ends)
            one = self._batch.running.pop(rid)
            request = one.request
            self._batch.tokens -= request.context + request.generate
            self._pager.ended(one, self._batch)
            self._run.finished.append(
                Finished(rid, request.arrival_s, one.admitted_s, self._env.now, request.generate)
            )

    def _expected_s(self, compute_s: float, paging: Paging) -> float:
        rate = self._server.link_bytes_per_s
        at_once_s = max(compute_s, paging.ahead_bytes / rate)
        return at_once_s + paging.demand_bytes / rate + paging.stall_s

    def _count(self, step_s: float) -> int:
        """Steps until someone ends, someone may join, or a block is full."""
        count = min(self._server.block_tokens, self._ends[0][0] - self._batch.step)
        if self._coming and len(self._batch) < self._server.most_running:
            wait_s = self._coming[0].arrival_s - self._env.now
            # A waiting request that was not admitted gets its next chance when someone ends, not
            # after every step.
            if wait_s > 0:
                count = min(count, max(1, math.ceil(wait_s / step_s)))
        return count

    def _carry_out(
        self, compute_s: float, paging: Paging, count: int
    ) -> Generator[simpy.Event, Any, None]:
        computed = self._env.timeout(count * compute_s)
        if paging.ahead_bytes:
            yield computed & self._transfer(paging.ahead_bytes * count)
        else:
            yield computed
        if paging.demand_bytes:
            yield self._transfer(paging.demand_bytes * count)
        if paging.stall_s:
            yield self._env.timeout(count * paging.stall_s)

    def _transfer(self, nbytes: float) -> simpy.Event:
        landed = self._env.event()
        self._network.open((PCIE,), round(nbytes), lambda _: landed.succeed())
        return landed
