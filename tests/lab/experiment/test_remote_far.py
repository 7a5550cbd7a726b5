"""A link of a set speed stands between an owner of memory and those who use it."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.remote.far import Bucket, Far, ports
from sgl_kvtier.launch import free_port

ECHO = """
import socket, sys, threading
master = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
server = socket.create_server(("0.0.0.0", int(sys.argv[2])))
master.sendall(b"here")
def answer(one):
    while data := one.recv(1 << 16):
        one.sendall(data)
while True:
    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()
"""
"""An owner that says to its master that it is here, and sends back what it is sent."""


class Clock:
    """A clock that moves by sleeping alone."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def far() -> Iterator[tuple[Far, int]]:
    """A far owner and the port on which it is reached from here."""
    with socket.create_server(("127.0.0.1", 0)) as master:
        port = free_port()
        there = str(master.getsockname()[1])
        try:
            one = Far([sys.executable, "-c", ECHO, there, str(port)], f"127.0.0.1:{there}")
        except BenchError as error:
            pytest.skip(str(error))
        try:
            heard, _ = master.accept()
            with heard:
                assert heard.recv(4, socket.MSG_WAITALL) == b"here"
            yield one, port
        finally:
            one.stop()


def connected(port: int) -> socket.socket:
    until = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 5)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_bytes_come_back_as_they_were_sent(far: tuple[Far, int]) -> None:
    one, port = far
    one.speed(1.0)
    sent = bytes(range(256)) * 4096
    with connected(port) as asked:
        asked.settimeout(20)
        got = bytearray()
        for start in range(0, len(sent), 1 << 16):
            part = sent[start : start + (1 << 16)]
            asked.sendall(part)
            while len(got) < start + len(part) and (more := asked.recv(1 << 16)):
                got += more
    assert got == sent


def test_nothing_else_reaches_it(far: tuple[Far, int]) -> None:
    one, port = far
    connected(port).close()
    assert port in ports(one.pid)
    inside = psutil.Process(one.pid)
    assert all(there.laddr.port != port for there in psutil.Process().net_connections("tcp"))
    assert inside.is_running()


def test_the_owner_ends_with_its_relay(far: tuple[Far, int]) -> None:
    one, port = far
    connected(port).close()
    one.stop()
    until = time.monotonic() + 20
    while psutil.pid_exists(one.pid) and psutil.Process(one.pid).status() != "zombie":
        assert time.monotonic() < until
        time.sleep(0.05)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1)


def test_a_relay_that_ended_is_no_link_any_more(far: tuple[Far, int]) -> None:
    one, _ = far
    one.stop()
    with pytest.raises((BenchError, ValueError)):
        one.speed(1.0)


def test_a_bucket_lets_as_much_pass_as_its_speed_says() -> None:
    clock = Clock()
    bucket = Bucket(lambda: clock.now, clock.sleep)
    bucket.bytes_per_s = 1000.0
    for _ in range(100):
        bucket.take(50)
    assert clock.slept == pytest.approx(5.0, abs=0.01)


def test_a_link_that_rested_saves_up_next_to_nothing() -> None:
    clock = Clock()
    bucket = Bucket(lambda: clock.now, clock.sleep)
    bucket.bytes_per_s = 1000.0
    clock.now += 3600
    bucket.take(1000)
    assert clock.slept == pytest.approx(1.0, abs=0.01)


def test_without_a_speed_nothing_waits() -> None:
    clock = Clock()
    bucket = Bucket(lambda: clock.now, clock.sleep)
    bucket.take(1 << 40)
    assert clock.slept == 0
