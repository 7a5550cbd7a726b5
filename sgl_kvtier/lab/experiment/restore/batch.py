"""One batch of requests, asked for together or as a stream, beside requests that decode."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_kvtier.lab.experiment.restore.arms import BATCH_ARMS
from sgl_kvtier.lab.experiment.restore.plan import MOST_DECODED
from sgl_kvtier.lab.experiment.restore.trial import (
    OUTPUT_TOKENS,
    Batch,
    Trial,
    Trials,
    grown,
    outcome,
)
from sgl_kvtier.lab.outside.client import ABORTED, Client, Completion, Metrics

PUBLISHED_S = 0.7
"""Seconds after which a server's counters are in its /metrics: it publishes them twice a second."""
_ANSWERS = ("kvtier:restore_started_total", "kvtier:restore_declined_total")


class Batches:
    """Asks one server for batches. `beside` are the prompts of the requests that decode."""

    def __init__(self, trials: Trials, beside: Sequence[Sequence[int]]) -> None:
        self.trials = trials
        self._beside = beside

    async def run(
        self,
        base: Batch,
        prompts: Sequence[Sequence[int]],
        after_s: Sequence[float],
        *,
        repeat: bool = True,
    ) -> Batch:
        """The batch `base` describes, its outcome filled in; `after_s` says when each is asked for,
        in seconds from the first. Raises BenchError when the server refuses a setting or to flush.
        """

        async def once() -> Batch:
            await self.trials.ready(base)
            made = await self.trials.watched(lambda: self._make(base, prompts, after_s))
            steps = [row["seconds"] for row in made.steps if "step" in row]
            computing_s = sum(steps) / self.trials.client.dilation if steps else None
            return dataclasses.replace(made, computing_s=computing_s)

        return await self.trials.repeated(once, repeat=repeat)

    async def _make(
        self, base: Batch, prompts: Sequence[Sequence[int]], after_s: Sequence[float]
    ) -> Batch:
        client = self.trials.client
        before = await client.metrics()
        places = list(range(len(prompts)))
        if BATCH_ARMS[base.arm].shortest_first:
            places.sort(key=lambda place: len(prompts[place]))
        decoders = Decoders(client, self._beside)
        await decoders.begin()
        done = await self._ask_all([prompts[place] for place in places], after_s)
        decoded = await decoders.end()
        await asyncio.sleep(PUBLISHED_S)
        by_place = dict(zip(places, done, strict=True))
        return _outcome(
            dataclasses.replace(base, **self._counted(before, await client.metrics())),
            [(by_place[place], len(ids)) for place, ids in enumerate(prompts)],
            decoded,
            client.dilation,
        )

    async def _ask_all(
        self, prompts: Sequence[Sequence[int]], after_s: Sequence[float]
    ) -> list[Completion]:
        """Each is sent at its time, or as soon as the server has read the one before: it reads one
        at a time anyhow, and a long prompt longer, so that shorter ones would be there first.
        """
        client, tasks = self.trials.client, []
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        for ids, delay_s in zip(prompts, after_s, strict=True):
            await asyncio.sleep(begin_s + delay_s * client.dilation - loop.time())
            taken = asyncio.Event()
            asking = client.generate(ids, OUTPUT_TOKENS, logprobs=True, taken=taken)
            tasks.append(asyncio.create_task(asking))
            await taken.wait()
        return list(await asyncio.gather(*tasks))

    def _counted(self, before: Metrics, after: Metrics) -> dict[str, Any]:
        read = grown(before, after, "kvtier:read_bytes_total")
        first = _answers(before)
        answers = {name: n - first.get(name, 0.0) for name, n in _answers(after).items()}
        return {
            "read_bytes": read * self.trials.bytes_scale,
            "answers": {name: n for name, n in answers.items() if n > 0},
        }


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


def _outcome(
    base: Batch,
    done: Sequence[tuple[Completion, int]],
    decoded: Sequence[Completion],
    dilation: float,
) -> Batch:
    requests = tuple(
        outcome(Trial(base.model, tokens, base.kind, base.arm, base.round, base.gbps), one, tokens)
        for one, tokens in done
    )
    sent_s = min(one.sent_s for one in requests)
    ends = [
        (one.sent_s - sent_s) / dilation + one.ttft_s for one in requests if one.ttft_s is not None
    ]
    errors = [one.error for one, _ in done] + [one.error for one in decoded]
    makespan_s = max(ends) if len(ends) == len(requests) else None
    until_s = sent_s + (makespan_s or 0.0) * dilation
    return dataclasses.replace(
        base,
        requests=requests,
        sent_s=sent_s,
        makespan_s=makespan_s,
        gaps_s=tuple(gap for one in decoded for gap in gaps_within(one, sent_s, until_s, dilation)),
        decoded=tuple(one.output_ids for one in decoded),
        error=next((error for error in errors if error is not None), None),
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
            said: Mapping[str, str] = labels
            text = f"{said.get('mode', 'declined')}: {said.get('reason', '')}"
            found[text] = found.get(text, 0.0) + value
    return found
