"""Inspects a store without opening it: identities, ranks, slots, and whether pages are intact."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sgl_kvtier.errors import StoreError
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.store.disk.env import Env, NotOursError, read_large_file
from sgl_kvtier.store.disk.format import BLOCK, RECORD, SlotHead, unpack_log
from sgl_kvtier.store.disk.identity import fingerprint_of
from sgl_kvtier.store.disk.index_log import NAME, most_bytes
from sgl_kvtier.store.disk.namespace import (
    CONFIG,
    PATIENT,
    folder_bytes,
    list_namespaces,
    list_ranks,
    lock_folder,
    namespace_bytes,
    read_identity,
)
from sgl_kvtier.store.disk.segment import BUFFERED, Segment, segment_number
from sgl_kvtier.store.io.transfer import Mover
from sgl_kvtier.store.recovery import (
    latest,
    named_in,
    newest_sequence,
    open_segments,
    pool_codes,
    scan,
)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A folder named like an identity's. If it is not one, `fields` is empty, `fingerprint` is
    None, and `problem` says why.
    """

    path: str
    fields: dict[str, Any]
    fingerprint: bytes | None
    ranks: list[str]
    nbytes: int
    opened_ns: int
    problem: str = ""


@dataclass(slots=True)
class Check:
    """What fsck found in one rank's folder."""

    pages: int = 0
    good: int = 0
    corrupt: int = 0
    unreadable: int = 0
    not_indexed: int = 0
    """Intact pages that the index does not name: a restart does not find them, and they take space
    until they are overwritten.
    """
    stale: int = 0
    """Index entries whose slot holds something else."""
    erased: int = 0
    index_whole: bool = True


def namespaces(env: Env, root: str) -> list[Namespace]:
    """All identities below a store's path. Raises StoreError if there is no such folder, or if it
    is not this user's.
    """
    try:
        env.list(root)
    except PermissionError as error:
        raise StoreError(
            f"{root}: {error.strerror}. Run this as the user whose servers use it"
        ) from error
    except OSError as error:
        raise StoreError(f"no store at {root}: give the folder that store.path names") from error
    found = []
    for path in list_namespaces(env, root):
        try:
            identity = read_identity(env, path)
            opened = env.modified_ns(os.path.join(path, CONFIG))
        except (StoreError, OSError) as error:
            found.append(Namespace(path, {}, None, list_ranks(env, path), 0, 0, str(error)))
            continue
        ranks, nbytes = list_ranks(env, path), namespace_bytes(env, path)
        found.append(
            Namespace(path, identity["fields"], fingerprint_of(identity), ranks, nbytes, opened)
        )
    return found


class Held(NamedTuple):
    """The pages of a tenant in a store, by its digest; `NOBODY` has the pages without a tenant."""

    digest: str
    pages: int
    nbytes: int
    """Bytes of the pages' slots."""


def count_pages(env: Env, namespace: Namespace, rank: str) -> int:
    """Number of pages in a rank's index. Safe while a server runs, whose latest may be missing."""
    return len(_listed(env, namespace, rank))


def count_by_tenant(env: Env, namespace: Namespace) -> list[Held]:
    """The pages in the indexes of all ranks by tenant, the largest first. Safe while a server runs;
    its latest pages may be missing.
    """
    found: dict[str, tuple[int, int]] = {}
    for rank in namespace.ranks:
        records = _listed(env, namespace, rank)
        whose = pool_codes(records)
        nbytes = 2 * BLOCK + (records["length"].astype(np.int64) - 1) // BLOCK * BLOCK
        pages = np.bincount(whose.tenants, minlength=len(whose.digests))
        sums = np.bincount(whose.tenants, nbytes, minlength=len(whose.digests))
        for digest, count, size in zip(whose.digests, pages.tolist(), sums.tolist(), strict=True):
            before = found.get(digest, (0, 0))
            found[digest] = (before[0] + count, before[1] + int(size))
    held = [Held(digest, *counts) for digest, counts in found.items() if counts[0]]
    return sorted(held, key=lambda one: (-one.nbytes, one.digest))


def _listed(env: Env, namespace: Namespace, rank: str) -> np.ndarray:
    """The records of the pages in a rank's index whose segments exist: the log names pages of
    removed segments until it is rewritten.
    """
    nothing = np.empty(0, RECORD)
    if namespace.fingerprint is None:
        return nothing
    # An upper bound: no slot is smaller, and only slots that were written are in the log.
    slots = folder_bytes(env, rank) // (2 * BLOCK)
    try:
        log = read_large_file(env, os.path.join(rank, NAME), most_bytes(slots))
        records, _ = unpack_log(log, namespace.fingerprint)
        numbers = {n for name in env.list(rank) if (n := segment_number(name))}
    except (OSError, MemoryError):
        return nothing
    return named_in(records, numbers)


def check_rank(
    env: Env,
    namespace: Namespace,
    rank: str,
    *,
    repair: bool,
    step: Callable[[int], None] = lambda _: None,
) -> Check:
    """Reads every page of a rank and verifies its checksum; `repair` erases damaged ones.

    Locks the folder meanwhile: raises StoreBusyError if a server runs. `step` is called with the
    bytes read.
    """
    if namespace.fingerprint is None:
        raise StoreError(namespace.problem)
    try:
        lock = lock_folder(env, rank, PATIENT)
    except NotOursError as error:
        raise StoreError(error.advice) from error
    except OSError as error:
        advice = (
            "Checking takes the store's lock: mount the filesystem writable, or check a copy"
            if error.errno == errno.EROFS
            else "Run this as the user who owns the store"
            if isinstance(error, PermissionError)
            else "Check the disk, or check a copy of the store on another one"
        )
        raise StoreError(f"cannot lock {rank}: {error.strerror}. {advice}") from error
    result = Check()
    try:
        segments, _ = open_segments(env, rank, namespace.fingerprint, BUFFERED, remove=repair)
        try:
            _check_segments(env, namespace.fingerprint, rank, segments, result, repair, step)
        finally:
            for segment in segments:
                env.close(segment.fd)
    finally:
        env.close(lock)
    return result


def _check_segments(
    env: Env,
    identity: bytes,
    rank: str,
    segments: list[Segment],
    result: Check,
    repair: bool,
    step: Callable[[int], None],
) -> None:
    mover = Mover(env, BUFFERED, verify=True)
    log = os.path.join(rank, NAME)
    try:
        data = read_large_file(env, log, most_bytes(sum(segment.slots for segment in segments)))
        records, result.index_whole = unpack_log(data, identity)
    except OSError:
        records, result.index_whole = unpack_log(b"", identity)
    if repair and not result.index_whole and not len(records):
        with contextlib.suppress(OSError):
            # The next open rebuilds it from the slot headers. A log that is incomplete at its end
            # is kept: only it may know that a page was deleted.
            env.unlink(log)
    live = latest(records, segments, newest_sequence(env))
    indexed = {
        (int(r["segment"]), int(r["slot"])): (bytes(r["key"]), int(r["sequence"])) for r in live
    }
    for segment in segments:
        seen = set()
        for head in _heads(env, segment, identity):
            result.pages += 1
            outcome = _check_page(mover, segment, head, result)
            place = (segment.number, head.slot)
            known = indexed.get(place)
            if known == (head.key, head.sequence):
                seen.add(place)
            elif outcome is ReadOutcome.OK:
                result.not_indexed += 1
            if repair and outcome is ReadOutcome.CORRUPT:
                mover.erase(segment, head.slot)
                result.erased += 1
            step(segment.slot_bytes)
        result.stale += sum(place[0] == segment.number and place not in seen for place in indexed)


def _heads(env: Env, segment: Segment, identity: bytes) -> Iterator[SlotHead]:
    for record in scan(env, segment, identity):
        yield SlotHead(
            identity,
            bytes(record["key"]),
            record["pool"].decode("ascii", "replace"),
            int(record["sequence"]),
            int(record["length"]),
            int(record["segment"]),
            int(record["slot"]),
        )


def _check_page(mover: Mover, segment: Segment, head: SlotHead, result: Check) -> ReadOutcome:
    fits = head.length <= segment.slot_bytes - BLOCK
    outcome = ReadOutcome.CORRUPT
    if fits:
        (outcome,) = mover.read(segment, [head], [[memoryview(bytearray(head.length))]])
    if outcome is ReadOutcome.OK:
        result.good += 1
    elif outcome is ReadOutcome.FAILED:
        result.unreadable += 1
    else:
        result.corrupt += 1
    return outcome
