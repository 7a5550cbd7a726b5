"""What a folder holds when it is opened: the index log where it is whole, slot headers where it is not.

Payloads are never read here. Anything claimed wrongly is found out when the page is read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.store.buffers import Scratch
from sgl_kvtier.store.core import Core
from sgl_kvtier.store.env import Env, read_fully
from sgl_kvtier.store.format import BLOCK, MAX_PAYLOAD, PUT, RECORD, SlotHead, key_words, slot_bytes
from sgl_kvtier.store.hashtable import key_hash
from sgl_kvtier.store.room import Room
from sgl_kvtier.store.segment import DirectIO, Segment, open_segment, segment_number

logger = logging.getLogger(__name__)

_FUTURE_NS = 366 * 24 * 3600 * 10**9


def load_table(core: Core, room: Room) -> None:
    """Fills an empty slot table from what the folder holds, and lets the log go on from there. Raises OSError."""
    segments, aside = open_segments(core.env, core.folder, core.identity, core.io)
    room.adopt(segments, aside)
    written, whole = core.log.load()
    if not whole and segments:
        logger.warning("the index of %s is missing or damaged: reading %d slot headers", core.folder, sum(s.slots for s in segments))
        with ThreadPoolExecutor(core.config.io_threads) as pool:
            written = np.concatenate(list(pool.map(lambda s: scan(core.env, s, core.identity), segments)))
    newest = newest_sequence(core.env)
    live = latest(written, segments, newest)
    _enter(core, live, {segment.number: segment.base for segment in segments})
    known = written["sequence"][written["sequence"] <= newest]
    core.sequence = max(core.env.wall_ns(), int(known.max()) if len(known) else 0)
    room.settle(int(written["segment"].max()) if len(written) else 0)
    live = live[np.isin(live["segment"], list(room.segments))]
    if not whole or not core.log.resume(len(written)) or core.log.worth_rewriting(len(live)):
        core.log.rewrite(lambda: live)


def _enter(core: Core, live: np.ndarray, bases: dict[int, int]) -> None:
    if not len(live):
        return
    live = live[np.argsort(live["sequence"], kind="stable")]
    numbers = np.array(sorted(bases))
    base = np.array([bases[n] for n in sorted(bases)])[np.searchsorted(numbers, live["segment"])]
    rows = base + live["slot"].astype(np.int64)
    names, pool = np.unique(live["pool"], return_inverse=True)
    ids = np.array([core.table.pool_id(name.decode("ascii", "replace")) for name in names])
    core.table.enter(rows, key_words(live), ids[pool], live["length"], live["sequence"])
    core.table.publish(rows)
    # The order of writing stands in for the order of use, which is not kept on disk.
    core.table.age(rows)


def open_segments(
    env: Env, folder: str, identity: bytes, io: DirectIO, *, remove: bool = True
) -> tuple[list[Segment], list[int]]:
    """Every segment of ours in the folder, and the numbers of those that cannot be opened or removed.

    A file with a segment's name and another content can hold no page of ours: it is removed, or with `remove` false
    passed over. Raises OSError.
    """
    found = []
    aside = []
    for name in env.list(folder):
        number = segment_number(name)
        if number is None:
            continue
        try:
            segment = open_segment(env, folder, number, identity, io)
            if segment is not None:
                found.append(segment)
                continue
            logger.warning("%s/%s is not a segment of this store", folder, name)
            if remove:
                env.unlink(os.path.join(folder, name))
        except OSError as error:
            logger.warning("leaving %s/%s aside: %s", folder, name, error)
            aside.append(number)
    return found, aside


def latest(records: np.ndarray, segments: Iterable[Segment], newest: int) -> np.ndarray:
    """One PUT record per page that the log says is there: the last word on each slot, then the newest of each key.

    `newest` is the largest sequence number that can be true.
    """
    slots = {segment.number: segment for segment in segments}
    if not len(records) or not slots:
        return records[:0]
    place = records["segment"].astype(np.uint64) << np.uint64(32) | records["slot"]
    _, last = np.unique(place[::-1], return_index=True)
    records = records[len(records) - 1 - last]
    records = records[(records["kind"] == PUT) & (records["sequence"] <= newest)]
    records = records[_fits(records, slots)]
    records = records[np.argsort(records["sequence"], kind="stable")]
    return _newest_of_each_key(records)


def scan(env: Env, segment: Segment, identity: bytes) -> np.ndarray:
    """PUT records from the slot headers of one segment. Unreadable headers are free slots."""
    rows = []
    block = Scratch().bounce(BLOCK)
    for slot in range(segment.slots):
        try:
            if read_fully(env, segment.fd, [block], segment.offset(slot)) < len(block):
                break
        except OSError:
            continue
        head = SlotHead.unpack(block)
        if head is None or (head.identity, head.segment, head.slot) != (identity, segment.number, slot):
            continue
        if head.length <= MAX_PAYLOAD:
            rows.append((head.key, head.pool.encode(), head.sequence, head.segment, head.slot, head.length, PUT))
    return np.array(rows, RECORD)


def newest_sequence(env: Env) -> int:
    """The largest sequence number that a header or record can carry without being damaged."""
    return env.wall_ns() + _FUTURE_NS


def _fits(records: np.ndarray, slots: dict[int, Segment]) -> NDArray[np.bool_]:
    keep = np.zeros(len(records), bool)
    for number, segment in slots.items():
        mine = records["segment"] == number
        keep |= mine & (records["slot"] < segment.slots) & (records["length"] <= segment.slot_bytes - slot_bytes(0))
    return keep


def _newest_of_each_key(records: np.ndarray) -> np.ndarray:
    # 64 bits stand for a key here: should two keys ever share them, one page is lost, none is wrong.
    _, pool = np.unique(records["pool"], return_inverse=True)
    names = key_hash(key_words(records), pool.astype(np.uint16))
    _, first = np.unique(names[::-1], return_index=True)
    return records[len(records) - 1 - first]
