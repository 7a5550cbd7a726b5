"""Configurations that cannot restore or look ahead, and the flag or setting that corrects them.

The arguments are SGLang's resolved ones: a user's value may be in another field by then, as
`--enable-dp-attention` is in `attn_dp_size`. So tests/runtime/test_refusals.py tries each refusal
with a real command line. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.runtime.backend.host_pages import CONTIGUOUS
from sgl_kvtier.runtime.cpu.platform import works_at_once
from sgl_kvtier.runtime.sglang import anchors, slot_pools

_ANYWAY = 'policy.restore = "fastest" in kvtier.json asks for it anyway'
_WHOLE = "--disable-hybrid-swa-memory keeps whole sequences in all layers, in more device memory"
_NO_FLAG = 'no flag changes this; policy.restore = "off" in kvtier.json ends this line'


_WITH_DRAFT_KV = ("EAGLE", "EAGLE3", "STANDALONE")
"""Algorithms whose draft KV is stored in the target's slots: as tail layers of the target's pages
(MTP), or in a pool of its own. SGLang resolves NEXTN to EAGLE.
"""


@dataclass(frozen=True)
class Refusal:
    """Why a server cannot restore or look ahead. `holds` gets the object that its list names."""

    what: str
    remedy: str
    holds: Callable[[Any], bool] = lambda _: True

    def __str__(self) -> str:
        return f"{self.what} ({self.remedy})"


def _ranks_come_or_differ(args: Any) -> bool:
    return bool(args.dwdp_size > 1 or args.ep_join_mode is not None)


def _prefill_is_tiled(args: Any) -> bool:
    # See Scheduler.init_deterministic_inference_config: it admits nothing with a shorter chunk.
    backend = args.prefill_attention_backend or args.attention_backend
    return bool(args.enable_deterministic_inference) and backend == "flashinfer"


def _is_nvidia(args: Any) -> bool:
    # AMD's torch calls its devices "cuda" as well.
    return bool(args.device == "cuda" and torch.version.hip is None)


def _writes_wait() -> bool:
    """Whether the scheduler waits for forwards to have read their inputs before it overwrites them.
    SGLang does on NVIDIA GPUs (`Scheduler._apply_war_barrier`).
    """
    from sglang.srt.environ import envs

    barrier = getattr(envs, "SGLANG_ENABLE_WAR_BARRIER", None)
    return barrier is not None and bool(barrier.get())


OF_MODEL = (
    Refusal(
        "the radix cache is off",
        "SGLang has it off for embedding models, and for multimodal ones unless --model-impl "
        "sglang is given",
        lambda ctx: ctx.disable_radix_cache,
    ),
    Refusal(
        "states and window pages in one model: nobody has restored both together",
        _NO_FLAG,
        lambda ctx: ctx.is_hybrid_ssm and ctx.is_hybrid_swa,
    ),
)
"""Checked with the context in which SGLang builds its cache."""

OF_STATES = (
    Refusal(
        "states on an accelerator that is not NVIDIA's: SGLang may give a request another state "
        "while a forward still reads which one it has",
        "SGLANG_ENABLE_WAR_BARRIER=1 in the environment",
        lambda args: args.device != "cpu" and not _is_nvidia(args) and not _writes_wait(),
    ),
)
"""For models whose linear layers keep states. Checked with the resolved arguments."""

OF_ARGUMENTS = (
    Refusal(
        "chunked prefill is off",
        "--chunked-prefill-size 4096",
        lambda args: (args.chunked_prefill_size or 0) <= 0,
    ),
    Refusal(
        "pages of one token, SGLang's default on CUDA, which are slow to store as well",
        "--page-size 64",
        lambda args: args.page_size == 1,
    ),
    Refusal(
        "host pages in pieces",
        "--hicache-mem-layout page_first_direct with --hicache-io-backend direct, or page_first "
        "with kernel",
        lambda args: args.hicache_mem_layout not in CONTIGUOUS,
    ),
    Refusal(
        "host memory is a buffer only",
        "--hicache-host-memory-mode cache",
        lambda args: args.hicache_host_memory_mode == "buffer_only",
    ),
    Refusal(
        "speculative decoding in another way than EAGLE, EAGLE3, NEXTN (MTP), STANDALONE or NGRAM: "
        "SGLang keeps a draft's KV in other places, or computes it from tokens that the names of "
        "its pages do not tell",
        "--speculative-algorithm EAGLE, or omit it",
        lambda args: args.speculative_algorithm not in (None, "NGRAM", *_WITH_DRAFT_KV),
    ),
    Refusal(
        "a draft of several models (multi-layer EAGLE): SGLang keeps the KV of the first one alone",
        "omit --enable-multi-layer-eagle",
        lambda args: args.enable_multi_layer_eagle,
    ),
    Refusal(
        "a draft tree of several branches: nobody has run it with restored pages",
        "--speculative-eagle-topk 1",
        lambda args: (
            args.speculative_algorithm in _WITH_DRAFT_KV and args.speculative_eagle_topk != 1
        ),
    ),
    Refusal(
        "deterministic inference with FlashInfer: prefills are cut on its tiles, and restoring "
        "cuts them elsewhere",
        "--prefill-attention-backend triton, or omit --enable-deterministic-inference",
        _prefill_is_tiled,
    ),
    Refusal(
        "experts whose weights move between ranks, or whose ranks join later",
        "omit --dwdp-size and --elastic-ep-join-mode",
        _ranks_come_or_differ,
    ),
    Refusal(
        "prefill and decode are apart",
        "omit --disaggregation-mode",
        lambda args: args.disaggregation_mode != "null",
    ),
    Refusal(
        "pipeline stages on several machines",
        "--nnodes 1, or --pp-size 1",
        lambda args: args.pp_size > 1 and args.nnodes > 1,
    ),
    Refusal(
        "context parallelism of attention", "--attn-cp-size 1", lambda args: args.attn_cp_size > 1
    ),
    Refusal("context parallelism of decoding", "--dcp-size 1", lambda args: args.dcp_size > 1),
)
"""Checked with the resolved arguments."""

NOT_MIXED: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("speculative decoding", lambda args: args.speculative_algorithm is not None),
    ("data-parallel attention", lambda args: args.attn_dp_size > 1),
    ("pipeline stages", lambda args: args.pp_size > 1),
)
"""With what `--enable-mixed-chunk` was never run with restored pages: chunks are not mixed with
decoding there. Checked with the resolved arguments.
"""

UNPROVEN = (
    Refusal(
        "more than one rank: auto waits for a run on two GPUs",
        _ANYWAY,
        lambda args: args.tp_size * args.pp_size > 1,
    ),
    Refusal(
        "neither a CPU nor an NVIDIA GPU: nothing was run on this kind of device",
        _ANYWAY,
        lambda args: args.device != "cpu" and not _is_nvidia(args),
    ),
)
"""For servers whose policy.restore is auto. Checked with the resolved arguments."""

SIDE_PAGES = Refusal("the model keeps other pages beside its KV pages", _NO_FLAG)
"""Checked with the pools built for the model, where its settings did not tell."""

WIDTHS = Refusal("K and V of different widths: nobody has restored such pages", _NO_FLAG)
"""Checked with the pools built for the model, too."""

UNREADABLE = Refusal(
    "the check at start cannot read these pages back from the device",
    "omit the variables SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT; for "
    f"other pages {_NO_FLAG}",
)
"""Depends on the layout of pages in the pools that were built."""

STAGES = Refusal("not looking ahead: more than one pipeline stage", "--pp-size 1")
UNEVEN = Refusal(
    "not looking ahead: host memory does not hold equally many pages on all ranks",
    "--max-total-tokens N gives all ranks equal pools",
)
WRITE_BACK = Refusal(
    "SGLang chooses what leaves the device: with write-back it has to copy first",
    "--hicache-write-policy write_through",
)


def unsupported(args: Any, ctx: Any) -> str | None:
    """Why this server can neither restore nor look ahead, or None."""
    of_states = OF_STATES if ctx.is_hybrid_ssm else ()
    return _told(
        [*_holding(OF_MODEL, ctx), *_holding(of_states, args), *_holding(OF_ARGUMENTS, args)]
    )


def not_mixed(args: Any, anchored: bool) -> str | None:
    """Why no step of this server has both a chunk and requests that decode, although the flag asks
    for it; None if they are mixed, or nothing asks for it. `anchored`: the model has windows or
    states.
    """
    if not args.enable_mixed_chunk:
        return None
    if anchored:
        return "windows or states"
    return next((what for what, holds in NOT_MIXED if holds(args)), None)


def anchors_of(ctx: Any) -> str | None:
    """The kind of anchor of the model for which SGLang builds its cache: windows or states; None
    where the KV pages are enough.
    """
    return "windows" if ctx.is_hybrid_swa else "states" if ctx.is_hybrid_ssm else None


def unproven(args: Any, policy: PolicyConfig) -> str | None:
    """Why a server whose policy.restore is auto does not restore although it could, or None. On
    such a server, naming a mode turns it on: fastest, both, load or compute.
    """
    if policy.restore != "auto":
        return None
    return _told(_holding(UNPROVEN, args))


def looks_ahead_by_default(args: Any) -> bool:
    """Whether policy.prefetch and policy.eviction mean on where they are auto: on servers that
    restore by default and have device memory of their own to prefetch into.
    """
    return not works_at_once(args.device) and not _holding(UNPROVEN, args)


def lacking(tree: Any) -> str | None:
    """Why the pools built for the model rule out restoring, or None. In addition to the KV pages,
    only pools with the same slots are supported (`slot_pools`).
    """
    from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

    beside = [kind.name for kind in tree.tree_components if kind != BASE_COMPONENT_TYPE]
    kinds = anchors.unknown(tree, beside)
    pools = slot_pools.foreign(tree)
    if kinds or pools:
        return f"{', '.join([*kinds, *pools])}: {SIDE_PAGES}"
    return str(WIDTHS) if slot_pools.any_unequal_widths(tree.cache_controller) else None


def _holding(refusals: tuple[Refusal, ...], asked: Any) -> list[Refusal]:
    return [refusal for refusal in refusals if refusal.holds(asked)]


def _told(refusals: list[Refusal]) -> str | None:
    return "; ".join(map(str, refusals)) or None
