"""Small words for tests of the remote store; those of local ones are in tests/store/store_pages.py."""

from __future__ import annotations

import os
from collections.abc import Iterable

from store_pages import named, put, read

from sgl_kvtier.remote.page import Namespace
from sgl_kvtier.remote.store import RemoteStore
from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.types import PageKey

IDENTITY = Identity({"model": "lab", "dtype": "bfloat16"}, name="lab")
NAMESPACE = Namespace(IDENTITY.fingerprint, "tp0")
STARTED_S = 20.0


def stored(store: RemoteStore, names: Iterable[object], nbytes: int = 5000) -> dict[PageKey, bytes]:
    """Pages with these names, all of which the store took."""
    pages = named(names, nbytes)
    assert put(store, pages) == [PutOutcome.STORED] * len(pages)
    return pages


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
