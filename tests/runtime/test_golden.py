"""Answers kept between runs of the tests: found again for the same server and prompts, and for
nothing else.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest
import shared
from golden import Answers, Golden, key_of
from serving import Answer, Served, flags
from shared import Shared

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


# Servers that tests share: one for each set of flags and settings, and few at once.


class FakeServed:
    """Notes what is asked of it."""

    def __init__(self, folder: Path, config: Path, env: dict[str, str]) -> None:
        self.folder, self.config, self.env = folder, config, env
        self.told: list[str] = []
        self.stopped = False

    def flush(self) -> None:
        self.told.append("flush")

    def restore(self, mode: str) -> None:
        self.told.append(mode)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeServed]:
    made: list[FakeServed] = []

    @contextmanager
    def serving(folder, arguments, config, **env):
        server = FakeServed(folder, config, env)
        made.append(server)
        yield server
        server.stopped = True

    monkeypatch.setattr(shared, "serving", serving)
    return made


def test_the_same_flags_and_settings_have_one_server_which_is_found_as_it_was_started(
    started, tmp_path
):
    servers = Shared(tmp_path)
    policy = {"policy": {"restore": "both"}}
    first = servers.get(flags(), policy)
    assert servers.get(flags(), policy) is first
    assert first.told == ["flush", "both"]
    assert servers.get(flags(), {"policy": {"restore": "off"}}) is not first
    assert servers.get(flags(seed=1), policy) is not first
    assert len(started) == 3


def test_the_one_whose_use_is_longest_ago_is_stopped_for_another(started, tmp_path):
    servers = Shared(tmp_path)
    for seed in (0, 1, 0, 2):
        servers.get(flags(seed=seed))
    assert [server.stopped for server in started] == [False, True, False]
    servers.close()
    assert all(server.stopped for server in started)


def test_settings_and_variables_may_name_the_servers_folder(started, tmp_path):
    Shared(tmp_path).get(flags(), {"policy": {"decision_log": "{folder}/log"}}, {"AT": "{folder}"})
    (server,) = started
    assert f'"{server.folder}/log"' in server.config.read_text()
    assert server.env == {"AT": str(server.folder)}
