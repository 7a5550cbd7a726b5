"""HiCache's copies and a card's on the links of a paced device, the disk of SGLang's file backend,
and the tier of each page.

Bytes are really moved, at the scale of the pools at hand. Links and disk are charged the bytes of
the modelled model. SGLang's threads.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_kvtier.lab.paced.clock import Disk, Link, current_stream, now, sleep_until, stream_of
from sgl_kvtier.runtime.cuda import card_memory
from sgl_kvtier.runtime.cuda.card_memory import CardMemory
from sgl_kvtier.runtime.cuda.page_shape import PageShape
from sgl_kvtier.runtime.cuda.staging import Room

_SCATTER_SHARE = 0.03
"""Seconds of a scatter for each of the link: an H100 reads and writes its own memory at 3,350 GB/s,
and the link carries 50.
"""
_FREE_BYTES = 1 << 40
"""The pool at hand leaves no less: the modelled card's is sized by who starts the server."""
_DRIVER_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t
)
_FAILED = 719
"""cudaErrorLaunchFailure."""
_COMPUTED, _HOST, _STORAGE = "the device", "host memory", "storage"
_TIERS = (_COMPUTED, _HOST, _STORAGE)


class Pages:
    """The origin of each page. The device's pages were computed or copied; those of host memory
    were copied from the device or read from storage. Pages of the host pool are its own numbers.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._device = torch.zeros(0, dtype=torch.uint8)
        self._host = torch.zeros(0, dtype=torch.uint8)

    def computed(self, slots: torch.Tensor) -> None:
        """A forward wrote these device slots."""
        self._device = _room(self._device, self._pages(slots))
        self._device[self._pages(slots)] = 0

    def allocated(self, host_slots: torch.Tensor) -> None:
        """These slots of host memory were allocated: rows that are not copied into them are read
        from storage.
        """
        self._host = _room(self._host, self._pages(host_slots))
        self._host[self._pages(host_slots)] = 2

    def saved(self, host_slots: torch.Tensor) -> None:
        """They were copied from the device."""
        self._host = _room(self._host, self._pages(host_slots))
        self._host[self._pages(host_slots)] = 1

    def loaded(self, host_slots: torch.Tensor, slots: torch.Tensor) -> None:
        """Host memory was copied into these device slots."""
        self._device = _room(self._device, self._pages(slots))
        self._host = _room(self._host, self._pages(host_slots))
        self._device[self._pages(slots)] = self._host[self._pages(host_slots)]

    def tier(self, slot: int) -> str:
        """Where the page of a device slot came from."""
        page = slot // self._page_size
        return _TIERS[int(self._device[page])] if page < self._device.numel() else _COMPUTED

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        return slots // self._page_size


def _room(marks: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    need = int(pages.max()) + 1 if pages.numel() else 0
    if need <= marks.numel():
        return marks
    return torch.cat([marks, marks.new_zeros(2 * need - marks.numel())])


class Damage:
    """One bit of a page changed on purpose, in `tier` (device, host or none), at the `nth` copy."""

    def __init__(self, tier: str = "", nth: int = 1, seed: int = 0) -> None:
        self._tier = tier
        self._left = nth
        self._chance = random.Random(seed)
        self.done: str | None = None

    def strike(self, tier: str, buffer: torch.Tensor, slots: torch.Tensor) -> None:
        """After a copy into `slots` of a buffer whose first axis is slots or pages of them."""
        if tier != self._tier or self.done is not None:
            return
        self._left -= 1
        if self._left > 0:
            return
        row = int(slots[self._chance.randrange(slots.numel())])
        flat = buffer[row].view(-1).view(torch.uint8)
        byte = self._chance.randrange(flat.numel())
        flat[byte] ^= 1 << self._chance.randrange(8)
        self.done = f"one bit of byte {byte} of row {row} was changed in {tier}"


class Copies:
    """The two copies of page_first_direct pools, taking their link's time on the current stream."""

    def __init__(
        self,
        to_device: Link,
        to_host: Link,
        bytes_scale: float,
        pages: Pages,
        damage: Damage,
        copied: Callable[[str, float, float, int], None] = lambda *_: None,
    ) -> None:
        """`bytes_scale`: bytes of the model for each byte at hand. `copied` is told of each copy as
        `pace.PaceLog.copied` is.
        """
        self._to_device = to_device
        self._to_host = to_host
        self._scale = bytes_scale
        self._pages = pages
        self._damage = damage
        self._copied = copied

    def card(self, pool: Any) -> tuple[CardMemory, Callable[..., Scatter]]:
        """What staged copies from a host pool ask of a card."""
        memory = Memory(pool, (self._to_device, self._to_host), self._scale, self._copied)

        def scatter(shape: PageShape, room_pages: int, buffers: list[torch.Tensor]) -> Scatter:
            del room_pages  # every room says its own
            return Scatter(shape, buffers, memory, self._pages, self._damage)

        return memory, scatter

    def load(self, copy: Callable[..., None]) -> Callable[..., None]:
        """Around transfer_kv_per_layer_direct_pf_lf."""

        def per_layer(
            src_ptrs: Sequence[torch.Tensor],
            dst_ptrs: Sequence[torch.Tensor],
            src_indices: torch.Tensor,
            dst_indices: torch.Tensor,
            layer_id: int,
            page_size: int,
        ) -> None:
            copy(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size)
            nbytes = len(dst_indices) * sum(_row_bytes(one) for one in dst_ptrs)
            begin, end = self._to_device.copy(current_stream(), nbytes * self._scale)
            self._copied("to_device", begin, end, nbytes)
            self._pages.loaded(src_indices, dst_indices)
            self._damage.strike("device", dst_ptrs[0], dst_indices)

        return per_layer

    def save(self, copy: Callable[..., None]) -> Callable[..., None]:
        """Around transfer_kv_all_layer_direct_lf_pf."""

        def all_layers(
            src_ptrs: Sequence[torch.Tensor],
            dst_ptrs: Sequence[torch.Tensor],
            src_indices: torch.Tensor,
            dst_indices: torch.Tensor,
            page_size: int,
        ) -> None:
            copy(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size)
            nbytes = len(src_indices) * sum(_row_bytes(one) for one in src_ptrs)
            begin, end = self._to_host.copy(current_stream(), nbytes * self._scale)
            self._copied("to_host", begin, end, nbytes)
            self._pages.saved(dst_indices)
            self._damage.strike("host", dst_ptrs[0], dst_indices[::page_size] // page_size)

        return all_layers


class Memory(CardMemory):
    """A paced card's memory, and its copy engine: a driver's function, or torch's copies where C
    cannot call it. Mover's thread.
    """

    shares_bus = False  # the link itself knows what small copies wait for

    def __init__(
        self,
        pool: Any,
        links: tuple[Link, Link],
        bytes_scale: float,
        copied: Callable[[str, float, float, int], None],
    ) -> None:
        """`links`: to the device and back."""
        super().__init__(0)
        self._device = torch.device("cpu")
        self._pool, self._scale, self._told = pool, bytes_scale, copied
        self._link, self._link_back = links
        self._driver = _DRIVER_COPY(self._driver_copied)
        self._sources: dict[int, tuple[int, int, float, float]] = {}
        """By the address of a piece of a room: whence its bytes came, how many, and when."""

    def unread(self, pool: Any) -> str | None:
        """None: all memory of this device is the host's."""
        del pool
        return None

    def free_bytes(self) -> int:
        """Enough for any staging."""
        return _FREE_BYTES

    def pinned(self, numel: int) -> torch.Tensor:
        """Memory of the host."""
        return torch.empty(numel, dtype=torch.int64)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Moves the bytes now; the current stream has them when its link does."""
        target.copy_(source)
        self._took(target.data_ptr(), source.data_ptr(), source.nbytes, current_stream())

    def copy_back(self, pinned: torch.Tensor, source: torch.Tensor) -> None:
        """Moves the bytes now; the host has them when the link back does. They were gathered before
        on the device, which takes what a scatter takes.
        """
        pinned.copy_(source)
        seconds = self._link_back.seconds_of(pinned.nbytes * self._scale)
        current_stream().launch(seconds * _SCATTER_SHARE)
        self._link_back.copy(current_stream(), pinned.nbytes * self._scale)

    def driver_copy(self) -> int | None:
        """The same as a driver's function."""
        if card_memory._native is None:
            return None
        return ctypes.cast(self._driver, ctypes.c_void_p).value

    def _driver_copied(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        """As cudaMemcpyAsync: called without the interpreter, from C."""
        del kind
        try:
            ctypes.memmove(to, source, nbytes)
            self._took(to, source, nbytes, stream_of(stream))
        except Exception:  # C knows numbers only
            return _FAILED
        return 0

    def _took(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        begin, end = self._link.copy(stream, nbytes * self._scale)
        self._sources[to] = source, nbytes, begin, end

    def copied(self, room: Room, pages: int) -> tuple[torch.Tensor, float]:
        """The host pages whose K came into a room last, and the link's seconds for K and V. The log
        has a line for all of them, since one for each piece would keep the interpreter.
        """
        base = self._pool.kv_buffer.data_ptr()
        found: list[int] = []
        begins, ends = list[float](), list[float]()
        for half in (0, 1):
            at = room.place[0] + half * room.pages * room.half_bytes
            end_at = at + pages * room.half_bytes
            while at < end_at:
                source, nbytes, begin, end = self._sources[at]
                first = (source - base) // room.half_bytes
                if not half:
                    found.extend(range(first, first + nbytes // room.half_bytes))
                at += nbytes
                begins.append(begin)
                ends.append(end)
        moved = 2 * pages * room.half_bytes
        self._told("to_device", min(begins), max(ends), moved)
        return torch.tensor(found[:pages]), self._link.seconds_of(moved * self._scale)


class Scatter:
    """Staged pages into their slots by torch, in the time that a card's kernel takes."""

    def __init__(
        self,
        shape: PageShape,
        buffers: list[torch.Tensor],
        memory: Memory,
        pages: Pages,
        damage: Damage,
    ) -> None:
        """`buffers` as for `TritonScatter`."""
        self._shape, self._memory, self._pages, self._damage = shape, memory, pages, damage
        self._keys = buffers[0]
        whole = shape.tokens * shape.row_bytes
        self._buffers = [buffer.view(torch.uint8).view(-1, whole) for buffer in buffers]

    def prepare(self) -> None:
        """There is nothing to compile."""

    def launch(self, room: Room, slots: torch.Tensor) -> None:
        """On the current stream."""
        shape = self._shape
        firsts = slots[:: shape.tokens]
        for half in (0, 1):
            rows = self._layers(room.piece(half, 0, len(firsts)), len(firsts))
            for layer in range(shape.layers):
                into = self._buffers[half * shape.layers + layer]
                into.index_copy_(0, firsts // shape.tokens, rows[:, layer].reshape(len(firsts), -1))
        host_pages, seconds = self._memory.copied(room, len(firsts))
        current_stream().launch(seconds * _SCATTER_SHARE)
        self._pages.loaded(host_pages * shape.tokens, firsts)
        self._damage.strike("device", self._keys, slots)

    def _layers(self, piece: torch.Tensor, pages: int) -> torch.Tensor:
        """[page, layer, token, byte], as the rows of a layer lie in the pool."""
        shape = self._shape
        if shape.layer_major:
            return piece.view(pages, shape.layers, shape.tokens, shape.row_bytes)
        return piece.view(pages, shape.tokens, shape.layers, shape.row_bytes).transpose(1, 2)


def compared(
    compare: Callable[..., list[int]], seconds_per_byte: float
) -> Callable[..., list[int]]:
    """Around the comparison of pages that were read back: it takes the time of as many bytes as the
    modelled pages have. `seconds_per_byte`: of those at hand.
    """

    def took(found: Any, *rest: Any) -> list[int]:
        end = now() + len(found) * seconds_per_byte
        layers = compare(found, *rest)
        sleep_until(end)
        return layers

    return took


def _row_bytes(buffer: torch.Tensor) -> int:
    return buffer[0].numel() * buffer.element_size()


def nixl_backend(read: Disk, write: Disk, bytes_scale: float) -> Callable[..., Any]:
    """A hook around HiCacheNixl._xfer_pre_registered: each batch waits for the disk's bandwidth."""

    def transfer(
        original: Callable[..., Any], store: Any, buffers: Sequence[Any], keys: Any, direction: str
    ) -> Any:
        done = original(store, buffers, keys, direction)
        if done:
            disk = write if direction == "WRITE" else read
            disk.serve(sum(size for _, size in buffers) * bytes_scale)
        return done

    return transfer


def mooncake_backend(
    read: Disk, write: Disk, bytes_scale: float
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks around MooncakeStore._get_batch_zero_copy_impl and _put_batch_zero_copy_impl: a batch
    waits for the disk's bandwidth, for the pages of it that were moved.
    """

    def get(
        original: Callable[..., Any], store: Any, keys: Any, buffers: Any, sizes: Sequence[Any]
    ) -> Any:
        done = original(store, keys, buffers, sizes)
        moved = [size for size, code in zip(sizes, done, strict=True) if code > 0]
        read.serve(_total(moved) * bytes_scale)
        return done

    def put(
        original: Callable[..., Any],
        store: Any,
        keys: Any,
        buffers: Any,
        sizes: Sequence[Any],
        *rest: Any,
        **more: Any,
    ) -> Any:
        done = original(store, keys, buffers, sizes, *rest, **more)
        moved = [size for size, code in zip(sizes, done, strict=True) if code == 0]
        write.serve(_total(moved) * bytes_scale)
        return done

    return get, put


def _total(sizes: Sequence[Any]) -> int:
    """Bytes of pages, each in one buffer or in several."""
    return sum(one if isinstance(one, int) else sum(one) for one in sizes)


def file_backend(
    read: Disk, write: Disk, bytes_scale: float
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks around HiCacheFile.get and .set: each page waits for the disk's bandwidth."""

    def get(
        original: Callable[..., Any], store: Any, key: Any, target: Any, *rest: Any, **more: Any
    ) -> Any:
        found = original(store, key, target, *rest, **more)
        if found is not None:
            read.serve(target.numel() * target.element_size() * bytes_scale)
        return found

    def put(
        original: Callable[..., Any], store: Any, key: Any, value: Any, *rest: Any, **more: Any
    ) -> Any:
        if not store.exists(key):
            write.serve(value.numel() * value.element_size() * bytes_scale)
        return original(store, key, value, *rest, **more)

    return get, put
