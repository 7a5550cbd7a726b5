"""A whole tick beside running forwards: it plans, loads, settles and splices without waiting for the
device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import device_pools
import pytest
import torch
from place import PLACES, Place

from sgl_kvtier.lab.audit import Audit
from sgl_kvtier.policy import messages
from sgl_kvtier.policy.messages import Compute, Mode, StepPlan
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.scheduler.tick import RestoreTick
from sgl_kvtier.runtime.scheduler.view import Views
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Link, PageKey, Span, Tier

PAGES = 8


class Allocator:
    """Hands out whole device pages in order, as tensors on the device, which it never reads."""

    def __init__(self, place: Place, pages: range) -> None:
        self._place, self._free = place, list(pages)
        self.freed = 0

    def available_size(self) -> int:
        return len(self._free) * self._place.page

    def alloc(self, tokens: int) -> torch.Tensor | None:
        count = tokens // self._place.page
        taken, self._free = self._free[:count], self._free[count:]
        # From pinned memory: a copy that the scheduler need not wait for.
        slots = device_pools.slots(taken, self._place.page)
        if self._place.on_card:
            return slots.pin_memory().to("cuda", non_blocking=True)
        return slots

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        self.freed += len(slots)


class HostPages:
    """Where bounce pages come from: the highest of the real host pool."""

    def __init__(self, host: Any) -> None:
        self.size_per_token = 4
        self.anchor_entry = SimpleNamespace(host_pool=host)
        self._next = self.size = host.size
        self.freed = 0

    def alloc(self, tokens: int, **how: Any) -> torch.Tensor:
        self._next -= tokens
        return torch.arange(self._next, self._next + tokens)

    def free(self, slots: torch.Tensor) -> None:
        self.freed += len(slots)


class Store:
    """A backend whose pages are in the bounce pages already when it is asked for them."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self.read: dict[PageKey, torch.Tensor] = {}

    def begin_read(
        self, keys: Any, slots: torch.Tensor, deadline_s: float, on_page: Callable[..., None]
    ) -> Any:
        for index, page in enumerate(slots.view(-1, self._host.page_size)):
            self.read[keys[index]] = page.clone()
            on_page(index, ReadOutcome.OK)
        return SimpleNamespace(cancel=lambda: None, done=True)


class Scene:
    """One restoration of eight stored pages in real pools, and a planner that does as it is told."""

    def __init__(self, where: str) -> None:
        io, layout = (
            ("kernel", "page_first") if where == "cuda" else ("direct", "page_first_direct")
        )
        self.place = Place(where, io, device_pools.pools(where, layout))
        self.place.warm()
        controller = self.place.controller
        self.store = Store(self.place.host)
        host = HostPages(self.place.host)
        self.allocator = Allocator(self.place, range(8, 60))
        tree = SimpleNamespace(
            page_size=self.place.page,
            token_to_kv_pool_allocator=self.allocator,
            cache_controller=SimpleNamespace(
                mem_pool_host=host,
                storage_backend=self.store,
                write_policy="write_through",
                **_copying(controller),
            ),
            req_to_token_pool=SimpleNamespace(available_size=lambda: 4),
            evictable_size=lambda: 0,
            evict_host=None,
            unlock=lambda lock: None,
            is_chunk_cache=lambda: True,
            ongoing_prefetch={},
            tp_world_size=1,
        )
        self.engine = RestoreEngine(
            StepContext(tree), PageMover(self.place.copies, self.place.page), 0, lambda _: None
        )
        keys = tuple(PageKey(bytes([n]) * 32) for n in range(PAGES))
        prompt = (PAGES + 1) * self.place.page
        self.r = Restoration(
            "r", None, prompt, 0, PAGES, ((Span(0, PAGES), Tier.STORAGE),), keys, torch.empty(0)
        )
        self.r.mode = Mode.BOTH
        self.engine.begin(self.r)
        self.told: list[Any] = []
        self.plan = StepPlan()
        planner = SimpleNamespace(observe=self.told.append, step=lambda view: self.plan)
        turns = SimpleNamespace(look=lambda scheduler: None)
        self.tick = RestoreTick(
            self.engine,
            planner,
            Agreement(tree, 1, first=True),
            turns,
            Views(self.engine, 256, host.size),
        )
        self.scheduler = SimpleNamespace(
            chunked_req=None, waiting_queue=[], last_batch=None, is_mixed_chunk=False,
            running_batch=SimpleNamespace(reqs=[], batch_is_full=False),
        )  # fmt: skip

    def run(self, plan: StepPlan) -> None:
        """One tick with this plan."""
        self.plan = plan
        self.tick.run(self.scheduler)
        assert self.engine.counters.planner_failures == 0

    def until_landed(self) -> None:
        """Ticks until every page has landed."""
        until = time.monotonic() + 60
        while not all(self.r.is_landed(page) for page in range(PAGES)):
            assert time.monotonic() < until, "pages did not land"
            self.engine.mover.wait_news(0.01)
            self.run(StepPlan(computes=(Compute("r", Span(0, 0), 0),)))

    def source(self) -> torch.Tensor:
        """The host slots from which the pages came, the lowest first."""
        return torch.cat([self.store.read[key] for key in self.r.keys])

    def close(self) -> None:
        self.engine.close()


def _copying(controller: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(controller).items()
        if name not in ("mem_pool_host", "storage_backend")
    }


def loads(*spans: Span) -> StepPlan:
    """A plan that loads these pages, and grants nothing yet."""
    return StepPlan(
        loads=tuple(
            messages.Load("r", span, Tier.STORAGE, Link.STORAGE_TO_DEVICE, 60.0) for span in spans
        ),
        computes=(Compute("r", Span(0, 0), 0),),
    )


@contextmanager
def no_waiting(place: Place) -> Iterator[None]:
    """On a card whatever waits for it inside raises."""
    if not place.on_card:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=PLACES)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    threads = torch.get_num_threads()
    made = Scene(request.param)
    yield made
    made.close()
    torch.set_num_threads(threads)


def test_whole_ticks_that_load_settle_and_splice_never_wait_for_the_device(scene):
    place = scene.place
    with place.launched():
        place.sleep(0.05)
    with no_waiting(place):
        scene.run(loads(Span(6, 8), Span(2, 6), Span(0, 2)))
    scene.until_landed()
    with place.launched():
        place.sleep(0.05)
    with no_waiting(place):
        scene.run(StepPlan(computes=(Compute("r", Span(0, 8), 0),)))
        slots = scene.engine.splice(scene.r, Span(0, 8))
        scene.run(StepPlan())
    assert len(slots) == PAGES * place.page
    assert place.holds_slots(scene.source(), slots)


def test_loads_of_an_abandoned_request_give_their_pages_back_without_waiting(scene):
    place = scene.place
    with place.launched():
        place.sleep(0.05)
    with no_waiting(place):
        scene.run(loads(Span(0, 8)))
        scene.engine.abandon(scene.r, "aborted")
    until = time.monotonic() + 60
    while scene.engine.busy and time.monotonic() < until:
        scene.engine.mover.wait_news(0.01)
        with no_waiting(place):
            scene.run(StepPlan())
    assert not scene.engine.busy and scene.engine.context.slots.tokens == 0
    assert scene.allocator.freed == PAGES * place.page


def test_an_audit_on_the_device_finds_what_was_loaded_and_what_was_spoiled(scene):
    scene.run(loads(Span(0, 8)))
    scene.until_landed()
    place, engine = scene.place, scene.engine
    kept = _kept(scene)
    engine.context.tree.cache_controller.storage_backend = kept
    controller = SimpleNamespace(**{**vars(place.controller), "storage_backend": kept})
    engine.audit = Audit(controller, place.page, engine.counters)
    slots = torch.cat([load.device_slots for load in scene.r.loads])
    place.device.k_buffer[1].view(torch.uint8)[slots[3 * place.page]] ^= 1
    engine.splice(scene.r, Span(0, 8))
    engine.audit.close()
    assert dict(engine.counters.audited_pages) == {"equal": 7, "differs": 1}


def _kept(scene: Scene) -> Any:
    from sgl_kvtier.runtime.backend.host_pages import parts_of

    def begin_read_into(keys: Any, parts: Any) -> Any:
        for key, into in zip(keys, parts, strict=True):
            [page] = parts_of(scene.place.host, 1, scene.store.read[key])
            for view, data in zip(into, page, strict=True):
                view[:] = data
        outcomes = [ReadOutcome.OK] * len(keys)
        return SimpleNamespace(wait=lambda _s: True, outcomes=outcomes)

    return SimpleNamespace(begin_read=None, begin_read_into=begin_read_into)
