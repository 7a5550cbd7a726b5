"""One measurement of one restoration: caches emptied, arm set, request streamed, neighbours on the
machine watched.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.machine import CpuWatch, pace_seconds
from sgl_kvtier.lab.experiment.restore.arms import COMPUTE, RESTORE_ARMS, ArmSwitch, RestoreArm
from sgl_kvtier.lab.outside.client import Cached, Client, Completion, Metrics
from sgl_kvtier.lab.paced.pace import MOST_OVERRUN, Reader, lost_seconds

OUTPUT_TOKENS = 4
"""Generated per trial: the first for its time, the others for the pace of decoding and for
equality.
"""

QUIET_CORES = 0.15
"""A server that uses less than this has done with writing pages back."""

UNWATCHED_S = 1.0
"""Seconds a server is left alone before a trial where its processor use cannot be read. Whether it
still writes pages back is not seen then.
"""

STORED_WITHIN_S = 60.0

DISCARDED = "discarded"
"""The kind of attempts that were disturbed and made again: their times count for nothing, their
answers do.
"""

SLOWEST = 2.5
"""A machine this many times slower than at its best disturbs a trial. Less is common on virtual
machines from one moment to the next, and evens out over rounds.
"""


@dataclass(frozen=True)
class Attempt:
    """One measurement: what it was of, and what disturbed it. `length` are the tokens that can be
    restored, `kind` is what it was measured for, `gbps` the bandwidth of the throttled store.
    Seconds, bytes and bandwidths of a paced device are those of the modelled machine.
    """

    model: str
    length: int
    kind: str
    arm: str
    round: int
    gbps: float
    load_over_compute: float | None = None
    foreign_cores: float | None = 0.0
    """None where the server's own use is not known, and so not told from that of others."""
    stolen_cores: float = 0.0
    slowness: float = 1.0
    """The machine's slowness around it: seconds of a fixed piece of computing, over the least of
    this run.
    """
    repeats: int = 0
    error: str | None = None
    sent_s: float = 0.0
    """When its first request was sent, on the monotonic clock of this machine."""
    lost_s: float | None = None
    """Seconds until the last first token that a paced device lost because this machine was too
    slow.
    """
    steps: tuple[dict[str, Any], ...] = ()
    """The lines that a paced device wrote of it up to its last first token (`lab.paced.pace`), and
    of all that was wrong.
    """

    @property
    def took_s(self) -> float | None:
        """Seconds until the last first token; None where there was none."""
        raise NotImplementedError


@dataclass(frozen=True)
class Trial(Attempt):
    """One request's outcome."""

    prompt_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    cached: Cached | None = None
    output_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    @property
    def took_s(self) -> float | None:
        return self.ttft_s


@dataclass(frozen=True)
class Batch(Attempt):
    """A batch's outcome. Its requests stand in the order they were drawn in, not that of sending.

    `makespan_s` is from the first request's sending to the last first token. `gaps_s` are the
    seconds between two tokens of the requests beside, as far as the batch was under way, and
    `decoded` their output. `computing_s` are seconds of prefill steps, where a device writes them.
    `answers` are the planner's: how many hits it took or declined, by mode and reason.
    """

    at_once: int = 0
    poisson: float | None = None
    requests: tuple[Trial, ...] = ()
    makespan_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    decoded: tuple[tuple[int, ...], ...] = ()
    computing_s: float | None = None
    read_bytes: float = 0.0
    answers: dict[str, float] = field(default_factory=dict)

    @property
    def took_s(self) -> float | None:
        return self.makespan_s

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others of its kind."""
        return (*self.place, self.arm, self.load_over_compute)

    @property
    def place(self) -> tuple[Any, ...]:
        """What tells its requests from others."""
        return self.model, self.round, self.at_once, self.poisson


_Made = TypeVar("_Made", bound=Attempt)


class ServerCpu:
    """Processor seconds of a server's process tree. The tree is listed once, since listing costs
    more than reading.

    `known` is False, and all seconds 0, where its process is not known.
    """

    def __init__(self, pid: int | None) -> None:
        self.known = pid is not None
        self._processes: list[psutil.Process] = []
        if pid is not None:
            try:
                launcher = psutil.Process(pid)
                self._processes = [launcher, *launcher.children(recursive=True)]
            except psutil.Error as error:
                raise BenchError(f"process {pid} is not there: {error}") from error

    def seconds(self) -> float:
        """User and system time so far of those that live."""
        total = 0.0
        for process in self._processes:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total


class Trials:
    """Makes trials against one server.

    A trial is repeated when others use more than `quiet_foreign` cores, when the machine's slowness
    is above `slowest`, or when a paced device lost too much of its time. `discard` takes the
    attempts that do not count, as such. Of a paced device `bytes_scale` is the bytes of the model
    for each byte moved, and `steps` its log.
    """

    def __init__(
        self,
        client: Client,
        cpu: ServerCpu,
        *,
        quiet_foreign: float = 0.1,
        slowest: float = SLOWEST,
        most_repeats: int = 2,
        look_every_s: float = 0.08,
        unwatched_s: float = UNWATCHED_S,
        pace: Callable[[], float] = pace_seconds,
        discard: Callable[[Any], None] = lambda _: None,
        bytes_scale: float = 1.0,
        steps: Reader | None = None,
        arms: Mapping[str, RestoreArm] = RESTORE_ARMS,
    ) -> None:
        self.client = client
        self.switch = ArmSwitch(client, bytes_scale, arms)
        self.bytes_scale = bytes_scale
        self._steps = steps
        self._cpu = cpu
        self._quiet_foreign = quiet_foreign
        self._most_repeats = most_repeats
        self._look_every_s = look_every_s
        self._unwatched_s = unwatched_s
        self._discard = discard
        self._slowest = slowest
        self._pace = pace
        self._best_pace_s = float("inf")

    async def run(
        self, base: Trial, ids: Sequence[int], *, flush: bool = True, repeat: bool = True
    ) -> Trial:
        """The trial `base` describes, its outcome filled in; a disturbed one is repeated.

        `repeat` False keeps the first attempt, however disturbed. Raises BenchError when the server
        refuses a setting or to flush; a request that fails is a trial with `error`.
        """

        async def once() -> Trial:
            await self.ready(base, flush=flush)
            return await self.watched(lambda: self._ask(base, ids))

        return await self.repeated(once, repeat=repeat)

    async def repeated(self, once: Callable[[], Awaitable[_Made]], *, repeat: bool = True) -> _Made:
        """The least disturbed of several attempts, or the first that was not. One that fails is
        kept at once: how disturbed it was is no excuse.
        """
        made: list[_Made] = []
        for attempt in range(self._most_repeats + 1 if repeat else 1):
            made.append(dataclasses.replace(await once(), repeats=attempt))
            if made[-1].error is not None or self._disturbance(made[-1]) <= 1:
                break
        kept = min(made, key=self._disturbance) if made[-1].error is None else made[-1]
        for one in made:
            if one is not kept:
                self._discard(dataclasses.replace(one, kind=DISCARDED))
        return dataclasses.replace(kept, repeats=attempt)

    def _disturbance(self, one: Attempt) -> float:
        """Above 1 it was disturbed. Others' use that is not known does not count."""
        others = (one.foreign_cores or 0.0) + one.stolen_cores
        lost = one.lost_s / one.took_s if one.lost_s and one.took_s else 0.0
        return max(others / self._quiet_foreign, one.slowness / self._slowest, lost / MOST_OVERRUN)

    def _slowness(self) -> float:
        now = self._pace()
        self._best_pace_s = min(self._best_pace_s, now)
        return now / self._best_pace_s

    async def ready(self, base: Attempt, *, flush: bool = True) -> None:
        """Waits until the server does nothing, empties its caches and sets it to an attempt's
        arm.
        """
        await self.settle()
        if flush:
            await self.client.flush()
        await self.switch.use(base.arm, base.gbps)

    async def watched(self, make: Callable[[], Awaitable[_Made]]) -> _Made:
        """What `make` measures, with what disturbed it meanwhile."""
        before = self._slowness()
        watch = CpuWatch(self._cpu.seconds)
        made = await make()
        share = watch.stop()
        return dataclasses.replace(
            made,
            foreign_cores=share.foreign_cores if self._cpu.known else None,
            stolen_cores=share.stolen_cores,
            slowness=max(before, self._slowness()),
            **self._kept_pace(made.sent_s),
        )

    async def _ask(self, base: Trial, ids: Sequence[int]) -> Trial:
        done = await self.client.generate(ids, OUTPUT_TOKENS, logprobs=True)
        return outcome(base, done, len(ids))

    def _kept_pace(self, began: float) -> dict[str, Any]:
        """What a paced device wrote of an attempt. What it found wrong before belongs to it too, so
        that nothing is passed over.
        """
        if self._steps is None:
            return {}
        new = self._steps.new()
        first = [row for row in new if row.get("step") == "prefill" and row["at"] >= began]
        wrong = [row for row in new if "mismatch" in row]
        return {"steps": (*first, *wrong), "lost_s": lost_seconds(first) / self.client.dilation}

    async def prime(self, model: str, ids: Sequence[int], page: int) -> tuple[Trial, float]:
        """Computes a prompt and waits until the store has all its whole pages.

        Returns the trial, and the bytes of one page of the modelled machine. Raises BenchError when
        the pages do not get there.
        """
        await self.settle()
        await self.client.flush()
        await self.switch.use(COMPUTE, 0.0)
        before = await self.client.metrics()
        done = await self.client.generate(ids, OUTPUT_TOKENS, logprobs=True)
        if done.error is not None:
            raise BenchError(f"the prompt of {len(ids)} tokens was not answered: {done.error}")
        pages = len(ids) // page
        after = await self._stored(pages, before)
        # Over the store's whole life: all its pages have one size, and those of this prompt may
        # have been there before.
        nbytes = (after.total("kvtier:written_bytes_total") or 0.0) / max(
            after.total("kvtier:pages_written_total") or 0.0, 1.0
        )
        trial = outcome(Trial(model, len(ids) - page, "prime", COMPUTE, 0, 0.0), done, len(ids))
        return trial, nbytes * self.bytes_scale

    async def settle(self, most_s: float = 20.0) -> None:
        """Waits until the server does nothing: what follows is not slowed by pages still being
        written back. Where that cannot be seen, a fixed time.
        """
        if not self._cpu.known:
            await asyncio.sleep(self._unwatched_s)
            return
        loop = asyncio.get_running_loop()
        until, calm, last = loop.time() + most_s, 0, self._cpu.seconds()
        while calm < 2 and loop.time() < until:
            began = loop.time()
            await asyncio.sleep(self._look_every_s)
            now = self._cpu.seconds()
            calm = (
                calm + 1 if now - last < QUIET_CORES * (loop.time() - began) or now == last else 0
            )
            last = now

    async def _stored(self, pages: int, before: Metrics) -> Metrics:
        loop = asyncio.get_running_loop()
        within_s = STORED_WITHIN_S * self.client.dilation
        until = loop.time() + within_s
        while loop.time() < until:
            after = await self.client.metrics()
            # A page of a prompt that was primed before is kept, not written again.
            if (
                grown(before, after, "kvtier:pages_written_total")
                + grown(before, after, "kvtier:pages_kept_total")
                >= pages
            ):
                return after
            await asyncio.sleep(min(0.25, 3 * self._look_every_s))
        raise BenchError(
            f"{pages} pages were not in the store after {within_s:.0f} s, only "
            f"{grown(before, after, 'kvtier:pages_written_total'):.0f}. Does the server run with the kvtier backend, "
            "--enable-metrics and write-through?"
        )


def outcome(base: Trial, done: Completion, prompt_tokens: int) -> Trial:
    """The trial with what came of its request."""
    return dataclasses.replace(
        base,
        sent_s=done.sent_s,
        prompt_tokens=prompt_tokens,
        ttft_s=done.ttft_s if done.error is None else None,
        tpot_s=done.tpot_s,
        cached=done.cached,
        output_ids=done.output_ids,
        logprobs=done.logprobs,
        error=done.error,
    )


def grown(before: Metrics, after: Metrics, name: str) -> float:
    """The growth of a counter; one that is not there counts as 0."""
    return (after.total(name) or 0.0) - (before.total(name) or 0.0)
