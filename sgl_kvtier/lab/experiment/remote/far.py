"""An owner of memory that is reached over a link of a set speed: a process with a network of its
own, and a relay outside it.

An owner listens on ports that it draws, on all addresses, so nothing can stand before it on the
same host. Here it runs in a network namespace. The relay listens on the same ports outside and
passes bytes on by sockets that were opened inside. Both directions have a token bucket. It needs no
rights beyond a user's where the kernel lets users make namespaces. Run as a process by `Far`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.launch import HOST

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1 << 20
_CHUNK_BYTES = 64 << 10
_BURST_S = 0.005
"""A link that rested may catch up this much."""
_LOOK_S = 0.05
_DONE = "done"
_LISTENING = "0A"
"""A socket's state in /proc/net/tcp."""


class Far:
    """An owner behind a relay, from the outside. Raises BenchError where it does not start."""

    def __init__(self, command: Sequence[str], master: str) -> None:
        given = json.dumps({"command": list(command), "port": int(master.rpartition(":")[2])})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sgl_kvtier.lab.experiment.remote.far", given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self.pid = int(self._line())
        except ValueError as error:
            self.stop()
            raise BenchError(
                "a link cannot be made slower here: this kernel lets no user make a network "
                "namespace. Run as root, or leave --gbps at 0"
            ) from error

    def speed(self, gbps: float) -> None:
        """Gigabits per second from now on, each way; 0: as fast as it goes. Raises BenchError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{gbps}\n")
            self._process.stdin.flush()
            done = self._line() == _DONE
        except OSError:
            done = False
        if not done:
            raise BenchError("the relay before Mooncake's owner has ended: run it again")

    def stop(self) -> None:
        """Ends both; the owner goes with its relay."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Bucket:
    """Bytes per second in one direction, shared by all its connections. For any threads."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_s = 0.0
        self.bytes_per_s = 0.0
        """0: no limit."""

    def take(self, nbytes: int) -> None:
        """Returns when these bytes may pass."""
        with self._lock:
            if not self.bytes_per_s:
                return
            now = self._clock()
            self._free_s = max(self._free_s, now - _BURST_S) + nbytes / self.bytes_per_s
            wait_s = self._free_s - now
        if wait_s > 0:
            self._sleep(wait_s)


def main() -> None:
    """Serves until its standard input closes: a line is a speed in gigabits per second."""
    given = json.loads(sys.argv[1])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        inside(theirs, given["command"], given["port"])
        os._exit(0)
    theirs.close()
    relay = Relay(ours, given["port"])
    print(relay.owner, flush=True)
    for line in sys.stdin:
        relay.speed(float(line))
        print(_DONE, flush=True)


def inside(outside: socket.socket, command: list[str], master_port: int) -> None:
    """The process with a network of its own: runs the owner, and opens sockets there for the relay.
    A socket stays in the network that it was opened in, also when another process has it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    flags = _CLONE_NEWNET | (0 if os.geteuid() == 0 else _CLONE_NEWUSER)
    if libc.unshare(flags):
        return
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
    master = socket.create_server((HOST, master_port))
    owner = os.fork()
    if owner == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.execv(command[0], command)
    socket.send_fds(outside, [str(owner).encode()], [master.fileno()])
    while outside.recv(1):
        with socket.socket() as opened:
            socket.send_fds(outside, [b"."], [opened.fileno()])
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)


class Relay:
    """The side that others see. Its threads end with the process."""

    def __init__(self, far: socket.socket, master_port: int) -> None:
        self._far = far
        self._lock = threading.Lock()
        self._read, self._written, self._free = Bucket(), Bucket(), Bucket()
        said, descriptors, _, _ = socket.recv_fds(far, 32, 1)
        if not said:
            sys.exit(1)
        self.owner = int(said)
        self._master = (HOST, master_port)
        inner = socket.socket(fileno=descriptors[0])
        _begin(self._accept, inner, lambda: socket.create_connection(self._master), self._free)
        _begin(self._listen, {master_port})

    def speed(self, gbps: float) -> None:
        """Both directions from now on."""
        for bucket in (self._read, self._written):
            bucket.bytes_per_s = gbps * 1e9 / 8

    def _listen(self, known: set[int]) -> None:
        """Listens outside on every port that the owner listens on inside, as they come."""
        while True:
            for port in ports(self.owner) - known:
                known.add(port)
                try:
                    outer = socket.create_server((HOST, port))
                except OSError:  # another program has it here: this owner cannot be reached
                    os._exit(1)
                _begin(self._accept, outer, lambda port=port: self._connect(port), self._written)
            time.sleep(_LOOK_S)

    def _connect(self, port: int) -> socket.socket:
        with self._lock:
            self._far.send(b".")
            _, descriptors, _, _ = socket.recv_fds(self._far, 1, 1)
        opened = socket.socket(fileno=descriptors[0])
        opened.connect((HOST, port))
        return opened

    def _accept(
        self, server: socket.socket, connect: Callable[[], socket.socket], there: Bucket
    ) -> None:
        back = self._free if there is self._free else self._read
        while True:
            one, _ = server.accept()
            try:
                other = connect()
            except OSError:
                one.close()
                continue
            for end in (one, other):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _begin(_pump, one, other, there)
            _begin(_pump, other, one, back)


def ports(pid: int) -> set[int]:
    """The TCP ports that are listened on in the network of a process."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING:
                    found.add(int(words[1].rpartition(":")[2], 16))
    return found


def _pump(source: socket.socket, target: socket.socket, bucket: Bucket) -> None:
    """Bytes one way until either end closes. They pass through a pipe, so Python sees none."""
    out, into = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(into, _F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        while taken := os.splice(source.fileno(), into, _CHUNK_BYTES):
            bucket.take(taken)
            while taken:
                taken -= os.splice(out, target.fileno(), taken)
    except OSError:
        pass
    finally:
        os.close(out)
        os.close(into)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _begin(work: Callable[..., None], *given: Any) -> None:
    threading.Thread(target=work, args=given, daemon=True).start()


if __name__ == "__main__":
    main()
