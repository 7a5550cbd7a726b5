"""SGLang's real host pools, small, in this process; and a backend on a temporary store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sgl_kvtier.lab.gpu.pools import random_bytes
from sgl_kvtier.runtime.backend.storage import KVTierStorage
from sgl_kvtier.runtime.cpu import hicache

PAGE, PAGES = 16, 32


def device_pool(dtype: torch.dtype = torch.float32) -> Any:
    """An MHA device pool of 16 pages of 2 x 12,288 bytes in fp32: 3 layers, 2 heads of 32."""
    hicache.install()
    return MHATokenToKVPool(
        size=256,
        page_size=PAGE,
        dtype=dtype,
        head_num=2,
        head_dim=32,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )


def host_pool_of(device: Any, layout: str = "page_first_direct") -> Any:
    """An MHA host pool of 32 pages for a device pool."""
    return MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 2.0, 0, PAGE, layout,
        device_capacity_tokens=256, start_layer=0, end_layer=device.layer_num, host_token_capacity=PAGES * PAGE,
    )  # fmt: skip


def host_pool(
    layout: str = "page_first_direct", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """An MHA host pool of 32 pages with random contents, for a device pool as above."""
    pool = host_pool_of(device_pool(dtype), layout)
    random_bytes(pool.kv_buffer, seed)
    return pool


def unequal_pool(layout: str = "page_first_direct", *, heads: int = 2, layers: int = 3) -> Any:
    """A host pool of 32 random pages, whose K and V have heads of 192 and of 128, as MiMo V2's."""
    hicache.install()
    device = MHATokenToKVPool(
        size=256, page_size=PAGE, dtype=torch.bfloat16, head_num=heads, head_dim=192, v_head_dim=128, layer_num=layers,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    pool = AsymmetricMHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 2.0, 0, PAGE, layout,
        device_capacity_tokens=256, start_layer=0, end_layer=layers, host_token_capacity=PAGES * PAGE,
    )  # fmt: skip
    for number, buffer in enumerate(pool.kv_buffer):
        random_bytes(buffer, seed=number)
    return pool


def latent_pool(
    layers: int,
    *,
    rank: int = 32,
    rope: int = 8,
    page: int = PAGE,
    tokens: int = 256,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Any:
    """A device pool of MLA latents, `rank` + `rope` numbers a token and layer."""
    if device == "cpu":
        hicache.install()
    return MLATokenToKVPool(
        size=tokens, page_size=page, dtype=dtype, kv_lora_rank=rank, qk_rope_head_dim=rope, layer_num=layers,
        device=device, enable_memory_saver=False,
    )  # fmt: skip


def latent_host_pool(
    device: Any, drafts: tuple[Any, ...] = (), layout: str = "page_first_direct", tokens: int = 512
) -> Any:
    """The host pool of a pool of latents, with a layer per draft in its pages."""
    return MLATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 2.0, 0, device.page_size, layout,
        draft_buffer_infos=tuple(draft.get_device_pool_infos()[0].buffer_info for draft in drafts),
        device_capacity_tokens=device.size, start_layer=0, end_layer=device.layer_num, target_layer_num=device.layer_num, host_token_capacity=tokens,
    )  # fmt: skip


def dsa_pool(tokens: int = 256, rope: int = 8, device: str = "cpu") -> Any:
    """A device pool of 2 layers' latents and DSA's index keys, in pages of 64 tokens."""
    if device == "cpu":
        hicache.install()
    return DSATokenToKVPool(
        size=tokens, page_size=64, kv_lora_rank=32, dtype=torch.bfloat16, qk_rope_head_dim=rope, layer_num=2, device=device,
        index_head_dim=128, enable_memory_saver=False, kv_cache_dim=32 + rope, index_buf_size=tokens,
    )  # fmt: skip


def index_key_pool() -> Any:
    """A host pool of DSA's index keys, which lie where the latents' pages lie."""
    device = dsa_pool()
    return DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), latent_host_pool(device))


def numbering_pool() -> Any:
    """DeepSeek V4's host pool of KV, which has slots for 16 pages of 256 tokens and no bytes."""
    return LogicalHostPool(16 * 256, 256, layout="page_first_direct")


def compressed_pool(seed: int) -> Any:
    """A host pool beside it: 16 pages of its latents, one for four tokens, with random bytes."""
    random = torch.Generator().manual_seed(seed)
    item = 64 * 584
    layers = [torch.zeros(8, item, dtype=torch.uint8) for _ in range(2)]
    pool = DeepSeekV4PagedHostPool(
        pool_name=str(PoolName.DEEPSEEK_V4_C4),
        device_buffers=layers,
        item_bytes=item,
        num_host_pages=16,
        slot_page_size=256,
        layout="page_first_direct",
        pin_memory=False,
    )
    shape = pool.kv_buffer.shape
    pool.kv_buffer.copy_(torch.randint(0, 255, shape, dtype=torch.uint8, generator=random))
    return pool


def state_pool() -> Any:
    """A host pool of the states of linear layers: one state is a page."""
    hicache.install()
    states = MambaStateBufferInfo(temporal=torch.zeros(2, 8, 4, 4), conv=(torch.zeros(2, 8, 4, 3),))
    return MambaPoolHost(states, 2.0, 0, device_capacity=8, layout="page_first_direct")


def storage_config(**changes: Any) -> HiCacheStorageConfig:
    """One rank, no metrics; `extra_config` is for the caller to give."""
    values: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "m",
    }  # fmt: skip
    return HiCacheStorageConfig(**{**values, **changes})


def server_args(model_path: str = "no-such-folder", **changes: Any) -> SimpleNamespace:
    """The fields of a server's configuration that make up an identity."""
    values: dict[str, Any] = {
        "model_path": model_path, "revision": None, "dtype": "float32", "quantization": None, "kv_cache_dtype": "auto",
        "json_model_override_args": "{}", "load_format": "auto", "speculative_algorithm": None, "random_seed": 1,
        "speculative_draft_model_path": None, "quantization_param_path": None,
        "nnodes": 1, "tp_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def serve_with(patch: pytest.MonkeyPatch, args: SimpleNamespace) -> None:
    """SGLang answers as in the process of a server with these arguments."""
    patch.setattr("sglang.srt.runtime_context.get_server_args", lambda: args)
    patch.setattr("sglang.srt.arg_groups.model_override_base.resolving_view", lambda given: given)
    alone = SimpleNamespace(dp_rank=None, num_dp_ranks=1)
    patch.setattr("sglang.srt.runtime_context.get_parallel", lambda: alone)


def backend_on(
    folder: Path | str,
    pool: Any,
    sides: Iterable[tuple[Any, Any]] = (),
    sections: dict[str, Any] | None = None,
    store: dict[str, Any] | None = None,
    **config: Any,
) -> KVTierStorage:
    """A backend with a store in this folder and these host pools, as SGLang opens it."""
    extra = {
        "module_path": "sgl_kvtier.runtime.backend.storage",
        "store": {"path": str(folder), "min_free_bytes": 0, "segment_bytes": "4MiB"}
        | (store or {}),
        **(sections or {}),
    }
    backend = KVTierStorage(storage_config(extra_config=extra, **config), {})
    backend.register_mem_pool_host(pool)
    for name, side in sides:
        backend.register_mem_host_pool_v2(side, name)
    backend.on_host_pools_registered()
    return backend


def keys(*names: object) -> list[str]:
    """Names of pages, of the form that SGLang's have."""
    return [hashlib.sha256(str(name).encode()).hexdigest() for name in names]


class Ranks:
    """A group of ranks that run one after the other, the first one first."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def broadcast_object(self, value: Any) -> Any:
        """The first rank's value."""
        self.said.append(value)
        return self.said[0]


def slots(pages: Sequence[int]) -> torch.Tensor:
    """The host slots of these pages."""
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


def page_bytes(pool: Any, page: int) -> bytes:
    """One page's bytes, whatever the layout."""
    return pool.get_data_page(page * PAGE).contiguous().view(torch.uint8).numpy().tobytes()


def pages_of(pool: Any, *pages: int) -> list[bytes]:
    """The bytes of these pages."""
    return [page_bytes(pool, page) for page in pages]
