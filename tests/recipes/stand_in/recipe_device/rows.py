"""Signatures in every pool of a model: keys and values, latents, DSA's index keys, pages of sliding
windows, states by request, and the states of DeepSeek V4's compressors by window page.

A row says which tokens stand before it: it holds the chain of these tokens (`paced.signatures`),
and in each 8 bytes a constant of the buffer and column. Whatever is behind another prefix, in
another layer, or was never loaded, differs. All tensors are on the host; the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sgl_kvtier.lab.paced.signatures import mix

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _constants(number: int, count: int) -> torch.Tensor:
    first = 1 + number * 100_003
    return mix(torch.arange(first, first + count) * _GOLDEN)


class Rows:
    """A buffer of one layer, by token slots, window slots or states: int64 [rows, columns]."""

    def __init__(self, kind: str, name: str, buffer: torch.Tensor, number: int) -> None:
        self.kind, self.name = kind, name
        flat = buffer.view(buffer.shape[0], -1).view(torch.uint8)
        whole = flat.shape[1] // 8 * 8
        # What is left behind the last whole 8 bytes of a row is not signed.
        self._lanes = flat[:, :whole].view(torch.int64) if whole == flat.shape[1] else None
        self._bytes = flat[:, :whole]
        self.constants = _constants(number, whole // 8)

    def write(self, slots: torch.Tensor, chain: torch.Tensor) -> None:
        """Rows of tokens with these chains, int64 [slots]."""
        self.put(slots, chain[:, None] + self.constants)

    def put(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """These rows as they are."""
        if self._lanes is not None:
            self._lanes.index_copy_(0, slots, values)
        else:
            self._bytes[slots] = values.view(torch.uint8)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The rows of these slots without the buffer's constants: their chains, where all is right,
        int64 [slots, columns].
        """
        if self._lanes is not None:
            return self._lanes.index_select(0, slots) - self.constants
        return self._bytes[slots].contiguous().view(torch.int64) - self.constants


class IndexKeys(Rows):
    """DSA's packed index keys: of a page first the keys of all tokens, then their scales."""

    def __init__(self, kind: str, name: str, buffer: torch.Tensor, number: int, page: int) -> None:
        self.kind, self.name, self._page = kind, name, page
        flat = buffer.view(buffer.shape[0], -1).view(torch.uint8)
        width = flat.shape[1] // page - 4
        self._keys = flat[:, : page * width].unflatten(1, (page, width))
        self._scales = flat[:, page * width :].unflatten(1, (page, 4))
        self.constants = _constants(number, width // 8 + 1)

    def put(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        at = slots // self._page, slots % self._page
        self._keys[at] = values[:, :-1].contiguous().view(torch.uint8)
        self._scales[at] = values[:, -1:].to(torch.int32).view(torch.uint8)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        at = slots // self._page, slots % self._page
        keys = self._keys[at].contiguous().view(torch.int64) - self.constants[:-1]
        scales = self._scales[at].contiguous().view(torch.int32).to(torch.int64)
        # Of a scale only 32 bits are kept: they are compared with those that the keys ask for.
        asked = (keys[:, :1] + self.constants[-1:]).to(torch.int32).to(torch.int64)
        return torch.cat([keys, keys[:, :1] + (scales - asked)], 1)


class Pools:
    """Everything that one model's forward writes, by the kinds of slots it lies at."""

    def __init__(self, pool: Any, requests: Any, tag: str) -> None:
        """`pool` and `requests` are SGLang's pools of tokens and of requests. `tag` goes before the
        kinds of rows: a draft's are counted apart.
        """
        self.states: list[Rows] = []
        self.windows: list[Rows] = []
        self.pages: list[Rows] = []
        """Of DeepSeek V4: rows of whole pages, by the number of a page of token slots."""
        self.window_pages: list[Rows] = []
        """By the number of a page of window slots: windows, and states of compressors."""
        self.computed = torch.empty(0, dtype=torch.int64)
        """Of DeepSeek V4: chains of tokens by slot, as far as a forward here has computed them."""
        self._pool, self._requests, self.page = pool, requests, pool.page_size
        if hasattr(pool, "kv_pools") and hasattr(pool, "index_pools"):
            self.tokens: list[Rows] = []
            for kinds in (pool.kv_pools, pool.index_pools):
                for part in kinds.values():
                    self.pages += _numbered(f"{tag}compressed", _packed(part), len(self.pages))
            self.window_pages += _numbered(f"{tag}window", _packed(pool.swa_kv_pool), 1000)
            kinds = (pool.compress_state_pools, pool.indexer_compress_state_pools)
            states = [_state_pages(part) for kind in kinds for part in kind if _keeps(part)]
            self.window_pages += _numbered(f"{tag}compressor state", states, 4000)
            return
        whole = getattr(pool, "full_kv_pool", pool)
        self.tokens = [*_numbered(f"{tag}kv", _layers(whole), 0)]
        index = getattr(whole, "index_k_with_scale_buffer", None)
        for number, buffer in enumerate(index if index is not None else ()):
            self.tokens.append(
                IndexKeys(f"{tag}index keys", f"{number}", buffer, 2000 + number, whole.page_size)
            )
        if hasattr(pool, "swa_kv_pool"):
            self.windows = [*_numbered(f"{tag}window", _layers(pool.swa_kv_pool), 1000)]
        mamba = None if tag else getattr(requests, "mamba_pool", None)
        if mamba is not None:
            cache = mamba.mamba_cache
            for part in (*cache.conv, cache.temporal):
                for layer in range(part.shape[0]):
                    number = 3000 + len(self.states)
                    self.states.append(Rows("state", str(number), part[layer], number))

    def note(self, slots: torch.Tensor, chain: torch.Tensor) -> None:
        """Tokens of these slots were computed, with these chains."""
        if (more := int(slots.max()) + 1 - len(self.computed)) > 0:
            self.computed = torch.cat([self.computed, torch.zeros(more, dtype=torch.int64)])
        self.computed[slots] = chain

    def window_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Where the window pages of these token slots are; 0 where they are gone."""
        return self._pool.translate_loc_from_full_to_swa(slots).to(torch.int64)

    def state_slots(self, requests: torch.Tensor) -> torch.Tensor:
        """Where the states of these requests are."""
        return self._requests.req_index_to_mamba_index_mapping[requests].to(torch.int64)

    def described(self) -> str:
        """Buffers and bytes by kind, for the log."""
        return ", ".join(
            f"{len(rows)} buffers of {sum(r.constants.numel() for r in rows) * 8} bytes a {what}"
            for rows, what in (
                (self.tokens, "token"),
                (self.windows, "window token"),
                (self.states, "state"),
                (self.pages, "page"),
                (self.window_pages, "window page"),
            )
            if rows
        )


def _packed(pool: Any) -> list[torch.Tensor]:
    """Buffers of a pool whose rows are pages; none of one that is not there."""
    if pool is None:
        return []
    buffers = getattr(pool, "kv_buffer", None)
    return [*(pool.index_k_with_scale_buffer if buffers is None else buffers)]


def _keeps(states: Any) -> bool:
    """Whether these are states of a compressor that stay with a window page. With pages of 256
    tokens those of 128 tokens to one are never read behind the end of a page.
    """
    return states is not None and states.ratio == 4


def _state_pages(states: Any) -> torch.Tensor:
    """The states of a layer's compressor: [window page, byte], as many as there are whole ones."""
    every, ring = states.kv_score_buffer.kv_score, states.ring_size
    return every[: len(every) // ring * ring].view(torch.uint8).view(len(every) // ring, -1)


def _layers(pool: Any) -> list[torch.Tensor]:
    latents = getattr(pool, "kv_buffer", None)
    return [*latents] if latents is not None else [*pool.k_buffer, *pool.v_buffer]


def _numbered(kind: str, buffers: list[torch.Tensor], first: int) -> Iterator[Rows]:
    for number, buffer in enumerate(buffers):
        yield Rows(kind, str(number), buffer, first + number)
