"""A restore engine around fake pools, a fake mover and no storage: the test says how loads end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo

from sgl_kvtier.policy import messages
from sgl_kvtier.policy.messages import Mode
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.polls import LANDED, OPEN, Poll
from sgl_kvtier.runtime.step.restoration import Load, Restoration, Stored
from sgl_kvtier.types import Link, PageKey, Span, Tier

PAGE, PAGES = 16, 64


class Pool:
    """Hands out whole pages in order and takes them back."""

    def __init__(self) -> None:
        self.free_pages = list(range(PAGES))
        self.size = PAGES * PAGE

    def available_size(self) -> int:
        return len(self.free_pages) * PAGE

    def alloc(self, tokens: int, **how: Any) -> torch.Tensor | None:
        count = tokens // PAGE
        if count > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return (torch.tensor(taken)[:, None] * PAGE + torch.arange(PAGE)).flatten()

    def free(self, slots: torch.Tensor) -> None:
        self.free_pages += [int(slot) // PAGE for slot in slots[::PAGE]]

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        self.free(slots)


class Mover:
    """Keeps the loads it was given; the test says when their pages end."""

    def __init__(self) -> None:
        self.loads: list[Load] = []

    def submit(self, load: Load, storage: Any, deadline_s: float) -> None:
        self.loads.append(load)

    def wait_news(self, timeout_s: float) -> None:
        for load in self.loads:
            for offset in range(len(load.span)):
                if load.poll.local[offset] == OPEN:
                    load.poll.mark(offset, LANDED, 1.0)


def engine_with(pages: int = 8) -> tuple[RestoreEngine, Restoration, Mover]:
    """An engine that restores one request of `pages` pages from storage, nothing loaded yet."""
    host: Any = Pool()
    host.size_per_token = 4
    tree = SimpleNamespace(
        page_size=PAGE,
        token_to_kv_pool_allocator=Pool(),
        cache_controller=SimpleNamespace(mem_pool_host=host, storage_backend=None),
        evict_host=None,
        ongoing_backup={},
        unlock=lambda lock: None,
    )
    mover: Any = Mover()
    engine = RestoreEngine(StepContext(tree), mover, 0, lambda offer: None)
    r = restoration("r", pages)
    engine.begin(r)
    return engine, r, mover


def restoration(rid: str, pages: int = 8) -> Restoration:
    """Of the first pages of a prompt, all from storage and in both ways."""
    sources = ((Span(0, pages), Tier.STORAGE),)
    r = Restoration(rid, None, (pages + 1) * PAGE, 0, pages, sources, (), torch.empty(0))
    r.mode = Mode.BOTH
    return r


def load_of(
    span: Span, source: Tier = Tier.STORAGE, link: Link = Link.STORAGE_TO_DEVICE
) -> messages.Load:
    """What a plan says of a load for the request."""
    return messages.Load("r", span, source, link, 1.0)


def host_load(
    host_slots: torch.Tensor,
    device_slots: torch.Tensor,
    page: int,
    number: int = 1,
    anchor: Any = None,
) -> Load:
    """A load of a request's pages that are in host memory, for the mover."""
    pages = len(host_slots) // page
    span = Span(0, pages)
    r: Any = Restoration(
        f"r{number}", None, pages * page + 1, 0, pages, ((span, Tier.HOST),), (), host_slots
    )
    return Load(
        r, span, Link.HOST_TO_DEVICE, device_slots, host_slots, False, 0.0, 60.0, Poll(number, pages),
        anchor=anchor,
    )  # fmt: skip


def load(engine: RestoreEngine, span: Span) -> Load:
    """Begins a load of these pages from storage."""
    engine.load(load_of(span))
    return engine.loads[-1]


def end(load: Load, *states: int, at: float = 0.5) -> None:
    """A load's pages end, the lowest first, all of them alike where one state is given."""
    for page, state in enumerate(states * len(load.span) if len(states) == 1 else states):
        load.poll.mark(page, state, at)


def settle(engine: RestoreEngine, now: float) -> list[Any]:
    """One tick's settling; the facts it noted."""
    engine.context.now = now
    engine.settle([bytes(one.poll.local) for one in engine.loads], [now] * len(engine.loads))
    facts, engine.context.facts = engine.context.facts, []
    return facts


class AnchorLab:
    """An engine that restores one request of a model with anchors, windows or states, of which
    subclasses have SGLang's own pools.
    """

    def __init__(
        self, tree: Any, component: Any, pages: int, anchor: int, ends: tuple[int, ...]
    ) -> None:
        """`anchor`: so many of the last pages come with it. `ends`: lower ends that have one too."""
        self.tree = component.cache = tree
        mover: Any = Mover()
        self.engine = RestoreEngine(StepContext(tree), mover, 0, lambda offer: None)
        self.offered: list[Stored] = []
        self.engine.offers.instead = lambda r, stored: self.offered.append(stored)
        self.free = self.available()
        self.req = SimpleNamespace(
            kv=ReqKvInfo(), swa_branching_seqlen=None, mamba_branching_seqlen=None
        )
        keys = tuple(PageKey(page.to_bytes(32, "big")) for page in range(pages))
        sources = ((Span(0, pages), Tier.STORAGE),)
        self.r = Restoration(
            "r", self.req, (pages + 1) * PAGE, 0, pages, sources, keys, torch.empty(0),
            anchor=Span(pages - anchor, pages), stored=Stored(0, keys, sources, ends),
        )  # fmt: skip
        self.r.mode = Mode.BOTH
        self.engine.begin(self.r)

    def available(self) -> tuple[int, ...]:
        """Free slots of all pools."""
        raise NotImplementedError

    @property
    def held(self) -> tuple[int, int]:
        """What SGLang's memory checks are told of: KV slots and those of anchors."""
        slots = self.engine.context.slots
        return slots.tokens, slots.anchor_slots

    def load(self, first: int, stop: int) -> Any:
        """Begins a load; None where there was no room for it."""
        self.engine.load(load_of(Span(first, stop)))
        self.engine.context.slots.free()
        return self.engine.loads[-1] if self.engine.loads else None

    def end(self, load: Any, *states: int) -> list[Any]:
        """A load's pages end, as in `end`; the facts of the tick after."""
        end(load, *states, at=1.0)
        return self.settle()

    def settle(self) -> list[Any]:
        facts = settle(self.engine, 1.0)
        self.engine.context.slots.free()
        return facts
