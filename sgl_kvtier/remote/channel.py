"""Replies of a child process, and its pages copied out of the ring and checked where they landed.

Compiled (native/landing.c) all of it runs without Python's lock. Where there is no extension module
the same is done here.
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
    """Pages and their places in the ring. `sizes` counts headers."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    heads: Sequence[bytes]
    buffers: list[list[memoryview]]


def place(
    extent: int, heads: Sequence[bytes], lengths: Sequence[int], buffers: list[list[memoryview]]
) -> Placed:
    """Pages one after the other from the start of an extent."""
    sizes = [HEAD_BYTES + length for length in lengths]
    ends = itertools.accumulate(padded(size) for size in sizes[:-1])
    return Placed([extent, *(extent + end for end in ends)], sizes, heads, buffers)


def bytes_in_ring(lengths: Iterable[int]) -> int:
    """Bytes of the extent that pages of these lengths need."""
    return sum(padded(HEAD_BYTES + length) for length in lengths)


class Channel(Protocol):
    """One child's replies. `receive` is for one thread, the rest for any."""

    def receive(self, seconds: float) -> list[Reply] | None:
        """Replies within this time, their pages landed and checked; None: the child is gone. The
        code of a page that is not the expected one is CORRUPT. Pages may land before, and while
        nothing waits here.
        """

    def send(self, message: bytes) -> bool:
        """Sends a request; False when the child does not take it now. Does not block."""

    def expect(self, number: int, pages: Placed) -> None:
        """The pages of call `number` land in these buffers."""

    def forget(self, number: int) -> bool:
        """Whether the call had not landed. From then on nothing is written for it."""


def open_channel(sock: socket.socket, wake_fd: int, ring: Ring) -> Channel:
    """The channel of a child: compiled where it can be."""
    return (NativeChannel if _native is not None else PythonChannel)(sock, wake_fd, ring)


def wake(fd: int) -> None:
    """Ends the wait of the channels that have this eventfd, without letting go of Python's lock."""
    if _native is not None:
        _native.wake(fd)
    else:
        os.eventfd_write(fd, 1)


def pack_pages(ring: Ring, pages: Placed) -> None:
    """Writes pages into the ring, each behind its header with the checksum."""
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
    """A `Channel` in C, with a thread on which pages land. Raises OSError where none can start."""

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
