"""An operating system that fails when told to: the call to fail, how, and once or from then on."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvtier.lab.stress.store.faults import (
    FOREVER,
    Call,
    FaultyEnv,
    Planned,
    What,
    arm,
    counts,
    fail,
    take,
)

_SECTOR = 512
SHORT = "short"
"""Instead of an error number: a transfer moves only part of what was asked. Calls that move nothing
succeed.
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """Call number `at` (counted from 0) fails, and with `forever` all later ones too."""

    at: int
    kind: int | str
    forever: bool = False


class FailingEnv(FaultyEnv):
    """An operating system that counts calls, its own and those of the compiled I/O threads, and
    fails by plan. Any thread. One at a time in a process. Closing and clocks never fail, and pauses
    take no time. Raises BenchError where the I/O threads with faults are not built.
    """

    def __init__(self, fault: Fault | None = None) -> None:
        self.arm(fault)

    @property
    def lasting(self) -> bool:
        """Whether calls go on failing once one has failed."""
        return self._fault is not None and self._fault.forever

    @property
    def calls(self) -> int:
        """Calls since the last plan."""
        return counts().calls[Call.ANY]

    @property
    def failed(self) -> int:
        """Those that failed."""
        return counts().faults[Call.ANY]

    def arm(self, fault: Fault | None) -> None:
        """Starts counting anew with another plan."""
        self._fault = fault
        if fault is None:
            arm()
            return
        short = fault.kind == SHORT
        what, amount = (What.SHORT, -_SECTOR) if short else (What.FAIL, int(fault.kind))
        last = FOREVER if fault.forever else fault.at
        arm([Planned(Call.ANY, fault.at, last, what, amount)])

    def open(self, path: str, flags: int) -> int:
        self._count()
        return super().open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, _half(buffers) if self._count() else buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, _half(buffers) if self._count() else buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._count()
        super().allocate(fd, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._count()
        super().truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        self._count()
        super().sync(fd)

    def size(self, fd: int) -> int:
        self._count()
        return super().size(fd)

    def status(self, path: str) -> os.stat_result:
        self._count()
        return super().status(path)

    def same_file(self, fd: int, path: str) -> bool:
        self._count()
        return super().same_file(fd, path)

    def bytes_on_disk(self, path: str) -> int:
        self._count()
        return super().bytes_on_disk(path)

    def modified_ns(self, path: str) -> int:
        self._count()
        return super().modified_ns(path)

    def touch(self, path: str) -> None:
        self._count()
        super().touch(path)

    def list(self, path: str) -> list[str]:
        self._count()
        return super().list(path)

    def make_directory(self, path: str) -> None:
        self._count()
        super().make_directory(path)

    def make_private(self, path: str) -> bool:
        self._count()
        return super().make_private(path)

    def make_sticky(self, path: str) -> None:
        self._count()
        super().make_sticky(path)

    def unlink(self, path: str) -> None:
        self._count()
        super().unlink(path)

    def remove_directory(self, path: str) -> None:
        self._count()
        super().remove_directory(path)

    def rename(self, old: str, new: str) -> None:
        self._count()
        super().rename(old, new)

    def free_bytes(self, path: str) -> int:
        self._count()
        return super().free_bytes(path)

    def filesystem_bytes(self, path: str) -> int:
        self._count()
        return super().filesystem_bytes(path)

    def is_read_only(self, path: str) -> bool:
        self._count()
        return super().is_read_only(path)

    def lock(self, fd: int) -> None:
        self._count()
        super().lock(fd)

    def lock_shared(self, fd: int) -> None:
        self._count()
        super().lock_shared(fd)

    def pause(self, seconds: float) -> None:
        pass

    def _count(self) -> bool:
        """Raises the planned error when it is time; True when a transfer is to be cut short."""
        what, amount = take(Call.OTHER)
        if what == What.FAIL:
            raise fail(amount)
        return what == What.SHORT


def _half(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The first half of a transfer in whole 512-byte sectors, as a device would cut it; at least
    one sector.
    """
    total = sum(len(b) for b in buffers)
    left = max(_SECTOR, total // 2 // _SECTOR * _SECTOR)
    cut = []
    for buffer in buffers:
        if left:
            cut.append(buffer[:left])
            left -= min(left, len(buffer))
    return cut


FAULT_KINDS: tuple[int | str, ...] = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EAGAIN, SHORT)
"""The faults that the sweeps inject."""
