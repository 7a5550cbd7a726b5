"""The server of a fuzz run: started, looked after, killed without warning, started again on the
same store.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import Setup, prepare
from sgl_kvtier.lab.experiment.restore.server import STRICT
from sgl_kvtier.lab.fuzz.log import FuzzLog, suspicious
from sgl_kvtier.lab.outside.server import Launch, Server, Usage, free_port

SCHEDULER = "sglang::scheduler"
"""How SGLang's scheduler processes call themselves."""

_IDLE_CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
_START_S = 400.0
_DRAIN_S = 60.0
"""SGLang looks every 5 s whether it was asked to end, and whether its requests have ended."""


class FuzzServer:
    """One server after another on one port, folder and key. Findings in their logs go to `log`;
    `env` are more variables, and `signals` what each in turn is ended with.
    """

    def __init__(
        self,
        arm: str,
        setup: Setup,
        folder: Path,
        log: FuzzLog,
        sections: Mapping[str, Mapping[str, Any]],
        env: Mapping[str, str] | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGKILL,),
    ) -> None:
        self.admin_key = secrets.token_hex(8)
        self._folder = folder
        self._log = log
        extra = (*setup.extra, "--admin-api-key", self.admin_key)
        whole = Setup(**{**vars(setup), "extra": extra, "sections": {**setup.sections, **sections}})
        launch = prepare(arm, whole, folder)
        self._launch = Launch(
            launch.arguments, {**launch.env, **STRICT, **_IDLE_CHECKS, **(env or {})}
        )
        self._signals = itertools.cycle(signals)
        self._port = free_port()
        self._server: Server | None = None
        self._read = 0
        self._killing = False
        self._is_gone = False

    @property
    def url(self) -> str:
        """Where it answers, also after a restart."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def settings(self) -> Path:
        """Its kvtier.json."""
        return self._folder / "storage.json"

    @property
    def alive(self) -> bool:
        """Whether the server process is there, or on its way back from a kill."""
        if self._killing:
            return True
        if self._server is None:
            return False
        try:
            self._server.raise_if_ended("while it was fuzzed")
        except BenchError as error:
            if not self._is_gone:
                self._log.find(f"crash: {str(error).splitlines()[0]}")
            self._is_gone = True
            return False
        return True

    def start(self) -> None:
        """Starts it and waits until it answers. Raises BenchError when it does not."""
        self._folder.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + 30
        while True:
            self._server = Server("fuzz", self._launch, self._folder, port=self._port)
            try:
                self._server.start()
                break
            except BenchError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)  # the killed one's port
        self._server.wait_until_healthy(_START_S)

    def kill_and_start(self) -> None:
        """Ends the server with the next signal and starts a new one.

        SIGKILL goes to the whole process group, so that none of its processes runs any code after
        that. SIGTERM goes to the launcher, which then answers the requests under way.
        """
        self.look()
        server = self._server
        assert server is not None and server.pid is not None, "it was started"
        self._killing = True
        try:
            how = next(self._signals)
            if how is signal.SIGKILL:
                os.killpg(server.pid, how)
            server.stop(_DRAIN_S)
            self._log.note("kill" if how is signal.SIGKILL else "terminate")
            self.start()
        finally:
            self._killing = False

    def usage(self) -> Usage:
        """Processes, threads, descriptors and memory of the present one."""
        return Usage(0, 0, 0, 0.0, 0) if self._server is None else self._server.usage()

    @contextlib.contextmanager
    def halted(self) -> Iterator[int]:
        """SIGSTOP to its schedulers while the block runs, SIGCONT behind it; yields how many there
        are.
        """
        found = [] if self._server is None else self._server.processes(SCHEDULER)
        try:
            for process in found:
                process.suspend()
            yield len(found)
        finally:
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.resume()

    def look(self) -> None:
        """Reads what its log has grown by, and keeps what it must not say."""
        path = self._folder / "server.log"
        try:
            with path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except OSError:
            return
        self._read += len(new)
        for text in suspicious(new.decode(errors="replace")):
            self._log.find(text)

    def stop(self) -> None:
        """Looks at its log a last time and ends it."""
        self.look()
        if self._server is not None:
            self._server.stop()
        self._server = None
        self._read = self._size()  # what it says while it ends is not a finding

    def _size(self) -> int:
        try:
            return (self._folder / "server.log").stat().st_size
        except OSError:
            return 0
