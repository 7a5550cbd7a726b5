"""Servers whose processes are forked from one process that has imported SGLang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver

_CONTEXT = multiprocessing.get_context("forkserver")


class Popen:
    """A server as `subprocess.Popen` would have it: `python -m sglang.launch_server` with these
    arguments and variables, in a session of its own.
    """

    def __init__(self, env: dict[str, str], log: str, arguments: list[str]) -> None:
        """The first one starts the process that all are forked from, with its variables."""
        if forkserver._forkserver._forkserver_address is None:
            before = dict(os.environ)
            os.environ.update(env)
            _CONTEXT.set_forkserver_preload(["preload"])
            forkserver.ensure_running()
            os.environ.clear()
            os.environ.update(before)
        self._process = _CONTEXT.Process(target=_launch, args=(env, log, arguments))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The status it ended with; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a server", timeout or 0.0)
        return self._process.exitcode

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()


def stop() -> None:
    """Ends the process that servers are forked from. Servers that run go on."""
    pid = forkserver._forkserver._forkserver_pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        forkserver._forkserver._forkserver_pid = None


def _launch(env: dict[str, str], log: str, arguments: list[str]) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
    # SGLang spawns its workers, which imports everything once more.
    multiprocessing.Process = multiprocessing.get_context("fork").Process  # type: ignore[misc]
    multiprocessing.set_start_method = lambda *_, **__: None
    sys.argv = ["sglang.launch_server", *arguments]
    from sglang.launch_server import (
        kill_process_tree,
        load_plugins,
        prepare_server_args,
        run_server,
    )

    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
