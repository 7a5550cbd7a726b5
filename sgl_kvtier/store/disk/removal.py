"""Removes the folder of an identity that no process has open. It is checked first, and removed only
if everything in it is the store's.

A folder is recognized by its content, not by its name. If it holds anything else, all of it stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat

from sgl_kvtier.errors import StoreBusyError, StoreError, StoreFormatError
from sgl_kvtier.store.disk.env import Env, NotOursError, check_owned, check_private
from sgl_kvtier.store.disk.namespace import (
    CONFIG,
    LOCK,
    PROFILE,
    PROOF,
    check_root,
    is_open,
    is_rank_file,
    is_rank_name,
    keep_apart,
    list_namespaces,
    list_ranks,
    lock_folder,
    namespace_bytes,
    read_identity,
)
from sgl_kvtier.store.disk.segment import is_segment, segment_number

logger = logging.getLogger(__name__)

_NAMESPACE_FILE = re.compile(
    rf"^({re.escape(CONFIG)}|{re.escape(PROFILE)})(\.[0-9]+\.new)?$|^{re.escape(PROOF)}$"
    rf"|^\.({re.escape(PROFILE)}|{re.escape(PROOF)})\.[0-9]+$"
)


def remove_namespace(env: Env, namespace: str, tries: int = 1) -> int:
    """Removes an identity's folder. Returns the bytes freed: 0 if it is in use, or another process
    has removed it or is removing it.

    Raises StoreError, with nothing removed, if the folder holds something that no store made or
    belongs to another user. May raise OSError.
    """
    locks: dict[str, int] = {}
    try:
        keep_apart(env, os.path.dirname(namespace))
        # A cheap check first: a server that needs space calls this often, and a folder in use stays
        # in use for long.
        with contextlib.suppress(PermissionError):
            if any(is_open(env, rank) for rank in list_ranks(env, namespace)):
                return 0
        for rank in look_through(env, namespace):
            locks[rank] = lock_folder(env, rank, tries)
        # Checked again: with the locks held no other process changes it.
        ranks = look_through(env, namespace)
        if ranks.keys() != locks.keys():
            return 0
        freed = namespace_bytes(env, namespace)
        for rank, names in ranks.items():
            for name in names:
                if name != LOCK:
                    env.unlink(os.path.join(rank, name))
        # Locks last, so that no process opens a folder that is half removed.
        for rank in ranks:
            env.unlink(os.path.join(rank, LOCK))
            env.remove_directory(rank)
        _remove_config(env, namespace)
        return freed
    except (StoreBusyError, FileNotFoundError):
        return 0
    finally:
        for fd in locks.values():
            env.close(fd)


def others_by_age(env: Env, own: str, *, says: bool = True) -> list[tuple[str, int]]:
    """(folder, bytes) of the other identities below the same root that belong to this user, the one
    opened longest ago first. Ignored folders are logged, unless `says` is off.
    """
    found = []
    for path in list_namespaces(env, os.path.dirname(own)):
        if path == own:
            continue
        try:
            check_namespace(env, path)
            opened = env.modified_ns(os.path.join(path, CONFIG))
        except StoreError as error:
            if says:
                logger.warning("%s. It is left alone and does not count", error)
            continue
        except OSError:
            opened = 0
        found.append((opened, path, namespace_bytes(env, path)))
    return [(path, nbytes) for _, path, nbytes in sorted(found)]


def check_namespace(env: Env, namespace: str) -> None:
    """Raises StoreError unless a folder is an identity's and private to this user, or OSError."""
    try:
        check_private(namespace, env.status(namespace))
    except NotOursError as error:
        raise StoreError(error.advice) from error
    read_identity(env, namespace)


def look_through(env: Env, namespace: str) -> dict[str, list[str]]:
    """The file names of each rank's folder. Raises StoreError for foreign files, or OSError."""
    check_root(os.path.dirname(namespace))
    check_namespace(env, namespace)
    ranks = {}
    for name in env.list(namespace):
        path = os.path.join(namespace, name)
        if is_rank_name(name) and env.is_directory(path):
            ranks[path] = _look_into_rank(env, path)
        else:
            _check_file(env, path, bool(_NAMESPACE_FILE.match(name)))
    return ranks


def _look_into_rank(env: Env, rank: str) -> list[str]:
    try:
        check_private(rank, env.status(rank))
    except NotOursError as error:
        raise StoreError(error.advice) from error
    names = env.list(rank)
    for name in names:
        path = os.path.join(rank, name)
        _check_file(env, path, is_rank_file(name))
        if segment_number(name) is not None and not is_segment(env, path):
            raise _foreign(path)
    return names


def _check_file(env: Env, path: str, named_as_ours: bool) -> None:
    found = env.status(path)
    if not named_as_ours or not stat.S_ISREG(found.st_mode):
        raise _foreign(path)
    try:
        check_owned(path, found)
    except NotOursError as error:
        raise StoreError(error.advice) from error


def _remove_config(env: Env, namespace: str) -> None:
    """Removes a folder without ranks, unless a server or rank has added something meanwhile."""
    names = env.list(namespace)
    if not all(map(_NAMESPACE_FILE.match, names)):
        return
    # config.json last: the folder is recognized by it.
    for name in sorted(names, key=lambda name: name == CONFIG):
        env.unlink(os.path.join(namespace, name))
    env.remove_directory(namespace)


def _foreign(path: str) -> StoreFormatError:
    return StoreFormatError(
        f"{path} was not made by a page store. Move it away, or remove it yourself"
    )
