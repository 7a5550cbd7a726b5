"""SGLang's real device and host pools on a CPU or a card, with random contents. They come with as
much of its controller as copies need.

For measurements and tests of copies without a server.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sgl_kvtier.runtime.cpu import hicache

LAYERS = 4
WAYS = (("kernel", "page_first"), ("direct", "page_first_direct"), ("kernel", "page_head"))
"""SGLang's copies on a card: I/O backend and host layout."""
CPU_WAYS = (("direct", "page_first_direct"),)
"""The ways there are where torch copies."""


def random_bytes(tensor: torch.Tensor, seed: int = 0) -> None:
    """Fills a host tensor. Bytes are below 120, so that no float of it is infinite or no number.

    Drawn eight at a time: bounded bytes one by one take longer than all else in most tests.
    """
    flat = tensor.view(-1).view(torch.uint8)
    stream = torch.Generator().manual_seed(seed)
    words = torch.empty(-(-flat.numel() // 8), dtype=torch.int64).random_(generator=stream)
    flat.copy_((words & 0x7777777777777777).view(torch.uint8)[: flat.numel()])


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
        size=tokens,
        page_size=page,
        dtype=dtype,
        head_num=heads,
        head_dim=dim,
        layer_num=layers,
        device=device,
        enable_memory_saver=False,
    )
    host = MHATokenToKVPoolHost(
        on_device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        page,
        layout,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=2 * tokens,
    )
    random_bytes(host.kv_buffer)
    return on_device, host


def controller(device: Any, host: Any, io: str, fence_stream: Any = None) -> Any:
    """As much of SGLang's controller as copies ask for, with its own methods."""
    found = SimpleNamespace(
        device=str(device.device),
        io_backend=io,
        load_fence_stream=fence_stream,
        transfer_layer_id_max=device.layer_num,
        mem_pool_host=host,
        mem_pool_device=device,
        storage_backend=None,
    )
    for name in ("move_indices", "_l2_transfers", "_l2_load_transfers"):
        setattr(found, name, getattr(HiCacheController, name).__get__(found))
    return found


def slots(pages: list[int], page: int, device: str = "cpu") -> torch.Tensor:
    """The token slots of these pages."""
    return (torch.tensor(pages)[:, None] * page + torch.arange(page)).flatten().to(device)
