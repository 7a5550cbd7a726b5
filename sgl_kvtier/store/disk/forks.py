"""Folders that this process owns, so that a forked child releases them.

A folder's lock is held as long as any process has its descriptor open. A forked child would keep
the folder locked for its whole life, although none of the store's threads runs in it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable

from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.namespace import RankFolder

_owned: dict[int, weakref.WeakMethod[Callable[[], None]] | None] = {}
"""Every owned folder by its lock's descriptor, with the method to call in a forked child; None
while the store is being opened.
"""


def owns(folder: RankFolder, leave: Callable[[], None] | None = None) -> None:
    """Registers a folder: a forked child closes this folder's lock and calls `leave`, a method of
    the store that is open there.
    """
    _owned[folder.lock_fd] = weakref.WeakMethod(leave) if leave is not None else None


def release(env: Env, folder: RankFolder) -> None:
    """Releases a folder, so that another process can own it."""
    _owned.pop(folder.lock_fd, None)
    folder.release(env)


def _leave_to_parent() -> None:
    for lock_fd, method in _owned.items():
        with contextlib.suppress(OSError):
            os.close(lock_fd)
        if method is not None and (leave := method()) is not None:
            leave()
    _owned.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
