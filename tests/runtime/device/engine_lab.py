"""The restore engine and its mover on a device that lies in wait: restorations begin, load, splice,
hang, give room and are given up as chance wants, while streams lag.

Pages that are given back are somebody else's at once: a forward writes the device slots, the host
writes the bounce pages. So an owner who let go too early is seen whatever the timing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_streams import PAGE, PAGES, Rig, slots_of

from sgl_kvtier.policy import messages
from sgl_kvtier.policy.messages import Mode
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Link, PageKey, Span, Tier

PREFIX = 8


class Allocator:
    """Whole pages in the order in which they were freed. `freed` is told what is given back."""

    def __init__(self, freed: Callable[[torch.Tensor], None]) -> None:
        self.free_pages = list(range(PAGES))
        self.size, self.size_per_token = PAGES * PAGE, 4
        self._freed = freed

    def available_size(self) -> int:
        return len(self.free_pages) * PAGE

    def alloc(self, tokens: int, **_: Any) -> torch.Tensor | None:
        count = tokens // PAGE
        if count > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return slots_of(*taken)

    def free(self, slots: torch.Tensor) -> None:
        self._freed(slots)
        self.free_pages = [int(slot) // PAGE for slot in slots[::PAGE]] + self.free_pages

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        self.free(slots)


class Store:
    """Reads pages into host memory when it is told to; one in ten fails."""

    def __init__(self, rig: Rig, chance: random.Random) -> None:
        self.rig, self.chance = rig, chance
        self.pending: list[tuple[Any, int, torch.Tensor, int, Callable[..., None]]] = []

    def begin_read(
        self,
        keys: Sequence[PageKey],
        slots: torch.Tensor,
        deadline_s: float,
        on_page: Callable[[int, ReadOutcome], None],
    ) -> Any:
        job = SimpleNamespace(cancelled=False)
        job.cancel = lambda: setattr(job, "cancelled", True)
        for index, page in enumerate(slots.view(-1, PAGE)):
            value = int.from_bytes(keys[index], "big")
            self.pending.append((job, index, page, value, on_page))
        return job

    def read(self) -> None:
        """The next page, if there is one."""
        if not self.pending:
            return
        job, index, page, value, on_page = self.pending.pop(0)
        if job.cancelled:
            on_page(index, ReadOutcome.CANCELLED)
            return
        self.rig.fill(page, value)
        fails = self.chance.random() < 0.1
        on_page(index, ReadOutcome.FAILED if fails else ReadOutcome.OK)


class EngineLab:
    """One scheduler process around `rig`. Call `end` when done."""

    def __init__(self, rig: Rig, seed: int = 0) -> None:
        self.rig, self.chance = rig, random.Random(seed)
        self.device = Allocator(lambda slots: rig.forward("their next owner", [], slots.tolist()))
        self.host = Allocator(lambda slots: rig.fill(slots, -1, "their next owner"))
        self.store = Store(rig, random.Random(seed + 1))
        tree = SimpleNamespace(
            page_size=PAGE,
            token_to_kv_pool_allocator=self.device,
            cache_controller=SimpleNamespace(
                mem_pool_host=self.host, storage_backend=self.store, write_policy="write_through"
            ),
            evict_host=None,
            unlock=lambda lock: None,
            is_chunk_cache=lambda: True,
        )
        mover = PageMover(rig.copies, PAGE)
        self.engine = RestoreEngine(StepContext(tree), mover, 0, lambda offer: None)
        self.rows: list[tuple[torch.Tensor, list[int]]] = []
        self.begun = self.spliced = self.given_up = self.written_off = 0

    # --- what a scheduler does ------------------------------------------------------------------

    def begin(self) -> Restoration | None:
        """Another request, of pages in storage. The value of a page is its key."""
        if len(self.engine.restorations) >= 3:
            return None
        self.begun += 1
        keys = tuple(
            PageKey((1000 * self.begun + page).to_bytes(32, "big")) for page in range(PREFIX)
        )
        sources = ((Span(0, PREFIX), Tier.STORAGE),)
        rid = f"r{self.begun}"
        r = Restoration(rid, None, (PREFIX + 1) * PAGE, 0, PREFIX, sources, keys, torch.empty(0))
        r.mode = Mode.BOTH
        self.engine.begin(r)
        return r

    def some(self) -> Restoration | None:
        alive = list(self.engine.restorations.values())
        return self.chance.choice(alive) if alive else None

    def load(self) -> None:
        r = self.some()
        if r is None:
            return
        taken = [page for load in r.loads for page in range(load.span.start, load.span.stop)]
        stop = min(taken, default=r.pages)
        start = max(r.front, stop - self.chance.randint(1, 3))
        if start < stop and self.device.available_size() >= (stop - start) * PAGE:
            self.ask(r, Span(start, stop))

    def ask(self, r: Restoration, span: Span) -> None:
        """One load of a plan."""
        self.engine.load(messages.Load(r.rid, span, Tier.STORAGE, Link.STORAGE_TO_DEVICE, 1.0))

    def tick(self) -> None:
        """Time passes, now and then so much that what is open hangs."""
        engine = self.engine
        engine.context.now += 3.0 if self.chance.random() < 0.03 else 0.01
        engine.context.slots.free()
        states = [bytes(load.poll.local) for load in engine.loads]
        before = sum(load.written_off for load in engine.loads)
        engine.settle(states, [max(load.poll.ended_at) for load in engine.loads])
        self.written_off += max(0, sum(load.written_off for load in engine.loads) - before)
        engine.context.facts.clear()

    def splice(self) -> None:
        """The lowest landed run becomes a row's, and a forward reads it."""
        r = self.some()
        landed = [] if r is None else [p for p in range(r.front, r.pages) if r.is_landed(p)]
        if r is None or not landed:
            return
        start = stop = landed[0]
        while stop in landed:
            stop += 1
        wanted = [int.from_bytes(r.keys[page], "big") for page in range(start, stop)]
        slots = self.engine.splice(r, Span(start, stop))
        self.rig.forward("the chunk behind the jump", slots.tolist())
        for page, value in zip(slots.view(-1, PAGE), wanted, strict=True):
            assert self.rig.values(page.tolist()) == {value}
        self.rows.append((slots, wanted))
        self.spliced += stop - start
        if r.front == r.pages:
            self.engine._close(r, "met")

    def forward(self) -> None:
        self.rig.forward("decoding", [int(s) for slots, _ in self.rows for s in slots])

    def give_up(self) -> None:
        r = self.some()
        if r is not None and self.chance.random() < 0.25:
            self.engine.abandon(r, "aborted")
            self.given_up += 1

    def give_room(self) -> None:
        if self.chance.random() < 0.1 and self.engine.give_room(PAGE):
            self.given_up += 1

    def finish(self) -> None:
        """A request ends; forwards that read its row may not have."""
        if self.rows:
            slots, _ = self.rows.pop(self.chance.randrange(len(self.rows)))
            self.device.free(slots)

    def run(self, pages: int) -> None:
        """Until so many pages were spliced and some requests given up, as chance wants; streams lag
        behind all the while.
        """
        every = [
            self.begin, self.load, self.load, self.store.read, self.store.read, self.store.read, self.tick, self.tick,
            self.splice, self.forward, self.give_up, self.give_room, self.finish,
        ]  # fmt: skip
        end = time.monotonic() + 60
        while (self.spliced < pages or self.given_up < 3) and time.monotonic() < end:
            self.chance.choice(every)()
            self.rig.device.steps(self.chance.randrange(5))
            if self.chance.random() < 0.2:
                time.sleep(0.0005)  # the mover's turn

    def settle(self) -> None:
        """Until nothing is under way."""
        end = time.monotonic() + 30
        while (self.engine.busy or self.store.pending) and time.monotonic() < end:
            self.store.read()
            self.rig.device.drain()
            self.tick()
            time.sleep(0.0005)

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets streams run until the mover has done something."""
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            self.rig.device.drain()
            time.sleep(0.001)

    def end(self) -> None:
        """Everything is given up and back, and the threads end."""
        self.engine.abandon_all("over")
        self.settle()
        while self.rows:
            self.finish()
        self.rig.device.drain()
        self.engine.close()


def lab_of(
    monkeypatch: pytest.MonkeyPatch, seed: int = 0, *, overlap: bool = True, staged: bool = True
) -> EngineLab:
    """A lab on a device of its own."""
    return EngineLab(Rig(monkeypatch, seed, overlap=overlap, staged=staged), seed)
