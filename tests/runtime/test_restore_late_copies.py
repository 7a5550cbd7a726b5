"""An accelerator in the small: copies that complete late, one after the other, while everything
else goes on.

Device and host memory are arrays whose free pages hold a canary. A late copy that reads a bounce
page which was given away, or writes a device page which was, changes what must not change; a page
taken for landed too early still holds the canary. The mover and the engine are real, and so are the
threads; the store's reads and the device's copies take as long as chance wants.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kvtier.policy import messages
from sgl_kvtier.policy.messages import Mode
from sgl_kvtier.runtime.ranks.polls import LANDED, OPEN
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.restore.restoration import Load, Restoration
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Link, PageKey, Span, Tier

PAGE, POOL, PREFIX = 4, 40, 12
CANARY = -1


class Pool:
    """Pages of an array. What is free holds the canary, and does so still when it is handed out."""

    def __init__(self) -> None:
        self.memory = torch.full((POOL * PAGE,), CANARY)
        self.free_pages = list(range(POOL))
        self.size = POOL * PAGE
        self.size_per_token = 4
        self.allocations = 0

    def available_size(self) -> int:
        return len(self.free_pages) * PAGE

    def alloc(self, tokens: int, **how: Any) -> torch.Tensor | None:
        count = tokens // PAGE
        if count > len(self.free_pages):
            return None
        self.allocations += 1
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        slots = (torch.tensor(taken)[:, None] * PAGE + torch.arange(PAGE)).flatten()
        assert (self.memory[slots] == CANARY).all(), "a free page was written to"
        return slots

    def free(self, slots: torch.Tensor) -> None:
        self.memory[slots] = CANARY
        self.free_pages += [int(slot) // PAGE for slot in slots[::PAGE]]

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        self.free(slots)


class Worker:
    """A thread that does one thing after the other, each after a while."""

    def __init__(self, chance: random.Random, longest_s: float) -> None:
        self._chance, self._longest_s = chance, longest_s
        self._todo: list[Callable[[], None]] = []
        self._lock = threading.Condition()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def do(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._todo.append(action)
            self._lock.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._todo:
                    self._lock.wait()
                action = self._todo.pop(0)
            time.sleep(self._chance.random() * self._longest_s)
            try:
                action()
            except BaseException as error:
                self.failure = error


class LateCopies:
    """The device: a stream that reads host memory and writes device memory when a copy's turn
    comes, not when it is begun.
    """

    def __init__(self, host: Pool, device: Pool, stream: Worker) -> None:
        self.host, self.device, self.stream = host, device, stream

    def fence(self) -> int:
        return self.device.allocations

    def begin(self, host_slots: torch.Tensor, device_slots: torch.Tensor, fence: int) -> Any:
        assert 0 < fence <= self.device.allocations, "a fence taken before the slots were"
        copy = SimpleNamespace(over=False)
        copy.done = lambda: copy.over

        def run() -> None:
            values = self.host.memory[host_slots]
            assert (values != CANARY).all(), (
                "a bounce page was given away before its copy had read it"
            )
            assert (self.device.memory[device_slots] == CANARY).all(), (
                "a device page was somebody else's"
            )
            self.device.memory[device_slots] = values
            copy.over = True

        self.stream.do(run)
        return copy


class LateStore:
    """Reads page by page into host memory; one in ten fails, and a cancelled job's pages that were
    not begun are not read.
    """

    def __init__(self, host: Pool, disk: Worker, chance: random.Random) -> None:
        self.host, self.disk, self.chance = host, disk, chance

    def begin_read(
        self,
        keys: Sequence[PageKey],
        slots: torch.Tensor,
        deadline_s: float,
        on_page: Callable[[int, ReadOutcome], None],
    ) -> Any:
        job = SimpleNamespace(cancelled=False)
        job.cancel = lambda: setattr(job, "cancelled", True)

        def read(index: int, page: torch.Tensor) -> None:
            if job.cancelled:
                on_page(index, ReadOutcome.CANCELLED)
                return
            self.host.memory[page] = int.from_bytes(keys[index], "big")
            on_page(index, ReadOutcome.FAILED if self.chance.random() < 0.1 else ReadOutcome.OK)

        for index, page in enumerate(slots.view(-1, PAGE)):
            self.disk.do(lambda index=index, page=page: read(index, page))
        return job


class Lab:
    """Restorations that begin, load, splice and are given up as chance wants."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.device, self.host = Pool(), Pool()
        self.stream = Worker(random.Random(seed + 1), 0.002)
        self.disk = Worker(random.Random(seed + 2), 0.0005)
        store = LateStore(self.host, self.disk, random.Random(seed + 3))
        tree = SimpleNamespace(
            page_size=PAGE,
            token_to_kv_pool_allocator=self.device,
            cache_controller=SimpleNamespace(mem_pool_host=self.host, storage_backend=store),
            evict_host=None,
            unlock=lambda lock: None,
            is_chunk_cache=lambda: True,
        )
        mover = PageMover(LateCopies(self.host, self.device, self.stream), PAGE)
        self.engine = RestoreEngine(StepContext(tree), mover, 0, lambda offer: None)  # type: ignore[arg-type]
        self.begun = self.spliced = self.abandoned = 0
        self.rows: list[torch.Tensor] = []

    def begin(self) -> None:
        if len(self.engine.restorations) >= 3:
            return
        self.begun += 1
        keys = tuple(
            PageKey((1000 * self.begun + page).to_bytes(32, "big")) for page in range(PREFIX)
        )
        r = Restoration(
            f"r{self.begun}",
            None,
            (PREFIX + 1) * PAGE,
            0,
            PREFIX,
            ((Span(0, PREFIX), Tier.SSD),),
            keys,
            torch.empty(0),
        )
        r.mode = Mode.BOTH
        self.engine.restorations[r.rid] = r

    def some(self) -> Restoration | None:
        return (
            self.chance.choice(list(self.engine.restorations.values()))
            if self.engine.restorations
            else None
        )

    def load(self) -> None:
        r = self.some()
        if r is None:
            return
        taken = {page for load in r.loads for page in range(load.span.start, load.span.stop)}
        stop = min(taken, default=r.pages)
        start = max(r.front, stop - self.chance.randint(1, 4))
        if start < stop and self.device.available_size() >= (stop - start) * PAGE:
            self.engine.load(
                messages.Load(r.rid, Span(start, stop), Tier.SSD, Link.SSD_TO_HBM, 60.0)
            )

    def tick(self) -> None:
        engine = self.engine
        engine.context.slots.free()
        states = [bytes(load.poll.local) for load in engine.loads]
        engine.settle(states, [max(load.poll.ended_at) for load in engine.loads])
        engine.context.facts.clear()

    def splice(self) -> None:
        """The lowest landed run becomes a row's: every token must be the page's own by now."""
        r = self.some()
        landed = (
            [page for page in range(r.front, r.pages) if r.is_landed(page)] if r is not None else []
        )
        if r is None or not landed:
            return
        start = stop = landed[0]
        while stop in landed:
            stop += 1
        slots = self.engine.splice(r, Span(start, stop))
        wanted = [
            int.from_bytes(r.keys[page], "big") for page in range(start, stop) for _ in range(PAGE)
        ]
        assert self.device.memory[slots].tolist() == wanted
        self.spliced += stop - start
        self.rows.append(slots)
        if r.front == r.pages:
            self.engine._close(r, "met")

    def abandon(self) -> None:
        r = self.some()
        if r is not None and self.chance.random() < 0.3:
            self.engine.abandon(r, "aborted")
            self.abandoned += 1

    def release(self) -> None:
        if self.rows:
            self.device.free(self.rows.pop(self.chance.randrange(len(self.rows))))

    def run(self, pages: int) -> None:
        """Until so many pages were spliced."""
        actions = [
            self.begin,
            self.load,
            self.load,
            self.load,
            self.tick,
            self.tick,
            self.splice,
            self.splice,
            self.abandon,
            self.release,
        ]
        end = time.monotonic() + 120
        while (self.spliced < pages or self.abandoned < 5) and time.monotonic() < end:
            self.chance.choice(actions)()
            if self.chance.random() < 0.3:
                time.sleep(0.0005)
        self.engine.abandon_all("over")
        end = time.monotonic() + 30
        while self.engine.busy and time.monotonic() < end:
            self.tick()
            time.sleep(0.001)
        self.tick()


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_read_before_it_landed_nor_freed_before_its_copy_ended(seed: int) -> None:
    lab = Lab(10 * seed)
    lab.run(100)
    for slots in lab.rows:
        lab.device.free(slots)
    lab.engine.close()
    assert lab.stream.failure is None and lab.disk.failure is None
    assert lab.spliced >= 100 and lab.abandoned >= 5
    for pool in (lab.device, lab.host):
        assert sorted(pool.free_pages) == list(range(POOL))
        assert (pool.memory == CANARY).all()
    assert lab.engine.context.slots.tokens == 0 and lab.engine.context.slots.host_tokens == 0


def test_a_page_whose_copy_has_not_ended_is_open_and_its_bounce_page_is_not_given_away() -> None:
    host, device = Pool(), Pool()
    held = SimpleNamespace(do=lambda action: None)  # a stream that never comes to it
    mover = PageMover(LateCopies(host, device, held), PAGE)  # type: ignore[arg-type]
    disk = Worker(random.Random(0), 0.0)
    tree = SimpleNamespace(
        page_size=PAGE, token_to_kv_pool_allocator=device, evict_host=None, unlock=lambda lock: None,
        cache_controller=SimpleNamespace(mem_pool_host=host, storage_backend=LateStore(host, disk, random.Random(99))),
    )  # fmt: skip
    engine = RestoreEngine(StepContext(tree), mover, 0, lambda offer: None)  # type: ignore[arg-type]
    keys = tuple(PageKey((page + 1).to_bytes(32, "big")) for page in range(2))
    r = Restoration("r", None, 3 * PAGE, 0, 2, ((Span(0, 2), Tier.SSD),), keys, torch.empty(0))
    engine.restorations["r"] = r
    engine.load(messages.Load("r", Span(0, 2), Tier.SSD, Link.SSD_TO_HBM, 60.0))
    (load,) = engine.loads
    time.sleep(0.2)
    engine.abandon(r, "aborted")
    engine.settle([bytes(load.poll.local)], [0.0])
    engine.context.slots.free()
    assert isinstance(load, Load) and OPEN in load.poll.local and LANDED not in load.poll.local
    assert (
        engine.holds_memory
        and host.available_size() == device.available_size() == (POOL - 2) * PAGE
    )
