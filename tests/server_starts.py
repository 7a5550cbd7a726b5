"""Reports how many real servers a run of tests started, in all its processes, and how long they took
to answer: most of the time of tests on servers. A test that can share a server should (`runtime/shared.py`).
"""

from __future__ import annotations

from typing import Any

import pytest


class ServerStarts:
    """A plugin of pytest."""

    def __init__(self) -> None:
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
        if output is not None:  # a test process: the first one reports
            output["server_starts"] = (self.count, self.seconds)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.count:
            return
        text = f"{self.count} server starts, {self.seconds:.0f} s until they answered"
        terminalreporter.write_line(text)
