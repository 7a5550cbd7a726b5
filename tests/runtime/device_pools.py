"""SGLang's real device and host pools on a CPU or a card, random contents, and as much of its
controller as copies ask for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sgl_kvtier.runtime.cpu import hicache

LAYERS = 4
WAYS = (("kernel", "page_first"), ("direct", "page_first_direct"), ("kernel", "page_head"))
"""SGLang's copies on a card: I/O backend and host layout."""
CPU_WAYS = (("direct", "page_first_direct"),)
"""What there is where torch copies."""
LAYOUTS = tuple(layout for _, layout in WAYS)


def random_bytes(tensor: torch.Tensor, seed: int = 0) -> None:
    """Fills a host tensor. Below 120, so that no float of it is infinite or no number."""
    flat = tensor.view(-1).view(torch.uint8)
    stream = torch.Generator().manual_seed(seed)
    flat.copy_(torch.randint(0, 120, (flat.numel(),), generator=stream, dtype=torch.uint8))


def pools(
    device: str,
    layout: str,
    *,
    page: int = 16,
    tokens: int = 1024,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 8,
    dim: int = 128,
    layers: int = LAYERS,
) -> tuple[Any, Any]:
    """A device pool of zeros and a host pool of random bytes, of keys and values."""
    if device == "cpu":
        hicache.install()
    on_device = MHATokenToKVPool(
        size=tokens, page_size=page, dtype=dtype, head_num=heads, head_dim=dim, layer_num=layers,
        device=device, enable_memory_saver=False,
    )  # fmt: skip
    host = MHATokenToKVPoolHost(
        on_device.get_device_pool_infos()[0].buffer_info, 2.0, 0, page, layout,
        device_capacity_tokens=tokens, start_layer=0, end_layer=layers, host_token_capacity=2 * tokens,
    )  # fmt: skip
    random_bytes(host.kv_buffer)
    return on_device, host


def latent_pools(
    device: str, layout: str, *, page: int = 16, tokens: int = 1024
) -> tuple[Any, Any]:
    """The same of MLA latents."""
    if device == "cpu":
        hicache.install()
    on_device = MLATokenToKVPool(
        size=tokens, page_size=page, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64,
        layer_num=LAYERS, device=device, enable_memory_saver=False,
    )  # fmt: skip
    host = MLATokenToKVPoolHost(
        on_device.get_device_pool_infos()[0].buffer_info, 2.0, 0, page, layout,
        device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS, target_layer_num=LAYERS,
        host_token_capacity=2 * tokens,
    )  # fmt: skip
    random_bytes(host.kv_buffer)
    return on_device, host


def controller(device: Any, host: Any, io: str, fence_stream: Any = None) -> Any:
    """As much of SGLang's controller as copies ask for, with its own methods."""
    found = SimpleNamespace(
        device=str(device.device), io_backend=io, load_fence_stream=fence_stream,
        transfer_layer_id_max=LAYERS, mem_pool_host=host, mem_pool_device=device, storage_backend=None,
    )  # fmt: skip
    for name in ("move_indices", "_l2_transfers", "_l2_load_transfers"):
        setattr(found, name, getattr(HiCacheController, name).__get__(found))
    return found


def slots(pages: list[int], page: int, device: str = "cpu") -> torch.Tensor:
    """The token slots of these pages."""
    return (torch.tensor(pages)[:, None] * page + torch.arange(page)).flatten().to(device)


def rows(device: Any, at: torch.Tensor) -> list[torch.Tensor]:
    """What the device has in these slots: bytes [token, ...] of K and V of each layer in turn, or of
    the latents.
    """
    both = (
        zip(device.k_buffer, device.v_buffer, strict=True)
        if hasattr(device, "k_buffer")
        else ((layer,) for layer in device.kv_buffer)
    )
    return [
        piece.view(torch.uint8)[at.to(piece.device)].flatten(1).cpu()
        for two in both
        for piece in two
    ]


def put(device: Any, at: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    """Writes what `rows` gives, row by row: a copy that owes nothing to SGLang's."""
    both = [device.k_buffer, device.v_buffer] if hasattr(device, "k_buffer") else [device.kv_buffer]
    pieces = [layer for two in zip(*both, strict=True) for layer in two]
    for piece, data in zip(pieces, wanted, strict=True):
        flat = piece.view(torch.uint8).view(len(piece), -1)
        flat[at.to(piece.device)] = data.to(piece.device)


def wanted_rows(host: Any, at: torch.Tensor) -> list[torch.Tensor]:
    """What `rows` must be once the pages in these host slots were copied: read from the host pool
    token by token, by what its layout means.
    """
    buffer = host.kv_buffer.view(torch.uint8)
    pieces = buffer if buffer.dim() > 4 and buffer.shape[0] == 2 else buffer.unsqueeze(0)
    found = []
    for layer in range(host.layer_num):
        for piece in pieces:
            found.append(torch.stack([_token(host, piece, slot, layer) for slot in at.tolist()]))
    return found


def _token(host: Any, piece: torch.Tensor, slot: int, layer: int) -> torch.Tensor:
    page, offset = divmod(slot, host.page_size)
    if host.layout == "page_first":  # token, layer, head, number
        return piece[slot, layer].flatten()
    if host.layout == "page_first_direct":  # page, layer, token, head, number
        return piece[page, layer, offset].flatten()
    return piece[page, :, offset, layer].flatten()  # page, head, token, layer, number


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether all rows are equal, byte by byte."""
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))
