"""Reads and writes runs of neighbouring slots, and verifies or computes their checksums."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.store.disk.buffers import Scratch
from sgl_kvtier.store.disk.env import Env, read_fully, write_fully
from sgl_kvtier.store.disk.format import BLOCK, SlotHead, checksum, matches, padded, same_head, seal
from sgl_kvtier.store.disk.segment import DirectIO, Segment

MOST_BUFFERS = 1000
"""Most buffers in one call; the kernel's limit is 1024."""


class Mover:
    """Page I/O for one thread at a time. Keeps its aligned scratch memory between calls."""

    def __init__(self, env: Env, io: DirectIO, verify: bool) -> None:
        self._env = env
        self._io = io
        self._verify = verify
        self._scratch = Scratch()

    def read(
        self, segment: Segment, heads: list[SlotHead], into: list[Sequence[memoryview]]
    ) -> list[ReadOutcome]:
        """Reads neighbouring slots, lowest first. One outcome per slot: OK, CORRUPT or, for all,
        FAILED. Never raises OSError.
        """
        blocks = self._scratch.heads(len(heads))
        parts = self._parts(blocks, heads, into)
        flat = [buffer for part in parts for buffer in part]
        direct = self._io.fits(flat) and len(flat) <= MOST_BUFFERS
        bounce = None if direct else self._scratch.bounce(len(heads) * segment.slot_bytes)
        try:
            got = read_fully(
                self._env,
                segment.fd,
                flat if bounce is None else [bounce],
                segment.offset(heads[0].slot),
            )
        except OSError:
            return [ReadOutcome.FAILED] * len(heads)
        outcomes = []
        for i, head in enumerate(heads):
            start = i * segment.slot_bytes
            whole = got >= start + BLOCK + head.length
            if whole and bounce is not None:
                blocks[i][:] = bounce[start : start + BLOCK]
                _scatter(bounce[start + BLOCK :], into[i])
            outcomes.append(
                ReadOutcome.OK
                if whole and self._good(blocks[i], head, into[i])
                else ReadOutcome.CORRUPT
            )
        return outcomes

    def write(
        self, segment: Segment, heads: list[SlotHead], data: list[Sequence[memoryview]]
    ) -> None:
        """Writes neighbouring slots, lowest first. Raises OSError; any of them may be torn then."""
        blocks = self._scratch.heads(len(heads))
        for block, head, part in zip(blocks, heads, data, strict=True):
            packed = head.pack()
            block[:] = seal(packed, checksum(packed, part))
        self._scratch.padding()[:] = bytes(BLOCK)
        parts = self._parts(blocks, heads, data)
        flat = [buffer for part in parts for buffer in part]
        if not self._io.fits(flat) or len(flat) > MOST_BUFFERS:
            flat = [self._gather(parts, len(heads) * segment.slot_bytes)]
        write_fully(self._env, segment.fd, flat, segment.offset(heads[0].slot))

    def erase(self, segment: Segment, slot: int) -> None:
        """Zeroes a slot's header, so that no scan finds its page again. Raises OSError."""
        block = self._scratch.heads(1)[0]
        block[:] = bytes(BLOCK)
        write_fully(self._env, segment.fd, [block], segment.offset(slot))

    def flip(self, segment: Segment, head: SlotHead, bit: int) -> None:
        """Flips one bit of a stored page, for fault injection. Raises OSError."""
        block = self._scratch.heads(1)[0]
        at = segment.offset(head.slot) + BLOCK + bit // 8 // BLOCK * BLOCK
        read_fully(self._env, segment.fd, [block], at)
        block[bit // 8 % BLOCK] ^= 1 << bit % 8
        write_fully(self._env, segment.fd, [block], at)

    def _good(self, block: memoryview, head: SlotHead, payload: Sequence[memoryview]) -> bool:
        packed = head.pack()
        return matches(block, packed, payload) if self._verify else same_head(block, packed)

    def _parts(
        self, blocks: list[memoryview], heads: list[SlotHead], payloads: list[Sequence[memoryview]]
    ) -> list[list[memoryview]]:
        """Per slot its header, its payload's buffers, and the padding after them."""
        parts = []
        for block, head, payload in zip(blocks, heads, payloads, strict=True):
            part = [block, *payload]
            if padded(head.length) > head.length:
                # All slots share one block of padding: what is read into it is never used.
                part.append(self._scratch.padding()[: padded(head.length) - head.length])
            parts.append(part)
        return parts

    def _gather(self, parts: list[list[memoryview]], nbytes: int) -> memoryview:
        bounce = self._scratch.bounce(nbytes)
        at = 0
        for part in parts:
            for buffer in part:
                bounce[at : at + len(buffer)] = buffer
                at += len(buffer)
        return bounce[:at]


def _scatter(source: memoryview, into: Sequence[memoryview]) -> None:
    at = 0
    for buffer in into:
        buffer[:] = source[at : at + len(buffer)]
        at += len(buffer)
