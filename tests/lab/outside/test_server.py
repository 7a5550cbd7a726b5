"""A server as a child process: it is started, waited for, and always stopped. A stand-in takes
SGLang's place here.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.outside.server import (
    HOST,
    Launch,
    Server,
    end_on_signals,
    stop_all,
    stop_servers,
)
from sgl_kvtier.launch import detect_device, free_port, missing_packages

SITE = Path(__file__).parents[1] / "fake_site"


def make_server(folder: Path, task: str = "", port: int | None = None) -> Server:
    env = {"PYTHONPATH": str(SITE), "FAKE_SGLANG": f"recompute:{task}"}
    return Server("recompute", Launch((), env), folder, port=port)


def group_of(server: Server) -> list[int]:
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == server.pid and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (OSError, psutil.Error):
            continue
    return members


def test_a_server_answers_while_it_is_up_and_is_gone_afterwards(tmp_path: Path) -> None:
    with make_server(tmp_path) as server:
        server.wait_until_healthy(60)
        assert urllib.request.urlopen(server.url + "/model_info").status == 200
        usage = server.usage()
        assert usage.processes >= 1
        assert usage.rss_bytes > 1 << 20
        assert usage.open_files > 0
        assert usage.cpu_s > 0
    assert group_of(server) == []
    assert server.usage().processes == 0


def test_a_server_that_ends_while_starting_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = make_server(tmp_path, "refuse")
    server.start()
    with pytest.raises(
        BenchError, match=r"(?s)ended with status 3 while starting.*no memory left for you"
    ) as caught:
        server.wait_until_healthy(60)
    assert str(server.log_path) in str(caught.value)


def test_a_server_that_is_never_ready_is_stopped(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.start()
    with pytest.raises(BenchError, match="not ready after 0 s"):
        server.wait_until_healthy(0)
    assert group_of(server) == []


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    server = make_server(tmp_path, "stubborn")
    server.start()
    server.wait_until_healthy(60)
    server.stop(patience_s=0.2)
    assert group_of(server) == []


def test_workers_that_outlive_their_server_are_killed_with_it(tmp_path: Path) -> None:
    server = make_server(tmp_path, "child")
    server.start()
    server.wait_until_healthy(60)
    deadline = time.monotonic() + 60
    while "worker" not in server.log_path.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(group_of(server)) == 2
    server.stop()
    assert group_of(server) == []


def test_stopping_twice_or_before_the_start_does_nothing(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    server.stop()
    server.start()
    server.stop()
    server.stop()
    assert group_of(server) == []


def test_what_is_still_running_at_the_end_is_stopped(tmp_path: Path) -> None:
    servers = [make_server(tmp_path / name) for name in "ab"]
    for server in servers:
        server.start()
    stop_all()
    assert [group_of(server) for server in servers] == [[], []]
    stop_servers(servers)


def test_a_taken_port_is_named_with_the_process_that_has_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            BenchError, match=f"port {port} of {HOST} cannot be used.*process {os.getpid()}.*--port"
        ):
            make_server(tmp_path, port=port).start()


def test_a_free_port_is_one_that_no_outgoing_connection_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < free_port() < first for _ in range(20))
    free = free_port()
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        ports = [taken.getsockname()[1], free]
        monkeypatch.setattr("random.sample", lambda *_: ports)
        assert free_port() == free
        ports.pop()
        assert free_port() not in (0, *ports)


def test_sigterm_becomes_a_keyboard_interrupt_inside_the_block_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), end_on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_device_is_found_without_importing_torch() -> None:
    loaded = "torch" in sys.modules
    assert detect_device() in ("cpu", "cuda")
    assert ("torch" in sys.modules) == loaded


def test_missing_packages_are_found_without_importing() -> None:
    assert missing_packages(["json", "no_such_package_at_all"]) == ["no_such_package_at_all"]
