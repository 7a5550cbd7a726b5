"""Folders that this process owns, so that a process forked from it lets go of them.

A folder's lock is held as long as any process has its descriptor. A child that kept it would hold
the folder for its whole life, and only the thread that forked continues in it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable

from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.namespace import RankFolder

_owned: dict[int, weakref.WeakMethod[Callable[[], None]] | None] = {}
"""Each folder not released, by its lock's descriptor; None while its store is being opened."""


def owns(folder: RankFolder, leave: Callable[[], None] | None = None) -> None:
    """From now on a forked child closes this folder's lock and calls `leave`, a method of the store
    that is open there.
    """
    _owned[folder.lock_fd] = weakref.WeakMethod(leave) if leave is not None else None


def release(env: Env, folder: RankFolder) -> None:
    """Releases a folder, so that another process may own it."""
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
