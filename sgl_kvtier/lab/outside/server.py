"""A real SGLang server as a child process: its own process group, port, folder and log; always
stopped.

Whatever ends the caller ends the server: a return, an exception, Ctrl-C, SIGTERM through
`end_on_signals`. Every started server is registered, and those left are stopped when the
interpreter exits.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from sgl_kvtier.errors import BenchError
from sgl_kvtier.launch import free_port, refuse_taken_port
from sgl_kvtier.page_hash import compile_page_hash

HOST = "127.0.0.1"
_LOOK_S = 0.5
TERMINATE_S = 10.0
"""How long a server has to end after SIGTERM before its processes are killed."""


@dataclass(frozen=True)
class Usage:
    """Resources of a server's whole process tree at one moment. `rss_bytes` counts shared pages
    once per process.
    """

    rss_bytes: int
    open_files: int
    threads: int
    cpu_s: float
    processes: int


@dataclass(frozen=True)
class Launch:
    """A server to start: the arguments behind `python -m sglang.launch_server`, without host and
    port, and added variables.
    """

    arguments: tuple[str, ...]
    env: Mapping[str, str]


class Server:
    """One SGLang server process group. Use from one thread; `stop` may be called twice."""

    def __init__(self, name: str, launch: Launch, folder: Path, *, port: int | None = None) -> None:
        self.name = name
        self.folder = folder
        self.port = free_port() if port is None else port
        self.log_path = folder / "server.log"
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The launcher's process id, which is also the group's; None before `start`."""
        return None if self._process is None else self._process.pid

    @property
    def command(self) -> list[str]:
        """The whole command line, as it is started."""
        place = ["--host", HOST, "--port", str(self.port)]
        return [sys.executable, "-m", "sglang.launch_server", *self._launch.arguments, *place]

    def start(self) -> None:
        """Starts the process and returns at once. SGLang's page hash is compiled first, where it
        never was. Raises BenchError when the port is taken or nothing can be started.
        """
        refuse_taken_port(self.port)
        refused = compile_page_hash()
        if refused:
            print(refused, file=sys.stderr)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._process = self._spawn()
        except OSError as error:
            raise BenchError(f"{self.name}: cannot start a server: {error}") from error
        self._started_s = time.monotonic()
        _RUNNING[id(self)] = self

    def _spawn(self) -> subprocess.Popen[bytes]:
        # A session of its own: the terminal's Ctrl-C does not reach it, and its group can be found
        # again.
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._launch.env},
                start_new_session=True,
            )

    def wait_until_healthy(self, timeout_s: float = 300.0) -> float:
        """Blocks until /health says 200 and returns the seconds since the start.

        Raises BenchError with the log's last lines when the process ends or the time is over; it is
        stopped then.
        """
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            self.raise_if_ended("while starting")
            if self._healthy():
                return time.monotonic() - self._started_s
            time.sleep(_LOOK_S)
        log = self.last_lines()
        self.stop()
        raise BenchError(f"{self.name}: the server was not ready after {timeout_s:.0f} s. {log}")

    def raise_if_ended(self, when: str) -> None:
        """Raises BenchError with the log's last lines if the server process is gone."""
        if self._process is None or self._process.poll() is None:
            return
        status = self._process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self.stop()
        raise BenchError(f"{self.name}: the server {how} {when}. {self.last_lines()}")

    def last_lines(self, count: int = 25) -> str:
        """The end of the log with its path, for messages."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            text = ""
        lines = [line for line in text.splitlines() if line.strip()][-count:]
        return f"Last lines of {self.log_path}:\n" + "\n".join("  " + line for line in lines)

    def usage(self) -> Usage:
        """Memory, descriptors, threads and processor time of the whole tree now. Zeroes when it has
        ended.
        """
        rss = files = threads = count = 0
        cpu = 0.0
        for process in self._members():
            try:
                with process.oneshot():
                    rss += process.memory_info().rss
                    threads += process.num_threads()
                    times = process.cpu_times()
                files += process.num_fds()
            except psutil.Error:
                continue
            cpu += times.user + times.system
            count += 1
        return Usage(rss, files, threads, cpu, count)

    def disk_bytes(self) -> tuple[int, int]:
        """Bytes the tree's living processes have read from and written to block devices, as the
        kernel counts them.
        """
        read = written = 0
        for process in self._members():
            try:
                counters = process.io_counters()
            except psutil.Error:
                continue
            read += counters.read_bytes
            written += counters.write_bytes
        return read, written

    def processes(self, word: str) -> list[psutil.Process]:
        """The tree's living processes whose command line begins with `word`, as SGLang names its
        own.
        """
        found = []
        for process in self._members():
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith(word):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def ask_to_end(self) -> None:
        """SIGTERM, without waiting."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self, patience_s: float = TERMINATE_S) -> None:
        """SIGTERM, then after `patience_s` SIGKILL to what is left of the process group. Does
        nothing when it has ended or never began.
        """
        process = self._process
        if process is None:
            return
        members = self._members()
        self.ask_to_end()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass
        # Workers that outlive the launcher keep its group; those that left the group are in the
        # list from before.
        for member in {*members, *self._members()}:
            try:
                member.kill()
            except psutil.Error:
                continue
        process.wait()
        psutil.wait_procs(members, timeout=5)
        _RUNNING.pop(id(self), None)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=25) as answer:
                return answer.status == 200
        except (OSError, HTTPException):
            return False

    def _members(self) -> list[psutil.Process]:
        pid = self.pid
        if pid is None:
            return []
        found: dict[int, psutil.Process] = {}
        try:
            launcher = psutil.Process(pid)
            for process in [launcher, *launcher.children(recursive=True)]:
                found[process.pid] = process
        except psutil.Error:
            pass  # the launcher has ended; orphans are still found by their group
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == pid:
                    found[process.pid] = process
            except OSError:
                continue
        return list(found.values())


_RUNNING: dict[int, Server] = {}


def stop_servers(servers: Sequence[Server]) -> None:
    """Stops these servers, all at the same time."""
    for server in servers:
        server.ask_to_end()
    for server in servers:
        server.stop()


def stop_all() -> None:
    """Stops every server of this process that is still running. Registered to run when the
    interpreter exits.
    """
    stop_servers(list(_RUNNING.values()))


atexit.register(stop_all)


@contextmanager
def end_on_signals() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP end the program as Ctrl-C does, so that `finally` clauses
    run.
    """

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(signal.Signals(number).name)

    with signals_handled(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def signals_handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Inside the block these signals have another handler."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)
