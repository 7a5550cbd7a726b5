"""Messages between the store and its child process, on a socket that keeps their boundaries.

A request is a head, the pool's name, a place in the ring per page (GET, PUT) and the keys. A reply
is a head and one code per key, or one code for CLEAR. Integers are little-endian. The compiled
channel parses replies too.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

_REQUEST = struct.Struct("<QBBHI")
REPLY = struct.Struct("<QB3xI")
_KEY = 32
MOST_KEYS = 2048
"""Most keys of one request: larger messages do not fit the socket's buffer."""
MOST_REPLY = 8192
MOST_REQUEST = 1 << 17


class Op(enum.IntEnum):
    """The kind of a request or reply."""

    UP = 0
    """The child's first message: the engine is ready."""
    DOWN = 1
    """The child's last message: why the engine cannot be used, as text."""
    EXISTS = 2
    GET = 3
    PUT = 4
    REMOVE = 5
    CLEAR = 6


def answers(op: Op, keys: Sequence[bytes]) -> int:
    """Number of codes in the reply to a call."""
    return 1 if op is Op.CLEAR else len(keys)


class Request(NamedTuple):
    """One call. `offsets` and `sizes` are places in the ring, including headers."""

    id: int
    op: Op
    pool: str
    keys: Sequence[bytes]
    offsets: Sequence[int] = ()
    sizes: Sequence[int] = ()

    def pack(self) -> bytes:
        """The message as bytes."""
        pool = self.pool.encode()
        n = len(self.offsets)
        head = _REQUEST.pack(self.id, self.op, len(pool), n, len(self.keys))
        places = struct.pack(f"<{n}Q{n}I", *self.offsets, *self.sizes)
        return b"".join((head, pool, places, *self.keys))

    @classmethod
    def unpack(cls, message: bytes) -> Request:
        """Parses a message."""
        number, op, pool_bytes, n, count = _REQUEST.unpack_from(message)
        at = _REQUEST.size
        pool = message[at : at + pool_bytes].decode()
        at += pool_bytes
        places = struct.unpack_from(f"<{n}Q{n}I", message, at)
        at += 12 * n
        keys = [message[at + _KEY * i : at + _KEY * (i + 1)] for i in range(count)]
        return cls(number, Op(op), pool, keys, places[:n], places[n:])


class Reply(NamedTuple):
    """The result of a call: one code per key, or a text. `value` is a number of objects."""

    id: int
    op: int
    value: int
    codes: bytes

    def pack(self) -> bytes:
        """The message as bytes."""
        return REPLY.pack(self.id, self.op, self.value) + self.codes

    @classmethod
    def unpack(cls, message: bytes) -> Reply:
        """Parses a message."""
        number, op, value = REPLY.unpack_from(message)
        return cls(number, op, value, message[REPLY.size :])
