"""What a process on the stand-in can change and count."""

from __future__ import annotations

import ctypes
from typing import Any

_library = ctypes.CDLL(None)
for _name in ("stand_in_gate",):
    getattr(_library, _name).restype = ctypes.c_void_p
for _name in ("stand_in_pageable_copies", "stand_in_pinned_copies", "stand_in_launched_kernels"):
    getattr(_library, _name).restype = ctypes.c_long


class Gate:
    """A place at which a stream stops until the gate is opened: an order that a test chooses."""

    def __init__(self, stream: Any) -> None:
        """`stream`: of torch. What was put before runs; what is put later waits."""
        self._gate = ctypes.c_void_p(_library.stand_in_gate(ctypes.c_void_p(stream.cuda_stream)))

    def open(self) -> None:
        """More than once does nothing."""
        _library.stand_in_open(self._gate)


def set_jitter(microseconds: int) -> None:
    """The longest delay in front of an operation, from now on."""
    _library.stand_in_set_jitter(ctypes.c_long(microseconds))


def set_bus(gbps: float) -> None:
    """The speed of each direction between host and device, from now on; 0: that of a memcpy."""
    _library.stand_in_set_bus(ctypes.c_double(gbps))


def pageable_copies() -> int:
    """Copies begun so far from or to pageable memory: their callers waited."""
    return int(_library.stand_in_pageable_copies())


def pinned_copies() -> int:
    """All others."""
    return int(_library.stand_in_pinned_copies())


def launched_kernels() -> int:
    """Kernels of Triton, nvcc and those emulated by name; not aten's."""
    return int(_library.stand_in_launched_kernels())
