"""Access to a step of SGLang's scheduler: its queue, its chunked-prefill slot, decoding requests.

Scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl_kvtier.runtime.sglang.types import Handle, Req, Scheduler


def waiting(scheduler: Scheduler | None) -> Sequence[Req]:
    """Waiting requests, in the order in which they will run; empty before the first step."""
    return scheduler.waiting_queue if scheduler is not None else ()


def waiting_of(scheduler: Scheduler | None, handle: Handle) -> Req | None:
    """The waiting request that has this cache handle, or None. Two requests with one id, which
    SGLang accepts from several tokenizer processes, have equal handles.
    """
    return next((req for req in waiting(scheduler) if req.cache_request_handle is handle), None)


def in_slot(scheduler: Scheduler) -> Req | None:
    """The request in the chunked-prefill slot, of which there is one."""
    return scheduler.chunked_req


def slot_is_open(scheduler: Scheduler, rows: Any) -> bool:
    """Whether a request may take the slot in this step. `rows` is SGLang's pool of request rows."""
    running, last = scheduler.running_batch, scheduler.last_batch
    if not running.reqs and last is not None and last.forward_mode.is_extend():
        running = last  # which is the running one in this step, as after a mixed one
    return scheduler.chunked_req is None and not running.batch_is_full and rows.available_size() > 0


def admits(adder: Any) -> bool:
    """Whether waiting requests may run with another one in the pass of this prefill adder."""
    most = adder.prefill_max_requests
    return not adder.running_batch.batch_is_full and (
        most is None or len(adder.can_run_list) + 1 < most
    )


def is_longest(batch: Any) -> bool:
    """Whether no other rank of data-parallel attention has more tokens in this prefill step. All
    ranks leave a forward together, so if one has more tokens, it determines the duration.
    """
    counts = batch.global_num_tokens
    return counts is None or int(batch.extend_num_tokens) >= max(counts)


def decoding(scheduler: Scheduler) -> list[Req]:
    """Requests that decode, and those that the last batch prefilled, which join in this step."""
    running, last = list(scheduler.running_batch.reqs), scheduler.last_batch
    if last is not None and last is not scheduler.running_batch and last.forward_mode.is_extend():
        running += [req for req in last.reqs if req is not scheduler.chunked_req]
    return running


def decoding_count(scheduler: Scheduler) -> int:
    """How many requests decode already."""
    last = scheduler.last_batch
    mixed = () if last is None or last is scheduler.running_batch else decoded_in(last)
    return len(scheduler.running_batch.reqs) + len(mixed)


def decoded_in(batch: Any) -> Sequence[Req]:
    """Requests that decode in a batch with prefill (--enable-mixed-chunk): its last ones, of one
    token each.
    """
    return batch.decoding_reqs or () if batch.forward_mode.is_extend() else ()


def mixed(scheduler: Scheduler) -> bool:
    """Whether requests decoded in the last batch although it has prefill."""
    return scheduler.last_batch is not None and bool(decoded_in(scheduler.last_batch))


def mixes(scheduler: Scheduler) -> bool:
    """Whether requests that decode would do so in a step with a chunk."""
    return bool(scheduler.is_mixed_chunk) and not any(
        req.return_logprob or req.beam_group is not None for req in decoding(scheduler)
    )


def never_mix(scheduler: Scheduler) -> None:
    """From now on no step has both a chunk and requests that decode."""
    scheduler.is_mixed_chunk = False


_SHORTEST_PREFILL = 256
"""Tokens. In a step in which a replica prefills, one with fewer is taken for one that decodes."""


def decoding_elsewhere(batch: Any) -> int:
    """How many requests the other replicas of data-parallel attention decode in the step of this
    batch. 0 without a batch, when no replica has one, and where SGLang keeps their numbers of
    tokens to itself (its `require_mlp_tp_gather`).
    """
    counts = list(getattr(batch, "global_num_tokens", None) or ())
    if len(counts) < 2:
        return 0
    mode = batch.forward_mode
    own = batch.batch_size() if mode.is_decode() else batch.extend_num_tokens or 0
    own = 0 if mode.is_idle() or mode.is_prebuilt() else own
    counts.remove(own if own in counts else max(counts))  # some prefills count as more tokens
    if batch.is_extend_in_batch:
        counts = [count for count in counts if count < _SHORTEST_PREFILL]
    return int(sum(counts))


def computes(scheduler: Scheduler) -> bool:
    """Whether a batch is running, or one is certain to follow."""
    return bool(
        scheduler.running_batch.reqs
        or scheduler.last_batch is not None
        or scheduler.chunked_req is not None
    )


def all_requests(scheduler: Scheduler) -> set[str]:
    """Ids of all that wait, run, or are between two chunks, in all pipeline stages' batches."""
    there = {req.rid for req in scheduler.waiting_queue}
    stages = (*getattr(scheduler, "running_mbs", ()), *getattr(scheduler, "mbs", ()))
    for batch in (scheduler.running_batch, scheduler.last_batch, *stages):
        there.update(req.rid for req in (batch.reqs if batch is not None else ()))
    if scheduler.chunked_req is not None:
        there.add(scheduler.chunked_req.rid)
    return there
