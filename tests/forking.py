"""Servers whose processes are forked from one that has imported SGLang. Importing it, three times a
server, is most of what a start of a small server takes on two cores.

From there on they do what `python -m sglang.launch_server` does. Run as a program, this file is the
process that forks: it reads a line of JSON for each command and answers with one.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from sgl_kvtier.lab.outside.server import HOST, Server

CHANGES = ("SPOIL", "RAN", "MISTAKE", "PLAIN_COPIES", "ADAPTERS", "GONE", "DRAFTS")
"""Variables of `runtime/changed_site` that change modules. Only while a server runs it reads what
they say.
"""
_KINDS = ("PYTHONPATH", "SGLANG_PLATFORM", "SGLANG_EXTERNAL_MODEL_PACKAGE", "TORCHDYNAMO_DISABLE")
"""Variables that decide what is imported."""


class Importer:
    """A process that has imported SGLang, for servers whose modules are the same. What these read of
    other variables while they are imported is the first server's.
    """

    _running: ClassVar[dict[tuple[str, ...], Importer]] = {}

    def __init__(self, env: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `_stop`)
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=dict(env),
            text=True,
            start_new_session=True,
        )
        self.servers = 0
        """How many run."""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Importer:
        """The one for a server with these variables. Where there is none it is started, and those
        without a server end: each has about a gigabyte of memory.
        """
        changes = (name for name in CHANGES if name in env)
        key = (*(env.get(name, "") for name in _KINDS), *changes)
        if key not in cls._running:
            for known in [known for known, one in cls._running.items() if not one.servers]:
                cls._running.pop(known)._stop()
            cls._running[key] = cls(env)
        return cls._running[key]

    @classmethod
    def stop_all(cls) -> None:
        """Ends them. Servers that run go on."""
        while cls._running:
            _, one = cls._running.popitem()
            one._stop()

    def _stop(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def ask(self, **command: Any) -> Any:
        """The answer to a command. Raises OSError when the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")[-2000:]
            raise OSError(f"the process that imports SGLang has ended: {said}")
        return json.loads(answer)


atexit.register(Importer.stop_all)


class ForkedPopen:
    """A forked server as `subprocess.Popen` would have it, in a session of its own."""

    def __init__(self, env: dict[str, str], log: str, arguments: list[str]) -> None:
        self._importer = Importer.of(env)
        self.pid: int = self._importer.ask(env=env, log=log, arguments=arguments)
        self._importer.servers += 1
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The status it ended with; None while it runs."""
        if self.returncode is None:
            self.returncode = self._importer.ask(poll=self.pid)
            self._importer.servers -= self.returncode is not None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a server", timeout or 0.0)
            time.sleep(0.05)
        return self.returncode

    def terminate(self) -> None:
        """SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)


class Forked(Server):
    """A server that is forked."""

    def _spawn(self) -> Any:
        place = ["--host", HOST, "--port", str(self.port)]
        told = [*self._launch.arguments, *place]
        return ForkedPopen({**os.environ, **self._launch.env}, str(self.log_path), told)


def _serve() -> None:
    """Imports what servers import, then forks and waits for them until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401

    from sgl_kvtier.runtime.sglang import page_hash

    page_hash.load()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        command = json.loads(line)
        answer: int | None
        if "poll" in command:
            pid, status = os.waitpid(command["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                answers.close()
                _launch(command["env"], command["log"], command["arguments"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _launch(env: dict[str, str], log: str, arguments: list[str]) -> None:
    """The forked process: never returns."""
    status = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor, number in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(descriptor, number)
        os.environ.clear()
        os.environ.update(env)
        # SGLang spawns its workers, which imports everything once more.
        multiprocessing.Process = multiprocessing.get_context("fork").Process  # type: ignore[misc]
        multiprocessing.set_start_method = lambda *_, **__: None
        sys.argv = ["sglang.launch_server", *arguments]
        import runpy

        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    _serve()
