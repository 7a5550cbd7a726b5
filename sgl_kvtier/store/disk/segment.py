"""A segment: one pre-allocated file of equal slots. Creates, opens, closes and discards it."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass

from sgl_kvtier.store.disk.buffers import Scratch
from sgl_kvtier.store.disk.env import Env, address, create_file, read_fully, write_fully
from sgl_kvtier.store.disk.format import (
    BLOCK,
    may_begin_a_segment,
    pack_segment_head,
    slot_offset,
    spoiled_segment_head,
    unpack_segment_head,
)

PROBE = "probe"
MOST_SEGMENT_NUMBER = 1 << 20
"""Largest segment number; tables are indexed by it. After it, free numbers are reused from 1."""
NUMBER_MASK = (1 << 21) - 1
"""The bits of a segment's number on disk. In memory, higher bits hold a sibling's folder number."""
_PREFIX = "seg-"
_SHARE_OF_SIBLINGS = 0.75
"""Fraction of the segments' descriptors that siblings' segments may use, so that an owner can
always open some of its own.
"""


@dataclass(frozen=True, slots=True)
class DirectIO:
    """How files are opened for page I/O. `alignment`: what O_DIRECT requires of addresses and
    lengths, in bytes; 1 for the page cache.
    """

    flags: int
    alignment: int

    def opened(self, env: Env, fd: int) -> int:
        """Prepares the descriptor of a file that was opened with these flags for page I/O."""
        if not self.flags:
            env.read_exactly(fd)
        return fd

    def fits(self, buffers: list[memoryview]) -> bool:
        """Whether direct I/O can use this memory without a copy."""
        if self.alignment == 1:
            return True
        return all((address(buffer) | len(buffer)) % self.alignment == 0 for buffer in buffers)


BUFFERED = DirectIO(0, 1)


@dataclass(slots=True)
class Segment:
    """An open segment. Slot n begins at `offset(n)` and is the slot table's row `base` + n."""

    number: int
    slot_bytes: int
    slots: int
    path: str
    fd: int
    base: int = -1
    dirty: bool = False
    """Written since the last sync."""

    @property
    def nbytes(self) -> int:
        return BLOCK + self.slots * self.slot_bytes

    def offset(self, slot: int) -> int:
        return slot_offset(slot, self.slot_bytes)


def segment_name(number: int) -> str:
    """The file name of a segment."""
    return f"{_PREFIX}{number:08x}"


def segment_number(name: str) -> int | None:
    """The number in a segment's file name; None for any other name or number."""
    digits = name.removeprefix(_PREFIX)
    if digits == name or len(digits) != 8 or any(c not in "0123456789abcdef" for c in digits):
        return None
    number = int(digits, 16)
    return number if 0 < number <= MOST_SEGMENT_NUMBER else None


def create_segment(
    env: Env, folder: str, number: int, slot_bytes: int, slots: int, identity: bytes, io: DirectIO
) -> Segment:
    """Creates a segment file and reserves its disk space. On OSError nothing is left behind."""
    path = os.path.join(folder, segment_name(number))
    fd = io.opened(env, env.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | io.flags))
    segment = Segment(number, slot_bytes, slots, path, fd)
    try:
        _check_enough_left(env, fd, path)
        env.allocate(fd, segment.nbytes)
        head = _aligned(pack_segment_head(identity, number, slot_bytes, slots))
        write_fully(env, fd, [head], 0)
    except OSError:
        env.close(fd)
        with contextlib.suppress(OSError):
            env.unlink(path)
        raise
    return segment


class NotASegmentError(OSError):
    """A file with a segment's name but other content. Its origin is unknown."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "holds something else than a segment: move it away", path)


def open_segment(
    env: Env, folder: str, number: int, identity: bytes, io: DirectIO
) -> Segment | None:
    """Opens an existing segment; None if it is one, but damaged or of another identity.

    Raises NotASegmentError for any other content, and OSError.
    """
    path = os.path.join(folder, segment_name(number))
    fd = io.opened(env, env.open(path, os.O_RDWR | io.flags))
    try:
        _check_enough_left(env, fd, path)
        found = unpack_segment_head(_beginning(env, fd, 1), identity)
        if found is None and not may_begin_a_segment(_beginning(env, fd, 2)):
            raise NotASegmentError(path)
    except OSError:
        env.close(fd)
        raise
    if found is None or found[0] != number:
        env.close(fd)
        return None
    return Segment(number, found[1], found[2], path, fd)


def open_to_read(env: Env, folder: str, number: int, identity: bytes, io: DirectIO) -> Segment:
    """Opens a segment in another owner's folder for reading. Raises OSError, and NotASegmentError
    also if its head is not written yet.
    """
    path = os.path.join(folder, segment_name(number))
    fd = io.opened(env, env.open_to_read(path, io.flags))
    try:
        _check_enough_left(env, fd, path, _SHARE_OF_SIBLINGS)
        found = unpack_segment_head(_beginning(env, fd, 1), identity)
        if found is None or found[0] != number:
            raise NotASegmentError(path)
    except BaseException:
        env.close(fd)
        raise
    return Segment(number, found[1], found[2], path, fd)


def _check_enough_left(env: Env, fd: int, path: str, share: float = 1.0) -> None:
    if not env.leaves_enough(fd, share):
        raise OSError(errno.EMFILE, "too few descriptors are left for others", path)


def named_apart(segment: Segment, folder: int) -> Segment:
    """Puts the number of the segment's folder (from 1 on) into the high bits of its own number."""
    segment.number |= folder << NUMBER_MASK.bit_length()
    return segment


def is_segment(env: Env, path: str) -> bool:
    """Whether a file holds a segment of any identity. Raises OSError."""
    fd = env.open(path, os.O_RDONLY)
    try:
        return may_begin_a_segment(_beginning(env, fd, 2))
    finally:
        env.close(fd)


def spoil_segment(env: Env, segment: Segment) -> None:
    """Invalidates the head of a segment that cannot be removed. Raises OSError."""
    write_fully(env, segment.fd, [_aligned(spoiled_segment_head())], 0)


def probe_direct_io(env: Env, folder: str, setting: str) -> DirectIO:
    """Tests O_DIRECT in this folder. Raises OSError if it is `on` and does not work."""
    if setting == "off":
        return BUFFERED
    path = os.path.join(folder, PROBE)
    try:
        return DirectIO(os.O_DIRECT, _direct_alignment(env, path))
    except OSError:
        if setting == "on":
            raise
        return BUFFERED
    finally:
        with contextlib.suppress(OSError):
            env.unlink(path)


def _direct_alignment(env: Env, path: str) -> int:
    fd = create_file(env, path, os.O_RDWR | os.O_DIRECT)
    try:
        block = _aligned(bytes(2 * BLOCK))
        write_fully(env, fd, [block[:BLOCK]], 0)
        try:
            read_fully(env, fd, [block[512 : 512 + BLOCK]], 0)
        except OSError:
            read_fully(env, fd, [block[:BLOCK]], 0)
            return BLOCK
        return 512
    finally:
        env.close(fd)


def _beginning(env: Env, fd: int, blocks: int) -> bytes:
    """The first `blocks` blocks of a file, fewer if it is shorter."""
    buffer = _aligned(bytes(blocks * BLOCK))
    return bytes(buffer[: read_fully(env, fd, [buffer], 0)])


def _aligned(data: bytes) -> memoryview:
    buffer = Scratch().bounce(len(data))
    buffer[:] = data
    return buffer
