"""Runs Mooncake's master and one client that contributes memory on this host, to try the remote
tier out and for tests.

A cluster has one master, and one such client (`mooncake_client`, here called owner) on every host
that contributes memory. They have no authentication and no encryption.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from sgl_kvtier.errors import StoreError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.launch import free_port

START_S = 20.0


def missing_engine() -> str:
    """Why Mooncake cannot run here, and what to do; empty if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return f"Mooncake is not installed: {how_to_install('remote')}"
    if ctypes.util.find_library("ibverbs") is None:
        return "Mooncake needs libibverbs: apt-get install libibverbs1"
    return ""


def program(name: str) -> str:
    """The path of `mooncake_master` or `mooncake_client`. Raises StoreError if not installed."""
    found = importlib.util.find_spec("mooncake")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder, name)
        if path.is_file():
            if not os.access(path, os.X_OK):
                path.chmod(path.stat().st_mode | 0o111)
            return str(path)
    raise StoreError(f"no {name} here: {how_to_install('remote')}")


def master_command(address: str, port: int, metrics_port: int, lease_ms: int = 10_000) -> list[str]:
    """The command line of a master. It evicts early, since a full store refuses single pages."""
    return [
        program("mooncake_master"),
        f"--rpc_address={address}",
        f"--rpc_port={port}",
        f"--metrics_host={address}",
        f"--metrics_port={metrics_port}",
        "--eviction_high_watermark_ratio=0.85",
        "--eviction_ratio=0.1",
        f"--default_kv_lease_ttl={lease_ms}",
        "--logtostderr",
    ]


def owner_command(host: str, port: int, master: str, segment_bytes: int) -> list[str]:
    """The command line of an owner that contributes `segment_bytes` of memory."""
    return [
        program("mooncake_client"),
        f"--host={host}",
        f"--port={port}",
        f"--master_server_address={master}",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
        f"--global_segment_size={segment_bytes}",
    ]


class Servers:
    """A master and an owner as child processes. Use it in a `with` block, which kills both at its
    end. Raises StoreError if they do not start.
    """

    def __init__(
        self, segment_bytes: int, host: str = "127.0.0.1", port: int = 0, lease_ms: int = 10_000
    ) -> None:
        self.host = host
        self.port = port or free_port(host)
        self._metrics = free_port(host)
        self._segment_bytes = segment_bytes
        self._lease_ms = lease_ms
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def master(self) -> str:
        """The master's address, in the form of `remote.master`."""
        return f"{self.host}:{self.port}"

    @property
    def metrics(self) -> str:
        """The address of the master's metrics over HTTP."""
        return f"{self.host}:{self._metrics}"

    @property
    def commands(self) -> list[list[str]]:
        """The command lines, the master's first."""
        master = master_command(self.host, self.port, self._metrics, self._lease_ms)
        return [
            master,
            owner_command(self.host, free_port(self.host), self.master, self._segment_bytes),
        ]

    def start_master(self) -> subprocess.Popen[bytes]:
        """Starts a master and waits until it responds."""
        process = self._start(self.commands[0])
        self._await(process, "does not listen", lambda: self._page("/metrics") is not None)
        return process

    def start_owner(self) -> subprocess.Popen[bytes]:
        """Starts an owner and waits until the master lists its memory."""
        before = self.segments()
        process = self._start(self.commands[1])
        self._await(process, "gives no memory", lambda: bool(self.segments() - before))
        return process

    def stop(self) -> None:
        """Kills all processes that were started, even those stopped by a signal."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait()
        self._started.clear()

    def __enter__(self) -> Servers:
        try:
            self.start_master()
            self.start_owner()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        nothing = subprocess.DEVNULL
        process = subprocess.Popen(
            command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )
        self._started.append(process)
        return process

    def _await(
        self, process: subprocess.Popen[bytes], trouble: str, ready: Callable[[], bool]
    ) -> None:
        until = time.monotonic() + START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > until:
                raise StoreError(
                    f"{Path(str(process.args[0])).name} {trouble}: run it by hand to see why: "  # type: ignore[index]
                    f"{' '.join(process.args)}"  # type: ignore[arg-type]
                )
            time.sleep(0.05)

    def segments(self) -> set[str]:
        """The owners that the master lists."""
        return set((self._page("/get_all_segments") or "").split())

    def _page(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(
                f"http://{self.host}:{self._metrics}{path}", timeout=1
            ) as r:
                return str(r.read().decode())
        except (OSError, urllib.error.URLError):
            return None
