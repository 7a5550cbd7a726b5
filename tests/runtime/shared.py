"""Servers that several tests use: one for each set of flags, settings and variables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from serving import Served, config_file, serving

MOST = 2
"""Servers that run at once. The one whose last use is longest ago is stopped for another."""


class Shared:
    """Running servers by what they were started with. Tests find caches empty and
    `policy.restore` as their settings say, and a store with other tests' pages: their prompts are
    their own, and other settings that they change they change back.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, tuple[ExitStack, Served]] = {}
        self._started = 0

    def get(
        self,
        arguments: Sequence[str],
        sections: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Served:
        """A server with these launch arguments, sections of kvtier.json and variables. In these two
        `{folder}` is the server's own folder.
        """
        key = json.dumps([list(arguments), sections, env], sort_keys=True)
        if key in self._running:
            self._running[key] = found = self._running.pop(key)  # the last one used
            (_, server) = found
            server.flush()
            server.restore((sections or {}).get("policy", {}).get("restore", "load"))
            return server
        while len(self._running) >= MOST:
            self._stop(next(iter(self._running)))
        self._started += 1
        folder = self._folder / f"server-{self._started}"
        told = json.dumps([sections or {}, env or {}]).replace("{folder}", str(folder))
        (own_sections, own_env) = json.loads(told)
        config = config_file(folder, **own_sections)
        with ExitStack() as stack:
            server = stack.enter_context(serving(folder, arguments, config, **own_env))
            self._running[key] = (stack.pop_all(), server)
        return server

    def close(self) -> None:
        """Stops all."""
        for key in list(self._running):
            self._stop(key)

    def _stop(self, key: str) -> None:
        (stack, _) = self._running.pop(key)
        stack.close()


@contextmanager
def sharing(folder: Path) -> Iterator[Shared]:
    """Shared servers, stopped at the end whatever happens."""
    shared = Shared(folder)
    try:
        yield shared
    finally:
        shared.close()
