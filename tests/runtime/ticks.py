"""Ticks without a server: trees that are bare, and a planner that plans nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sgl_kvtier.policy.messages import StepPlan
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.scheduler.tick import RestoreTick


def bare_tree(**more: Any) -> Any:
    """A tree with a host pool of 64 tokens, in pages of 16, and no storage."""
    pool = SimpleNamespace(size=64)
    host = SimpleNamespace(anchor_entry=SimpleNamespace(host_pool=pool), size_per_token=4)
    return SimpleNamespace(
        page_size=16,
        token_to_kv_pool_allocator=None,
        cache_controller=SimpleNamespace(mem_pool_host=host, storage_backend=None),
        unlock=lambda lock: None,
        **more,
    )


def idle_tick(
    engine: Any,
    ranks: int = 2,
    *,
    first: bool = True,
    told: list[Any] | None = None,
    ahead: Any = None,
) -> RestoreTick:
    """The tick of one of so many ranks. `told` is what its planner observes."""
    planner: Any = SimpleNamespace(
        observe=[].append if told is None else told.append, step=lambda view: StepPlan()
    )
    turns: Any = SimpleNamespace(look=lambda scheduler: None)
    views: Any = SimpleNamespace(of=lambda scheduler, now: None)
    agreement = Agreement(engine.context.tree, ranks, first=first)
    return RestoreTick(engine, planner, agreement, turns, views, ahead)
