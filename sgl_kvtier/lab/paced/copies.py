"""HiCache's copies on the links of a paced device, the disk of SGLang's file backend, and the tier
of each page.

Bytes are really moved, at the scale of the pools at hand. Links and disk are charged the bytes of
the modelled model. SGLang's threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_kvtier.lab.paced.clock import Disk, Link, current_stream

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
        self, to_device: Link, to_host: Link, bytes_scale: float, pages: Pages, damage: Damage
    ) -> None:
        """`bytes_scale`: bytes of the model for each byte at hand."""
        self._to_device = to_device
        self._to_host = to_host
        self._scale = bytes_scale
        self._pages = pages
        self._damage = damage

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
            self._to_device.copy(current_stream(), nbytes * self._scale)
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
            self._to_host.copy(current_stream(), nbytes * self._scale)
            self._pages.saved(dst_indices)
            self._damage.strike("host", dst_ptrs[0], dst_indices[::page_size] // page_size)

        return all_layers


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
