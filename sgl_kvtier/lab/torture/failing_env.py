"""An operating system that fails when told to: the call to fail, how, and once or from then on."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvtier.store.disk.env import Env

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


class FailingEnv(Env):
    """An `Env` that counts its calls and fails by plan. Any thread. Closing and clocks never fail,
    and pauses take no time.
    """

    native = False

    def __init__(self, fault: Fault | None = None) -> None:
        self._fault = fault
        self._lock = threading.Lock()
        self.calls = 0
        self.failed = 0

    @property
    def lasting(self) -> bool:
        """Whether calls go on failing once one has failed."""
        return self._fault is not None and self._fault.forever

    def arm(self, fault: Fault | None) -> None:
        """Starts counting anew with another plan."""
        with self._lock:
            self._fault = fault
            self.calls = self.failed = 0

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

    def make_private(self, path: str) -> None:
        self._count()
        super().make_private(path)

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
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
            fault = self._fault
            if fault is None or number < fault.at or (number > fault.at and not fault.forever):
                return False
            self.failed += 1
        if isinstance(fault.kind, str):
            return True
        raise OSError(fault.kind, os.strerror(fault.kind))


def _half(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The first half of a transfer in whole 512-byte sectors, as a device would cut it; at least
    one sector.
    """
    total = sum(len(b) for b in buffers)
    left = max(512, total // 2 // 512 * 512)
    cut = []
    for buffer in buffers:
        if left:
            cut.append(buffer[:left])
            left -= min(left, len(buffer))
    return cut


FAULT_KINDS: tuple[int | str, ...] = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EAGAIN, SHORT)
"""The faults that the sweeps inject."""
