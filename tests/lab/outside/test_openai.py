"""Servers asked by /v1/completions: what is read from a stream, and that no failure escapes it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeOpenAI
from fake_sglang import in_a_thread
from test_replay import ENCODER, make_session, recorded_prompts

from sgl_kvtier.cli import main
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.measures import Round, sample_rows
from sgl_kvtier.lab.outside import openai
from sgl_kvtier.lab.outside.client import Cached, Completion
from sgl_kvtier.lab.outside.lab_model import write_named
from sgl_kvtier.lab.outside.openai import OpenAIClient
from sgl_kvtier.lab.outside.replay import ReplayOptions, Sample, replay


def ask(server: FakeOpenAI, prompt: Sequence[int], count: int) -> Completion:
    async def run() -> Completion:
        async with server.up(), OpenAIClient(server.url, timeout_s=30.0) as client:
            return await client.generate(prompt, count)

    return asyncio.run(run())


def replayed(server: FakeOpenAI, options: ReplayOptions, turns: int = 2) -> list[Sample]:
    samples: list[Sample] = []

    async def run() -> None:
        async with server.up(), OpenAIClient(server.url) as client:
            await replay([make_session("s", turns)], client, ENCODER, options, samples)

    asyncio.run(run())
    return samples


def test_the_prompt_is_sent_as_token_ids_and_greedily_continued_at_a_fixed_length() -> None:
    server = FakeOpenAI()
    ask(server, [9, 8], 3)
    (body,) = server.requests
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("some-model", [9, 8], 3)
    assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0, True, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("usage", ["every", "last"])
@pytest.mark.parametrize("per_event", [1, 2])
def test_every_token_has_a_time_however_events_carry_them(usage: str, per_event: int) -> None:
    server = FakeOpenAI(usage=usage, per_event=per_event)
    done = ask(server, [1, 2, 3], 5)
    assert done.error is None
    assert len(done.token_times_s) == 5
    assert list(done.token_times_s) == sorted(done.token_times_s)
    assert done.ttft_s == done.token_times_s[0]
    assert (done.text, done.output_ids) == ("".join(server.words([1, 2, 3], 5)), ())
    assert done.prompt_tokens == 3


def test_without_any_usage_an_event_with_text_is_a_token() -> None:
    done = ask(FakeOpenAI(usage="none"), [1], 4)
    assert len(done.token_times_s) == 4
    assert (done.prompt_tokens, done.cached) == (None, None)


def test_cached_tokens_are_read_with_their_tiers_where_the_server_names_them() -> None:
    tiers = {"device": 16, "host": 8, "storage": 4}
    assert ask(FakeOpenAI(cached=28, tiers=tiers), [1], 1).cached == Cached(16, 8, 4, total=28)
    told_a_total = ask(FakeOpenAI(cached=28), [1], 1).cached
    assert told_a_total == Cached(total=28)
    assert not told_a_total.sums_up


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("refuse", "HTTP 400: .*too long"),
        ("break", "ended before the answer did"),
        ("error", "out of luck"),
        ("abort", "aborted by the server"),
    ],
)
def test_a_failed_request_is_a_completion_with_an_error(failure: str, message: str) -> None:
    done = ask(FakeOpenAI(failure=failure), [1], 4)
    assert re.search(message, done.error or "")


@pytest.mark.parametrize(
    "event",
    [
        {"choices": "none"},
        {"choices": [7]},
        {"id": 7},
        {"choices": [{"text": 7}]},
        {"choices": [{"token_ids": [-1]}]},
        {"choices": [{"token_ids": [1] * 2000}], "usage": {"completion_tokens": 1}},
        {"choices": [{"finish_reason": 3}]},
        {"usage": {"completion_tokens": 1 << 40}},
        {"usage": {"completion_tokens": "many"}},
        {"usage": {"prompt_tokens_details": []}},
        {"sglext": {"cached_tokens_details": {"device": -1}}},
    ],
)
def test_an_answer_that_is_none_is_an_error_not_an_exception(event: dict[str, Any]) -> None:
    done = ask(FakeOpenAI(strange=event), [1], 2)
    assert done.error is not None
    assert len(done.error) < 500


def test_text_without_end_is_an_error_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "MOST_LINE_BYTES", 1 << 10)

    class Talkative(FakeOpenAI):
        def words(self, prompt: list[int], count: int) -> list[str]:
            return ["w" * 700] * count

    done = ask(Talkative(), [1], 4)
    assert "a text of more than" in (done.error or "")
    assert len(done.text) < 3 * 700


def test_a_request_has_the_name_that_the_server_gave_it() -> None:
    assert ask(FakeOpenAI(strange={"id": "cmpl-7", "choices": []}), [1], 1).rid == "cmpl-7"


def test_token_ids_that_a_server_sends_are_the_answer() -> None:
    event = {"choices": [{"text": "", "token_ids": [4, 5]}]}
    done = ask(FakeOpenAI(strange=event), [1], 4)
    assert done.answer == (4, 5)
    assert len(done.token_times_s) == 4


@pytest.mark.parametrize("models", [[], None, [{"root": "x"}], ["m"]])
def test_a_server_without_a_model_is_refused_before_anything_is_asked(models: Any) -> None:
    with pytest.raises(BenchError, match="lists no model"):
        ask(FakeOpenAI(models=models), [1], 1)


def test_a_replay_sends_the_same_prompts_on_either_route() -> None:
    server = FakeOpenAI()
    replayed(server, ReplayOptions(), 3)
    assert [body["prompt"] for body in server.requests] == recorded_prompts(make_session("s", 3))


def test_the_servers_own_text_is_fed_back_when_asked_for() -> None:
    server = FakeOpenAI()
    replayed(server, ReplayOptions(feedback="server"))
    first, second = (body["prompt"] for body in server.requests)
    assert second[: len(first)] == first
    assert second != recorded_prompts(make_session("s", 2))[1]


def test_answers_without_token_ids_are_compared_as_text() -> None:
    class Other(FakeOpenAI):
        def words(self, prompt: list[int], count: int) -> list[str]:
            return ["other "] * count

    rounds = [
        Round("recompute", 1, replayed(FakeOpenAI(), ReplayOptions())),
        Round("same", 1, replayed(FakeOpenAI(), ReplayOptions())),
        Round("other", 1, replayed(Other(), ReplayOptions())),
    ]
    rows = sample_rows(rounds)
    assert [row["equal"] for row in rows] == [None, None, True, True, False, False]
    assert rows[0]["output_text"].startswith("w")
    assert rows[0]["output_tokens"] == 4


def test_kvtier_replay_measures_a_server_that_is_not_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "out.json"
    load = ("--trace", "generated:swe-mini", "--sessions", "2", "--turns", "2", "--divisor", "16")
    with in_a_thread(FakeOpenAI(cached=16)) as url:
        words = ["replay", url, "--route", "openai", *load, "--gap-scale", "0"]
        assert main(words) == 1
        assert "give its tokenizer with --tokenizer" in capsys.readouterr().err
        model = str(write_named("tiny-qwen3"))
        assert main([*words, "--tokenizer", model, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["settings"]["route"] == "openai"
    assert (result["figures"]["requests"], result["figures"]["errors"]) == (4, 0)
    assert result["figures"]["ttft_ms"]["n"] == 4
    assert "64 from a cache that the server does not name" in capsys.readouterr().out
