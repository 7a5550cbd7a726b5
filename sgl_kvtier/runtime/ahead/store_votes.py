"""With several ranks: agreement on the pages that are in every rank's store.

Each rank has its own store: pages are written at different times, and one rank may lose or evict a
page that another has. The map counts a page as stored when it is on all ranks. So every rank looks
up the pages that SGLang has written and, after a rank has lost pages, all pages that the map has as
stored. The ranks agree by a poll (`polls.py`). Pages found by a storage query need no poll, since
SGLang's ranks have agreed on it. Scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from sgl_kvtier.policy.pages.page_state import PageView
from sgl_kvtier.runtime.ahead.tier_facts import TierFacts
from sgl_kvtier.runtime.sglang import storage_ops
from sgl_kvtier.runtime.sglang.attached import backend_of
from sgl_kvtier.runtime.sglang.types import Tree
from sgl_kvtier.runtime.step.page_names import from_hex
from sgl_kvtier.runtime.step.polls import LANDED, LOST, Poll
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Lookup, PageKey, Tier

_SLICE = 512
"""Pages of one poll: 4 KiB in a reduction."""
_PERIOD_S = 1.0
"""Seconds between two polls on whether a rank's store has lost pages."""
_NO = LOST[ReadOutcome.MISS]


class StoreVotes:
    """One per scheduler process of several. `number` returns the number of a new poll."""

    def __init__(
        self, tree: Tree, pages: PageView, facts: TierFacts, number: Callable[[], int]
    ) -> None:
        """Starts watching what SGLang writes to storage."""
        self._tree = tree
        self._pages = pages
        self._facts = facts
        self._number = number
        self._writing: dict[int, tuple[PageKey, ...]] = {}
        self._todo: dict[PageKey, None] = {}
        self._next: int | None = None
        """Cursor into the map for the check of stored pages that starts when a rank reports a loss;
        None when no check is running.
        """
        self._vote: tuple[Poll, tuple[PageKey, ...]] | None = None
        self._losses: Poll | None = None
        self._ask_at = 0.0
        self._seen = (0, 0)
        self.stop = storage_ops.watch_writes(tree, self._written)
        """Stops watching."""

    def polls(self) -> list[Poll]:
        """The polls in progress."""
        return [
            poll
            for poll in (self._losses, self._vote[0] if self._vote else None)
            if poll is not None
        ]

    def forget(self) -> None:
        """The store was detached, or replaced by another."""
        self._writing.clear()
        self._todo.clear()
        self._next = None
        self._vote = self._losses = None
        self._seen = (0, 0)

    def found(self, hashes: Sequence[str], tiers: Sequence[Tier | None]) -> None:
        """A storage query has found these pages in these tiers on every rank."""
        for tier in (Tier.STORAGE, Tier.REMOTE):
            names = [name for name, there in zip(hashes, tiers, strict=False) if there is tier]
            self._facts.placed(self._not_known(from_hex(names), tier), tier)

    def look(self, now: float) -> int:
        """Applies the poll that has ended and starts the next one. Returns how many pages were not
        where the map had them. `now` is the agreed time in seconds.
        """
        gone = 0
        if self._losses is not None and self._losses.over:
            if not self._losses.well:
                self._next = 0
            self._losses = None
        if self._vote is not None and self._vote[0].over:
            gone = self._take(*self._vote)
            self._vote = None
        for operation in [
            number for number in self._writing if storage_ops.written(self._tree, number)
        ]:
            self._todo.update(dict.fromkeys(self._not_known(self._writing.pop(operation))))
        if self._next is not None and not self._todo:
            part, self._next = self._pages.resident_part(Tier.STORAGE, self._next, _SLICE)
            self._todo.update(dict.fromkeys(part))
        if (
            now >= self._ask_at
            and self._losses is None
            and not self._todo
            and self._vote is None
            and self._next is None
        ):
            self._ask_at = now + _PERIOD_S
            self._losses = Poll(self._number(), 1)
            self._losses.mark(0, _NO if self._has_lost() else LANDED, time.monotonic())
        if self._todo and self._vote is None:
            keys = tuple(islice(self._todo, _SLICE))
            for key in keys:
                del self._todo[key]
            self._vote = Poll(self._number(), len(keys)), keys
            self._answer(*self._vote)
        return gone

    # --- private ----------------------------------------------------------------------------------

    def _written(self, operation: int, names: Sequence[str]) -> None:
        """SGLang has begun to write a node's pages to storage; all ranks do in the same step."""
        self._writing[operation] = from_hex(names)

    def _not_known(
        self, keys: tuple[PageKey, ...], tier: Tier = Tier.STORAGE
    ) -> tuple[PageKey, ...]:
        pages = ((key, self._pages.page(key)) for key in keys)
        return tuple(key for key, page in pages if page is None or tier not in page.tiers)

    def _answer(self, poll: Poll, keys: tuple[PageKey, ...]) -> None:
        store, now = self._store(), time.monotonic()
        answers = store.lookup(keys) if store is not None else [Lookup.MISS] * len(keys)
        for page, answer in enumerate(answers):
            poll.mark(page, _NO if answer is Lookup.MISS else LANDED, now)

    def _take(self, poll: Poll, keys: tuple[PageKey, ...]) -> int:
        unknown = dict.fromkeys(self._not_known(keys))
        there = dict.fromkeys(
            key for key, state in zip(keys, poll.seen, strict=True) if state == LANDED
        )
        self._facts.placed(tuple(key for key in there if key in unknown), Tier.STORAGE)
        gone = tuple(key for key in keys if key not in there and key not in unknown)
        self._facts.dropped(gone, Tier.STORAGE)
        return len(gone)

    def _has_lost(self) -> bool:
        """Whether this rank's store has dropped pages since the last call."""
        store = self._store()
        stats = store.stats() if store is not None else None
        before, self._seen = (
            self._seen,
            (0, 0) if stats is None else (stats.pages_evicted + stats.pages_corrupt, stats.pages),
        )
        return self._seen[0] != before[0] or self._seen[1] < before[1]

    def _store(self) -> Any:
        return getattr(backend_of(self._tree.cache_controller), "local_store", None)
