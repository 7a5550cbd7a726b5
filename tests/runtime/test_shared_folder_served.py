"""Real servers on one `store.path`: what one of them wrote comes back on the other, and on one that is
started after it was killed. So it does between data-parallel ranks of one server.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from serving import TOKENS, Answer, Served, flags, prompts, serving
from shared import Shared

pytestmark = pytest.mark.server
PAGE = 16
WHOLE = (TOKENS - 1) // PAGE * PAGE
"""Tokens of a prompt that can come from a cache: whole pages, and at least one is computed."""
LAST = prompts(2, seed=63)


@pytest.fixture(scope="module")
def one(servers: Shared) -> Served:
    """A server that stays."""
    return servers.get(flags())


@pytest.fixture(scope="module")
def killed(one: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Answer]]:
    """What another server on its folder answered last, before it was killed."""
    before, after = prompts(2, seed=61), prompts(2, seed=62)
    config = one.server.folder / "kvtier.json"
    with serving(tmp_path_factory.mktemp("other"), flags(), config) as other:
        told = [one.ask(ids) for ids in before]
        one.settle()
        found(told, [other.ask(ids) for ids in before])
        told = [other.ask(ids) for ids in after]
        other.settle()
        found(told, [one.ask(ids) for ids in after])
        told = [other.ask(ids) for ids in LAST]
        other.settle()
        os.killpg(other.server.pid, signal.SIGKILL)
        yield told


def found(told: list[Answer], again: list[Answer]) -> None:
    """The same answers, from storage."""
    assert [answer.storage for answer in again] == [WHOLE] * len(told)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in told]


def test_two_servers_on_one_folder_find_what_the_other_wrote(one, killed):
    found(killed, [one.ask(ids) for ids in LAST])
    assert one.metric("kvtier:pages_corrupt_total") == 0


def test_a_server_started_after_one_was_killed_finds_its_pages(one, killed, tmp_path):
    with serving(tmp_path, flags(), one.server.folder / "kvtier.json") as server:
        found(killed, [server.ask(ids) for ids in LAST])
        assert server.metric("kvtier:pages_corrupt_total") == 0


@pytest.mark.slow
def test_data_parallel_ranks_of_one_server_find_what_the_other_wrote(servers):
    server = servers.get(flags(dp_size=2))
    for writer, reader in ((0, 1), (1, 0)):
        asked = prompts(2, seed=64 + writer)
        told = [server.ask(ids, routed_dp_rank=writer) for ids in asked]
        assert [answer.cached for answer in told] == [0, 0]
        server.settle()
        found(told, [server.ask(ids, routed_dp_rank=reader) for ids in asked])
    assert server.metric("kvtier:pages_corrupt_total") == 0
