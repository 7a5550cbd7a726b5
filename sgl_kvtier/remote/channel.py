"""Receives a child's replies: copies its pages from the ring to their destinations and verifies
them there.

The compiled version (native/landing.c) does all of it without the GIL. Without the extension module
the same is done in Python.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sgl_kvtier.remote.child.engine import Code
from sgl_kvtier.remote.child.messages import MOST_REPLY, Reply
from sgl_kvtier.remote.page import HEAD_BYTES, checksum, is_this_page
from sgl_kvtier.remote.ring import Ring, padded

_native: Any
try:
    from sgl_kvtier.remote import _native  # type: ignore[no-redef, attr-defined, unused-ignore]
except ImportError:
    _native = None


class Placed(NamedTuple):
    """Pages and their offsets in the ring. `sizes` include the header."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    heads: Sequence[bytes]
    buffers: list[list[memoryview]]


def place(
    extent: int, heads: Sequence[bytes], lengths: Sequence[int], buffers: list[list[memoryview]]
) -> Placed:
    """Places pages one after the other from the start of an extent."""
    sizes = [HEAD_BYTES + length for length in lengths]
    ends = itertools.accumulate(padded(size) for size in sizes[:-1])
    return Placed([extent, *(extent + end for end in ends)], sizes, heads, buffers)


def bytes_in_ring(lengths: Iterable[int]) -> int:
    """Size of an extent for pages of these lengths, in bytes."""
    return sum(padded(HEAD_BYTES + length) for length in lengths)


class Channel(Protocol):
    """The connection to one child. One thread calls `receive`; any thread the rest."""

    def receive(self, seconds: float) -> list[Reply] | None:
        """Waits for replies, whose pages have then been copied and verified; None if the child is
        gone. A page that is not the expected one has the code CORRUPT. Pages may also be copied
        while no thread waits here.
        """

    def send(self, message: bytes) -> bool:
        """Sends a request; False if the child cannot take it now. Does not block."""

    def expect(self, number: int, pages: Placed) -> None:
        """Registers the destinations for the pages of call `number`."""

    def forget(self, number: int) -> bool:
        """Removes the destinations of a call: nothing is written to them any more. False if its
        pages have been copied already.
        """


def open_channel(sock: socket.socket, wake_fd: int, ring: Ring) -> Channel:
    """The channel of a child, compiled if possible."""
    return (NativeChannel if _native is not None else PythonChannel)(sock, wake_fd, ring)


def wake(fd: int) -> None:
    """Wakes the channels that wait on this eventfd, without releasing the GIL."""
    if _native is not None:
        _native.wake(fd)
    else:
        os.eventfd_write(fd, 1)


def pack_pages(ring: Ring, pages: Placed) -> None:
    """Writes pages into the ring, each after its header with the checksum."""
    if _native is not None:
        offsets = np.array(pages.offsets, np.uint64)
        _native.pack(ring.memory, offsets, b"".join(pages.heads), pages.buffers)
        return
    memory = memoryview(ring.memory)
    for at, head, parts in zip(pages.offsets, pages.heads, pages.buffers, strict=True):
        memory[at : at + HEAD_BYTES] = head[:-16] + checksum(head, parts)
        at += HEAD_BYTES
        for part in parts:
            memory[at : at + len(part)] = part
            at += len(part)


class NativeChannel:
    """A `Channel` in C, with a thread that copies pages. Raises OSError if it cannot start."""

    def __init__(self, sock: socket.socket, wake_fd: int, ring: Ring) -> None:
        self._channel = _native.Channel(sock.fileno(), wake_fd, ring.memory)

    def receive(self, seconds: float) -> list[Reply] | None:
        messages = self._channel.receive(seconds)
        return None if messages is None else [Reply.unpack(one) for one in messages]

    def send(self, message: bytes) -> bool:
        return bool(self._channel.send(message))

    def expect(self, number: int, pages: Placed) -> None:
        offsets = np.array(pages.offsets, np.uint64)
        self._channel.expect(number, offsets, b"".join(pages.heads), pages.buffers)

    def forget(self, number: int) -> bool:
        return bool(self._channel.forget(number))


class PythonChannel:
    """A `Channel` in Python."""

    def __init__(self, sock: socket.socket, wake_fd: int, ring: Ring) -> None:
        self._sock = sock
        self._wake_fd = wake_fd
        self._memory = memoryview(ring.memory)
        self._lock = threading.Lock()
        self._calls: dict[int, Placed] = {}

    def receive(self, seconds: float) -> list[Reply] | None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        ready = dict(poll.poll(min(max(seconds, 0), 60) * 1000))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        replies: list[Reply] = []
        while True:
            try:
                message = self._sock.recv(MOST_REPLY, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return replies
            except OSError:
                message = b""
            if not message:
                return replies or None
            replies.append(self._landed(Reply.unpack(message)))

    def send(self, message: bytes) -> bool:
        try:
            self._sock.send(message, socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def expect(self, number: int, pages: Placed) -> None:
        with self._lock:
            self._calls[number] = pages

    def forget(self, number: int) -> bool:
        with self._lock:
            return self._calls.pop(number, None) is not None

    def _landed(self, reply: Reply) -> Reply:
        codes = bytearray(reply.codes)
        for i, code in enumerate(codes):
            with self._lock:
                pages = self._calls.get(reply.id)
                if pages is None:
                    break
                if code == Code.OK and not self._land(pages, i):
                    codes[i] = Code.CORRUPT
        self.forget(reply.id)
        return reply._replace(codes=bytes(codes))

    def _land(self, pages: Placed, i: int) -> bool:
        at = pages.offsets[i]
        found = bytes(self._memory[at : at + HEAD_BYTES])
        at += HEAD_BYTES
        for part in pages.buffers[i]:
            view = part.cast("B") if part.nbytes else part
            view[:] = self._memory[at : at + part.nbytes]
            at += part.nbytes
        return is_this_page(pages.heads[i], found, pages.buffers[i])
