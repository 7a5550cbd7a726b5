"""Allocations and copies of GPU memory that loads need; and uploads of indices through pinned
memory that is reused.

An upload from pageable memory may wait for all work on its stream, while holding the GIL.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from dataclasses import dataclass
from typing import Any

import torch

_native: Any
try:
    from sgl_kvtier.runtime.cuda import _native  # type: ignore[no-redef, attr-defined, unused-ignore]
except ImportError:
    _native = None

logger = logging.getLogger(__name__)

_PLACES = 8
_TOKENS = 4096


class CardMemory:
    """Memory of one device. Asynchronous methods run on the calling thread's current stream."""

    shares_bus = True
    """Whether SGLang's own small copies wait for what is queued on the bus."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)

    def unread(self, pool: Any) -> str | None:
        """Why the copy engine cannot read the pages of this host pool, or None."""
        return None if pool.pin_memory else "host memory that is not pinned"

    def free_bytes(self) -> int:
        """Free device memory in bytes."""
        free: int = torch.get_device_module("cuda").mem_get_info()[0]
        return free

    def pinned(self, numel: int) -> torch.Tensor:
        """Pinned host memory for `numel` indices (int64)."""
        return torch.empty(numel, dtype=torch.int64, pin_memory=True)

    def indices(self, numel: int) -> torch.Tensor:
        """Device memory for `numel` indices (int64), of the current stream."""
        return torch.empty(numel, dtype=torch.int64, device=self._device)

    def raw(self, nbytes: int) -> torch.Tensor:
        """Device memory. Raises torch.OutOfMemoryError."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def write(self, pinned: torch.Tensor, values: torch.Tensor) -> None:
        """Writes to pinned memory, synchronously."""
        pinned.copy_(values)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies contiguous pinned memory to contiguous device memory, asynchronously."""
        target.copy_(source, non_blocking=True)

    def copy_back(self, pinned: torch.Tensor, source: torch.Tensor) -> None:
        """Copies contiguous device memory to contiguous pinned memory, asynchronously."""
        pinned.copy_(source, non_blocking=True)

    def driver_copy(self) -> int | None:
        """The address of the driver's asynchronous copy, for `send_pages`. None, and a log line, if
        torch has to make each copy.
        """
        try:
            address = _driver_copy()
            self._try(address)
        except Exception as error:
            # A library, a driver or another torch may raise anything; copies by torch are only
            # slower.
            logger.warning("kvtier: torch makes each copy of a load, in some µs: %s", error)
            return None
        return address

    def driver_events(self) -> tuple[int, int] | None:
        """The addresses of the driver's functions that record an event and wait for one, for
        `send_pages`. None if C cannot call them.
        """
        try:
            return _address("EventRecord"), _address("EventSynchronize")
        except AttributeError as error:
            logger.warning("kvtier: what is queued on the bus is not bounded: %s", error)
            return None

    def clear_error(self) -> None:
        """Clears the error of a copy that the driver refused. Otherwise torch would report it for
        its own next kernel. An error that the device cannot recover from stays.
        """
        try:
            _runtime_function("GetLastError")()
        except AttributeError:
            logger.debug("kvtier: this torch's runtime has no GetLastError")

    def _try(self, driver_copy: int) -> None:
        """Raises RuntimeError unless what the driver copies arrives."""
        source = torch.arange(32, dtype=torch.uint8).pin_memory()
        target, stream = self.raw(32), torch.cuda.current_stream(self._device)
        halves = (source.data_ptr(), source.data_ptr() + 16, 2, 1, 8)
        slots = torch.tensor([1, 0])
        send_pages(driver_copy, stream.cuda_stream, (target.data_ptr(), 2), halves, slots)
        stream.synchronize()
        pages = source.view(2, 2, 8)
        if not torch.equal(target.cpu().view(2, 2, 8), pages.flip(1)):
            raise RuntimeError("what its driver copied did not arrive")


def send_pages(
    driver_copy: int,
    stream: int,
    room: tuple[int, int],
    host: tuple[int, int, int, int, int],
    host_slots: torch.Tensor,
    borders: array[int] | bytes = b"",
    window: array[int] | None = None,
) -> None:
    """Makes all copies of a load on a stream, in one call with the GIL released. Neighbours in host
    memory are one copy of K, and another of V.

    `room`: address and pages; `host`: addresses of K and V, pages, tokens per page, bytes of a
    page's K. `host_slots` (int64) are of whole pages. `borders` (`registration_borders`) are
    addresses at which a copy is split. With a `window` (`BusWindow.fields`) the call blocks until
    the last slice may be queued; without one everything is queued at once. Raises ValueError, with
    nothing sent, if the slots are not of whole pages; RuntimeError if the driver fails: copies sent
    before are in flight.
    """
    fields = bytearray() if window is None else window
    _native.send(driver_copy, stream, room, host, host_slots.numpy(), borders, fields)


def registration_borders(buffer: torch.Tensor) -> array[int]:
    """The addresses (uint64) at which one registration of this host memory with the driver ends and
    the next one begins. SGLang registers a large host pool in several pieces, and the driver
    refuses a copy that reads from two of them. Source: `_cuda_host_register` in
    sglang/srt/mem_cache/pool_host/common.py of SGLang 0.5.23.
    """
    ranges = sorted(getattr(buffer, "_sglang_cuda_host_registered_ranges", None) or ())
    return array("Q", (address for address, _ in ranges[1:]))


def _driver_copy() -> int:
    """The address of cudaMemcpyAsync, or hipMemcpyAsync, in the library that this torch uses.
    Raises RuntimeError or AttributeError if it cannot be called.
    """
    if _native is None:
        raise RuntimeError("sgl_kvtier.runtime.cuda._native is not compiled")
    return _address("MemcpyAsync")


def _address(name: str) -> int:
    """The address of `_runtime_function`."""
    address = ctypes.cast(_runtime_function(name), ctypes.c_void_p).value
    assert address is not None, "a function has an address"
    return address


def _runtime_function(name: str) -> Any:
    """cudaNAME, or hipNAME, of the runtime that this torch has loaded. Raises AttributeError if
    there is none.
    """
    return getattr(ctypes.CDLL(None), ("hip" if torch.version.hip else "cuda") + name)


@dataclass
class _Place:
    pinned: torch.Tensor
    ended: Any = None
    """The event after its last upload."""


class IndexRing:
    """Pinned buffers for uploads of indices. Used by one thread, the mover's."""

    def __init__(self, module: Any, memory: CardMemory) -> None:
        self._module, self._memory = module, memory
        self._places = [_Place(memory.pinned(_TOKENS)) for _ in range(_PLACES)]
        self._next = 0

    def upload(self, slots: torch.Tensor) -> torch.Tensor:
        """Copies these host indices to device memory, on the current stream. Blocks only while all
        buffers of the ring are in flight.
        """
        place = self._places[self._next]
        self._next = (self._next + 1) % len(self._places)
        if place.ended is not None:
            place.ended.synchronize()
        if len(slots) > len(place.pinned):
            place.pinned = self._memory.pinned(len(slots))
        pinned, device = place.pinned[: len(slots)], self._memory.indices(len(slots))
        self._memory.write(pinned, slots)
        self._memory.copy(device, pinned)
        place.ended = self._module.Event(blocking=True)
        place.ended.record()
        return device
