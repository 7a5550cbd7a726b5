"""A child process played by the test: it takes the store's calls and answers when and how it is
told to.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from sgl_kvtier.remote.channel import Channel, open_channel, pack_pages, place
from sgl_kvtier.remote.child.engine import Code
from sgl_kvtier.remote.child.messages import MOST_REQUEST, Op, Reply, Request
from sgl_kvtier.remote.page import Namespace
from sgl_kvtier.remote.ring import Ring
from sgl_kvtier.types import PageKey


class Child:
    """In the place of an `Agent`, with the other end of its socket."""

    def __init__(self, ring: Ring, wake_fd: int, pid: int) -> None:
        self._ours, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ring = ring
        self.pid = pid
        self.channel: Channel = _MayBeDeaf(open_channel(self._ours, wake_fd, ring), self)
        self.killed = False
        self.dies = True
        """Whether it is dead as soon as it is killed."""
        self.deaf = False
        """It takes no calls: its socket's buffer is full."""
        self._say(Reply(0, Op.UP, 0, b""))

    def call(self, op: Op, seconds: float = 20.0) -> Request:
        """The next call of this kind. Probes before it are answered; nothing else may come."""
        while True:
            request = self.next(seconds)
            assert request is not None, f"no call {op.name} came"
            if request.op is op and not _is_probe(request):
                return request
            assert _is_probe(request), f"{request.op.name} came instead of {op.name}"
            self.answer(request, Code.MISS)

    def next(self, seconds: float) -> Request | None:
        """What comes within this time."""
        self.socket.settimeout(max(seconds, 1e-3))
        try:
            return Request.unpack(self.socket.recv(MOST_REQUEST))
        except TimeoutError:
            return None

    def probe(self, seconds: float = 20.0) -> None:
        """Answers a probe, which has to come."""
        request = self.next(seconds)
        assert request is not None and _is_probe(request)
        self.answer(request, Code.MISS)

    def answer(self, request: Request, *codes: int, removed: int = 0) -> None:
        """Ends a call."""
        self._say(Reply(request.id, request.op, removed, bytes(codes)))

    def transfer(
        self, request: Request, namespace: Namespace, keys: Sequence[PageKey], data: Sequence[bytes]
    ) -> None:
        """Writes pages into the ring where a call wants its own."""
        lengths = [len(one) for one in data]
        heads = namespace.heads(request.pool, keys, lengths)
        placed = place(0, heads, lengths, [[memoryview(one)] for one in data])
        pack_pages(self.ring, placed._replace(offsets=request.offsets))

    def die(self) -> None:
        """It is dead, and its socket is closed."""
        self.dies = True
        self.socket.close()

    def kill(self) -> None:
        self.killed = True
        if self.dies:
            self.socket.close()

    def gone(self, timeout_s: float) -> bool:
        return self.dies

    def leave(self) -> None:
        self._ours.close()

    def _say(self, reply: Reply) -> None:
        self.socket.send(reply.pack())


class _MayBeDeaf:
    """The channel of a child that may take no calls."""

    def __init__(self, channel: Channel, child: Child) -> None:
        self._channel = channel
        self._child = child
        self.receive = channel.receive
        self.expect = channel.expect
        self.forget = channel.forget

    def send(self, message: bytes) -> bool:
        return not self._child.deaf and self._channel.send(message)


def _is_probe(request: Request) -> bool:
    return request.op is Op.EXISTS and list(request.keys) == [bytes(32)]


def span(request: Request) -> set[int]:
    """The blocks of 64 bytes of the ring that a call may be written to."""
    return {
        block
        for offset, size in zip(request.offsets, request.sizes, strict=True)
        for block in range(offset // 64, -(-(offset + size) // 64))
    }


def never(true, seconds: float = 0.3) -> None:  # type: ignore[no-untyped-def]
    """Looks for a while whether something that must not be so becomes so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert not true()
        time.sleep(0.005)
