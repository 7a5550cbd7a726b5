"""The lists of deletes that apply to every folder of the same pages and every owner.

An owner erases only its own pages. It writes all other deletes to a list in its folder, which its
siblings poll. Each erases such pages of its own, and ignores those in other folders.
"""

from __future__ import annotations

import numpy as np
import numpy.char  # numpy would import it at first use, which deadlocks in a child forked meanwhile
from numpy.typing import NDArray

from sgl_kvtier.store.disk.env import Env, read_fully, write_file
from sgl_kvtier.store.disk.format import (
    GONE,
    RECORD,
    key_words,
    pack_frame,
    pack_log_head,
    unpack_log,
)
from sgl_kvtier.store.recovery import pool_codes
from sgl_kvtier.tenants import MARK, NOBODY, mark, parted

_MARK = MARK.encode()
_MOST_BYTES = 256 << 20
ANY_TIME = (1 << 64) - 1
"""The time of a delete that applies whenever the page was written."""


def read_gone(env: Env, path: str, identity: bytes) -> np.ndarray:
    """The list in a file; empty if there is no file. Raises OSError."""
    try:
        fd = env.open_to_read(path)
    except FileNotFoundError:
        return np.empty(0, RECORD)
    try:
        buffer = np.empty(min(env.size(fd), _MOST_BYTES), np.uint8).data
        records, _ = unpack_log(buffer[: read_fully(env, fd, [buffer], 0)], identity)
    finally:
        env.close(fd)
    gone: np.ndarray = records[records["kind"] == GONE]
    return gone


def write_gone(env: Env, path: str, identity: bytes, records: np.ndarray) -> None:
    """Replaces the list, atomically and synced. An empty list removes the file. Raises OSError."""
    if len(records):
        write_file(env, path, pack_log_head(identity) + pack_frame(records))
    elif env.exists(path):
        env.unlink(path)


def gone_records(keys: list[bytes], pool: str, until: int, tenant: str = NOBODY) -> np.ndarray:
    """Entries for pages by key; without keys one for all pages, or for all of a tenant."""
    if tenant != NOBODY:
        # A tenant's mark without a pool's name, which no page has as its pool.
        return np.array([(b"", mark(tenant).encode(), until, 0, 0, 0, GONE)], RECORD)
    named = [(key, pool.encode(), until, 0, 0, 0, GONE) for key in keys]
    return np.array(named or [(b"", b"", until, 0, 0, 0, GONE)], RECORD)


class Deletes:
    """The union of lists of deletes. An entry deletes one page by key, all pages of a tenant, or
    all pages, if their sequence number is not larger than its own.
    """

    def __init__(self, records: np.ndarray) -> None:
        self.tenants: dict[str, int] = {}
        """Digests of tenants whose pages are deleted, and up to which sequence number."""
        named = records["pool"] != b""
        everything = records[~named]
        for i, digest in _of_tenants(records).items():
            named[i] = False
            self.tenants[digest] = max(self.tenants.get(digest, 0), int(records["sequence"][i]))
        self.all_until = int(everything["sequence"].max()) if len(everything) else 0
        self._until: dict[bytes, int] = {}
        for record in records[named]:
            self._until[_name(record)] = max(
                self._until.get(_name(record), 0), int(record["sequence"])
            )
        self._words = np.unique(key_words(records[named])[:, 0])
        self.named = records[named]
        self._records = records

    def until(self, newest: int) -> int:
        """The largest sequence number of an entry that is at most `newest`."""
        known = self._records["sequence"][self._records["sequence"] <= newest]
        return int(known.max()) if len(known) else 0

    def hit(self, pages: np.ndarray) -> NDArray[np.bool_]:
        """For each page record, whether the page is deleted."""
        found: NDArray[np.bool_] = pages["sequence"] <= self.all_until
        if len(self._words):
            for i in np.flatnonzero(np.isin(key_words(pages)[:, 0], self._words)).tolist():
                found[i] |= int(pages["sequence"][i]) <= self._until.get(_name(pages[i]), -1)
        if self.tenants and len(pages):
            whose = pool_codes(pages)
            until = np.array([self.tenants.get(d, 0) for d in whose.digests], np.uint64)
            found |= pages["sequence"] <= until[whose.tenants]
        return found

    def needed_for(self, pages: np.ndarray) -> np.ndarray:
        """The entries that delete one of these pages. All others can be removed."""
        hit = pages[self.hit(pages)]
        names = {_name(page) for page in hit}
        whose = set(pool_codes(hit).digests) if self.tenants and len(hit) else set()
        everything = bool((pages["sequence"] <= self.all_until).any())
        keep = [_name(entry) in names if entry["pool"] else everything for entry in self._records]
        for i, digest in _of_tenants(self._records).items():
            keep[i] = digest in whose
        needed: np.ndarray = self._records[np.array(keep, bool)]
        return needed


def _name(record: np.ndarray) -> bytes:
    pool = bytes(record["pool"])
    if _MARK in pool:
        pool = parted(pool.decode("ascii", "replace"))[0].encode()
    return bytes(record["key"]) + pool


def _of_tenants(records: np.ndarray) -> dict[int, str]:
    """The entries that delete all pages of a tenant: index and digest."""
    if not len(records):
        return {}
    pools = records["pool"]
    # Tested by the missing key, because a pool's own name may begin with a mark.
    keyless = ~key_words(records).any(axis=1)
    marked = np.flatnonzero(keyless & numpy.char.startswith(pools, _MARK)).tolist()
    whose = {i: parted(pools[i].decode("ascii", "replace"))[1] for i in marked}
    return {i: digest for i, digest in whose.items() if digest != NOBODY}
