"""Forwards of Llama and Qwen3 models in which requests stop computing their prefix at a layer.

SGLang's loop over the layers is run part by part. Between two parts the rows of a prefix whose
upper layers were loaded are left out: the batch goes on as one with a longer prefix and fewer new
tokens. Its own rows for them stay 0 in the end; only the last of a request is ever asked for.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from sgl_kvtier.runtime.cpu.platform import STAND_IN

logger = logging.getLogger(__name__)

_ROOT = "sglang.srt.models."
_FAMILIES = {
    "LlamaForCausalLM": "llama.LlamaModel",
    "Qwen3ForCausalLM": "qwen3.Qwen3Model",
    "Qwen3MoeForCausalLM": "qwen2_moe.Qwen2MoeModel",
}
"""The class that has the layers, by the model's architecture."""


class Pass(Protocol):
    """One forward, as `restore.Pass`."""

    parts: int
    shares: Sequence[Any]

    def at(self, part: int) -> list[int]:
        """Before the layers of a part: how many first tokens of each request are left out."""

    def end(self) -> None:
        """The last part was launched, or the forward has failed."""


class Source(Protocol):
    """Where upper layers come from, as `restore.Layers`."""

    def take(self, batch: Any) -> Pass | None:
        """What a forward of this batch can take; None where that is nothing."""


_layers: Source | None = None


def serve(layers: Source) -> None:
    """From now on this process's forwards ask `layers`."""
    global _layers
    first, _layers = _layers is None, layers
    if not first or os.environ.get(STAND_IN):
        return  # a device that stands in has forwards of its own
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in _FAMILIES.values():
        module = _ROOT + name.partition(".")[0]
        if module in sys.modules:
            HookRegistry.register(f"{_ROOT}{name}.forward", _forward, HookType.AROUND)
    HookRegistry.apply_hooks()


def architectures_of(server_args: Any) -> list[str]:
    """The names of the model's architecture."""
    from sglang.srt.configs.model_config import ModelConfig

    return list(ModelConfig.from_server_args(server_args).hf_config.architectures or ())


def unknown_model(names: Sequence[str]) -> str | None:
    """Why the forward of a model of this architecture cannot be cut at a layer, or None."""
    if any(name in _FAMILIES for name in names):
        return None
    return f"is for {', '.join(_FAMILIES)}, not {', '.join(names) or 'an unnamed model'}"


def taken(batch: Any) -> Pass | None:
    """What a forward of this batch can take from storage, or None. Never raises."""
    try:
        return None if _layers is None else _layers.take(batch)
    except Exception:
        logger.exception("kvtier: a batch could not be restored by layers; it is computed")
        return None


def _forward(
    original: Callable[..., Any],
    model: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    input_embeds: Any = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    plain = input_embeds is None and pp_proxy_tensors is None and positions.dim() == 1
    may = plain and not model.layers_to_capture and not forward_batch.can_run_tbo
    run = taken(forward_batch) if may else None
    if run is None:
        return original(model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    try:
        return _by_layers(model, input_ids, positions, forward_batch, run)
    finally:
        run.end()


def _by_layers(
    model: Any, input_ids: torch.Tensor, positions: torch.Tensor, whole: Any, run: Pass
) -> torch.Tensor:
    residual = importlib.import_module("sglang.srt.layers.layer_boundary.residual.batch")
    context = importlib.import_module("sglang.srt.model_executor.forward_context")
    backend = context.get_attn_backend()
    each = len(model.layers) // run.parts
    rows = torch.arange(input_ids.shape[0], device=input_ids.device)
    cuts, batch, hidden, places = [0] * len(run.shares), whole, None, positions
    for part in range(run.parts):
        now = run.at(part)
        layers = model.layers[part * each : (part + 1) * each]
        if now != cuts:
            kept = _rows(run, now, rows.device)
            short = _without(whole, run, now, kept)
            if hidden is not None:
                found = residual.to_pp(hidden, batch)
                inside = torch.searchsorted(rows, kept)
                left = type(found)({name: one[inside] for name, one in found.tensors.items()})
                hidden = layers[0].attn_boundary.from_pp(left, short)
            cuts, rows, batch, places = now, kept, short, short.positions
            backend.init_forward_metadata(batch)
        if hidden is None:
            hidden = model.embed_tokens(input_ids[rows])
            residual.start(batch)
        for layer in layers:
            hidden = layer(places, hidden, batch)
    hidden = residual.final_norm(hidden, batch, model.norm)
    if batch is whole:
        return hidden
    backend.init_forward_metadata(whole)
    out = hidden.new_zeros((input_ids.shape[0], hidden.shape[1]))
    out[rows] = hidden
    return out


def _rows(run: Pass, cuts: Sequence[int], device: Any) -> torch.Tensor:
    """The rows of the whole batch that are computed."""
    pieces, at = [], 0
    for share, cut in zip(run.shares, cuts, strict=True):
        pieces.append(torch.arange(at + cut, at + share.tokens, device=device))
        at += share.tokens
    return torch.cat(pieces)


def _without(whole: Any, run: Pass, cuts: Sequence[int], rows: torch.Tensor) -> Any:
    """The batch without the first tokens of its requests: they are a part of their prefix."""
    batch = copy.copy(whole)
    tokens = [share.tokens - cut for share, cut in zip(run.shares, cuts, strict=True)]
    prefix = [share.prefix + cut for share, cut in zip(run.shares, cuts, strict=True)]
    batch.input_ids = whole.input_ids[rows]
    batch.positions = whole.positions[rows]
    batch.out_cache_loc = whole.out_cache_loc[rows]
    batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = tokens, prefix
    batch.extend_num_tokens = sum(tokens)
    for name, values in (("extend_seq_lens", tokens), ("extend_prefix_lens", prefix)):
        like = getattr(whole, name)
        setattr(batch, name, torch.tensor(values, dtype=like.dtype, device=like.device))
    if whole.extend_start_loc is not None:
        starts = torch.cumsum(batch.extend_seq_lens, 0) - batch.extend_seq_lens
        batch.extend_start_loc = starts.to(whole.extend_start_loc.dtype)
    for name in ("num_token_non_padded", "global_num_token_non_padded"):
        like = getattr(whole, name, None)
        if like is not None:
            setattr(batch, name, torch.full_like(like, sum(tokens)))
    batch.residual_stream = None
    return batch
