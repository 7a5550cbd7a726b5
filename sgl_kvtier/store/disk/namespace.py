"""The store's folders: one per identity with a readable config.json, and in it one per rank, each
with one owner.

    <path>/<name>-<fingerprint>/config.json
                               /<rank>/lock  index.log  seg-00000001 ...

Folders have mode 0700, files 0600, of one user, and no symbolic link is followed below <path>.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import itertools
import json
import logging
import os
import pwd
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import StoreBusyError, StoreError, StoreFormatError
from sgl_kvtier.outside import shown
from sgl_kvtier.store.disk.env import (
    OTHERS_WRITE,
    Env,
    NotOursError,
    read_file,
    write_file,
    write_fully,
)
from sgl_kvtier.store.disk.identity import Identity, fingerprint_of
from sgl_kvtier.store.disk.index_log import NAME
from sgl_kvtier.store.disk.segment import PROBE, segment_number

logger = logging.getLogger(__name__)

GONE_LIST = "gone"
"""The list of deletes that siblings have to apply too."""
WANTED = "wanted"
"""An empty file. Its mtime: when its owner, with less than its part, last found no space."""

CONFIG = "config.json"
LOCK = "lock"
PROFILE = "restore-profile.json"
"""A server's learned costs and bandwidths. The store only reserves the name."""
PROOF = "proof.json"
"""What servers have proved about restoration. The store only reserves the name."""
DIGESTS, DIGESTS_LOCK = "files.json", "files.lock"
"""In the root: digests of model files. The store reserves the names and makes them private."""
ABOUT = "sgl_kvtier page store"
PATIENT = 50
"""Attempts before a lock counts as another process's: `is_open` also holds it for a moment."""
_PAUSE_S = 0.02
_SHARED_FILES = {CONFIG, PROFILE, PROOF}
_MOST_CONFIG_BYTES = 1 << 20
_MOST_LOCK_BYTES = 64
_FINGERPRINT_DIGITS = 16
_RANK = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
_NAMESPACE = re.compile(rf"^[A-Za-z0-9][A-Za-z0-9_.-]*-[0-9a-f]{{{_FINGERPRINT_DIGITS}}}$")
_RANK_FILES = {LOCK, NAME, f"{NAME}.new", PROBE, GONE_LIST, WANTED}
_GONE_NEW = re.compile(rf"^{GONE_LIST}\.[0-9]+\.new$")
_DRAFT = re.compile(
    rf"^({re.escape(CONFIG)}\.[0-9]+\.new|\.({re.escape(PROFILE)}|{re.escape(PROOF)})\.[0-9]+)$"
)
"""Temporary files in an identity's folder, being written or left by a writer that was killed."""
_MOST_OWNERS = 1024
_BRIEF = 10
"""Attempts if another folder would do as well."""


_held: dict[tuple[int, int], int] = {}
"""The process that holds a lock, by the lock file's device and inode. The process id in a lock file
does not suffice: in every container the first process has id 1.
"""


@dataclass(frozen=True, slots=True)
class RankFolder:
    """A rank's folder that this process owns until `release`."""

    path: str
    namespace: str
    lock_fd: int

    def check(self, env: Env) -> None:
        """Raises OSError: ESTALE if the lock file at this path is not the one this process holds,
        because the folder was removed or replaced.
        """
        if not env.same_file(self.lock_fd, os.path.join(self.path, LOCK)):
            raise OSError(errno.ESTALE, "the folder is no longer this process's", self.path)

    def release(self, env: Env) -> None:
        with contextlib.suppress(OSError):
            _held.pop(_inode(os.fstat(self.lock_fd)), None)
        env.close(self.lock_fd)


def own_shared_folder(
    env: Env, root: str, identity: Identity, rank: str, alike: str, *, writes: bool
) -> RankFolder:
    """Creates or takes over a folder that no process owns, among those that hold one rank's pages.

    Their names are `rank` or match the regular expression `alike`; both may end with a dot and a
    number. A process that writes takes a folder with segments first, then an empty one, then a new
    one; any other takes an empty or a new one. Raises StoreError, which says what to do.
    """
    _prepare_root(env, root)
    namespace = os.path.join(root, identity.directory_name)
    there: dict[str, str] = {}
    # An error in listing is reported when the folder is created.
    with contextlib.suppress(OSError):
        there = {os.path.basename(path): path for path in list_alike(env, namespace, alike)}
    free = [name for name, path in there.items() if _is_free(env, path)]
    filled = [name for name in free if _has_segments(env, there[name])]
    empty = [name for name in free if name not in filled]
    fresh = (rank if n == 1 else f"{rank}.{n}" for n in range(1, _MOST_OWNERS))
    unknown = (name for name in fresh if name not in there)
    for name in itertools.chain(filled if writes else (), empty, unknown):
        with contextlib.suppress(StoreBusyError):
            return _own_rank_folder(env, root, identity, name, _BRIEF)
    raise StoreBusyError(f"{namespace} has {_MOST_OWNERS} owners already: stop some of them")


def list_alike(env: Env, namespace: str, alike: str) -> list[str]:
    """Folders whose names match a regular expression, with or without a number at the end. Empty
    folders are included: nothing in `namespace` changes when they get a lock. Raises OSError.
    """
    fits = re.compile(rf"(?:{alike})(?:\.([0-9]{{1,4}}))?")
    names = [name for name in env.list(namespace) if is_rank_name(name) and fits.fullmatch(name)]
    return [path for name in names if env.is_directory(path := os.path.join(namespace, name))]


def own_rank_folder(env: Env, root: str, identity: Identity, rank: str) -> RankFolder:
    """Creates and locks the folder of a rank. Raises StoreError, which says what to do."""
    _prepare_root(env, root)
    return _own_rank_folder(env, root, identity, rank, PATIENT)


def _prepare_root(env: Env, root: str) -> None:
    """Creates the folder of a store if it does not exist, and revokes other users' write access to
    this user's stores in it. Raises StoreError.
    """
    if not root:
        raise StoreError("store.path is not set: give the folder that pages are kept in")
    try:
        os.makedirs(root, mode=0o700, exist_ok=True)
        keep_apart(env, root)
        found = os.stat(root)
    except OSError as error:
        raise _unusable(root, error) from error
    if _may_be_exchanged(found):
        logger.warning(
            "%s may be written by other users (mode %04o): they cannot read or change pages, but "
            "they can rename or remove the folders of the store. Set store.path to a folder below "
            "it, which is made private",
            root,
            stat.S_IMODE(found.st_mode),
        )
    loose = _make_private(env, root)
    if loose:
        logger.warning(
            "%d folders and files of page stores below %s could be written by other users, as "
            "Kubernetes leaves them on a volume with an fsGroup. Only this user can write them "
            "now. Give that group to no other workload: it could have changed pages until now",
            loose,
            root,
        )


def _make_private(env: Env, root: str) -> int:
    """Makes folders and files of this user's stores below `root` private. Returns how many others
    could write until now.
    """
    loose = 0
    for namespace in list_namespaces(env, root):
        ranks = list_ranks(env, namespace)
        # Folders first: nobody can add a file to a private folder.
        for folder in (namespace, *ranks):
            with contextlib.suppress(OSError):
                loose += env.make_private(folder)
        for folder in (namespace, *ranks):
            names: list[str] = []
            with contextlib.suppress(OSError):
                names = [n for n in env.list(folder) if n in _SHARED_FILES or is_rank_file(n)]
            for name in names:
                with contextlib.suppress(OSError):
                    loose += _make_file_private(env, os.path.join(folder, name))
    for name in (DIGESTS, DIGESTS_LOCK):
        with contextlib.suppress(OSError):
            loose += _make_file_private(env, os.path.join(root, name))
    return loose


def _make_file_private(env: Env, path: str) -> bool:
    found = env.status(path)
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & OTHERS_WRITE:
        return False
    env.close(env.open(path, os.O_RDWR))
    return True


def _own_rank_folder(env: Env, root: str, identity: Identity, rank: str, tries: int) -> RankFolder:
    if not isinstance(rank, str) or not _RANK.fullmatch(rank) or ".." in rank:
        raise StoreError(
            f"not a rank's name: {shown(rank)}. At most 64 letters, digits, '_', '-' and '.'"
        )
    namespace = os.path.join(root, identity.directory_name)
    path = os.path.join(namespace, rank)
    try:
        lock_fd = _make_and_lock(env, namespace, path, tries)
    except NotOursError as error:
        raise StoreError(error.advice) from error
    except OSError as error:
        raise _unusable(root, error) from error
    try:
        _settle_config(env, namespace, identity)
    except NotOursError as error:
        env.close(lock_fd)
        raise StoreError(error.advice) from error
    except OSError as error:
        env.close(lock_fd)
        raise StoreError(
            f"cannot use {namespace}/{CONFIG}: {error}. Correct that, or choose another store.path"
        ) from error
    except BaseException:
        env.close(lock_fd)
        raise
    _held[_inode(os.fstat(lock_fd))] = os.getpid()
    return RankFolder(path, namespace, lock_fd)


def keep_apart(env: Env, root: str) -> None:
    """Prevents other users from renaming or replacing a store's folders below `root`: if it belongs
    to this user and others may write it, sets the sticky bit and logs a warning. Raises OSError,
    and StoreError as `check_root` does or if the bit does not stay.
    """
    check_root(root)
    found = os.stat(root)
    if not _may_be_exchanged(found) or found.st_uid != os.geteuid():
        return
    env.make_sticky(root)
    found = os.stat(root)
    if _may_be_exchanged(found):
        raise _exchangeable(root, found)
    logger.warning(
        "%s may be written by other users (mode %04o): it has the sticky bit now, so that they "
        "cannot rename or remove this user's folders in it",
        root,
        stat.S_IMODE(found.st_mode),
    )


def check_root(root: str) -> None:
    """Raises StoreError if `root` belongs to a third user and can be written by others, who could
    replace a store's folders. Changes nothing. May raise OSError.

    A folder of root that others may write is accepted, like volumes of Kubernetes: files of other
    users are recognized by their owner and never used, and only this user can write the store's
    files. A folder of this user is accepted too, because `keep_apart` secures it.
    """
    found = os.stat(root)
    if _may_be_exchanged(found) and found.st_uid not in (0, os.geteuid()):
        raise _exchangeable(root, found)


def _may_be_exchanged(found: os.stat_result) -> bool:
    """Whether other users may rename a directory's entries and put something in their place."""
    shared = found.st_mode & stat.S_IWOTH or (
        found.st_mode & stat.S_IWGRP and not _has_only_this_user(found.st_gid)
    )
    # With the sticky bit, as on /tmp, every user may add entries, but rename and remove only their
    # own.
    return bool(shared and not found.st_mode & stat.S_ISVTX)


def _exchangeable(root: str, found: os.stat_result) -> StoreError:
    return StoreError(
        f"{root} belongs to user {found.st_uid} and may be written by others (mode "
        f"{stat.S_IMODE(found.st_mode):04o}): they could put folders of theirs in the place of the "
        f"store's. Set store.path to a new folder below it, such as {os.path.join(root, 'kvtier')}"
    )


def _unusable(root: str, error: OSError) -> StoreError:
    """The StoreError for an OSError while a rank's folder was created, with advice."""
    what = error.strerror or str(error)
    if error.filename not in (None, root):
        what += f" ({error.filename})"
    advice = _ADVICE.get(error.errno or 0, "Choose a store.path that this user can write")
    for path in (root, *map(str, Path(root).parents)):
        if os.path.islink(path) and not os.path.exists(path):
            what = f"{path} is a symbolic link to {os.path.realpath(path)}, which is not there"
            advice = "Make that folder, or choose another store.path"
        elif os.path.exists(path) and not os.path.isdir(path):
            what = f"{path} is not a folder"
            advice = "Remove it, or choose another store.path"
    return StoreError(f"cannot use {root} for pages: {what}. {advice}")


_ADVICE = {
    errno.EROFS: "Mount the filesystem writable, or choose another store.path",
    errno.ENOSPC: "Free some space there, or choose another store.path",
    errno.EDQUOT: "Raise this user's disk quota, or choose another store.path",
    errno.ENOLCK: "A store needs flock: choose a store.path on a local disk",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENAMETOOLONG: "Choose a shorter store.path",
    errno.EIO: "Look at the kernel log (dmesg), and replace the disk",
}
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK)


def lock_folder(env: Env, path: str, tries: int = 1) -> int:
    """Locks a rank's folder; returns the descriptor that holds the lock. Raises StoreBusyError if
    another process has it, or OSError.
    """
    name = os.path.join(path, LOCK)
    for tried in range(tries):
        if tried:
            env.pause(_PAUSE_S)
        fd = env.open(name, os.O_RDWR | os.O_CREAT)
        try:
            env.lock(fd)
            # A process that removes a folder removes the lock file while holding it: a lock file
            # opened before that protects nothing.
            if env.same_file(fd, name):
                _sign(env, fd)
                return fd
        except BlockingIOError:
            pass
        except BaseException as error:
            env.close(fd)
            if isinstance(error, OSError) and error.errno in _NO_LOCKS:
                raise OSError(errno.ENOLCK, "this filesystem takes no locks", name) from error
            raise
        env.close(fd)
    owner = _owner(env, name)
    if _is_held_here(env, name):
        raise StoreBusyError(
            f"{path} belongs to {owner}, which is this one: a store is open there already. Close "
            "it with close(), or use it in a with block"
        )
    raise StoreBusyError(
        f"{path} belongs to {owner}, which is still running. Stop it, or give this server "
        "another store.path (one server per folder and rank)"
    )


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _is_held_here(env: Env, lock: str) -> bool:
    """Whether a store of this process holds this lock."""
    with contextlib.suppress(OSError):
        return _held.get(_inode(env.status(lock))) == os.getpid()
    return False


def is_open(env: Env, rank: str) -> bool:
    """Whether a running process owns this rank's folder. Changes nothing in it. Raises
    PermissionError if the lock may not be read.
    """
    try:
        fd = env.open(os.path.join(rank, LOCK), os.O_RDONLY)
    except PermissionError:
        raise
    except OSError:
        return False
    try:
        # A shared lock does not conflict with other `is_open` calls, and a server that starts now
        # retries.
        env.lock_shared(fd)
    except BlockingIOError:
        return True
    finally:
        env.close(fd)
    return False


def read_identity(env: Env, namespace: str) -> dict[str, Any]:
    """The `identity` object (`fields` and `store_format`) of an identity folder's config.json.
    Raises StoreFormatError if it is no folder of a store.
    """
    path = os.path.join(namespace, CONFIG)
    try:
        data = json.loads(read_file(env, path, _MOST_CONFIG_BYTES))
        identity = dict(data["identity"])
        fits = (
            fingerprint_of(identity).hex()[:_FINGERPRINT_DIGITS] == namespace[-_FINGERPRINT_DIGITS:]
        )
        if data["about"] != ABOUT or not fits or not isinstance(identity["fields"], dict):
            raise ValueError("it is about something else")
    except FileNotFoundError as error:
        raise StoreFormatError(
            f"{namespace} has no {CONFIG} of a page store: move it away, or remove it yourself"
        ) from error
    except PermissionError as error:
        raise StoreFormatError(
            f"{path}: {error.strerror}. Run this as the user whose servers use it"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreFormatError(
            f"{path} is damaged, or not a page store's ({error}): move {namespace} away, or remove "
            "it yourself"
        ) from error
    return identity


def list_namespaces(env: Env, root: str) -> list[str]:
    """Folders below a root that are named like an identity's; `read_identity` verifies one."""
    try:
        names = [name for name in env.list(root) if _NAMESPACE.fullmatch(name)]
    except OSError:
        return []
    paths = [os.path.join(root, name) for name in names]
    return [path for path in paths if env.is_directory(path)]


def list_ranks(env: Env, namespace: str) -> list[str]:
    """Folders of ranks in an identity's folder: those with a file that the store creates there."""
    found = []
    with contextlib.suppress(OSError):
        for name in env.list(namespace):
            path = os.path.join(namespace, name)
            if is_rank_name(name) and env.is_directory(path):
                with contextlib.suppress(OSError):
                    if any(map(is_rank_file, env.list(path))):
                        found.append(path)
    return found


def is_rank_name(name: str) -> bool:
    """Whether a rank's folder may have this name."""
    return bool(_RANK.fullmatch(name))


def is_rank_file(name: str) -> bool:
    """Whether the store creates files of this name in a rank's folder."""
    return name in _RANK_FILES or segment_number(name) is not None or is_left_over(name)


def is_left_over(name: str) -> bool:
    """Whether this is the name of a temporary file: left by a process that was killed, unless the
    folder's owner is writing it now.
    """
    return bool(_GONE_NEW.match(name))


def folder_bytes(env: Env, path: str) -> int:
    """Bytes on disk of the store's files in a folder. Files that disappear meanwhile count as 0."""
    total = 0
    with contextlib.suppress(OSError):
        for name in filter(is_rank_file, env.list(path)):
            with contextlib.suppress(OSError):
                total += env.bytes_on_disk(os.path.join(path, name))
    return total


def namespace_bytes(env: Env, namespace: str) -> int:
    """Bytes on disk of all ranks of an identity."""
    return sum(folder_bytes(env, rank) for rank in list_ranks(env, namespace))


def _is_free(env: Env, path: str) -> bool:
    with contextlib.suppress(OSError):
        return not is_open(env, path)
    return False


def _has_segments(env: Env, path: str) -> bool:
    with contextlib.suppress(OSError):
        return any(map(segment_number, env.list(path)))
    return False


def _make_and_lock(env: Env, namespace: str, path: str, tries: int) -> int:
    for _ in range(PATIENT):
        # FileNotFoundError: another server or a purge is removing the folder.
        with contextlib.suppress(FileNotFoundError):
            _make_folder(env, namespace)
            _make_folder(env, path)
            return lock_folder(env, path, tries)
    raise StoreBusyError(
        f"{path} is removed again and again by another process. Stop it, or choose another "
        "store.path"
    )


def _make_folder(env: Env, path: str) -> None:
    env.make_directory(path)
    if env.exists(path) and not env.is_directory(path):
        raise StoreError(
            f"{path} is not a folder, or is a symbolic link. Remove it or choose another store.path"
        )
    env.make_private(path)


def _settle_config(env: Env, namespace: str, identity: Identity) -> None:
    path = os.path.join(namespace, CONFIG)
    wanted = identity.canonical()
    if env.exists(path):
        try:
            found = json.loads(read_file(env, path, _MOST_CONFIG_BYTES, os.O_RDWR))["identity"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreFormatError(
                f"{path} is damaged ({error}). Remove the folder {namespace} to start anew"
            ) from error
        if found != json.loads(wanted):
            raise StoreFormatError(
                f"{path} describes other pages. Remove the folder {namespace} or choose another "
                "store.path"
            )
        with contextlib.suppress(OSError):
            env.touch(path)
        _sweep(env, namespace)
        return
    data = {"about": ABOUT, "name": identity.name, "identity": json.loads(wanted)}
    try:
        write_file(env, path, json.dumps(data, indent=2, sort_keys=True).encode())
    except FileNotFoundError:
        if not env.exists(path):
            raise
        # Another server created it first, and a third one has removed the temporary file.
        _settle_config(env, namespace, identity)


def _sweep(env: Env, namespace: str) -> None:
    """Removes temporary files of killed servers. A server that is writing one now retries."""
    with contextlib.suppress(OSError):
        for name in filter(_DRAFT.match, env.list(namespace)):
            with contextlib.suppress(OSError):
                env.unlink(os.path.join(namespace, name))


def _sign(env: Env, fd: int) -> None:
    with contextlib.suppress(OSError):
        env.truncate(fd, 0)
        write_fully(env, fd, [memoryview(b"%d\n" % os.getpid())], 0)


def _owner(env: Env, lock: str) -> str:
    """The owner's process id from the lock file, if that process exists. The id of a process that
    has ended stays there until the next owner.
    """
    with contextlib.suppress(OSError, ValueError):
        pid = int(read_file(env, lock, _MOST_LOCK_BYTES))
        if pid > 0 and env.process_exists(pid):
            return f"process {pid}"
    return "another process"


def _has_only_this_user(group: int) -> bool:
    """Whether this is the private group that some systems create for each user, so that group
    access is this user's alone.
    """
    try:
        name, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}
