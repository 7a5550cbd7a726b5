"""The executor's record of a restoration of one request, and of the loads that serve it.

The device slots of each page of a load are in one of these states:

    open     the store or a copy may write to them: no other code touches them, even after a cancel
    landed   they hold the page on every rank; `held` while the restoration owns them
    given    they were attached to the request's row, or freed: not ours any more

Scheduler's thread, except for marks in `Load.poll`, which the page mover's threads set.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sgl_kvtier.policy.messages import Mode
from sgl_kvtier.runtime.sglang.host_tier import Pin
from sgl_kvtier.runtime.sglang.types import Req
from sgl_kvtier.runtime.step.polls import LANDED, Poll
from sgl_kvtier.runtime.step.private_slots import AnchorSlots
from sgl_kvtier.types import Link, PageKey, Span, Tier


class Stored(NamedTuple):
    """Pages of a prompt in tiers below host memory: from page `start` on, those of `keys`.
    `sources` are their tiers, ascending; a page in none of them is a hole.
    """

    start: int
    keys: tuple[PageKey, ...]
    sources: tuple[tuple[Span, Tier], ...]
    ends: tuple[int, ...] = ()
    """For models with anchors: lower pages, ascending, at which storage has an anchor too."""

    def up_to(self, end: int) -> Stored:
        """The same, limited to pages below `end`."""
        sources = tuple(
            (Span(span.start, min(span.stop, end)), tier)
            for span, tier in self.sources
            if span.start < end
        )
        ends = tuple(other for other in self.ends if other < end)
        return Stored(self.start, self.keys[: end - self.start], sources, ends)


@dataclass(eq=False)
class Load:
    """One load, in flight or ended. `device_slots` and `host_slots` are token slots, ascending."""

    restoration: Restoration
    span: Span
    link: Link
    device_slots: torch.Tensor
    host_slots: torch.Tensor
    owns_host: bool
    """Whether the host slots are bounce pages of this load. Otherwise they are the tree's and
    pinned by the restoration.
    """
    begun_at: float
    due: float
    """A page that has not ended by this time is written off."""
    poll: Poll
    """States of its pages, lowest first. The mover's threads set them; the scheduler's thread
    applies those that all ranks agreed on.
    """
    job: Any = None
    cancelled: bool = False
    written_off: bool = False
    """It hung: the restoration goes on without it and ignores what it reports."""
    anchor: AnchorSlots | None = None
    """Slots of the anchor that comes with its last pages, ascending."""
    unread: int = 0
    """Number of pages whose read has not ended. Used by the mover only."""
    held: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        pages = len(self.span)
        self.held = bytearray(b"\1" * pages)
        self.unread = pages

    @property
    def ended(self) -> bool:
        """Every page has ended on every rank: no I/O touches the slots any more."""
        return self.poll.over

    def cancel(self) -> None:
        """Cancels the reads of pages that have not started."""
        self.cancelled = True
        if self.job is not None:
            self.job.cancel()

    def device_pages(self, first: int, stop: int, page_tokens: int) -> torch.Tensor:
        """Device slots of pages [first, stop), counted from the load's first page."""
        return self.device_slots[first * page_tokens : stop * page_tokens]

    def anchor_of(self, first: int, stop: int) -> AnchorSlots | None:
        """Anchor slots that come with these pages, or None."""
        if self.anchor is None:
            return None
        before = len(self.span) - len(self.anchor.device) // self.anchor.page
        low, high = max(first, before) - before, stop - before
        return self.anchor.pages(low, high) if low < high else None


@dataclass(eq=False)
class Restoration:
    """One request's restoration of pages [resident, pages) of its prompt. Pages before `resident`
    are in the tree's device memory.
    """

    rid: str
    req: Req
    prompt_tokens: int
    resident: int
    pages: int
    sources: tuple[tuple[Span, Tier], ...]
    keys: tuple[PageKey, ...]
    """Keys of the last `len(keys)` pages, which are in storage or missing."""
    host_slots: torch.Tensor
    """Token slots of the pages in host memory, from page `resident` on."""
    anchor: Span = field(default_factory=lambda: Span(0, 0))
    """The last pages, with which the window or the state comes; empty if the model has none."""
    stored: Stored | None = None
    """With an anchor: what storage has of the prompt."""
    node_lock: Any = None
    host_pin: Pin | None = None
    mode: Mode | None = None
    moved_at: float = 0.0
    """When a load of it last began or ended, or its mode was decided."""
    admitted: bool = False
    front: int = 0
    """The prefill cursor: pages [0, front) are computed, being computed or attached."""
    loads: list[Load] = field(default_factory=list)
    owner: dict[int, tuple[Load, int]] = field(default_factory=dict)
    """By page, the load that has it in flight or landed, and its index in that load. Without pages
    that a load has lost but still holds slots for: those are computed into other slots.
    """
    prefix: torch.Tensor | None = None
    """Slots attached at admission, after the tree's, before the request has a row."""
    spliced: dict[Tier, int] = field(default_factory=dict)
    computed_tokens: int = 0
    jumps: int = 0
    parks: int = 0
    parked_since: float = 0.0
    parked_s: float = 0.0
    waited_s: float = 0.0
    """Seconds it had waited in the chunked-prefill slot when its latest chunk was added."""
    offered_at: float = field(default_factory=time.monotonic)
    closed: bool = False
    to_look_at_again: Any = None
    """A page that was compared when it was loaded and will be compared once more
    (`proof/pages.py`). Set by the mover before that page lands.
    """

    def __post_init__(self) -> None:
        self.front = self.resident

    def tokens(self, page_tokens: int) -> int:
        """Number of tokens that could be loaded."""
        return sum(len(span) for span, _ in self.sources) * page_tokens

    def tier_of(self, page: int) -> Tier:
        """The tier of a page at the time of the offer."""
        return next(tier for span, tier in self.sources if page in span)

    def keys_of(self, span: Span) -> list[PageKey]:
        """Keys of pages in storage, the highest page first."""
        start = self.pages - len(self.keys)
        return [self.keys[page - start] for page in reversed(range(span.start, span.stop))]

    def is_landed(self, page: int) -> bool:
        """Whether the page has landed, on every rank, in device slots that we still own."""
        place = self.owner.get(page)
        return place is not None and place[0].poll.seen[place[1]] == LANDED

    @property
    def whole(self) -> bool:
        """Whether landed pages can be attached only up to the end (see `policy.messages`)."""
        return self.front < self.anchor.start

    @property
    def is_blocked(self) -> bool:
        """Whether landed pages at the prefill cursor wait for pages after them."""
        return (
            self.whole
            and self.is_landed(self.front)
            and not all(self.is_landed(page) for page in range(self.front, self.pages))
        )

    def shorter(self, page: int) -> Stored | None:
        """What storage has of the prompt up to its highest anchor at or below this page, or
        None.
        """
        if self.stored is None:
            return None
        ends = [end for end in self.stored.ends if self.front < end <= page]
        return self.stored.up_to(ends[-1]) if ends else None

    def barrier(self, start: int) -> int:
        """The first page from `start` on that is in flight or landed; `pages` if there is none."""
        return next((page for page in range(start, self.pages) if page in self.owner), self.pages)

    def landed_runs(self, span: Span) -> Iterator[tuple[Load, int, int]]:
        """The landed pages of `span` as ascending runs (load, first, stop) within one load."""
        run: tuple[Load, int, int] | None = None
        for page in range(span.start, span.stop):
            load, offset = self.owner[page]
            if run is not None and run[0] is load and run[2] == offset:
                run = (load, run[1], offset + 1)
                continue
            if run is not None:
                yield run
            run = (load, offset, offset + 1)
        if run is not None:
            yield run
