"""Servers that tests share: one for each set of flags and settings, and few at once."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest
import shared
from serving import flags
from shared import Shared


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
