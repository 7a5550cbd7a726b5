"""Port to a step of SGLang's scheduler: its queue, its slot for chunked prefill, what decodes.

Scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl_kvtier.runtime.sglang.types import Handle, Req, Scheduler


def waiting(scheduler: Scheduler | None) -> Sequence[Req]:
    """Waiting requests, in the order they will run. None, before the first step: none."""
    return scheduler.waiting_queue if scheduler is not None else ()


def waiting_of(scheduler: Scheduler | None, handle: Handle) -> Req | None:
    """The waiting request that the cache knows by this handle."""
    return next((req for req in waiting(scheduler) if req.cache_request_handle == handle), None)


def in_slot(scheduler: Scheduler) -> Req | None:
    """The request whose prompt is computed in chunks; one at a time."""
    return scheduler.chunked_req


def put_in_slot(scheduler: Scheduler, req: Req) -> None:
    """Gives the free slot to a request that has a row."""
    scheduler.chunked_req = req


def end_between_chunks(scheduler: Scheduler, req: Req) -> None:
    """Ends an aborted request that has a row and no slot, as SGLang ends the one in the slot."""
    holder, pending = scheduler.chunked_req, scheduler._pending_chunked_abort_req
    scheduler.chunked_req = scheduler._pending_chunked_abort_req = req
    try:
        scheduler.process_pending_chunked_abort()
    finally:
        scheduler.chunked_req, scheduler._pending_chunked_abort_req = holder, pending


def retract(scheduler: Scheduler, req: Req) -> None:
    """Puts a request that has a row and no slot back into the queue, to begin anew."""
    from sglang.srt.managers.schedule_batch import retract_all

    retract_all(
        reqs=[req],
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=scheduler.hisparse_coordinator,
        offload_kv=False,
    )
    scheduler._add_request_to_queue(req)


def uncounted_tokens(checker: Any, without_slot: Sequence[Req], page_tokens: int) -> int:
    """Tokens of these requests' rows that are not the tree's and that SGLang's memory check does
    not count.
    """
    from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens

    counted = checker._requests_owning_rows() if without_slot else ()
    return sum(
        kv_private_tokens(req.kv, page_tokens)
        for req in without_slot
        if not any(owner is req for owner in counted)
    )


def slot_is_open(scheduler: Scheduler, rows: Any, free: bool) -> bool:
    """Whether a request may take it in this step, where it is `free` or its holder may give it up.
    `rows` is SGLang's pool of request rows.
    """
    return free and not scheduler.running_batch.batch_is_full and rows.available_size() > 0


def decoding(scheduler: Scheduler) -> list[Req]:
    """Requests that decode, and those of the last batch's prompts, which join in this step."""
    running, last = list(scheduler.running_batch.reqs), scheduler.last_batch
    if last is not None and last is not scheduler.running_batch and last.forward_mode.is_extend():
        running += [req for req in last.reqs if req is not scheduler.chunked_req]
    return running


def decoding_count(scheduler: Scheduler) -> int:
    """How many decode already."""
    return len(scheduler.running_batch.reqs)


def computes(scheduler: Scheduler) -> bool:
    """Whether a batch is under way, or one is certain to follow."""
    return bool(
        scheduler.running_batch.reqs
        or scheduler.last_batch is not None
        or scheduler.chunked_req is not None
    )


def all_requests(scheduler: Scheduler) -> set[str]:
    """Ids of all that wait, run, or are between two chunks, in every pipeline stage's batches."""
    there = {req.rid for req in scheduler.waiting_queue}
    stages = (*getattr(scheduler, "running_mbs", ()), *getattr(scheduler, "mbs", ()))
    for batch in (scheduler.running_batch, scheduler.last_batch, *stages):
        there.update(req.rid for req in (batch.reqs if batch is not None else ()))
    if scheduler.chunked_req is not None:
        there.add(scheduler.chunked_req.rid)
    return there
