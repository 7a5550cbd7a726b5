"""Small words for tests of the remote store: keys, pages, and waiting."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from typing import Any

from sgl_kvtier.remote.page import Namespace
from sgl_kvtier.remote.store import RemoteStore
from sgl_kvtier.store.base import KV, PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.types import PageKey

IDENTITY = Identity({"model": "lab", "dtype": "bfloat16"}, name="lab")
NAMESPACE = Namespace(IDENTITY.fingerprint, "tp0")
STARTED_S = 20.0


def key(name: object) -> PageKey:
    return PageKey(hashlib.sha256(repr(name).encode()).digest())


def content(name: object, nbytes: int) -> bytes:
    return random.Random(repr(name)).randbytes(nbytes)


def put(store: RemoteStore, pages: dict[PageKey, bytes], pool: str = KV) -> list[PutOutcome]:
    return store.put([PageWrite(k, [memoryview(data)], pool) for k, data in pages.items()])


def stored(store: RemoteStore, names: Sequence[object], nbytes: int = 1000) -> dict[PageKey, bytes]:
    """Pages with these names, all of which the store took."""
    pages = {key(name): content(name, nbytes) for name in names}
    assert put(store, pages) == [PutOutcome.STORED] * len(pages)
    return pages


def read(
    store: RemoteStore, lengths: dict[PageKey, int], pool: str = KV, **how: Any
) -> list[tuple[ReadOutcome, bytes]]:
    buffers = [bytearray(n) for n in lengths.values()]
    pages = [PageRead(k, [memoryview(b)], pool) for k, b in zip(lengths, buffers, strict=True)]
    job = store.read(pages, **how)
    assert job.wait(60)
    assert job.in_flight == 0
    return [(outcome, bytes(b)) for outcome, b in zip(job.outcomes, buffers, strict=True)]


def outcomes(store: RemoteStore, pages: dict[PageKey, bytes]) -> list[ReadOutcome]:
    """How reads of pages end; those that are OK are compared."""
    found = read(store, {k: len(data) for k, data in pages.items()})
    for (outcome, data), expected in zip(found, pages.values(), strict=True):
        assert outcome is not ReadOutcome.OK or data == expected
    return [outcome for outcome, _ in found]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
