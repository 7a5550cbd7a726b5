"""The parts of a loaded page, pool by pool, in host memory and on the device. Used to read pages
back from the device and compare them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_kvtier.runtime.backend.host_pages import (
    PAGE_AXES,
    buffer_of,
    device_buffers,
    has_bytes,
    shape_of,
)
from sgl_kvtier.runtime.sglang import compressed_pools, slot_pools, states, windows
from sgl_kvtier.store.base import KV

_ROW_AXES = ("layer", "token", "head")
"""For a page that is one row: layers are consecutive in each layout."""


@dataclass(frozen=True, eq=False)
class Half:
    """K, V, the latents or the index keys of a pool, or a pool's whole pages."""

    name: str
    """Text for messages: `keys`, `draft values`, `index keys`, `c4 pages`, `recurrent states`."""
    layers: list[torch.Tensor]
    """The device's buffer of each layer of the host pool: [slot, ...], or [page, ...] if a page is
    one row. Layers of a draft in the same host pages come last.
    """


@dataclass(frozen=True, eq=False)
class LoadedPool:
    """A host pool and its device buffers."""

    host: Any
    """SGLang's host pool; `buffer_of` returns its pages."""
    device: Any
    """SGLang's device pool; None if only its buffers are known."""
    halves: list[Half]
    """One for each piece of a host page, in their order."""
    page_rows: int
    """Rows of a page on the device: one per token, or one in all."""
    axes: tuple[str, ...]
    """The axes of a half of a page in host memory, as in `PAGE_AXES`, with rows for tokens."""


def loaded_pools(controller: Any, page_tokens: int) -> list[LoadedPool]:
    """All pools that a load of this HiCache controller covers, that of the KV pages first. Raises
    ValueError with the reason if SGLang does not tell how pages lie in one of them.
    """
    some = torch.zeros(page_tokens, dtype=torch.int64)  # SGLang needs slots to describe a transfer
    return _described(controller, slot_pools.transfers(controller, some, some), page_tokens)


def anchor_pools(controller: Any, page_tokens: int) -> list[LoadedPool]:
    """The pools of windows, and those that share their slots, or of states; none for a model
    without. A slot of a state is a page of these pools, each of which is one of its tensors.
    """
    if slot_pools.has_states(controller):
        return _states(controller.mem_pool_host.entry_map[states.POOL].host_pool)
    if not slot_pools.has_windows(controller):
        return []
    some = torch.zeros(page_tokens, dtype=torch.int64)
    transfers = slot_pools.transfers(controller, some[:0], some[:0], (some, some))
    return _described(controller, transfers, page_tokens)


def _described(controller: Any, transfers: list[Any], page_tokens: int) -> list[LoadedPool]:
    found: dict[int, LoadedPool] = {}
    for transfer in transfers:
        host, device = transfer.host_pool, transfer.device_pool
        if not has_bytes(host):
            continue
        if getattr(device, "host_transfer_translate", None) is not None:
            raise ValueError("device slots with other numbers than the pool's")
        known = found.get(id(host))
        if known is None:
            found[id(host)] = _pool(_name_of(controller, host), host, device, page_tokens)
        elif transfer.is_draft and compressed_pools.has_page_rows(host):
            continue  # its layers are in the same host pool
        elif transfer.is_draft:
            for half, more in zip(known.halves, _buffers(host, device), strict=True):
                half.layers.extend(more)
        else:
            raise ValueError(f"two device pools behind one {type(host).__name__}")
    if not found:
        raise ValueError("SGLang describes no load")
    for pool in found.values():
        _check(pool)
    return list(found.values())


class _StateTensor:
    """One tensor of SGLang's host pool of states, as a host pool whose pages are slots."""

    page_size, layout = 1, "page_first_direct"

    def __init__(self, tensor: torch.Tensor, layers: int) -> None:
        """`tensor`: [slot, layer, ...]; one of a single layer may lack that axis."""
        slots = len(tensor)
        self.kv_buffer = tensor.view(slots, -1).view(torch.uint8).view(slots, layers, 1, -1)

    def get_page_buffer_meta(self, slots: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of these slots."""
        nbytes, first = self.kv_buffer[0].nbytes, self.kv_buffer.data_ptr()
        return [first + slot * nbytes for slot in slots.tolist()], [nbytes] * len(slots)


def _states(host: Any) -> list[LoadedPool]:
    """Recurrent states, convolution states, and what SGLang keeps with them. Raises ValueError."""
    try:
        tensors = [
            ("recurrent states", host.temporal_buffer, host.temporal_device_layers),
            *(
                ("convolution states", tensor, layers)
                for tensor, layers in zip(host.conv_buffer, host.conv_device_layers, strict=True)
            ),
            *(
                ("states beside", tensor, [layer])
                for tensor, layer in zip(
                    host.slot_state_buffers, host.slot_state_device_tensors, strict=True
                )
            ),
        ]
    except AttributeError as error:
        raise ValueError(f"states of another release ({error})") from error
    found = [
        LoadedPool(
            _StateTensor(tensor, len(layers)), None, [Half(name, list(layers))], 1, _ROW_AXES
        )
        for name, tensor, layers in tensors
        if tensor.numel()
    ]
    for pool in found:
        _check(pool)
    return found


def keys_and_values(host: Any, k: list[torch.Tensor], v: list[torch.Tensor]) -> LoadedPool:
    """A host pool of K and V with these device buffers by layer."""
    halves = [Half("keys", k), Half("values", v)]
    return LoadedPool(host, None, halves, int(host.page_size), PAGE_AXES[host.layout])


def _pool(name: str, host: Any, device: Any, page_tokens: int) -> LoadedPool:
    if host.layout not in PAGE_AXES or buffer_of(host) is None:
        raise ValueError(f"host pages of layout {host.layout} in {type(host).__name__}")
    if (order := shape_of(host).device_layout) is not None:
        raise ValueError(f"device pages of layout {order} in {type(host).__name__}")
    if compressed_pools.has_page_rows(host):
        named = "window" if name == windows.POOL else name.removeprefix(compressed_pools.PREFIX)
        rows = Half(f"{named.replace('_', ' ')} pages", compressed_pools.device_rows(host))
        return LoadedPool(host, device, [rows], 1, _ROW_AXES)
    buffers = _buffers(host, device)
    kinds = {1: ("latents",), 2: ("keys", "values")}.get(len(buffers))
    if _has_index_keys(host):
        kinds = ("index keys",)
    if kinds is None:
        raise ValueError(f"{len(buffers)} buffers of a page in {type(host).__name__}")
    of = "draft " if name.startswith("draft") else "window " if name == windows.POOL else ""
    halves = [Half(of + kind, list(layers)) for kind, layers in zip(kinds, buffers, strict=True)]
    if _has_index_keys(host):
        return LoadedPool(host, device, halves, 1, _ROW_AXES)
    return LoadedPool(host, device, halves, page_tokens, PAGE_AXES[host.layout])


def _has_index_keys(host: Any) -> bool:
    return hasattr(host, "index_k_with_scale_buffer")


def _buffers(host: Any, device: Any) -> list[list[torch.Tensor]]:
    """The device buffers of a host pool, by half and layer."""
    if not _has_index_keys(host):
        return [list(layers) for layers in device_buffers(device)]
    if device is not host.device_pool:  # a draft's
        return [list(device.index_k_with_scale_buffer)]
    # Layers that share another one's top-k have no index keys, on the device or in host memory.
    return [host.packed_device_index_buffers[: host.target_layer_num]]


def _name_of(controller: Any, host: Any) -> str:
    entries = getattr(controller.mem_pool_host, "entries", ())
    names = [str(one.name) for one in entries if one.host_pool is host]
    return names[0] if names else KV


def _check(pool: LoadedPool) -> None:
    """Raises ValueError unless the rows of these layers make up a host page."""
    _, sizes = pool.host.get_page_buffer_meta(torch.arange(pool.host.page_size))
    kind = type(pool.host).__name__
    if len(sizes) != len(pool.halves):
        raise ValueError(f"{len(sizes)} pieces of a page in {kind}")
    for half, nbytes in zip(pool.halves, sizes, strict=True):
        if any(not layer.is_contiguous() for layer in half.layers):
            raise ValueError("device rows that lie apart")
        row = half.layers[0][0].nbytes
        if any(layer[0].nbytes != row for layer in half.layers):
            raise ValueError(f"layers of different widths in {kind}")
        if len(half.layers) * pool.page_rows * row != nbytes:
            raise ValueError(
                f"host pages of {nbytes} bytes, of {len(half.layers)} layers of {row} bytes"
            )
