"""The replay: what it sends, in which order, and what it keeps when things go wrong."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeServer

from sgl_kvtier.lab.outside.client import Client, Completion
from sgl_kvtier.lab.outside.replay import (
    ReplayOptions,
    Sample,
    SampleLog,
    arrivals,
    prompt_sizes,
    replay,
    serve_first,
)
from sgl_kvtier.lab.workload.encoder import ByteEncoder, PromptTokens
from sgl_kvtier.lab.workload.session import Append, Call, Context, Message, Session

ENCODER = ByteEncoder(512, 1)


def make_session(name: str, turns: int = 3, gap_s: float = 0.0) -> Session:
    events: list = []
    for turn in range(turns):
        events.append(Append(Message("tool", text=f"{name} result {turn} " * 5)))
        events.append(
            Call(Message("assistant", text=f"{name} answer {turn}"), output_tokens=4, gap_s=gap_s)
        )
    return Session(name, "made up", tuple(events))


def run(
    server: FakeServer,
    sessions: Sequence[Session],
    options: ReplayOptions,
    path: Path | None = None,
) -> list[Sample]:
    samples: list[Sample] = []

    async def go() -> None:
        async with server.up(), Client(server.url) as client:
            log = SampleLog(path, arm="a", round=1)
            await replay(sessions, client, ENCODER, options, samples, log=log)

    asyncio.run(go())
    return samples


def recorded_prompts(session: Session) -> list[list[int]]:
    tokens, prompts = PromptTokens(ENCODER), []
    for _, prompt in Context(session).calls():
        tokens.show(prompt)
        prompts.append(tokens.ids.tolist())
    return prompts


def test_recorded_outputs_are_fed_back_so_that_prompts_do_not_depend_on_the_server(
    fake_server: FakeServer,
) -> None:
    session = make_session("s", 4)
    run(fake_server, [session], ReplayOptions())
    assert [body["input_ids"] for body in fake_server.requests] == recorded_prompts(session)
    assert {body["sampling_params"]["max_new_tokens"] for body in fake_server.requests} == {4}


def test_sessions_that_return_begin_with_their_second_request_and_do_not_wait(
    fake_server: FakeServer,
) -> None:
    sessions = [make_session("a", gap_s=0.0), make_session("b", gap_s=0.0)]

    async def go() -> None:
        async with fake_server.up(), Client(fake_server.url) as client:
            await serve_first(sessions, client, ENCODER)

    asyncio.run(go())
    first = [recorded_prompts(session)[0] for session in sessions]
    assert [body["input_ids"] for body in fake_server.requests] == first
    fake_server.requests.clear()
    options = ReplayOptions(returning=True, concurrency=1, pause_s=0.0)
    samples = run(fake_server, sessions, options)
    assert [(sample.session, sample.turn) for sample in samples] == [
        (name, turn) for name in "ab" for turn in (2, 3)
    ]
    asked = [body["input_ids"] for body in fake_server.requests]
    assert asked == [prompt for session in sessions for prompt in recorded_prompts(session)[1:]]


def test_the_servers_own_tokens_are_fed_back_when_asked_for(fake_server: FakeServer) -> None:
    run(fake_server, [make_session("s", 2)], ReplayOptions(feedback="server"))
    first, second = (body["input_ids"] for body in fake_server.requests)
    assert second[: len(first) + 4] == first + fake_server.answer(first, 4)


def test_no_more_sessions_run_at_once_than_asked_for(fake_server: FakeServer) -> None:
    samples = run(
        fake_server, [make_session(f"s{i}") for i in range(6)], ReplayOptions(concurrency=2)
    )
    assert len(samples) == 18
    assert fake_server.most_running == 2


def test_a_session_goes_on_after_a_request_that_failed(fake_server: FakeServer) -> None:
    session = make_session("s", 3)
    second = recorded_prompts(session)[1]
    fake_server.fail_when = lambda ids: "error" if ids == second else None
    samples = run(fake_server, [session], ReplayOptions())
    assert [sample.completion.error for sample in samples] == [None, "out of luck", None]
    assert [body["input_ids"] for body in fake_server.requests] == recorded_prompts(session)


def test_every_finished_request_is_in_the_log_with_its_labels(
    fake_server: FakeServer, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    samples = run(fake_server, [make_session("s", 2)], ReplayOptions(), log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["arm"], line["round"], line["session"], line["turn"]) for line in lines] == [
        ("a", 1, "s", 1),
        ("a", 1, "s", 2),
    ]
    assert [line["output_ids"] for line in lines] == [
        list(sample.completion.output_ids) for sample in samples
    ]


def test_what_was_measured_before_a_cancellation_is_kept(
    fake_server: FakeServer, tmp_path: Path
) -> None:
    session = make_session("s", 3)
    third = recorded_prompts(session)[2]
    fake_server.fail_when = lambda ids: "hang" if ids == third else None
    samples: list[Sample] = []
    log = tmp_path / "log.jsonl"

    async def go() -> None:
        async with fake_server.up(), Client(fake_server.url) as client:
            seen = asyncio.Event()
            task = asyncio.create_task(
                replay(
                    [session],
                    client,
                    ENCODER,
                    ReplayOptions(),
                    samples,
                    log=SampleLog(log),
                    on_done=lambda sample: seen.set() if sample.turn == 2 else None,
                )
            )
            await seen.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(go())
    assert [sample.turn for sample in samples] == [1, 2]
    assert len(log.read_text().splitlines()) == 2


def test_gaps_are_scaled_then_capped_and_never_negative() -> None:
    options = ReplayOptions(gap_scale=0.5, gap_cap_s=2.0)
    assert options.gap_s(1.0) == 0.5
    assert options.gap_s(60.0) == 2.0
    assert options.gap_s(-3.0) == 0.0
    assert ReplayOptions().gap_s(60.0) == 60.0


def test_prompt_sizes_are_those_that_are_sent(fake_server: FakeServer) -> None:
    session = make_session("s", 3)
    run(fake_server, [session], ReplayOptions())
    sent = [len(body["input_ids"]) for body in fake_server.requests]
    (row,) = prompt_sizes([session], ENCODER)
    assert row["calls"] == 3
    assert (row["first_prompt_tokens"], row["last_prompt_tokens"]) == (sent[0], sent[-1])
    assert row["prompt_tokens"] == sum(sent)
    assert row["longest_tokens"] == max(sent) + 4
    assert row["output_tokens"] == 12


# Sessions that arrive at a rate, in virtual time.


class _Jumping(selectors.DefaultSelector):
    """Never sleeps: what it was to wait is added to `now`."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which waits for nothing but the clock."""
    loop = _Loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


@dataclass
class TimedClient:
    """A client whose every request takes `answer_s`; keeps when each was sent and what it asked."""

    answer_s: float = 1.0
    dilation: float = 1.0
    sent: list[tuple[float, list[int]]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def generate(
        self, input_ids: Sequence[int], count: int, *, session_id: str | None = None
    ) -> Completion:
        sent_s = asyncio.get_running_loop().time()
        self.sent.append((sent_s, list(input_ids)))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.answer_s * self.dilation)
        self.running -= 1
        return Completion(sent_s, self.answer_s, tuple(range(count)), (self.answer_s,) * count)


OPEN = ReplayOptions(concurrency=None, rate=0.5, seed=3)


def replayed(client: TimedClient, options: ReplayOptions, count: int, **how) -> list[Sample]:
    samples: list[Sample] = []
    sessions = [make_session(f"s{number}", **how) for number in range(count)]
    run_virtually(replay(sessions, client, ENCODER, options, samples))
    return samples


def begun(samples: list[Sample]) -> list[float]:
    """When each session's first request was sent."""
    return [s.completion.sent_s for s in sorted(samples, key=by_session) if s.turn == 1]


def by_session(sample: Sample) -> tuple[str, int]:
    return sample.session, sample.turn


def test_every_session_begins_when_it_arrives_whatever_the_server_does() -> None:
    client = TimedClient(answer_s=1000.0)
    slow = replayed(client, OPEN, 6)
    assert begun(slow) == pytest.approx(arrivals(6, 0.5, 3))
    assert (len(slow), client.most_running) == (18, 6)


def test_the_same_seed_gives_the_same_arrivals_to_every_arm_and_round() -> None:
    fast, slow = (begun(replayed(TimedClient(answer), OPEN, 5)) for answer in (0.1, 50.0))
    assert fast == pytest.approx(slow)
    assert arrivals(5, 0.5, 3) != arrivals(5, 0.5, 4)


def test_arrivals_come_at_the_rate_asked_for_on_average() -> None:
    times = arrivals(20_000, 4.0, 0)
    assert all(later >= sooner for sooner, later in pairwise(times))
    assert times[-1] / len(times) == pytest.approx(0.25, rel=0.03)


def test_the_turns_of_a_session_wait_for_their_answers_and_their_tools() -> None:
    client = TimedClient(answer_s=2.0)
    samples = sorted(replayed(client, OPEN, 1, turns=3, gap_s=5.0), key=by_session)
    assert [s.completion.sent_s for s in samples] == pytest.approx([5.0, 12.0, 19.0])
    assert [ids for _, ids in client.sent] == recorded_prompts(make_session("s0", 3))


def test_a_slower_device_has_as_much_later_arrivals() -> None:
    slower = begun(replayed(TimedClient(dilation=4.0), OPEN, 5))
    assert slower == pytest.approx([4 * at for at in arrivals(5, 0.5, 3)])
