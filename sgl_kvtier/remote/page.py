"""A page as stored in the engine: the name of its object, and the header before its bytes.

The name is `kvt1/<fingerprint>/<rank>/<pool>/<key>`. The header repeats it and has a checksum over
itself and the page. Only the header identifies a page.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from urllib.parse import quote

import xxhash

from sgl_kvtier.errors import StoreError

HEAD_BYTES = 256
SUM_AT = HEAD_BYTES - 16
VERSION = 1
_HEAD = struct.Struct("<8sII32s32s32s32sQ")
_MAGIC = b"kvtpage\x01"
_FIELD = 32
_RANK = re.compile(r"[A-Za-z0-9_.-]{1,32}", re.ASCII)


class Namespace:
    """An identity's fingerprint (32 bytes) and a rank: whose pages these are. Raises StoreError for
    a rank's name that no header can hold.
    """

    def __init__(self, fingerprint: bytes, rank: str) -> None:
        if len(fingerprint) != _FIELD:
            raise StoreError(f"a fingerprint has {_FIELD} bytes, not {len(fingerprint)}")
        if not _RANK.fullmatch(rank):
            raise StoreError(f"not a rank's name: {rank!r}. 1 to 32 letters, digits, _ . or -")
        self._fingerprint = fingerprint
        self._rank = rank.encode()
        self.prefix = f"kvt1/{fingerprint.hex()[:32]}/{rank}/"

    def head(self, key: bytes, pool: str, length: int) -> bytes:
        """The header of a page of `length` bytes, with a zero checksum."""
        name = pool.encode()
        fields = (_MAGIC, VERSION, HEAD_BYTES, self._fingerprint, key, name, self._rank, length)
        return _HEAD.pack(*fields).ljust(HEAD_BYTES, b"\0")

    def heads(self, pool: str, keys: Sequence[bytes], lengths: Sequence[int]) -> list[bytes]:
        """The headers of pages of one pool."""
        return [self.head(key, pool, n) for key, n in zip(keys, lengths, strict=True)]


def can_be_named(pool: str, keys: Sequence[bytes]) -> bool:
    """Whether a pool's name and keys fit a header."""
    fits = pool.isascii() and 0 < len(pool) <= _FIELD and "\0" not in pool
    return fits and all(len(key) == _FIELD for key in keys)


def object_names(prefix: str, pool: str, keys: Sequence[bytes]) -> list[str]:
    """The names of pages' objects. `prefix`: that of a `Namespace`."""
    start = f"{prefix}{quote(pool, safe='')}/"
    return [start + key.hex() for key in keys]


def checksum(head: bytes, parts: Sequence[memoryview]) -> bytes:
    """XXH3-128 over a header with a zero checksum and the page's bytes: 16 bytes."""
    digest = xxhash.xxh3_128(head)
    for part in parts:
        digest.update(part)
    return bytes(digest.digest())


def is_this_page(expected: bytes, found: bytes, parts: Sequence[memoryview]) -> bool:
    """Whether a header and bytes read from the engine are the page that `expected` describes."""
    return found[:SUM_AT] == expected[:SUM_AT] and found[SUM_AT:] == checksum(expected, parts)
