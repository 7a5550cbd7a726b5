"""What of a request's prefix lies where when it is offered to the planner.

Whatever is refused here goes SGLang's own way and is counted under the reason. Scheduler's thread;
no side effects but a fresh match of the request's prefix.
"""

from __future__ import annotations

from sgl_kvtier.runtime.restore.restoration import Restoration
from sgl_kvtier.runtime.sglang.requests import match, prompt_tokens
from sgl_kvtier.runtime.sglang.types import Req
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.types import PageKey, Span, Tier


def find(
    context: StepContext, req: Req, storage_start: int | None, keys: tuple[PageKey, ...]
) -> Restoration | str:
    """A waiting request's restoration by a fresh match, or why there is none. `keys` are pages in
    storage from page `storage_start` of the prompt on. Between the tree's pages and those there
    must be no gap; pages that are in both count as the tree's.
    """
    page = context.page
    there = match(req, context.tree)
    if there.device % page or there.host % page:
        return "unaligned"
    resident, in_tree = there.device // page, there.tokens // page
    host = context.host.slots_below(req.best_match_node)
    if len(host) != there.host:
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
        prompt_tokens=prompt_tokens(req),
        resident=resident,
        pages=end,
        sources=tuple((span, tier) for span, tier in sources if span),
        keys=keys[in_tree - storage_start :],
        host_slots=host,
    )
