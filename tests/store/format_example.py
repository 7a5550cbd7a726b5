"""The example of docs/design/store-format.txt: one page in one slot, and a hexdump of what
the code writes for it.
"""

from __future__ import annotations

import numpy as np

from sgl_kvtier.store.disk.format import (
    BLOCK,
    PUT,
    RECORD,
    SlotHead,
    checksum,
    pack_frame,
    pack_log_head,
    pack_segment_head,
    seal,
    slot_bytes,
)
from sgl_kvtier.store.disk.identity import Identity

IDENTITY = Identity({"model": "example", "dtype": "bfloat16"}, name="example")
KEY = bytes(range(32))
PAYLOAD = b"a page of key-value bytes\n" * 200
HEAD = SlotHead(
    IDENTITY.fingerprint, KEY, "kv", 0x1122334455667788, len(PAYLOAD), segment=1, slot=0
)


def segment_bytes() -> bytes:
    """A segment of one slot that holds the page."""
    size = slot_bytes(len(PAYLOAD))
    packed = HEAD.pack()
    slot = seal(packed, checksum(packed, [memoryview(PAYLOAD)])) + PAYLOAD
    return pack_segment_head(IDENTITY.fingerprint, 1, size, 1) + slot.ljust(size, b"\0")


def log_bytes() -> bytes:
    """The index log that says so."""
    record = np.zeros(1, RECORD)
    record[0] = (KEY, b"kv", HEAD.sequence, HEAD.segment, HEAD.slot, HEAD.length, PUT)
    return pack_log_head(IDENTITY.fingerprint) + pack_frame(record)


def hexdump(data: bytes, start: int, stop: int) -> str:
    """Lines of 16 bytes of data[start, stop) as `hexdump -C` prints them."""
    lines = []
    for at in range(start, stop, 16):
        row = data[at : min(at + 16, stop)]
        halves = [" ".join(f"{b:02x}" for b in half) for half in (row[:8], row[8:])]
        text = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
        lines.append(f"{at:08x}  {halves[0]:<23}  {halves[1]:<23}  |{text}|")
    return "\n".join(lines)


def example() -> str:
    """The dump in the document."""
    segment = segment_bytes()
    parts = [
        "segment head\n" + hexdump(segment, 0, 80),
        "slot 0: header\n" + hexdump(segment, BLOCK, BLOCK + 160),
        "slot 0: payload\n" + hexdump(segment, 2 * BLOCK, 2 * BLOCK + 32),
        "index.log\n" + hexdump(log_bytes(), 0, len(log_bytes())),
    ]
    return "\n\n".join(parts)
