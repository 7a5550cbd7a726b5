"""Where a test's copies run: on a card, or on a CPU that stands in for one."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import device_pools
import pytest
import torch

from sgl_kvtier.runtime.restore.copy_device import copies_for

if "CUDA_STAND_IN_HOME" in os.environ:
    from sglang.srt.mem_cache.pool_host import base

    # SGLang leaves 10 GiB of the host's memory alone: more than a machine without a GPU may have.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
PLACES = ("cpu", CUDA)

LAYOUTS = tuple(
    pytest.param(place, io, layout, marks=[pytest.mark.gpu] if place == "cuda" else [])
    for place, ways in (("cpu", device_pools.CPU_WAYS), ("cuda", device_pools.WAYS))
    for io, layout in ways
)
"""Place, I/O backend and host layout: all that can be copied there."""

LATENTS = tuple(
    pytest.param(place, io, layout, marks=[pytest.mark.gpu] if place == "cuda" else [])
    for place, io, layout in (
        ("cpu", "direct", "page_first_direct"),
        ("cuda", "kernel", "page_first"),
        ("cuda", "direct", "page_first_direct"),
    )
)

_CYCLES_PER_S = 2e9
"""More clock cycles than an H100 has in a second: a sleep is never shorter than asked for."""


class Place:
    """A device with pools, a stream on which forwards run, and the copies under test."""

    def __init__(self, device: str, io: str, pools: tuple[Any, Any]) -> None:
        self.device, self.host = pools
        self.page: int = self.host.page_size
        self.on_card = device == "cuda"
        self.name = device
        self.forward = torch.cuda.Stream() if self.on_card else None
        self.controller = device_pools.controller(*pools, io, self.forward)
        if self.on_card:
            self.controller.device = "cuda"  # as SGLang calls it: without a number
        self.copies = copies_for(self.controller)

    def slots(self, pages: list[int]) -> torch.Tensor:
        """Device slots of these pages. Uploaded from pinned memory: from other memory torch would wait
        for all that the current stream holds.
        """
        slots = self.host_slots(pages)
        return slots.pin_memory().to("cuda", non_blocking=True) if self.on_card else slots

    def host_slots(self, pages: list[int]) -> torch.Tensor:
        """Host slots of these pages."""
        return device_pools.slots(pages, self.page)

    def begin(self, source: list[int], target: list[int]) -> Any:
        """Begins a copy of host pages into device pages, as the mover's thread does."""
        return self.begin_slots(self.host_slots(source), self.slots(target))

    def begin_slots(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """The same of slots. The fence is this thread's, the copy another's."""
        fence, found = self.copies.fence(), []

        def run() -> None:
            try:
                found.append(self.placed(self.copies.begin(source, target, fence), fence))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def placed(self, copy: Any, fence: Any) -> Any:
        """A copy that writes into slots only once it is placed, as the mover does when it has seen
        the fence; any other is under way already.
        """
        if hasattr(copy, "place"):
            if fence is not None:
                fence.synchronize()
            copy.place()
        return copy

    def warm(self) -> None:
        """One copy, so that what is compiled at first use is compiled."""
        wait(self.begin([0], [1]), 240.0)

    @contextlib.contextmanager
    def launched(self, *, overlap: bool = True) -> Iterator[None]:
        """What is inside belongs to a forward: on its stream, or on the scheduler's with overlap
        off.
        """
        if self.forward is None:
            yield
            return
        stream = self.forward if overlap else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            yield

    def sleep(self, seconds: float) -> None:
        """Keeps the present stream busy."""
        if self.on_card:
            torch.cuda._sleep(int(seconds * _CYCLES_PER_S))

    def scribble(self, pages: list[int]) -> None:
        """Writes all bytes of these device pages."""
        at = self.slots(pages)
        for layer in (*self.device.k_buffer, *self.device.v_buffer):
            layer.view(torch.uint8)[at] = 7

    def holds(self, source: list[int], target: list[int]) -> bool:
        """Whether the device pages are these host pages, byte by byte. Waits for the device."""
        return self.holds_slots(self.host_slots(source), self.slots(target))

    def holds_slots(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """The same of slots."""
        if self.on_card:
            torch.cuda.synchronize()
        return device_pools.same(
            device_pools.rows(self.device, target), device_pools.wanted_rows(self.host, source)
        )


def wait(copy: Any, seconds: float = 30.0) -> None:
    """Until a copy has ended."""
    until = time.monotonic() + seconds
    while not copy.done():
        assert time.monotonic() < until, "a copy did not end"
        time.sleep(0.0002)
