"""As much of SGLang around copies as they touch: its streams, its transfer engine, its forwards, its
page-first host pool; on a device that lies in wait.

Bytes move too, when the stream comes to it: what is read too early is not there yet.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.l2_transfer import L2Transfer
from virtual_device import INDEX, Memory, Race, VirtualDevice

from sgl_kvtier.runtime.cuda import card_memory, staging
from sgl_kvtier.runtime.cuda.all_layers import AllLayers
from sgl_kvtier.runtime.cuda.page_shape import shape_of
from sgl_kvtier.runtime.cuda.staged_copies import StagedCopies
from sgl_kvtier.runtime.cuda.staging import Room
from sgl_kvtier.runtime.restore.copy_device import StreamCopies

LAYERS, PAGE, PAGES, HEADS, DIM = 2, 4, 40, 1, 16
ROOM_PAGES = 2
_GRAIN = 16
_DRIVER_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t
)
_EVENT_RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)
_EVENT_WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)


class TrackedMemory:
    """`CardMemory` on the virtual device: ordinary tensors, every access declared by its address."""

    def __init__(self, device: VirtualDevice, by_driver: bool) -> None:
        """`by_driver`: the driver makes the copies of pages, else torch does."""
        self.device = device
        self.bytes = Memory("byte")
        self._driver = _DRIVER_COPY(self._copied) if by_driver else None
        self.kept: list[torch.Tensor] = []
        """A copy knows addresses alone: this memory is there as long as one may run."""
        self.borders: list[int] = []
        """Addresses of host memory between two registrations: no copy reads from both sides."""
        self.errors_cleared = 0
        self.shares_bus = True
        self._events = _EVENT_RECORD(self._recorded), _EVENT_WAIT(self._waited_for)

    def driver_events(self) -> tuple[int, int] | None:
        record, wait = (ctypes.cast(f, ctypes.c_void_p).value for f in self._events)
        assert record is not None and wait is not None
        return record, wait

    def _recorded(self, event: int, stream: int) -> int:
        """As cudaEventRecord."""
        self.device.events[event].record(self.device.streams[stream - 1])
        return 0

    def _waited_for(self, event: int) -> int:
        """As cudaEventSynchronize."""
        try:
            self.device.events[event].synchronize()
        except Exception:
            return 719
        return 0

    def clear_error(self) -> None:
        self.errors_cleared += 1

    def _refuse_two_registrations(self, source: int, nbytes: int) -> None:
        if any(source < border < source + nbytes for border in self.borders):
            raise RuntimeError("invalid argument: a copy from two registrations")

    def driver_copy(self) -> int | None:
        return ctypes.cast(self._driver, ctypes.c_void_p).value if self._driver else None

    def pinned(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=torch.int64)

    def indices(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, dtype=torch.int64)

    def raw(self, nbytes: int) -> torch.Tensor:
        self.kept.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.kept[-1]

    def write(self, pinned: torch.Tensor, values: torch.Tensor) -> None:
        self.device.touch("an index written", writes=[self.of(pinned)])
        pinned.copy_(values)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.is_contiguous() and source.is_contiguous(), "one piece each, as for memcpy"
        self._refuse_two_registrations(source.data_ptr(), source.nbytes)
        self.device.launch(
            "copy engine",
            reads=[self.of(source)],
            writes=[self.of(target)],
            does=lambda: target.copy_(source),  # type: ignore[arg-type,return-value]
        )

    def _copied(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        """As cudaMemcpyAsync. A race is noted, and no error: a card does not see it either."""
        device = self.device
        try:
            self.driver_call()
            self._refuse_two_registrations(source, nbytes)
            device.need_own("a copy by the driver")
            assert kind == 1, "host to device"
            with device.on(device.streams[stream - 1]):
                device.launch(
                    "copy engine",
                    reads=[self._at(source, nbytes)],
                    writes=[self._at(target, nbytes)],
                    does=lambda: self._move(target, source, nbytes),
                )
        except Race:
            pass
        except Exception:
            return 719
        return 0

    def _move(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def driver_call(self) -> None:
        """Tests plant failures here."""

    def of(self, tensor: torch.Tensor) -> tuple[Memory, range]:
        """The places of a contiguous tensor."""
        return self._at(tensor.data_ptr(), tensor.nbytes)

    def _at(self, first: int, nbytes: int) -> tuple[Memory, range]:
        return self.bytes, range(first // _GRAIN, -(-(first + nbytes) // _GRAIN))


class ReferenceScatter:
    """What a scatter does, in torch, when its stream comes to it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def launch(self, room: Room, slots: torch.Tensor) -> None:
        rig, into = self.rig, slots.tolist()
        pages = len(into) // PAGE
        pieces = [room.piece(half, 0, pages) for half in (0, 1)]

        def scatter() -> None:
            for piece, layers in zip(pieces, (rig.k, rig.v), strict=True):
                rows = piece.view(torch.int32).view(len(into), LAYERS, HEADS, DIM)
                for layer, buffer in enumerate(layers):
                    buffer[into] = rows[:, layer]

        rig.device.launch(
            "scatter",
            reads=[rig.memory.of(piece) for piece in pieces],
            writes=[(rig.kv, every_layer(into))],
            does=scatter,
        )


class Rig:
    """A schedule stream (the default one), a forward stream, two pools, and copies between them."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seed: int = 0,
        *,
        overlap: bool = True,
        staged: bool = False,
        by_driver: bool = True,
        all_layers: bool = False,
        registered_pages: int | None = None,
    ) -> None:
        """`staged`: copies through staging, all at once, or unless `by_driver` torch makes each; else
        by SGLang's kernels, a launch per layer or, with `all_layers`, one. `registered_pages`: host
        memory is registered in pieces of so many half pages, as SGLang does with a large pool.
        """
        if staged and by_driver and card_memory._native is None:
            pytest.skip("sgl_kvtier.runtime.cuda._native is not compiled")
        self.device = VirtualDevice(seed)
        self.kv, self.rows = Memory("device"), Memory("row")
        self.memory = TrackedMemory(self.device, by_driver)
        self.kernels: list[str] = []
        """What SGLang's copies have launched."""
        module = self.device.module
        monkeypatch.setattr(torch, "get_device_module", lambda _device=None: module)
        monkeypatch.setattr(l2_transfer, "device_module", module)
        monkeypatch.setattr(l2_transfer, "_timing_events_supported", lambda: True)
        self.forward_stream = module.Stream() if overlap else self.device.default
        self.k, self.v = (
            [torch.zeros(PAGES * PAGE, HEADS, DIM, dtype=torch.int32) for _ in range(LAYERS)]
            for _ in range(2)
        )
        self.pool = host_pool(self.k, self.v)
        self.memory.kept.append(self.pool.kv_buffer)
        if registered_pages is not None:
            self._register(registered_pages * shape_of(self.pool).half_bytes)
        self.pool.load_to_device_per_layer_physical = self._copy_layer
        self.controller: Any = SimpleNamespace(
            device="cuda",  # as SGLang writes it: without a number
            io_backend="kernel",
            load_fence_stream=self.forward_stream if overlap else module.Stream(),
            transfer_layer_id_max=LAYERS,
            mem_pool_host=self.pool,
            mem_pool_device=SimpleNamespace(),
            move_indices=lambda host, device: (host, device),
            _l2_load_transfers=lambda host, device: [L2Transfer(self.pool, None, host, device)],
        )
        monkeypatch.setattr(staging, "ROOM_BYTES", ROOM_PAGES * 2 * shape_of(self.pool).half_bytes)
        self.copies: Any = (
            StagedCopies(self.controller, ReferenceScatter(self), self.memory)  # type: ignore[arg-type]
            if staged
            else StreamCopies(
                self.controller,
                self.memory,  # type: ignore[arg-type]
                AllLayers(self.pool, self._copy_all) if all_layers else None,
            )
        )
        self._names = itertools.count(1)

    def _register(self, nbytes: int) -> None:
        buffer = self.pool.kv_buffer
        first, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        ranges = [(at, min(nbytes, end - at)) for at in range(first, end, nbytes)]
        buffer._sglang_cuda_host_registered_ranges = ranges
        self.memory.borders = [at for at, _ in ranges[1:]]

    def _copy_layer(
        self, _pool: Any, host: torch.Tensor, device: torch.Tensor, layer: int, _io: str, **_: Any
    ) -> None:
        self._kernel(f"copy of layer {layer}", host, device, [layer])

    def _copy_all(self, indices_src: torch.Tensor, indices_dst: torch.Tensor) -> None:
        self._kernel("copy of all layers", indices_src, indices_dst, range(LAYERS))

    def _kernel(
        self, what: str, host: torch.Tensor, device: torch.Tensor, copied: Iterable[int]
    ) -> None:
        into = device.tolist()
        self.kernels.append(what)

        def copy() -> None:  # the kernel reads its indices when it runs
            for half, layers in enumerate((self.k, self.v)):
                for layer in copied:
                    layers[layer][into] = self.pool.kv_buffer[half, host, layer]

        self.device.launch(
            what,
            reads=[self.memory.of(host)],
            writes=[(self.kv, [(slot, layer) for slot in into for layer in copied])],
            does=copy,
        )

    # --- what SGLang does beside it -------------------------------------------------------------

    def forward(self, what: str, reads: Iterable[int], writes: Iterable[int] = ()) -> None:
        """As `run_batch`: behind what the scheduler has done, on the forward stream."""
        if self.forward_stream is not self.device.default:
            self.forward_stream.wait_stream(self.device.default)
        with self.device.on(self.forward_stream):
            self.device.launch(
                what, reads=[(self.kv, every_layer(reads))], writes=[(self.kv, every_layer(writes))]
            )

    def hold(self) -> Any:
        """A forward that does not end until the answer is called."""
        return self.device.hold(self.forward_stream)

    # --- host pages -----------------------------------------------------------------------------

    def fill(self, host_slots: torch.Tensor, value: int, what: str = "a store's read") -> None:
        """The host writes these slots of all layers."""
        for half in (0, 1):
            for slot in host_slots.tolist():
                self.device.touch(what, writes=[self.memory.of(self.pool.kv_buffer[half, slot])])
        self.pool.kv_buffer[:, host_slots] = value

    def values(self, slots: Iterable[int]) -> set[int]:
        """Everything that is in these device slots now."""
        found: set[int] = set()
        for buffer in (*self.k, *self.v):
            found |= set(buffer[list(slots)].flatten().tolist())
        return found

    def load(self, host: torch.Tensor, slots: torch.Tensor, fence: Any = None) -> Any:
        """A copy as the mover makes it: begun, and placed when its fence has come."""
        fence = self.copies.fence() if fence is None else fence
        copy = self.copies.begin(host, slots, fence)
        while not fence.query():
            assert self.device.step()
        copy.place()
        return copy


def host_pool(k: list[torch.Tensor], v: list[torch.Tensor]) -> Any:
    """A page-first MHA host pool, as far as staged copies look at it."""
    return SimpleNamespace(
        layout="page_first",
        page_size=PAGE,
        layer_num=LAYERS,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.int32,
        kv_buffer=torch.zeros(2, PAGES * PAGE, LAYERS, HEADS, DIM, dtype=torch.int32),
        device_k_buffers=k,
        device_v_buffers=v,
        device_rows_packed=True,
        pin_memory=True,
        prepare_transfer_indices=lambda host, device, io: (host, device),
    )


def every_layer(slots: Iterable[int]) -> list[tuple[int, int]]:
    """A slot has a place in every layer."""
    return [(slot, layer) for slot in slots for layer in range(LAYERS)]


def slots_of(*pages: int) -> torch.Tensor:
    """The token slots of these pages."""
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


assert INDEX, "a device that is not the first: threads begin on the first one"
