"""Two real servers with folders of their own and one remote store: what one wrote comes back on the
other, and trouble of the store costs no request.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import until
from serving import ADMIN, TOKENS, Served, config_file, flags, prompts, serving

from sgl_kvtier.remote.child.memory import set_faults
from sgl_kvtier.remote.servers import Servers

pytestmark = [pytest.mark.server, pytest.mark.slow]
PAGE = 16
WHOLE = (TOKENS - 1) // PAGE * PAGE
PAGES = WHOLE // PAGE


class Engine:
    """What keeps shared pages: the section `remote` of its servers, and its end."""

    def __init__(self, section: dict[str, Any], end: Callable[[], None]) -> None:
        self.section = section
        self.end = end


@contextmanager
def started(kind: str, folder: Path) -> Iterator[Engine]:
    if kind == "memory":
        folder.mkdir()
        section = {"engine": "memory", "master": str(folder)}
        yield Engine(section, lambda: set_faults(folder, {"unreachable": True}))
        return
    with Servers(512 << 20) as servers:
        (master, _) = servers._started
        section = {"engine": "mooncake", "master": servers.master}
        yield Engine(section, lambda: os.kill(master.pid, signal.SIGKILL))


@pytest.fixture(
    scope="module", params=["memory", pytest.param("mooncake", marks=pytest.mark.mooncake)]
)
def shared(request, tmp_path_factory) -> Iterator[tuple[Engine, Served, Served]]:
    """The engine and two servers on it."""
    if request.param == "mooncake" and importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed: pip install 'sgl-kvtier[remote]'")
    folder = tmp_path_factory.mktemp(request.param)
    with started(request.param, folder / "engine") as engine:
        one, two = (
            config_file(folder / name, remote=engine.section, prefetch_threshold=64)
            for name in ("a", "b")
        )
        with serving(folder / "a", flags(), one) as a, serving(folder / "b", flags(), two) as b:
            for server in (a, b):
                until(lambda server=server: server.metric("kvtier:remote_up") == 1)
            yield engine, a, b


def sent(server: Served, ask: Callable[[], Any]) -> Any:
    """What `ask` returns, once the pages that it made were sent."""
    before = server.metric("kvtier:remote_pages_sent_total")
    answers = ask()
    count = PAGES * len(answers)
    until(lambda: server.metric("kvtier:remote_pages_sent_total") >= before + count)
    return answers


@pytest.mark.parametrize("mode", ["load", "off", "both"])
def test_a_prompt_that_one_server_answered_is_not_computed_by_another(shared, mode):
    """`off` is SGLang's own loading."""
    _, a, b = shared
    asked = prompts(2, seed=("load", "off", "both").index(mode) + 11)
    first = sent(a, lambda: [a.ask(ids) for ids in asked])
    b.restore(mode)
    read, kept = (b.metric(f"kvtier:remote_pages_{name}_total") for name in ("read", "kept"))
    again = [b.ask(ids) for ids in asked]
    assert [one.tokens for one in again] == [one.tokens for one in first]
    if mode == "both":  # its front computes some of so short a prompt, as much as comes out
        until(lambda: b.metric("kvtier:remote_pages_read_total") > read)
        return
    assert [one.storage for one in again] == [WHOLE] * 2
    until(lambda: b.metric("kvtier:remote_pages_read_total") >= read + 2 * PAGES)
    until(lambda: b.metric("kvtier:remote_pages_kept_total") >= kept + 2 * PAGES)


def test_it_comes_from_the_servers_own_disk_the_next_time(shared):
    _, a, b = shared
    (asked,) = prompts(1, seed=21)
    (first,) = sent(a, lambda: [a.ask(asked)])
    b.restore("load")
    kept = b.metric("kvtier:remote_pages_kept_total")
    b.ask(asked)
    until(lambda: b.metric("kvtier:remote_pages_kept_total") >= kept + PAGES)
    b.flush()
    read = b.metric("kvtier:remote_pages_read_total")
    again = b.ask(asked)
    assert (again.storage, again.tokens) == (WHOLE, first.tokens)
    assert b.metric("kvtier:remote_pages_read_total") == read


def test_a_prefix_lies_partly_on_the_disk_and_partly_elsewhere(shared):
    _, a, b = shared
    (asked,) = prompts(1, seed=22)
    b.restore("load")
    half = TOKENS // 2 // PAGE * PAGE
    b.ask(asked[:half])
    b.flush()
    before = a.metric("kvtier:remote_pages_sent_total")
    first = a.ask(asked)
    until(
        lambda: (
            a.metric("kvtier:remote_pages_sent_total") >= before + PAGES - half // PAGE
            and a.metric("kvtier:remote_names_waiting") == 0
        )
    )
    again = b.ask(asked)
    assert (again.storage, again.tokens) == (WHOLE, first.tokens)


def test_both_serve_on_when_the_master_is_gone(shared):
    engine, a, b = shared
    asked, new = prompts(1, seed=31)[0], prompts(1, seed=32)[0]
    a.restore("load")
    b.restore("load")
    (first,) = sent(a, lambda: [a.ask(asked)])
    a.flush()
    engine.end()
    begun = time.monotonic()
    assert b.ask(asked).tokens == first.tokens, "found or computed, but answered"
    again = a.ask(asked)
    assert (again.storage, again.tokens) == (WHOLE, first.tokens)
    assert a.ask(new).tokens == b.ask(new).tokens
    assert time.monotonic() - begun < 60
    until(lambda: a.metric("kvtier:remote_up") == b.metric("kvtier:remote_up") == 0)
    for server in (a, b):
        server.flush()
        assert server.ask(new).storage == WHOLE, "its own disk goes on"
        server.call("POST", "/hicache/storage-backend/clear", {}, ADMIN)
        assert server.call("GET", "/health", raw=True) is not None


def test_a_server_starts_and_serves_without_a_master(tmp_path):
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed: pip install 'sgl-kvtier[remote]'")
    section = {"engine": "mooncake", "master": "127.0.0.1:9"}
    config = config_file(tmp_path, remote=section, prefetch_threshold=64)
    (asked,) = prompts(1, seed=41)
    with serving(tmp_path, flags(), config) as server:
        first = server.ask(asked)
        server.flush()
        again = server.ask(asked)
        assert (again.storage, again.tokens) == (WHOLE, first.tokens)
        assert server.metric("kvtier:remote_up") == 0
