"""Plans of failing system calls, for the compiled I/O threads and for Python.

The module `_native_faults` is the store's own C source (store/native/), built a second time with
preadv, pwritev and completions that fail by plan. The module that servers load has no such thing.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from sgl_kvtier.errors import BenchError
from sgl_kvtier.extras import how_to_compile
from sgl_kvtier.store.disk.env import Env
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
