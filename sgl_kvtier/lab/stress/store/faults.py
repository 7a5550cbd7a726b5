"""Plans of failing system calls, for the compiled I/O threads and for Python, and operating systems
that fail by them.

The module `_native_faults` is the store's own C source (store/native/), built a second time with
preadv, pwritev and completions that fail by plan. The module that servers load has no such thing.
"""

from __future__ import annotations

import enum
import errno
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sgl_kvtier.errors import BenchError
from sgl_kvtier.extras import how_to_compile
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import BLOCK
from sgl_kvtier.store.io.native_threads import io_uring_error

_faults: Any
try:
    from sgl_kvtier.lab.stress.store import _native_faults as _faults  # type: ignore[no-redef, attr-defined, unused-ignore]
except ImportError:
    _faults = None

BUILT: Final = _faults is not None
"""Whether the I/O threads with faults are built here."""
FOREVER: Final = (1 << 64) - 1
MOST: Final = (1 << 63) - 1


class Call(enum.IntEnum):
    """Kinds of system calls, as in native/faulty.c. Each kind is counted from 0, and so are all."""

    OTHER = 0
    READ = 1
    """preadv of pages by an I/O thread."""
    WRITE = 2
    """pwritev of pages by an I/O thread."""
    COMPLETION = 3
    """The end of a read through a ring."""
    ANY = 4


class What(enum.IntEnum):
    """What happens instead of a call, as in native/faulty.c."""

    NOTHING = 0
    FAIL = 1
    """It fails with the errno that `amount` is."""
    SHORT = 2
    """It moves at most `amount` bytes. Below 0: half, in whole units of so many bytes."""
    DELAY = 3
    """It begins `amount` microseconds later, or when there is another plan."""
    KILL_BEFORE = 4
    KILL_AFTER = 5
    """The process is killed after it moved at most `amount` bytes. Below 0: any part of them, in
    whole units of so many bytes.
    """


class Planned(NamedTuple):
    """Calls [first, last] of one kind go wrong."""

    call: Call
    first: int
    last: int
    what: What
    amount: int = 0


class Counts(NamedTuple):
    """Since the plan was made, by `Call`: calls, and those that went wrong."""

    calls: tuple[int, ...]
    faults: tuple[int, ...]


def arm(plan: Sequence[Planned] = (), period: int = 0) -> None:
    """Puts a plan in the place of this process's last one; counts begin anew. With a `period`
    numbers of calls begin anew after so many. Raises BenchError where nothing can fail by plan.
    """
    if not BUILT:
        raise BenchError(
            f"the I/O threads with faults are not built here. With a C compiler: {how_to_compile()}"
        )
    _faults.arm([tuple(entry) for entry in plan], period)


def take(call: Call) -> tuple[int, int]:
    """Counts a call that Python is about to make: (what, amount)."""
    what, amount = _faults.take(call)
    return what, amount


def counts() -> Counts:
    """Counts of the present plan."""
    return Counts(*_faults.counts())


class FaultyEnv(Env):
    """An operating system with which the compiled I/O threads work by the present plan."""

    native_module = _faults


def engines() -> dict[str, dict[str, Any]]:
    """The settings of each kind of I/O threads that a server may have, by what `DiskStore.io` calls
    it; those with rings only where this process may use them.
    """
    rings = {} if io_uring_error() else {"io_uring": {"io": "io_uring"}}
    return {**rings, "threads": {"io": "threads"}, "python": {"native_io": False}}


def fail(number: int) -> OSError:
    """The error that a system call raises."""
    return OSError(number, os.strerror(number))


class HookedEnv(FaultyEnv):
    """An operating system whose calls pass `around`, but for closing and clocks."""

    def around(self, call: str, act: Callable[..., Any], *args: Any) -> Any:
        """Makes the call of this name, as `act(*args)`, or does something else in its place."""
        raise NotImplementedError


_CALLS: Final = (
    "open", "preadv", "pwritev", "allocate", "truncate", "sync", "size", "status", "same_file",
    "bytes_on_disk", "modified_ns", "touch", "list", "make_directory", "make_private",
    "make_sticky", "unlink", "remove_directory", "rename", "free_bytes", "filesystem_bytes",
    "is_read_only", "lock", "lock_shared",
)  # fmt: skip


def _hooked(name: str) -> Callable[..., Any]:
    def call(self: HookedEnv, *args: Any) -> Any:
        return self.around(name, getattr(super(HookedEnv, self), name), *args)

    return call


for _name in _CALLS:
    setattr(HookedEnv, _name, _hooked(_name))


_SECTOR = 512
SHORT = "short"
"""Instead of an error number: a transfer moves only part of what was asked. Calls that move nothing
succeed.
"""
FAULT_KINDS: tuple[int | str, ...] = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EAGAIN, SHORT)
"""The faults that the sweeps inject."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Call number `at` (counted from 0) fails, and with `forever` all later ones too."""

    at: int
    kind: int | str
    forever: bool = False


class FailingEnv(HookedEnv):
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

    def around(self, call: str, act: Callable[..., Any], *args: Any) -> Any:
        """Raises the planned error when it is time, or cuts a transfer short."""
        what, amount = take(Call.OTHER)
        if what == What.FAIL:
            raise fail(amount)
        if what == What.SHORT and call in ("preadv", "pwritev"):
            fd, buffers, offset = args
            return act(fd, _half(buffers), offset)
        return act(*args)

    def pause(self, seconds: float) -> None:
        pass


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


POINTS = (
    *(
        (call, moment)
        for call in (
            "open",
            "pwritev",
            "allocate",
            "rename",
            "unlink",
            "sync",
            "list",
            "size",
            "lock",
            "preadv",
        )
        for moment in ("before", "after")
    ),
    ("pwritev", "within"),
    ("pwritev", "within a sector"),
)
"""Every system call that changes or finds something, before and after it, and writes torn at two
sizes. Reads through a ring count as preadv; they are killed when they have ended.
"""

_TORN = {"within": 4096, "within a sector": 512}
"""Moments at which a write is torn, and of how many bytes it leaves a whole number."""
_MOVING = {"preadv": (Call.READ, Call.COMPLETION), "pwritev": (Call.WRITE,)}
"""Calls that the compiled I/O threads make too: they are counted there."""


_WRITES = 400
"""Writes of pages after which their troubles are the same again."""


class DeadlyEnv(HookedEnv):
    """Kills its own process at the `nth` call of one kind, Python's or an I/O thread's. One at a
    time in a process.
    """

    def __init__(
        self, point: tuple[str, str], nth: int, alone: AbstractContextManager[Any]
    ) -> None:
        """A call of Python's kills within `alone`: no other thread is in there then."""
        self._call, self._moment = point
        self._left = nth
        self._alone = alone
        what = What.KILL_BEFORE if self._moment == "before" else What.KILL_AFTER
        amount = -_TORN[self._moment] if self._moment in _TORN else MOST
        arm([Planned(call, nth - 1, nth - 1, what, amount) for call in _MOVING.get(self._call, ())])

    def around(self, call: str, act: Callable[..., Any], *args: Any) -> Any:
        due = self._due(call)
        if due and self._moment == "before":
            self._die()
        if due and self._moment in _TORN:
            _tear(_TORN[self._moment], *args)
        else:
            result = act(*args)
        if due:
            self._die()
        return result

    def _die(self) -> None:
        with self._alone:
            signal.raise_signal(signal.SIGKILL)

    def _due(self, call: str) -> bool:
        if call in _MOVING:
            return take(_MOVING[call][0])[0] != What.NOTHING
        if call != self._call:
            return False
        self._left -= 1
        return self._left == 0


def _tear(step: int, fd: int, data: Sequence[memoryview], offset: int) -> None:
    """Writes some units of `step` bytes."""
    whole = b"".join(data)
    cut = random.Random(len(whole) + offset).randrange(0, max(1, len(whole) // step)) * step
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), whole[:cut], offset)


class TroubledEnv(HookedEnv):
    """Pages are written slowly and sometimes not at all; now and then the log or a removal
    fails. One at a time in a process.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._logs: set[int] = set()
        arm([self._trouble(number) for number in range(_WRITES)], _WRITES)

    def _trouble(self, number: int) -> Planned:
        if self._chance.random() < 0.05:
            return Planned(Call.WRITE, number, number, What.FAIL, errno.EIO)
        return Planned(Call.WRITE, number, number, What.DELAY, self._chance.choice((0, 500, 3000)))

    def _fail(self, share: float) -> None:
        if self._chance.random() < share:
            raise fail(errno.EIO)

    def around(self, call: str, act: Callable[..., Any], *args: Any) -> Any:
        if call == "unlink":
            self._fail(0.05)
        elif call == "pwritev" and args[0] in self._logs:
            self._fail(0.01)
        elif call == "pwritev" and sum(map(len, args[1])) > BLOCK:
            what, amount = take(Call.WRITE)
            if what == What.FAIL:
                raise fail(amount)
            time.sleep(amount / 1e6)
        result = act(*args)
        if call == "open":
            is_log = os.path.basename(args[0]).startswith("index.log")
            (self._logs.add if is_log else self._logs.discard)(result)
        return result
