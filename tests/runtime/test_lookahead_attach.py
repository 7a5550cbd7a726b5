"""Looking ahead while the store of a running server is emptied, detached and attached."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ahead_lab import AHEAD, SESSIONS, Agents, check_map, counts, looking_ahead
from serving import ADMIN, STORAGE, Served

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

SLOW = {"throttle": {"read_gbps": 0.01}}
"""A page of 16 KiB takes 13 ms, so reads ahead are under way when the store goes."""


def when_idle(served: Served, method: str, path: str) -> None:
    """Asks until SGLang agrees: it detaches, and flushes, on an idle server only."""
    last: Exception | None = None
    for _ in range(60):
        try:
            served.call(method, path, {} if method == "POST" else None, ADMIN)
            return
        except OSError as error:  # urllib's HTTPError is one
            last = error
            time.sleep(0.3)
    raise AssertionError(f"{method} {path} was never agreed to: {last}")


def on_the_map(served: Served, tier: str) -> float:
    time.sleep(1.2)
    return counts(served)[f"map_{tier}_pages"]


def test_a_store_that_is_emptied_is_no_drift(tmp_path: Path) -> None:
    with looking_ahead(tmp_path, {**AHEAD, "restore": "off"}) as served:
        agents = Agents(1)
        for session in range(SESSIONS):
            agents.turn(served, session, 0)
        served.settle()
        assert on_the_map(served, "storage") > 0
        when_idle(served, "POST", STORAGE + "/clear")
        time.sleep(2.5)
        for session in range(2):
            agents.turn(served, session, 1)  # a step in which the map is compared with the store
        time.sleep(2.5)
        found = check_map(served)
        assert found["drift_total"] == 0 and found["failures_total"] == 0
        assert found["map_storage_pages"] == served.metric("kvtier:store_pages") > 0


def test_a_store_that_goes_while_pages_are_read_ahead_and_comes_back(tmp_path: Path) -> None:
    files = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "files")}
    with looking_ahead(tmp_path, {**AHEAD, "restore": "both"}, sections=SLOW, env=files) as served:
        agents = Agents(1)
        agents.run(served, 4, pause_s=0, turns=3)
        asked = [agents.said[session] for session in range(SESSIONS)]
        expected = [served.ask(prompt).tokens for prompt in asked]

        def answered() -> list[list[int]]:
            return [answer.tokens for answer in served.ask_all(asked, 4)]

        for again in range(3):
            assert answered() == expected
            # Sessions that are expected at once: their pages are read ahead when the store goes.
            for session in range(SESSIONS):
                served.hint(session=f"agent 1 {session}", expected_delay_s=0.2 * again)
            time.sleep(0.1)
            when_idle(served, "DELETE", STORAGE)
            assert on_the_map(served, "storage") == 0
            assert answered() == expected
            when_idle(served, "POST", "/flush_cache")
            served.attach(served.server.folder / "kvtier.json")
        assert answered() == expected
        found = check_map(served)
        print(found)
        assert found["drift_total"] == 0 and found["failures_total"] == 0
        # Another backend instead of ours: the tree is ours still, and has nothing to do with what
        # is stored.
        when_idle(served, "DELETE", STORAGE)
        served.call("PUT", STORAGE, {"hicache_storage_backend": "file"}, ADMIN)
        for _ in range(2):
            assert answered() == expected
            when_idle(served, "POST", "/flush_cache")
        assert on_the_map(served, "storage") == 0
        said = (tmp_path / "server.log").read_text(errors="replace")
        assert "Traceback" not in said and "planner failed" not in said
