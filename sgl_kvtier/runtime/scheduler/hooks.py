"""Hooks in SGLang's scheduler processes. On caches without our parts, each runs SGLang's own
method.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sgl_kvtier.runtime.cpu.platform import works_at_once
from sgl_kvtier.runtime.hints.scheduler import refuse_kv_hints
from sgl_kvtier.runtime.scheduler import queue
from sgl_kvtier.runtime.scheduler import setup as restore_setup
from sgl_kvtier.runtime.scheduler.parts import parts_of
from sgl_kvtier.runtime.sglang import step, tree_ranks
from sgl_kvtier.runtime.sglang.types import Req, Scheduler

logger = logging.getLogger(__name__)

_NAP_S = 0.001


def build_tree(
    original: Callable[..., Any], ctx: Any, *args: Any, cache_class: Any = None, **kwargs: Any
) -> Any:
    """Hook around SGLang's choice of a cache: ours if settings ask for it and it is possible."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    view = resolving_view(ctx.server_args)
    config = (
        restore_setup.wanted(view)
        if ctx.enable_hierarchical_cache and cache_class is None
        else None
    )
    if config is None:
        if cache_class is not None:
            kwargs["cache_class"] = cache_class
        return original(ctx, *args, **kwargs)
    line = restore_setup.own_way(view, ctx, config.policy)
    if line is not None:
        logger.warning("%s", line)
        return original(ctx, *args, **kwargs)
    from sgl_kvtier.runtime.scheduler.radix_cache import KVTierRadixCache

    return original(ctx, *args, cache_class=KVTierRadixCache, **kwargs)


def run_tick(result: None, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """Hook after SGLang's own cache events."""
    del result, args, kwargs
    parts = parts_of(scheduler.tree_cache)
    refuse_kv_hints(scheduler, parts)
    if parts is not None:
        if parts.keeps_chunks_apart:
            step.never_mix(scheduler)
        parts.tick.run(scheduler)


def adder_class(result: Any, scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
    del result, args, kwargs
    if parts_of(scheduler.tree_cache) is None:
        return None
    from sgl_kvtier.runtime.scheduler.prefill_adder import KVTierPrefillAdder

    return KVTierPrefillAdder


def order_queue(result: None, policy: Any, waiting: list[Req], *args: Any, **kwargs: Any) -> None:
    """Hook after SGLang has ordered its queue."""
    del result, args, kwargs
    parts = parts_of(policy.tree_cache)
    if parts is not None and queue.in_order_of_arrival(policy):
        parts.order_queue(waiting)


def repair_parked(result: Any, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """Hook after a batch was built without the waiting request in the chunked-prefill slot: SGLang
    has counted a chunk of it that is not in the batch. It would take the request's first output
    token for that of a middle chunk.
    """
    del args, kwargs
    batch, parked = result[0], step.in_slot(scheduler)
    if (
        batch is None
        or parked is None
        or parts_of(scheduler.tree_cache) is None
        or any(req is parked for req in batch.reqs)
    ):
        return
    parked.inflight_middle_chunks -= 1
    batch.contains_last_prefill_chunk = True


def read_first(
    original: Callable[..., bool], scheduler: Scheduler, req: Req, *args: Any, **kwargs: Any
) -> bool:
    """Hook around SGLang's check whether a request has lost pages since it was queued. Pages read
    for it since then count too. If it has to wait, the state slot and the planned state copy that
    its match left are undone: they may be another request's by its next match.
    """
    parts = parts_of(scheduler.tree_cache)
    if parts is None:
        return original(scheduler, req, *args, **kwargs)
    waits = parts.turns.at_turn(scheduler, req) or original(scheduler, req, *args, **kwargs)
    if waits and parts.context.anchors is not None:
        parts.context.anchors.not_admitted(req)
    return waits


def after_pass(result: Any, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """Hook after SGLang has looked for a batch. If there is none but pages are in flight, it waits
    until one lands, so that the threads that load it get the interpreter. If requests wait for
    storage, memory or a session, it sleeps briefly: SGLang's loop would keep a core busy. Not with
    pipeline stages, where a pass is of one of several batches and others may run.
    """
    del args, kwargs
    parts = parts_of(scheduler.tree_cache)
    if parts is None:
        return
    parts.turns.passed(result.batch_to_run is not None)
    parts.views.passed(result.batch_to_run)
    room = parts.context.room
    short, room.is_short = room.is_short, False
    if result.batch_to_run is not None:
        return
    if parts.engine.loads:
        parts.engine.mover.wait_news(_NAP_S)
    elif short or (tree_ranks.stages(scheduler.tree_cache) == 1 and step.waiting(scheduler)):
        time.sleep(_NAP_S)


def time_batch(
    original: Callable[..., Any], scheduler: Scheduler, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    parts = parts_of(scheduler.tree_cache)
    if parts is None:
        return original(scheduler, batch, *args, **kwargs)
    if parts.engine.guard is not None:
        parts.engine.guard.launching(batch)
    if not batch.forward_mode.is_extend():
        return original(scheduler, batch, *args, **kwargs)
    clock, attach = parts.tick.clock, parts.engine.attach
    stream = None if works_at_once(scheduler.device) else _forward_stream(scheduler)
    timed = clock.launch(batch, stream)
    completed = [] if attach is None else attach.launching(batch)
    result = original(scheduler, batch, *args, **kwargs)
    if attach is not None:
        attach.launched(completed, stream)
    layers = parts.engine.layers
    whole = (layers is None or layers.all_computed()) and step.is_longest(batch)
    clock.launched(timed, batch, whole=whole)
    return result


def _forward_stream(scheduler: Scheduler) -> Any:
    """The stream of SGLang's forwards: separate from the scheduler's, except with overlap off."""
    apart = scheduler.enable_overlap or tree_ranks.stages(scheduler.tree_cache) > 1
    return scheduler.forward_stream if apart else scheduler.schedule_stream


def time_result(result: None, scheduler: Scheduler, batch: Any, *args: Any, **kwargs: Any) -> None:
    del result, args, kwargs
    parts = parts_of(scheduler.tree_cache)
    if parts is not None:
        parts.tick.clock.processed(batch)
        if parts.engine.guard is not None:
            parts.engine.guard.processed(batch)
        parts.engine.result_processed(batch)


def is_fully_idle(
    original: Callable[..., bool], scheduler: Scheduler, *args: Any, **kwargs: Any
) -> bool:
    """Hook around SGLang's check: a server is not idle while we have transfers or slots in its
    pools. They are ended here on a paused server, which runs no step that could end them, and where
    SGLang is about to empty its pools or to give back their memory: it asks so only of a server
    that has nothing to do, and ends it if it is not idle.
    """
    idle = original(scheduler, *args, **kwargs)
    parts = parts_of(scheduler.tree_cache)
    if parts is None or kwargs.get("for_health_check") or (args and args[0]):
        return idle
    empties = "ignore_waiting" in kwargs
    if empties and not idle and parts.end_copies():
        idle = original(scheduler, *args, **kwargs)
    return idle and parts.is_idle(scheduler._engine_paused or empties)


def count_private(
    result: tuple[int, int], checker: Any, *args: Any, **kwargs: Any
) -> tuple[int, int] | None:
    del args, kwargs
    parts = parts_of(checker.tree_cache)
    if parts is None:
        return None
    slots = parts.context.slots
    return result[0] + slots.tokens, result[1] + slots.anchor_slots
