"""Counts the real servers that a run of tests starts, in all its processes, and how long they took to
answer. A run with `--most-server-starts` fails when there were more.
"""

from __future__ import annotations

from typing import Any

import pytest


class ServerStarts:
    """A plugin of pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._most: int | None = config.getoption("most_server_starts")
        self._counting = False
        self.count = 0
        self.seconds = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not any(item.get_closest_marker("server") for item in session.items):
            return
        from sgl_kvtier.lab.outside.server import Server

        start, wait = Server.start, Server.wait_until_healthy

        def counted_start(server: Server) -> None:
            self.count += self._counting
            start(server)

        def timed_wait(server: Server, *arguments: Any, **named: Any) -> float:
            seconds = wait(server, *arguments, **named)
            self.seconds += seconds if self._counting else 0.0
            return seconds

        Server.start, Server.wait_until_healthy = counted_start, timed_wait  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        # Tests of the class itself start other programs with it.
        self._counting = item.get_closest_marker("server") is not None
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        count, seconds = getattr(node, "workeroutput", {}).get("server_starts", (0, 0.0))
        self.count += count
        self.seconds += seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:  # a test process: the first one judges
            output["server_starts"] = (self.count, self.seconds)
        elif self._most is not None and self.count > self._most:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.count:
            return
        text = f"{self.count} server starts, {self.seconds:.0f} s until they answered"
        if self._most is not None and self.count > self._most:
            text += f": at most {self._most} are allowed, share one (tests/runtime/shared.py)"
        terminalreporter.write_line(text)
