"""What a paced device answers where nothing is wrong, and the pool of the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_kvtier.lab.experiment.load import Load, LoadOptions, load, undisturbed_tokens
from sgl_kvtier.lab.experiment.measures import Round, sample_rows
from sgl_kvtier.lab.experiment.scenarios.compare import answers_of
from sgl_kvtier.lab.outside.client import Completion
from sgl_kvtier.lab.outside.replay import ReplayOptions, Sample
from sgl_kvtier.lab.workload.encoder import ByteEncoder

PAGE = 16
OPTIONS = ReplayOptions(concurrency=None, gap_cap_s=1.0, most_output_tokens=4)


@pytest.fixture(scope="module")
def sessions() -> Load:
    options = LoadOptions("generated:swe-mini", sessions=3, turns=3, divisor=4)
    return load(options, ByteEncoder(512, 4))


def turns_of(load: Load) -> list[tuple[str, int]]:
    """All requests, turn by turn."""
    return [(one.session_id, turn) for turn in (1, 2, 3) for one in load.sessions]


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
