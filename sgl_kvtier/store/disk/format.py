"""The byte layout of the store's files; no other module knows offsets. It implements
docs/design/store-format.md.

A segment file is a 4 KiB head followed by slots of equal size; a slot is a 4 KiB header and a
payload padded to 4 KiB. The index log is a 64-byte head followed by frames of fixed-size records.
Integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

BLOCK = 4096
"""Alignment of everything in a segment, and the size of its head and of a slot's header."""

VERSION = 1
KEY_BYTES = 32
POOL_BYTES = 32
MAX_PAYLOAD = (1 << 32) - BLOCK

_SLOT = struct.Struct("<8sII32s32s32sQQII16s")
_SLOT_MAGIC = b"kvtslot\x01"
_SUM_AT = _SLOT.size - 16
_SEGMENT = struct.Struct("<8sII32sQQ16s")
_SEGMENT_MAGIC = b"kvtsegm\x01"
_LOG_HEAD = struct.Struct("<8sII32s16s")
_LOG_MAGIC = b"kvtindx\x01"
_FRAME = struct.Struct("<4sIQ")
_FRAME_MAGIC = b"KVTF"

LOG_HEAD_BYTES = _LOG_HEAD.size
FRAME_HEAD_BYTES = _FRAME.size

RECORD = np.dtype(
    [
        ("key", "V32"),
        ("pool", "S32"),
        ("sequence", "<u8"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("length", "<u4"),
        ("kind", "<u4"),
    ]
)
"""One record of the index log. PUT: a slot now holds a page. DROP: the slot is empty. SETTLED: a
page written up to this sequence number exists only if an earlier record names it. GONE (only in a
list of deletes): the page with this key, or every page if the pool is empty, is deleted if its
sequence number is not larger than this one.
"""

FIRST_WORD = np.dtype(
    {"names": ["word"], "formats": ["<u8"], "offsets": [0], "itemsize": RECORD.itemsize}
)
"""The same record, with only the first 64 bits of the key as a field."""

HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("block", "<u4"),
        ("identity", "S32"),
        ("key", "<u8", (4,)),
        ("pool", "S32"),
        ("sequence", "<u8"),
        ("length", "<u8"),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("checksum", "V16"),
    ]
)
"""The fields at the start of a slot's header; the rest of its block is zero."""

PUT = 1
DROP = 2
SETTLED = 3
GONE = 4

_ZEROS = bytes(BLOCK)


@dataclass(frozen=True, slots=True)
class SlotHead:
    """The header of a slot. `sequence` is unique to one write, so a stale slot never matches."""

    identity: bytes
    key: bytes
    pool: str
    sequence: int
    length: int
    segment: int
    slot: int

    def fields(self) -> bytes:
        """The header's fields, without the zero padding, with a zero checksum."""
        return _SLOT.pack(
            _SLOT_MAGIC,
            VERSION,
            BLOCK,
            self.identity,
            self.key,
            self.pool.encode(),
            self.sequence,
            self.length,
            self.segment,
            self.slot,
            bytes(16),
        )

    def pack(self) -> bytes:
        """The 4 KiB header block with a zero checksum."""
        return self.fields() + _ZEROS[_SLOT.size :]

    @classmethod
    def unpack(cls, block: bytes | memoryview) -> SlotHead | None:
        """Parses a header block without verifying its checksum; None if it is not a header."""
        magic, version, size, identity, key, pool, sequence, length, segment, slot, _ = (
            _SLOT.unpack_from(block)
        )
        if magic != _SLOT_MAGIC or version != VERSION or size != BLOCK:
            return None
        try:
            name = pool.rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError:
            return None
        return cls(identity, key, name, sequence, length, segment, slot)


def heads_of(
    identity: bytes,
    keys: np.ndarray,
    pools: np.ndarray,
    sequences: np.ndarray,
    lengths: np.ndarray,
    segments: np.ndarray,
    slots: np.ndarray,
) -> np.ndarray:
    """The header fields of many slots: `SlotHead.fields` in one array."""
    # Starts from repeated bytes, because numpy releases the GIL for each assignment of a text
    # column.
    pools = np.asarray(pools, f"S{POOL_BYTES}")
    alike = bytes(pools[0]) if len(pools) else b""
    one = SlotHead(identity, bytes(KEY_BYTES), alike.decode(), 0, 0, 0, 0).fields()
    heads = np.frombuffer(bytearray(one * len(keys)), HEAD)
    as_words = heads.view("<u8").reshape(-1, HEAD.itemsize // 8)
    first = HEAD.fields["key"][1] // 8  # type: ignore[index]
    # One column at a time: numpy keeps the GIL for fewer than 500 items.
    for word in range(KEY_BYTES // 8):
        as_words[:, first + word] = keys[:, word]
    if pools.tobytes() != alike.ljust(POOL_BYTES, b"\0") * len(keys):
        heads["pool"] = pools
    heads["sequence"] = sequences
    heads["length"] = lengths
    heads["segment"] = segments
    heads["slot"] = slots
    return heads


def checksum(head: bytes, payload: Iterable[memoryview]) -> bytes:
    """XXH3-128 over a header block with a zero checksum and the payload: 16 bytes."""
    digest = xxhash.xxh3_128(head)
    for part in payload:
        digest.update(part)
    return digest.digest()


def seal(head: bytes, digest: bytes) -> bytes:
    """The header block with its checksum in place."""
    return head[:_SUM_AT] + digest + head[_SUM_AT + 16 :]


def matches(block: memoryview, head: bytes, payload: Iterable[memoryview]) -> bool:
    """Whether a header block from disk is the expected one and its checksum fits the payload."""
    # Copied to bytes, which compare much faster than a memoryview.
    found = bytes(block)
    if found[:_SUM_AT] != head[:_SUM_AT] or found[_SUM_AT + 16 :] != head[_SUM_AT + 16 :]:
        return False
    return found[_SUM_AT : _SUM_AT + 16] == checksum(head, payload)


def same_head(block: memoryview, head: bytes) -> bool:
    """Whether a header block from disk is the expected one, ignoring its checksum."""
    return bytes(block[:_SUM_AT]) == head[:_SUM_AT]


def key_words(records: np.ndarray) -> np.ndarray:
    """The keys of records as rows of four 64-bit words."""
    return np.ascontiguousarray(records["key"]).view("<u8").reshape(-1, 4)


def padded(nbytes: int) -> int:
    """Bytes rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def slot_bytes(length: int) -> int:
    """Size of the slots that hold payloads of `length`."""
    return BLOCK + padded(length)


def slot_offset(slot: int, nbytes: int) -> int:
    """Byte offset at which slot number `slot` begins in a segment of slots of `nbytes`."""
    return BLOCK + slot * nbytes


def pack_segment_head(identity: bytes, segment: int, nbytes: int, slots: int) -> bytes:
    """The first block of a segment file."""
    head = _SEGMENT.pack(_SEGMENT_MAGIC, VERSION, segment, identity, nbytes, slots, bytes(16))
    block = head + _ZEROS[len(head) :]
    digest = xxhash.xxh3_128(block).digest()
    return head[:-16] + digest + block[len(head) :]


def unpack_segment_head(block: bytes, identity: bytes) -> tuple[int, int, int] | None:
    """(segment number, slot size in bytes, number of slots) from the first block of a segment; None
    if it belongs to another identity or is damaged.
    """
    if len(block) < BLOCK:
        return None
    magic, version, segment, owner, nbytes, slots, _ = _SEGMENT.unpack_from(block)
    if magic != _SEGMENT_MAGIC or version != VERSION or owner != identity:
        return None
    if block[:BLOCK] != pack_segment_head(identity, segment, nbytes, slots):
        return None
    return segment, nbytes, slots


def spoiled_segment_head() -> bytes:
    """The first block of a discarded segment. The magic still marks it as one of the store's."""
    return _SEGMENT_MAGIC + _ZEROS[len(_SEGMENT_MAGIC) :]


def may_begin_a_segment(blocks: bytes) -> bool:
    """Whether the first two blocks of a file are those of a segment, including one that is damaged,
    discarded or never finished (all zero). A shorter file may have fewer blocks.
    """
    if blocks[:BLOCK].startswith(_SEGMENT_MAGIC) or blocks[BLOCK:].startswith(_SLOT_MAGIC):
        return True
    return not any(blocks)


def settled(sequence: int) -> np.ndarray:
    """The SETTLED record: pages up to this sequence exist only if an earlier record names them."""
    # Segments are numbered from 1: this record names no slot.
    return np.array([(b"", b"", sequence, 0, 0, 0, SETTLED)], RECORD)


def pack_log_head(identity: bytes) -> bytes:
    """The head of an index log."""
    return _LOG_HEAD.pack(_LOG_MAGIC, VERSION, RECORD.itemsize, identity, bytes(16))


def pack_frame(records: np.ndarray) -> bytes:
    """Records as one frame of the index log."""
    body = records.tobytes()
    return _FRAME.pack(_FRAME_MAGIC, len(records), xxhash.xxh3_64_intdigest(body)) + body


def unpack_log(data: bytes | memoryview, identity: bytes) -> tuple[np.ndarray, bool]:
    """(records in written order, whether the log is complete). Stops at the first invalid frame."""
    if data[:LOG_HEAD_BYTES] != pack_log_head(identity):
        return np.empty(0, RECORD), False
    records, used = unpack_frames(data[LOG_HEAD_BYTES:])
    return records, LOG_HEAD_BYTES + used == len(data)


def unpack_frames(data: bytes | memoryview) -> tuple[np.ndarray, int]:
    """(records in written order, bytes parsed) up to the first incomplete or invalid frame."""
    frames = []
    at = 0
    while at + FRAME_HEAD_BYTES <= len(data):
        magic, count, digest = _FRAME.unpack_from(data, at)
        body = data[at + FRAME_HEAD_BYTES : at + FRAME_HEAD_BYTES + count * RECORD.itemsize]
        if magic != _FRAME_MAGIC or len(body) != count * RECORD.itemsize:
            break
        if xxhash.xxh3_64_intdigest(body) != digest:
            break
        frames.append(body)
        at += FRAME_HEAD_BYTES + len(body)
    # A log that was just rewritten is a single frame, which needs no copy.
    return np.frombuffer(frames[0] if len(frames) == 1 else b"".join(frames), RECORD), at
