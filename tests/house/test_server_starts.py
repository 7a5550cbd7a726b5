"""The number of real servers that a run of tests starts is counted over its processes, and bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from server_starts import ServerStarts


def run_of(most: int | None, *counts: int) -> tuple[Any, str]:
    """The exit status of a run whose processes started so many servers, and what it says."""
    config: Any = SimpleNamespace(getoption=lambda name: most)
    said: list[str] = []
    first = ServerStarts(config)
    for count in counts:
        worker = ServerStarts(config)
        worker.count, worker.seconds = count, 30.0 * count
        output: dict[str, Any] = {}
        told = SimpleNamespace(workeroutput=output)
        worker.pytest_sessionfinish(SimpleNamespace(config=told, exitstatus=0))  # type: ignore[arg-type]
        first.pytest_testnodedown(told)
    session: Any = SimpleNamespace(config=SimpleNamespace(), exitstatus=0)
    first.pytest_sessionfinish(session)
    first.pytest_terminal_summary(SimpleNamespace(write_line=said.append))
    return session.exitstatus, "".join(said)


def test_starts_of_all_processes_are_added_up() -> None:
    assert run_of(15, 7, 8) == (0, "15 server starts, 450 s until they answered")
    assert run_of(None, 40) == (0, "40 server starts, 1200 s until they answered")
    assert run_of(15) == (0, "")


def test_a_run_with_too_many_fails_and_says_so() -> None:
    status, said = run_of(15, 8, 8)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "at most 15 are allowed" in said
