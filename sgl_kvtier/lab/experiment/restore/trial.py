"""One measurement of one restoration, or of a batch of them: caches emptied, arm set, requests
streamed, neighbours on the machine watched. `RestoreLog` keeps what was measured, in memory and in a
file of JSON lines from which a later run goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.log import Log
from sgl_kvtier.lab.experiment.machine import CpuWatch, pace_seconds
from sgl_kvtier.lab.experiment.restore.arms import COMPUTE, RESTORE_ARMS, ArmSwitch, RestoreArm
from sgl_kvtier.lab.outside.client import ABORTED, Cached, Client, Completion, Metrics
from sgl_kvtier.lab.paced.pace import MOST_OVERRUN, Reader, lost_seconds

OUTPUT_TOKENS = 4
"""Generated per trial: the first for its time, the others for the pace of decoding and for
equality.
"""

QUIET_CORES = 0.15
"""A server that uses less than this has done with writing pages back."""

STORED_WITHIN_S = 60.0
_MOST_REPEATS = 2

PUBLISHED_S = 0.7
"""Seconds after which a server's counters are in its /metrics: it publishes them twice a second."""

MOST_DECODED = 4096
"""Tokens that a request that decodes beside a batch generates at most."""

_ANSWERS = ("kvtier:restore_started_total", "kvtier:restore_declined_total")

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
    """None in old logs, of a server whose own use was not known."""
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

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others of its kind."""
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

    @property
    def key(self) -> tuple[Any, ...]:
        place = (self.model, self.length, self.arm, self.round)
        return (*place, self.load_over_compute, self.prompt_tokens)


@dataclass(frozen=True)
class Batch(Attempt):
    """A batch's outcome. Its requests stand in the order they were drawn in, not that of sending.

    `makespan_s` is from the first request's sending to the last first token. `gaps_s` are the
    seconds between two tokens of the requests beside, as far as the batch was under way, and
    `decoded` their output. `computing_s` are seconds of prefill steps, where a device writes them.
    `answers` are the planner's: how many hits it took or declined, by mode and reason.
    """

    at_once: int = 0
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
        return (*self.place, self.arm, self.load_over_compute)

    @property
    def place(self) -> tuple[Any, ...]:
        """What tells its requests from others."""
        return self.model, self.round, self.at_once


_Made = TypeVar("_Made", bound=Attempt)
_One = TypeVar("_One", bound=Trial)


class ServerCpu:
    """Processor seconds of a server's process tree. The tree is listed once, since listing costs
    more than reading. Without a process there is none to add up.
    """

    def __init__(self, pid: int | None) -> None:
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
    """Makes trials and batches against one server.

    One is repeated when others use more than `quiet_foreign` cores, when the machine's slowness is
    above `slowest`, or when a paced device lost too much of its time. `discard` takes the attempts
    that do not count, as such. Of a paced device `bytes_scale` is the bytes of the model for each
    byte moved, and `steps` its log.
    """

    def __init__(
        self,
        client: Client,
        cpu: ServerCpu,
        *,
        quiet_foreign: float = 0.1,
        slowest: float = SLOWEST,
        look_every_s: float = 0.08,
        pace: Callable[[], float] = pace_seconds,
        discard: Callable[[Any], None] = lambda _: None,
        bytes_scale: float = 1.0,
        steps: Reader | None = None,
        arms: Mapping[str, RestoreArm] = RESTORE_ARMS,
    ) -> None:
        self._client = client
        self._arms = arms
        self._switch = ArmSwitch(client, bytes_scale, arms)
        self._bytes_scale = bytes_scale
        self._steps = steps
        self._cpu = cpu
        self._quiet_foreign = quiet_foreign
        self._look_every_s = look_every_s
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

        async def ask() -> Trial:
            done = await self._client.generate(ids, OUTPUT_TOKENS, logprobs=True)
            return outcome(base, done, len(ids))

        return await self._measured(base, ask, flush=flush, repeat=repeat)

    async def batch(
        self,
        base: Batch,
        prompts: Sequence[Sequence[int]],
        beside: Sequence[Sequence[int]] = (),
        *,
        repeat: bool = True,
    ) -> Batch:
        """The same of a batch, whose requests are sent at once. `beside` are the prompts of requests
        that decode meanwhile.
        """
        places = list(range(len(prompts)))
        if self._arms[base.arm].shortest_first:
            places.sort(key=lambda place: len(prompts[place]))

        async def ask() -> Batch:
            before = await self._client.metrics()
            decoders = Decoders(self._client, beside)
            await decoders.begin()
            done = await self._send([prompts[place] for place in places])
            decoded = await decoders.end()
            await asyncio.sleep(PUBLISHED_S)
            after = await self._client.metrics()
            read_bytes = grown(before, after, "kvtier:read_bytes_total") * self._bytes_scale
            first = _answers(before)
            answers = {name: n - first.get(name, 0.0) for name, n in _answers(after).items()}
            answers = {name: n for name, n in answers.items() if n > 0}
            counted = dataclasses.replace(base, read_bytes=read_bytes, answers=answers)
            drawn = [one for _, one in sorted(zip(places, done, strict=True))]
            tokens = [len(ids) for ids in prompts]
            return _batch_outcome(counted, drawn, tokens, decoded, self._client.dilation)

        return await self._measured(base, ask, repeat=repeat)

    async def prime(self, model: str, ids: Sequence[int], page: int) -> tuple[Trial, float]:
        """Computes a prompt and waits until the store has all its whole pages.

        Returns the trial, and the bytes of one page of the modelled machine. Raises BenchError when
        the pages do not get there.
        """
        base = Trial(model, len(ids) - page, "prime", COMPUTE, 0, 0.0)
        await self._ready(base)
        before = await self._client.metrics()
        done = await self._client.generate(ids, OUTPUT_TOKENS, logprobs=True)
        if done.error is not None:
            raise BenchError(f"the prompt of {len(ids)} tokens was not answered: {done.error}")
        after = await self._stored(len(ids) // page, before)
        # Over the store's whole life: all its pages have one size, and those of this prompt may
        # have been there before.
        nbytes = (after.total("kvtier:written_bytes_total") or 0.0) / max(
            after.total("kvtier:pages_written_total") or 0.0, 1.0
        )
        return outcome(base, done, len(ids)), nbytes * self._bytes_scale

    async def _measured(
        self,
        base: Attempt,
        ask: Callable[[], Awaitable[_Made]],
        *,
        flush: bool = True,
        repeat: bool = True,
    ) -> _Made:
        """The least disturbed of several attempts, or the first that was not. One that fails is
        kept at once: how disturbed it was is no excuse.
        """
        made: list[_Made] = []
        for attempt in range(_MOST_REPEATS + 1 if repeat else 1):
            await self._ready(base, flush=flush)
            made.append(dataclasses.replace(await self._watched(ask), repeats=attempt))
            if made[-1].error is not None or self._disturbance(made[-1]) <= 1:
                break
        kept = min(made, key=self._disturbance) if made[-1].error is None else made[-1]
        for one in made:
            if one is not kept:
                self._discard(dataclasses.replace(one, kind=DISCARDED))
        return dataclasses.replace(kept, repeats=attempt)

    def _disturbance(self, one: Attempt) -> float:
        """Above 1 it was disturbed."""
        others = (one.foreign_cores or 0.0) + one.stolen_cores
        lost = one.lost_s / one.took_s if one.lost_s and one.took_s else 0.0
        return max(others / self._quiet_foreign, one.slowness / self._slowest, lost / MOST_OVERRUN)

    async def _ready(self, base: Attempt, *, flush: bool = True) -> None:
        """Waits until the server does nothing, empties its caches and sets it to an attempt's
        arm.
        """
        await self._settle()
        if flush:
            await self._client.flush()
        await self._switch.use(base.arm, base.gbps)

    async def _settle(self, most_s: float = 20.0) -> None:
        """Waits until the server does nothing: what follows is not slowed by pages still being
        written back.
        """
        loop = asyncio.get_running_loop()
        until, calm, last = loop.time() + most_s, 0, self._cpu.seconds()
        while calm < 2 and loop.time() < until:
            began = loop.time()
            await asyncio.sleep(self._look_every_s)
            now = self._cpu.seconds()
            quiet = now == last or now - last < QUIET_CORES * (loop.time() - began)
            calm, last = calm + 1 if quiet else 0, now

    async def _watched(self, ask: Callable[[], Awaitable[_Made]]) -> _Made:
        """What was asked for, with what disturbed it meanwhile."""
        before = self._slowness()
        watch = CpuWatch(self._cpu.seconds)
        made = await ask()
        share = watch.stop()
        return dataclasses.replace(
            made,
            foreign_cores=share.foreign_cores,
            stolen_cores=share.stolen_cores,
            slowness=max(before, self._slowness()),
            **self._kept_pace(made),
        )

    def _slowness(self) -> float:
        now = self._pace()
        self._best_pace_s = min(self._best_pace_s, now)
        return now / self._best_pace_s

    def _kept_pace(self, made: Attempt) -> dict[str, Any]:
        """What a paced device wrote of an attempt. What it found wrong before belongs to it too, so
        that nothing is passed over.
        """
        if self._steps is None:
            return {}
        dilation, new = self._client.dilation, self._steps.new()
        first = [row for row in new if row.get("step") == "prefill" and row["at"] >= made.sent_s]
        wrong = [row for row in new if "mismatch" in row]
        found = {"steps": (*first, *wrong), "lost_s": lost_seconds(first) / dilation}
        if isinstance(made, Batch) and first:
            found["computing_s"] = sum(row["seconds"] for row in first) / dilation
        return found

    async def _send(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """Each is sent as soon as the server has read the one before: it reads one at a time anyhow,
        and a long prompt longer, so that shorter ones would be there first.
        """
        client, tasks = self._client, []
        for ids in prompts:
            taken = asyncio.Event()
            asking = client.generate(ids, OUTPUT_TOKENS, logprobs=True, taken=taken)
            tasks.append(asyncio.create_task(asking))
            await taken.wait()
        return list(await asyncio.gather(*tasks))

    async def _stored(self, pages: int, before: Metrics) -> Metrics:
        loop = asyncio.get_running_loop()
        within_s = STORED_WITHIN_S * self._client.dilation
        until = loop.time() + within_s
        while loop.time() < until:
            after = await self._client.metrics()
            written = grown(before, after, "kvtier:pages_written_total")
            # A page of a prompt that was primed before is kept, not written again.
            if written + grown(before, after, "kvtier:pages_kept_total") >= pages:
                return after
            await asyncio.sleep(min(0.25, 3 * self._look_every_s))
        raise BenchError(
            f"{pages} pages were not in the store after {within_s:.0f} s, only {written:.0f}. Does the "
            "server run with the kvtier backend, --enable-metrics and write-through?"
        )


class Decoders:
    """Requests that decode all the while. They are begun before a batch and ended after it."""

    def __init__(self, client: Client, prompts: Sequence[Sequence[int]]) -> None:
        self._client = client
        self._prompts = prompts
        self._tasks: dict[str, asyncio.Task[Completion]] = {}

    async def begin(self) -> None:
        """Returns when each has its first token, or has failed."""
        for ids in self._prompts:
            begun, rid = asyncio.Event(), f"beside-{uuid.uuid4().hex}"
            task = self._tasks[rid] = asyncio.create_task(
                self._client.generate(ids, MOST_DECODED, rid=rid, begun=begun)
            )
            first = asyncio.create_task(begun.wait())
            await asyncio.wait((task, first), return_when=asyncio.FIRST_COMPLETED)
            first.cancel()

    async def end(self) -> list[Completion]:
        """What they were given. Being ended here is no error of theirs."""
        for rid, task in self._tasks.items():
            if not task.done():
                await self._client.abort(rid)
        done = await asyncio.gather(*self._tasks.values())
        return [
            dataclasses.replace(one, error=None)
            if one.error is not None and one.error.startswith(ABORTED)
            else one
            for one in done
        ]


def outcome(base: _One, done: Completion, prompt_tokens: int) -> _One:
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


def _batch_outcome(
    base: Batch,
    done: Sequence[Completion],
    tokens: Sequence[int],
    decoded: Sequence[Completion],
    dilation: float,
) -> Batch:
    requests = tuple(
        outcome(Trial(base.model, n, base.kind, base.arm, base.round, base.gbps), one, n)
        for one, n in zip(done, tokens, strict=True)
    )
    sent_s = min(one.sent_s for one in requests)
    ends = [
        (one.sent_s - sent_s) / dilation + one.ttft_s for one in requests if one.ttft_s is not None
    ]
    makespan_s = max(ends) if len(ends) == len(requests) else None
    until_s = sent_s + (makespan_s or 0.0) * dilation
    return dataclasses.replace(
        base,
        requests=requests,
        sent_s=sent_s,
        makespan_s=makespan_s,
        gaps_s=tuple(gap for one in decoded for gap in gaps_within(one, sent_s, until_s, dilation)),
        decoded=tuple(one.output_ids for one in decoded),
        error=next((one.error for one in (*done, *decoded) if one.error is not None), None),
    )


def gaps_within(one: Completion, begin_s: float, end_s: float, dilation: float) -> list[float]:
    """Seconds between two tokens of a request, of those that reach into a time; `begin_s` and
    `end_s` are on this machine's monotonic clock.
    """
    times = [one.sent_s + at * dilation for at in one.token_times_s]
    return [
        (later - sooner) / dilation
        for sooner, later in itertools.pairwise(times)
        if later > begin_s and sooner < end_s
    ]


def _answers(metrics: Metrics) -> dict[str, float]:
    """The planner's answers so far, as `both: split is faster` and `declined: no room`."""
    found: dict[str, float] = {}
    for name, labels, value in metrics.to_json():
        # Every rank answers the same, so one is asked.
        if name in _ANSWERS and labels.get("tp_rank", "0") == "0":
            text = f"{labels.get('mode', 'declined')}: {labels.get('reason', '')}"
            found[text] = found.get(text, 0.0) + value
    return found


def grown(before: Metrics, after: Metrics, name: str) -> float:
    """The growth of a counter; one that is not there counts as 0."""
    return (after.total(name) or 0.0) - (before.total(name) or 0.0)


GRID, FIRST, CURVE, RESIDENT, PAGE, WARM, PRIME = (
    "grid",
    "first",
    "curve",
    "resident",
    "page",
    "warm",
    "prime",
)
"""Purposes of trials. `grid`: a cell. `first`: the first restoration after the bandwidth was
changed. `curve`: the compute curve. `resident`: a prompt still in device memory. `page`: a prompt
of one page. `warm`: nothing. `prime`: storing.
"""


@dataclass(frozen=True)
class Scale:
    """The quantities that one model's prompts of one length are measured with, fixed when they are
    first measured.

    `compute_s` is the time to first token when the prompt is computed; `prefix_bytes` are the bytes
    that loading it moves. The bandwidth of every cell follows from the two, so a continued run has
    the same cells.
    """

    model: str
    length: int
    page: int
    prefix_bytes: int
    compute_s: float

    def gbps(self, load_over_compute: float) -> float:
        """The bandwidth, in gigabits per second, for that ratio of loading time to computing time."""
        return self.prefix_bytes * 8e-9 / (load_over_compute * self.compute_s)


class RestoreLog(Log):
    """Trials, batches, and the scales they stand on. With a path every one is on disk before the next
    begins. A `PRIME` batch has the answers that computing each prompt alone gave.
    """

    kinds: ClassVar = {"trial": Trial, "scale": Scale, "batch": Batch}

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self.trials: list[Trial] = []
        self.scales: list[Scale] = []
        self.batches: list[Batch] = []

    def take(self, kind: str, record: Any) -> None:
        """Adds a record."""
        kept: dict[str, list[Any]]
        kept = {"trial": self.trials, "scale": self.scales, "batch": self.batches}
        kept[kind].append(record)

    def keep(self, made: Attempt) -> None:
        """Adds a trial or a batch."""
        self.add("batch" if isinstance(made, Batch) else "trial", made)

    def scale(self, model: str, length: int) -> Scale | None:
        """The scale this length was measured with; None when it was not measured yet."""
        return next((s for s in self.scales if (s.model, s.length) == (model, length)), None)

    def of(self, model: str, length: int, kind: str) -> list[Trial]:
        """Trials of one length for one purpose, those that succeeded."""
        return [
            t
            for t in self.trials
            if (t.model, t.length, t.kind) == (model, length, kind) and t.error is None
        ]

    def failed(self, model: str, length: int, kind: str) -> list[Trial]:
        """Trials that failed and were not made again since.

        A run that goes on from the log makes failed trials again, and then only the last attempt
        counts.
        """
        wanted = (model, length, kind)
        last = {t.key: t for t in self.trials if (t.model, t.length, t.kind) == wanted}
        return [t for t in last.values() if t.error is not None]

    def has(self, wanted: Attempt) -> bool:
        """Whether the trial or batch that this describes was made, and succeeded."""
        made = self.batches if isinstance(wanted, Batch) else self.trials
        key = (wanted.kind, wanted.key, None)
        return any((one.kind, one.key, one.error) == key for one in made)

    def reference(self, one: Batch) -> Batch | None:
        """The batch with the answers that a batch is compared with."""
        return next((b for b in self.batches if (b.kind, b.place) == (PRIME, one.place)), None)


def seconds(trials: Iterable[Trial]) -> list[float]:
    """The times to first token of those that have one."""
    return [trial.ttft_s for trial in trials if trial.ttft_s is not None]
