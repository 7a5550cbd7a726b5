"""Which requests may be restored, and what of their prefix lies where when they are offered.

Whatever is refused here goes SGLang's own way and is counted under the reason. Scheduler's thread;
no side effects but a fresh match of the request's prefix.
"""

from __future__ import annotations

from sgl_kvtier.runtime.restore.restoration import Restoration
from sgl_kvtier.runtime.sglang.types import Req
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.types import PageKey, Span, Tier


def refusal(req: Req) -> str | None:
    """Why this request is left to SGLang, or None. Requests that need the outputs of prefix tokens
    cannot skip them.
    """
    if req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids):
        return "input log-probs"
    if req.return_hidden_states:
        return "hidden states"
    if getattr(req, "return_routed_experts", False) or getattr(req, "return_indexer_topk", False):
        return "routed experts"
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return "input embeddings"
    if req.multimodal_inputs is not None:
        return "multimodal"
    if req.token_indices_to_pool is not None or req.is_prefill_only:
        return "no generation"
    if req.beam_group is not None:
        return "beam search"
    if req.session is not None and req.session.streaming:
        return "streaming session"
    return None


def find(
    context: StepContext, req: Req, storage_start: int | None, keys: tuple[PageKey, ...]
) -> Restoration | str:
    """A waiting request's restoration by a fresh match, or why there is none. `keys` are pages in
    storage from page `storage_start` of the prompt on. Between the tree's pages and those there
    must be no gap; pages that are in both count as the tree's.
    """
    page = context.page
    req.init_next_round_input(context.tree)
    if req.prefix_len % page or req.host_hit_length % page:
        return "unaligned"
    resident, in_tree = req.prefix_len // page, (req.prefix_len + req.host_hit_length) // page
    host = context.host.slots_below(req.best_match_node)
    if len(host) != req.host_hit_length:
        return "host pages in use"
    if in_tree > resident and context.host.write_back:
        # SGLang frees host copies of pages that are on the device too, pinned or not
        return "write-back"
    if storage_start is None:
        storage_start = in_tree
    if storage_start > in_tree:
        return "gap"
    end = max(storage_start + len(keys), in_tree)
    sources = ((Span(resident, in_tree), Tier.DRAM), (Span(in_tree, end), Tier.SSD))
    return Restoration(
        rid=req.rid,
        req=req,
        prompt_tokens=len(req.full_untruncated_fill_ids),
        resident=resident,
        pages=end,
        sources=tuple((span, tier) for span, tier in sources if span),
        keys=keys[in_tree - storage_start :],
        host_slots=host,
    )
