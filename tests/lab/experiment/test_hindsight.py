"""What could have been: the bound of an arm's rounds, and the offers that it declined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sgl_kvtier.lab.experiment.arms import ORACLE, Setup, oracle
from sgl_kvtier.lab.experiment.hindsight import answers_of, bound_of, declined_of, requests_of
from sgl_kvtier.lab.experiment.load import Load, LoadOptions, load, undisturbed_tokens
from sgl_kvtier.lab.experiment.measures import Round, sample_rows
from sgl_kvtier.lab.outside.client import Completion
from sgl_kvtier.lab.outside.replay import ReplayOptions, Sample
from sgl_kvtier.lab.workload.encoder import ByteEncoder

PAGE = 16
OPTIONS = ReplayOptions(concurrency=None, gap_cap_s=1.0, most_output_tokens=4)
SETUP = Setup(
    "/m",
    "m",
    "paced:h100-llama8b",
    PAGE,
    8192,
    device_tokens=2 * PAGE,
    host_ratio=1.0,
    variants={ORACLE: oracle(1 << 20)},
)


@pytest.fixture(scope="module")
def sessions() -> Load:
    options = LoadOptions("generated:swe-mini", sessions=3, turns=3, divisor=4)
    return load(options, ByteEncoder(512, 4))


def round_of(arm: str, sent: list[tuple[str, int]], *, wall_s: float = 60.0) -> Round:
    samples = [
        Sample(session, turn, Completion(float(place), place + 1.0))
        for place, (session, turn) in enumerate(sent)
    ]
    return Round(arm, 1, samples, wall_s=wall_s, complete=True)


def turns_of(load: Load) -> list[tuple[str, int]]:
    """All requests, turn by turn."""
    return [(one.session_id, turn) for turn in (1, 2, 3) for one in load.sessions]


def test_a_turn_has_the_pages_of_the_one_before_and_more(sessions: Load) -> None:
    asked = requests_of(sessions, OPTIONS, PAGE)
    assert sorted(asked) == sorted(turns_of(sessions))
    for session in sessions.sessions:
        first, second = (asked[session.session_id, turn] for turn in (1, 2))
        assert second.pages[: len(first.pages)] == first.pages
        assert len(second.pages) == second.tokens // PAGE >= len(first.pages)
        assert second.wait_s <= 1.0
        assert second.output_tokens <= 4


def test_what_nothing_is_evicted_for_has_nothing_to_load(sessions: Load) -> None:
    asked = requests_of(sessions, OPTIONS, PAGE)
    sent = turns_of(sessions)
    small, large = (
        bound_of(arm, [round_of(arm, sent)], asked, SETUP, OPTIONS)["bound"]
        for arm in ("kvtier", ORACLE)
    )
    assert small["ttft_later_ms"] == large["ttft_later_ms"] > 0
    assert large["ttft_later_on_demand_ms"] == pytest.approx(large["ttft_later_ms"])
    assert small["missing_on_device_tokens"] > large["missing_on_device_tokens"] == 0
    assert small["ttft_later_on_demand_ms"] >= small["ttft_later_ms"]
    assert small["wall_s"] == 60


def test_requests_count_in_the_order_in_which_they_were_sent(sessions: Load) -> None:
    asked = requests_of(sessions, OPTIONS, PAGE)
    longest = max(asked.values(), key=lambda one: one.tokens)
    setup = replace(SETUP, device_tokens=longest.tokens // PAGE * PAGE + PAGE)
    in_turn, one_by_one = turns_of(sessions), sorted(turns_of(sessions))
    missing = [
        bound_of("kvtier", [round_of("kvtier", sent)], asked, setup, OPTIONS)["bound"][
            "missing_on_device_tokens"
        ]
        for sent in (in_turn, one_by_one)
    ]
    assert missing[1] == 0 < missing[0]


def test_figures_are_means_over_complete_rounds(sessions: Load) -> None:
    asked = requests_of(sessions, OPTIONS, PAGE)
    sent = turns_of(sessions)
    rounds = [round_of("kvtier", sent, wall_s=wall_s) for wall_s in (10.0, 20.0, 99.0)]
    rounds[2].complete = False
    assert bound_of("kvtier", rounds, asked, SETUP, OPTIONS)["bound"]["wall_s"] == 15


def test_nothing_is_said_of_a_device_that_computes_and_of_prompts_that_follow_answers(
    sessions: Load,
) -> None:
    asked = requests_of(sessions, OPTIONS, PAGE)
    rounds = [round_of("kvtier", turns_of(sessions))]
    computing = replace(SETUP, device="cpu")
    assert bound_of("kvtier", rounds, asked, computing, OPTIONS) == {}
    assert bound_of("kvtier", rounds, asked, SETUP, replace(OPTIONS, feedback="server")) == {}
    assert bound_of("hicache", rounds, asked, SETUP, OPTIONS) == {}


def test_every_request_is_compared_with_what_computing_answers(sessions: Load) -> None:
    computed = answers_of(sessions, OPTIONS)
    assert computed is not None
    assert sorted(computed) == sorted(turns_of(sessions))
    wrong = turns_of(sessions)[4]
    samples = [
        Sample(*key, Completion(0.0, 1.0, output_ids=(1,) if key == wrong else computed[key]))
        for key in turns_of(sessions)
    ]
    rows = sample_rows([Round("kvtier", 1, samples, wall_s=1.0, complete=True)], computed)
    assert [(row["session"], row["turn"]) for row in rows if row["equal"] is False] == [wrong]
    assert sum(row["equal"] is True for row in rows) == len(samples) - 1
    assert answers_of(sessions, replace(OPTIONS, feedback="server")) is None
    assert answers_of(sessions, replace(OPTIONS, route="openai")) is None


def test_a_pool_for_everything_has_room_for_all_contexts(sessions: Load) -> None:
    tokens = undisturbed_tokens(sessions, PAGE)
    assert tokens % PAGE == 0
    assert tokens > sessions.context_tokens + sessions.longest_tokens


HEAD = (
    '{"log":"kvtier.decisions","version":4,"config":{},"engine":{"page_tokens":16,"page_bytes":4096,'
    '"chunk_tokens":256},"profile":null}'
)
ASKED = (
    '{"type":"Query","question":{"type":"LeftToEngine","offer":{"type":"RestoreOffered","rid":"a",'
    '"now":1.0,"prompt_tokens":340,"resident":0,"pages":20,"sources":[[[0,20],"storage"]]},'
    '"view":{"type":"StepView","now":1.0,"waiting":["a"],"free_pages":{"device":1}}},"answer":"no room"}'
)
DONE = '{"type":"ChunkDone","rid":"a","tokens":[320,340],"seconds":0.1,"now":5.0}'


def test_declined_offers_are_read_from_a_log_that_is_still_written(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join((HEAD, ASKED, DONE, DONE[:30])))
    found = declined_of(log, replace(SETUP, decisions=True, dilation=2.0))["declined"]
    assert found["no room"]["took_ms"] == 2000
    assert found["no room"]["offers"] == found["no room"]["known"] == 1


def test_without_a_log_nothing_is_said_of_offers(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(HEAD + "\n")
    assert declined_of(tmp_path / "log", SETUP) == {}
    assert declined_of(tmp_path / "none", replace(SETUP, decisions=True)) == {}
