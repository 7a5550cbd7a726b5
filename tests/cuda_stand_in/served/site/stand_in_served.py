"""SGLang on the CUDA stand-in: a plugin that SGLang loads in each of its processes (entry point
`sglang.srt.plugins`, this folder on PYTHONPATH).

It replaces what needs a GPU's binaries: attention, the kernel that stores rows of K and V, NCCL.
All else is SGLang's own: its overlap loop, streams, pools, allocation kernels, write-back, decode
graphs' buffers and events.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

NAME = "stand_in"
"""The attention backend's name. Not torch_native's, at whose name SGLang leaves its GPU kernels
out.
"""

MISTAKE = "STAND_IN_MISTAKE"
"""Names a mistake of `stand_in_mistakes.py` that is put into the project on purpose."""

PROVEN_BYTES = "STAND_IN_PROVEN_BYTES"
"""Says after how many bytes of loads a server can be proven, in the place of 8 GiB, which take
hours here.
"""

LINEAR = "STAND_IN_LINEAR"
"""Names the library of `linear.cpp`, for models with linear layers."""

HOST_RESERVE_BYTES = 1 << 30

logger = logging.getLogger(__name__)


def register() -> None:
    """Called by SGLang, which swallows what a plugin raises: this ends the process instead."""
    try:
        _register()
    except BaseException:
        logger.exception("the CUDA stand-in is not in place")
        os._exit(1)


def _register() -> None:
    from sglang.srt.arg_groups import choices

    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return  # neither the HTTP server nor the detokenizer computes
    _attention()
    _stores_rows_by_index()
    _small_host()
    _graphs()
    _gloo()
    if LINEAR in os.environ:
        import stand_in_linear

        stand_in_linear.in_place()
    if nbytes := os.environ.get(PROVEN_BYTES):
        from sgl_kvtier.runtime.proof import record

        record.FIRST_BYTES = int(nbytes)
    if mistake := os.environ.get(MISTAKE):
        import stand_in_mistakes

        stand_in_mistakes.MISTAKES[mistake]()
        print(f"planted on purpose: {mistake}", flush=True)
    # Not logged: SGLang has not configured its loggers yet.
    print(f"the CUDA stand-in is in place, in process {os.getpid()}", flush=True)


def _attention() -> None:
    import torch
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    torch.ops.load_library(os.environ["STAND_IN_ATTENTION"])

    class Attention(AttentionBackend):
        """As FlashAttention does, a forward takes its requests' rows of slots and lengths aside at
        its beginning, inside of a decode graph too. Later it reads nothing of the scheduler's.

        Layers with a sliding window have rows of their own in SGLang's pool of windows.

        A model with latents (MLA) attends to these in prefills too, as SGLang does it where its
        inference has to be deterministic: keys are rows of latents, values their first part.
        """

        def __init__(self, runner: Any) -> None:
            super().__init__()
            # By these names SGLang's backend for linear layers beside asks for them.
            self.req_to_token_pool = self._requests = runner.req_to_token_pool
            self.token_to_kv_pool = self._pool = runner.token_to_kv_pool
            self._has_windows = isinstance(self._pool, SWAKVPool)
            if runner.use_mla_backend:
                _attends_to_latents()

        def init_forward_metadata_in_graph(self, batch: Any) -> None:
            rows = batch.req_pool_indices.long()
            self._rows = self._requests.req_to_token.index_select(0, rows)
            self._lengths = batch.seq_lens.clone()
            if self._has_windows:
                self._window_rows = self._pool.translate_loc_from_full_to_swa(self._rows)
                into = self._pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
                self._windows_into = into

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            pass

        def get_cuda_graph_seq_len_fill_value(self) -> int:
            return 1

        def forward_extend(self, *arguments: Any, **more: Any) -> Any:
            batch = arguments[4]
            return self._forward(*arguments, added=batch.extend_seq_lens, **more)

        def forward_decode(self, *arguments: Any, **more: Any) -> Any:
            return self._forward(*arguments, added=None, **more)

        def _forward(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: Any,
            batch: Any,
            save_kv_cache: bool = True,
            *,
            added: torch.Tensor | None,
            sinks: torch.Tensor | None = None,
            **more: Any,
        ) -> torch.Tensor:
            assert not more, f"attention with {sorted(more)}"
            if save_kv_cache and k is not None:
                into = self._windows_into if self._has_windows else None
                place = KVWriteLoc(batch.out_cache_loc, into)
                self._pool.set_kv_buffer(layer, place, k, v)
            query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            window, rows = layer.sliding_window_size, self._rows
            if self._has_windows and self._pool.layers_mapping[layer.layer_id][1]:
                rows = self._window_rows
            out = q.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
            torch.ops.cuda_stand_in.attend(
                query,
                self._pool.get_key_buffer(layer.layer_id),
                self._pool.get_value_buffer(layer.layer_id),
                rows,
                self._lengths,
                added,
                out,
                layer.scaling,
                sinks,
                -1 if window is None else window,
            )
            return out.view(len(query), -1)

    register_attention_backend(NAME)(Attention)


def _attends_to_latents() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(NAME, lambda attention, batch: AttnForwardMethod.MLA)


def _stores_rows_by_index() -> None:
    """SGLang's `store_cache` is a kernel of nvcc's. Without it SGLang writes rows of K and V by
    indexing, on the same stream.
    """
    from sglang.srt.mem_cache import memory_pool

    memory_pool.can_use_store_cache = lambda *sizes: False


def _small_host() -> None:
    """SGLang leaves 10 GiB of the host's memory alone, more than a test machine may have."""
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = HOST_RESERVE_BYTES


def _gloo() -> None:
    """Tensor ranks: torch's gloo, which takes CUDA tensors, in the place of NCCL."""
    from sglang.srt.distributed import bootstrap, parallel_state

    made = parallel_state.init_model_parallel_group

    def without_nccl(*arguments: Any, **more: Any) -> Any:
        return made(*arguments, **{**more, "use_pynccl": False})

    parallel_state.init_model_parallel_group = without_nccl
    bootstrap.get_default_distributed_backend = lambda device: "gloo"


def _graphs() -> None:
    """The runtime captures nothing: a replay runs the captured function again, which launches the
    same kernels. Around it all is SGLang's: static buffers, padded batches, and the event inside of
    a graph that lets the scheduler go on before the forward has ended.
    """
    import torch
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import (
        FullCudaGraphBackend,
    )

    capturing = False
    torch.cuda.is_current_stream_capturing = lambda: capturing

    def run(function: Any) -> Any:
        nonlocal capturing
        capturing = True
        try:
            return function()
        finally:
            capturing = False

    def capture_one(
        self: Any,
        shape_key: Any,
        forward_fn: Any,
        capture_inputs: Any = None,
        post_warmup_hook: Any = None,
    ) -> None:
        forward_fn()
        if post_warmup_hook is not None:
            post_warmup_hook()
        self._graphs[shape_key] = forward_fn
        self._outputs[shape_key] = run(forward_fn)

    def replay(self: Any, shape_key: Any, static_forward_batch: Any, **more: Any) -> Any:
        return run(self._graphs[shape_key])

    FullCudaGraphBackend.capture_one = capture_one
    FullCudaGraphBackend.replay = replay
