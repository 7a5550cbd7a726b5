"""Whether a page could be written below a folder now. If not, the reason in one sentence, for the
log, the start of a server and `kvtier doctor`.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.sizes import format_bytes
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import BLOCK, slot_bytes
from sgl_kvtier.store.disk.index_log import INDEX_BYTES_PER_SLOT

_INDEX_FIXED_BYTES = 128 << 10
"""Bytes reserved for the index log's head, its slack, and the small files next to it, but at most
an eighth of the capacity.
"""


class NoRoom(NamedTuple):
    """Why no page can be written."""

    why: str
    """One sentence without a full stop: the free and the required bytes, and what to change."""
    lasting: bool
    """Whether the reason remains if other programs remove their files."""


def fixed_bytes(share_bytes: int) -> int:
    """Bytes that a folder's small files may take out of its share of the capacity."""
    return min(_INDEX_FIXED_BYTES, share_bytes // 8)


def no_room(
    env: Env, folder: str, config: StoreConfig, *, ranks: int = 1, page_bytes: int = 1
) -> NoRoom | None:
    """Why no page of `page_bytes` could be written below `folder` now; None if one could be.

    Changes nothing. If the folder does not exist, its nearest existing parent is checked. None also
    if the filesystem cannot be queried: opening the store then reports the error.
    """
    share = config.capacity_bytes // ranks
    needed = BLOCK + slot_bytes(page_bytes)
    usable = share - fixed_bytes(share) - INDEX_BYTES_PER_SLOT
    if usable < needed:
        return NoRoom(
            f"store.capacity_bytes leaves {format_bytes(max(0, usable))} to each of {ranks} ranks, "
            f"and a page with its segment needs {format_bytes(needed)}: raise "
            "store.capacity_bytes",
            lasting=True,
        )
    try:
        return _no_room_on(env, _nearest(env, folder), config, needed)
    except OSError:
        return None


def _no_room_on(env: Env, there: str, config: StoreConfig, needed: int) -> NoRoom | None:
    least, total = config.min_free_bytes, env.filesystem_bytes(there)
    if env.is_read_only(there):
        return NoRoom(
            "the filesystem is read-only: mount it writable, or choose another store.path",
            lasting=True,
        )
    if total == 0:
        if least == 0:
            return None
        return NoRoom(
            f"the filesystem does not say how much is free (0 B of 0 B), and "
            f"store.min_free_bytes keeps {format_bytes(least)} free: set it to 0 if this "
            "filesystem is meant, or choose another store.path",
            lasting=True,
        )
    free = env.free_bytes(there)
    if free >= least + needed:
        return None
    numbers = (
        f"the filesystem has {format_bytes(free)} free of {format_bytes(total)}, and a "
        f"new page needs {format_bytes(least + needed)} (store.min_free_bytes = "
        f"{format_bytes(least)} and the page)"
    )
    if total < least + needed:
        return NoRoom(
            f"{numbers}: lower store.min_free_bytes, or choose a store.path on a larger filesystem",
            lasting=True,
        )
    return NoRoom(
        f"{numbers}: remove other files there, lower store.min_free_bytes, or choose another "
        "store.path",
        lasting=False,
    )


def _nearest(env: Env, folder: str) -> str:
    """The folder, or its nearest existing parent."""
    path = os.path.abspath(folder)
    while not env.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path
