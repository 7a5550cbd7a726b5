"""Folders: one per identity with a readable config.json, one per rank below it, each with one owner.

    <path>/<name>-<fingerprint>/config.json
                               /<rank>/lock  index.log  seg-00000001 ...

Folders are 0700, files 0600, and no symbolic link is followed below <path>.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from dataclasses import dataclass

from sgl_kvtier.errors import StoreBusyError, StoreError, StoreFormatError
from sgl_kvtier.store.env import Env, read_file, write_file, write_fully
from sgl_kvtier.store.identity import Identity

logger = logging.getLogger(__name__)

CONFIG = "config.json"
LOCK = "lock"
_RANK = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
_NAMESPACE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*-[0-9a-f]{16}$")


@dataclass(frozen=True, slots=True)
class RankFolder:
    """A rank's folder that this process owns until `release`."""

    path: str
    namespace: str
    lock_fd: int

    def release(self, env: Env) -> None:
        env.close(self.lock_fd)


def own_rank_folder(env: Env, root: str, identity: Identity, rank: str) -> RankFolder:
    """Makes and locks the folder of a rank. Raises StoreError, StoreBusyError or StoreFormatError with what to do."""
    if not root:
        raise StoreError("store.path is not set: give the folder that pages are kept in")
    if not _RANK.match(rank) or ".." in rank:
        raise StoreError(f"not a rank's name: {rank!r}. Letters, digits, '_', '-' and '.' only")
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        namespace = os.path.join(root, identity.directory_name)
        path = os.path.join(namespace, rank)
        for folder in (namespace, path):
            env.make_directory(folder)
            if not env.is_directory(folder):
                raise StoreError(f"{folder} is not a folder, or is a symbolic link. Remove it or choose another store.path")
        lock_fd = lock_folder(env, path)
    except OSError as error:
        raise StoreError(f"cannot use {root} for pages: {error}. Choose a store.path that this user can write") from error
    try:
        _settle_config(env, namespace, identity)
    except OSError as error:
        env.close(lock_fd)
        raise StoreError(f"cannot write {namespace}/{CONFIG}: {error}") from error
    except StoreError:
        env.close(lock_fd)
        raise
    return RankFolder(path, namespace, lock_fd)


def lock_folder(env: Env, path: str) -> int:
    """The descriptor that holds a rank folder's lock. Raises StoreBusyError when another process has it, or OSError."""
    name = os.path.join(path, LOCK)
    fd = env.open(name, os.O_RDWR | os.O_CREAT)
    try:
        env.lock(fd)
    except BlockingIOError:
        env.close(fd)
        raise StoreBusyError(
            f"{path} belongs to process {_owner(env, name)}, which is still running. Stop it, or give this server "
            "another store.path (one server per folder and rank)"
        ) from None
    except OSError:
        env.close(fd)
        raise
    with contextlib.suppress(OSError):
        env.truncate(fd, 0)
        write_fully(env, fd, [memoryview(b"%d\n" % os.getpid())], 0)
    return fd


def list_namespaces(env: Env, root: str) -> list[str]:
    """Folders of identities below a root. Links and anything not named by us are left out."""
    try:
        names = [name for name in env.list(root) if _NAMESPACE.match(name)]
    except OSError:
        return []
    paths = [os.path.join(root, name) for name in names]
    return [path for path in paths if env.is_directory(path)]


def list_ranks(env: Env, namespace: str) -> list[str]:
    """Folders of ranks below an identity's folder."""
    try:
        paths = [os.path.join(namespace, name) for name in env.list(namespace) if _RANK.match(name)]
    except OSError:
        return []
    return [path for path in paths if env.is_directory(path)]


def folder_bytes(env: Env, path: str) -> int:
    """Bytes on disk of the files in one folder. Files that vanish meanwhile count nothing."""
    total = 0
    with contextlib.suppress(OSError):
        for name in env.list(path):
            with contextlib.suppress(OSError):
                total += env.bytes_on_disk(os.path.join(path, name))
    return total


def namespace_bytes(env: Env, namespace: str) -> int:
    """Bytes on disk of all ranks of an identity."""
    return sum(folder_bytes(env, rank) for rank in list_ranks(env, namespace))


def remove_namespace(env: Env, namespace: str) -> int:
    """Removes an identity's folder that nobody has open; returns the bytes freed, 0 when it is in use or somebody else has
    removed it, or is about to. May raise OSError."""
    ranks = list_ranks(env, namespace)
    locks: list[int] = []
    try:
        for rank in ranks:
            locks.append(lock_folder(env, rank))
        freed = namespace_bytes(env, namespace)
        for rank in ranks:
            for name in env.list(rank):
                if name != LOCK:
                    env.unlink(os.path.join(rank, name))
        # Locks last: until then nobody else can open what is half gone.
        for rank in ranks:
            env.unlink(os.path.join(rank, LOCK))
            env.remove_directory(rank)
        for name in env.list(namespace):
            env.unlink(os.path.join(namespace, name))
        env.remove_directory(namespace)
        return freed
    except (StoreBusyError, FileNotFoundError):
        return 0
    finally:
        for fd in locks:
            env.close(fd)


def others_by_age(env: Env, own: str) -> list[tuple[str, int]]:
    """(folder, bytes) of the other identities below the same root, the one opened longest ago first."""
    found = []
    for path in list_namespaces(env, os.path.dirname(own)):
        if path == own:
            continue
        try:
            opened = env.modified_ns(os.path.join(path, CONFIG))
        except OSError:
            opened = 0
        found.append((opened, path, namespace_bytes(env, path)))
    return [(path, nbytes) for _, path, nbytes in sorted(found)]


def _settle_config(env: Env, namespace: str, identity: Identity) -> None:
    path = os.path.join(namespace, CONFIG)
    wanted = identity.canonical()
    if env.exists(path):
        try:
            found = json.loads(read_file(env, path))["identity"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreFormatError(f"{path} is damaged ({error}). Remove the folder {namespace} to start anew") from error
        if found != json.loads(wanted):
            raise StoreFormatError(f"{path} describes other pages. Remove the folder {namespace} or choose another store.path")
        with contextlib.suppress(OSError):
            env.touch(path)
        return
    data = {"about": "sgl_kvtier page store", "name": identity.name, "identity": json.loads(wanted)}
    write_file(env, path, json.dumps(data, indent=2, sort_keys=True).encode())


def _owner(env: Env, lock: str) -> str:
    try:
        text = read_file(env, lock).decode().strip()
    except (OSError, UnicodeDecodeError):
        text = ""
    return text if text.isdigit() else "(unknown)"
