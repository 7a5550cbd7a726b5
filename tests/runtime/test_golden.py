"""Answers kept between runs of the tests: found again for the same server and prompts alone."""

from __future__ import annotations

import pytest
from golden import Answers, Golden, key_of
from serving import Answer, Served, flags

SAID: Answers = {(0, 0): [1, 2], (0, 1): [3], (1, 0): []}


class Nobody:
    """Who computes although the answers are kept."""

    def __call__(self) -> Answers:
        raise AssertionError("the answers were kept")


@pytest.fixture
def kept(tmp_path):
    return Golden(tmp_path)


def test_answers_are_computed_once(kept, tmp_path):
    arguments = flags(backend=None)
    assert kept.answers(arguments, Served, lambda: SAID) == SAID
    assert Golden(tmp_path).answers(arguments, Served, Nobody()) == SAID


def test_a_failed_server_leaves_nothing_behind(kept, tmp_path):
    def failing() -> Answers:
        raise RuntimeError("the server ended")

    with pytest.raises(RuntimeError, match="the server ended"):
        kept.answers(flags(), Served, failing)
    assert list(tmp_path.iterdir()) == []
    assert kept.answers(flags(), Served, lambda: SAID) == SAID


@pytest.mark.parametrize(
    "arguments",
    [flags(seed=1), flags("tiny-llama"), flags(tp_size=2), flags(dtype="bfloat16")],
    ids=["weights", "model", "ranks", "dtype"],
)
def test_another_server_has_answers_of_its_own(arguments):
    assert key_of(arguments, Served) != key_of(flags(), Served)


def test_another_sglang_or_another_way_of_asking_has_answers_of_its_own(monkeypatch):
    before = key_of(flags(), Served)
    assert key_of(flags(), Answer) != before
    monkeypatch.setattr("golden.installed_version", lambda: "0.6.0")
    assert key_of(flags(), Served) != before
