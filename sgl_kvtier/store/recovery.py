"""Opening a folder: its pages are read from the index log, or if that is incomplete, from slot
headers.

Payloads are not read here. A wrong entry is found when the page is read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.errors import StoreError
from sgl_kvtier.store.disk.buffers import Scratch
from sgl_kvtier.store.disk.env import Env, NotOursError, read_fully
from sgl_kvtier.store.disk.format import (
    BLOCK,
    DROP,
    FIRST_WORD,
    MAX_PAYLOAD,
    POOL_BYTES,
    PUT,
    RECORD,
    SETTLED,
    SlotHead,
    key_words,
    settled,
    slot_bytes,
)
from sgl_kvtier.store.disk.segment import (
    DirectIO,
    NotASegmentError,
    Segment,
    open_segment,
    segment_number,
)
from sgl_kvtier.store.index.core import Core, advice
from sgl_kvtier.store.index.hashtable import MIX, key_hash
from sgl_kvtier.store.index.room import Room
from sgl_kvtier.store.index.slots import SlotTable, State
from sgl_kvtier.tenants import parted

logger = logging.getLogger(__name__)

_FUTURE_NS = 366 * 24 * 3600 * 10**9


def load_table(core: Core, room: Room) -> np.ndarray:
    """Fills an empty slot table from the folder and opens the log for appending. Returns DROP
    records for slots, free in the table, that still hold an older copy of a page. They must be
    erased before the page is deleted, or the copy would come back at the next open. Raises OSError.
    """
    segments, aside = open_segments(core.env, core.folder, core.identity, core.io)
    room.adopt(segments, aside)
    newest = newest_sequence(core.env)
    written, whole = core.log.load(
        sum(segment.slots for segment in segments) + room.aside_bytes // slot_bytes(1)
    )
    believed = seen = written
    if not whole and segments:
        logger.warning(
            "the index of %s is missing or damaged: reading %d slot headers",
            core.folder,
            sum(s.slots for s in segments),
        )
        with ThreadPoolExecutor(core.config.io_threads) as pool:
            found = np.concatenate(
                list(pool.map(lambda s: scan(core.env, s, core.identity), segments))
            )
        believed, seen = believable(found, written, newest), np.concatenate([written, found])
    copies = last_of_each_slot(believed, segments, newest)
    live = _newest_of_each_key(copies)
    _enter(core, live, {segment.number: segment.base for segment in segments})
    possible = written[written["sequence"] <= newest]
    room.aside = named_in(possible, set(aside))
    known = seen["sequence"][seen["sequence"] <= newest]
    core.sequence = max(core.env.wall_ns(), int(known.max()) if len(known) else 0)
    room.settle(int(written["segment"].max()) if len(written) else 0)
    # Records ignored now must not come back when the clock is right again.
    whole = whole and len(possible) == len(written)
    there = len(live) + len(room.aside)
    if not whole or not core.log.resume(len(written)) or core.log.worth_rewriting(there):
        left = live[np.isin(live["segment"], list(room.segments))]
        core.log.rewrite(lambda: np.concatenate([room.aside, left, settled(core.sequence)]))
    else:
        core.log.append(settled(core.sequence))
    if len(live) == len(copies):
        return copies[:0]
    older = copies[~np.isin(places(copies), places(live))]
    older = older[np.isin(older["segment"], list(room.segments))]
    older["kind"] = DROP
    return older


def _enter(core: Core, live: np.ndarray, bases: dict[int, int]) -> None:
    if not len(live):
        return
    base = np.zeros(max(bases) + 1, np.int64)
    base[list(bases)] = list(bases.values())
    rows = base[live["segment"]] + live["slot"]
    pools = pool_codes(live)
    ids = np.array([core.table.pool_id(name) for name in pools.names])
    core.table.enter(
        rows,
        key_words(live),
        ids[pools.codes],
        live["length"],
        live["sequence"],
        tenants=tenants_of(core.table, pools),
    )
    core.table.publish(rows)
    # The order of writing stands in for the order of use, which is not stored.
    core.table.age(rows)


def snapshot(core: Core, room: Room) -> np.ndarray:
    """Records of all pages in the table at one moment, including those being written: the first
    frame of a new log.
    """
    table = core.table
    with core.lock:
        rows = np.flatnonzero((table.state == State.LIVE) | (table.state == State.WRITING))
        return np.concatenate([room.aside, room.records(rows, PUT), settled(core.sequence)])


def open_segments(
    env: Env, folder: str, identity: bytes, io: DirectIO, *, remove: bool = True
) -> tuple[list[Segment], list[int]]:
    """Opens every segment of this identity in the folder. Returns them, and the numbers of segments
    that cannot be opened or removed.

    A segment without pages of this identity is removed, or skipped if `remove` is false. A file
    that is named like a segment but is none is always skipped. Raises OSError, and StoreError for a
    segment of another user.
    """
    found: list[Segment] = []
    aside: list[int] = []
    why: dict[str, int] = {}
    try:
        for name in env.list(folder):
            number = segment_number(name)
            if number is None:
                continue
            try:
                segment = open_segment(env, folder, number, identity, io)
                if segment is not None:
                    found.append(segment)
                    continue
                logger.warning("%s/%s holds no pages of this store", folder, name)
                if remove:
                    env.unlink(os.path.join(folder, name))
            except NotOursError as error:
                raise StoreError(error.advice) from error
            except NotASegmentError as error:
                logger.warning("leaving %s/%s alone: it %s", folder, name, error.strerror)
            except OSError as error:
                aside.append(number)
                reason = advice(error)
                why[reason] = why.get(reason, 0) + 1
    except BaseException:
        for segment in found:
            env.close(segment.fd)
        raise
    for reason, count in why.items():
        logger.warning(
            "%d of %d segments of %s cannot be used until the next start, and their pages are not "
            "found before: %s",
            count,
            len(found) + len(aside),
            folder,
            reason,
        )
    return found, aside


def latest(records: np.ndarray, segments: Iterable[Segment], newest: int) -> np.ndarray:
    """One PUT record per page in the log, oldest first: the last record of each slot, and of those
    the newest of each key.

    `newest` is the largest valid sequence number.
    """
    return _newest_of_each_key(last_of_each_slot(records, segments, newest))


def last_of_each_slot(records: np.ndarray, segments: Iterable[Segment], newest: int) -> np.ndarray:
    """`latest`, including older copies of pages."""
    segments = list(segments)
    nothing = np.empty(0, RECORD)
    if not len(records) or not segments:
        return nothing
    # Each slot has an index in one dense array, which holds the last record for it.
    highest = max(s.number for s in segments)
    slots, bases = np.zeros(highest + 1, np.int64), np.zeros(highest + 1, np.int64)
    payload = np.zeros(highest + 1, np.int64)
    total = 0
    for segment in segments:
        slots[segment.number], bases[segment.number] = segment.slots, total
        payload[segment.number] = segment.slot_bytes - slot_bytes(0)
        total += segment.slots
    numbers = np.minimum(records["segment"], highest)
    known = np.flatnonzero((records["segment"] <= highest) & (records["slot"] < slots[numbers]))
    last = np.full(total, -1, np.int64)
    last[bases[numbers[known]] + records["slot"][known]] = known
    # Indexes are filtered first; the records, which are eleven times as large, are copied once at
    # the end.
    chosen = last[last >= 0]
    fits = records["length"][chosen] <= payload[records["segment"][chosen]]
    chosen = chosen[
        fits & (records["kind"][chosen] == PUT) & (records["sequence"][chosen] <= newest)
    ]
    sequences = records["sequence"][chosen]
    if (sequences[1:] < sequences[:-1]).any():
        chosen = chosen[np.argsort(sequences, kind="stable")]
    untouched = len(chosen) == len(records) and bool((chosen[1:] > chosen[:-1]).all())
    kept: np.ndarray = records if untouched else records[chosen]
    return kept


def named_in(records: np.ndarray, numbers: set[int]) -> np.ndarray:
    """The pages in these segments, open or not, by the last record of each slot."""
    if not numbers or not len(records):
        return records[:0]
    records = records[np.isin(records["segment"], list(numbers))]
    _, last = np.unique(places(records)[::-1], return_index=True)
    records = records[np.sort(len(records) - 1 - last)]
    named: np.ndarray = records[records["kind"] == PUT]
    return named


def believable(found: np.ndarray, written: np.ndarray, newest: int) -> np.ndarray:
    """Filters the PUT records made from slot headers by a log that is incomplete at its end.

    The log is valid up to its end. A header that is older than the last record of its slot, or than
    a SETTLED record, belongs to a page that was evicted, deleted or never acknowledged.
    """
    written = written[written["sequence"] <= newest]
    marks = written["sequence"][written["kind"] == SETTLED]
    said = written[written["kind"] != SETTLED]
    known_places, last = np.unique(places(said)[::-1], return_index=True)
    said = said[len(said) - 1 - last]
    floor = np.full(len(found), int(marks.max()) if len(marks) else 0, np.uint64)
    same = np.zeros(len(found), bool)
    if len(said):
        at = np.minimum(np.searchsorted(known_places, places(found)), len(said) - 1)
        known = known_places[at] == places(found)
        same = known & (said["kind"][at] == PUT) & (said["sequence"][at] == found["sequence"])
        floor = np.maximum(floor, np.where(known, said["sequence"][at], np.uint64(0)))
    return found[same | (found["sequence"] > floor)]


def scan(env: Env, segment: Segment, identity: bytes) -> np.ndarray:
    """PUT records from the slot headers of one segment. Unreadable headers count as free slots."""
    rows = []
    block = Scratch().bounce(BLOCK)
    for slot in range(segment.slots):
        try:
            if read_fully(env, segment.fd, [block], segment.offset(slot)) < len(block):
                break
        except OSError:
            continue
        head = SlotHead.unpack(block)
        if head is None or (head.identity, head.segment, head.slot) != (
            identity,
            segment.number,
            slot,
        ):
            continue
        if head.length <= MAX_PAYLOAD:
            rows.append(
                (
                    head.key,
                    head.pool.encode(),
                    head.sequence,
                    head.segment,
                    head.slot,
                    head.length,
                    PUT,
                )
            )
    return np.array(rows, RECORD)


def newest_sequence(env: Env) -> int:
    """The largest valid sequence number, a year ahead of the clock: larger ones are damaged."""
    return env.wall_ns() + _FUTURE_NS


class PoolCodes(NamedTuple):
    """The pools of records without their tenants, and the tenants."""

    names: list[str]
    codes: NDArray[np.int64]
    """For each record, the index of its pool in `names`."""
    digests: list[str]
    tenants: NDArray[np.int64]
    """For each record, the index of its tenant in `digests`."""


def pool_codes(records: np.ndarray) -> PoolCodes:
    """The distinct pools and tenants of records, and each record's."""
    pools = records["pool"]
    if len(pools) and (_words(pools) == _words(pools[:1])).all():
        name, digest = parted(pools[0].decode("ascii", "replace"))
        zeros = np.zeros(len(pools), np.int64)
        return PoolCodes([name], zeros, [digest], zeros)
    # Sorting numbers is several times as fast as sorting names. If two names ever hash to one
    # number, pages are lost, but none is wrong.
    _, first, codes = np.unique(_words(pools) @ MIX, return_index=True, return_inverse=True)
    both = [parted(pools[i].decode("ascii", "replace")) for i in first.tolist()]
    names, digests = (sorted({one[i] for one in both}) for i in (0, 1))
    name_at = np.array([names.index(name) for name, _ in both], np.int64)
    digest_of = {digest: i for i, digest in enumerate(digests)}
    tenant_at = np.array([digest_of[digest] for _, digest in both], np.int64)
    return PoolCodes(names, name_at[codes], digests, tenant_at[codes])


def tenants_of(table: SlotTable, pools: PoolCodes) -> NDArray[np.uint32]:
    """The table's numbers for the tenants of records. The caller holds the core's lock."""
    return table.tenant_ids(pools.digests)[pools.tenants]


def places(records: np.ndarray) -> NDArray[np.uint64]:
    """Segment and slot of each record combined into one number."""
    segments: NDArray[np.uint64] = records["segment"].astype(np.uint64) << np.uint64(32)
    return segments | records["slot"].astype(np.uint64)


def _words(names: NDArray[np.bytes_]) -> NDArray[np.uint64]:
    """The names' bytes as four numbers each, which compare several times faster."""
    return np.ascontiguousarray(names).view("<u8").reshape(len(names), POOL_BYTES // 8)


def _newest_of_each_key(records: np.ndarray) -> np.ndarray:
    # Most folders hold no key twice, and since keys are hashes, usually not even the first 64 bits
    # of one.
    first_words = np.sort(records.view(FIRST_WORD)["word"])
    if not (first_words[1:] == first_words[:-1]).any():
        return records
    # A key is compared by a 64-bit hash here. If two keys ever share it, one page is lost, but none
    # is wrong.
    names = key_hash(key_words(records), pool_codes(records).codes.astype(np.uint16))
    _, first = np.unique(names[::-1], return_index=True)
    return records[np.sort(len(records) - 1 - first)]
