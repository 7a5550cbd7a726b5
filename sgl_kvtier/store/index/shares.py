"""Guaranteed shares of tenants: how many bytes of this store's slots each is entitled to, and whose
page is evicted for whose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sgl_kvtier.store.disk.segment import Segment
from sgl_kvtier.store.index.slots import Rows, SlotTable, State
from sgl_kvtier.tenants import OTHERS, Tenant

Evict = Callable[[int, int], int]
"""Evicts up to the given number of a group's least recently used pages; returns how many."""


class Holding(NamedTuple):
    """The slots and evictions of one tenant of the settings, or of all others together."""

    name: str
    nbytes: int
    """Bytes of this store's slots that hold its pages."""
    promised: int
    """Bytes of this store's slots that no other tenant's pages can take from it."""
    evicted: int
    """Its pages evicted since the store was opened."""


class Shares:
    """The guaranteed shares in one store. The core's lock guards it.

    A guarantee refers to the bytes that all owners of the same pages may take (`Room.whole`). A
    tenant's pages in siblings' folders count towards it. If the remaining guarantees exceed this
    store's slots, all are scaled down in proportion.
    """

    def __init__(self, table: SlotTable, tenants: Sequence[Tenant], ranks: int) -> None:
        """Must be called before the table is filled. `ranks` stores share the capacity, and
        guarantees given in bytes.
        """
        self._table = table
        self._tenants = tenants
        self._ranks = ranks
        self.evicted = [0] * (len(tenants) + 1)
        table.count_by([tenant.digest for tenant in tenants])

    def promised(self, whole: int, here: int) -> list[int]:
        """Bytes of this store's slots that each group is guaranteed. `whole`: bytes that all owners
        may take; `here`: bytes of all slots of this store.
        """
        theirs = self._table.held[1].tolist()
        left = [0]
        for tenant, elsewhere in zip(self._tenants, theirs[1:], strict=True):
            nbytes = int(tenant.share * whole) or tenant.nbytes // self._ranks
            left.append(max(0, nbytes - elsewhere))
        total = sum(left)
        return left if total <= here else [nbytes * here // total for nbytes in left]

    def evict(
        self, group: int, count: int, free: int, nbytes: int, promised: list[int], evict: Evict
    ) -> None:
        """Frees up to `count` slots of `nbytes` for a group that also takes `free` free ones. Up to
        its guarantee it takes them from groups above theirs, the one furthest above first. Beyond
        it, its own pages go first, then those of groups above theirs. No group falls below its
        guarantee.
        """
        held = self._table.held[0]
        may = max(0, promised[group] - int(held[group]) - free * nbytes) // nbytes
        got = 0
        for own, most in ((False, may), (True, count), (False, count)):
            groups = [group] if own else self._above(group, promised)
            for other in groups:
                above = (int(held[other]) - promised[other]) // nbytes
                wanted = min(count, most) - got if not own else count - got
                if wanted <= 0:
                    break
                freed = evict(other, wanted if own else min(wanted, above))
                self.evicted[other] += freed
                got += freed

    def spared(self, segments: Sequence[Segment], promised: list[int]) -> Iterator[Segment]:
        """The segments whose removal leaves no group below its guarantee."""
        table, held = self._table, self._table.held[0]
        for segment in segments:
            rows: Rows = np.arange(segment.base, segment.base + segment.slots)
            rows = rows[table.state[rows] == State.LIVE]
            groups = table.group[table.tenant[rows]]
            gone = np.bincount(groups, minlength=len(held)) * segment.slot_bytes
            if all(
                nbytes == 0 or after >= least
                for nbytes, after, least in zip(
                    gone.tolist(), (held - gone).tolist(), promised, strict=True
                )
            ):
                yield segment

    def gone(self, segment: Segment) -> None:
        """Counts the pages of a segment as evicted. Called before it is removed."""
        rows = slice(segment.base, segment.base + segment.slots)
        live = self._table.state[rows] == State.LIVE
        groups = self._table.group[self._table.tenant[rows][live]]
        for group, count in enumerate(np.bincount(groups, minlength=len(self.evicted)).tolist()):
            self.evicted[group] += count

    def holdings(self, promised: list[int]) -> list[Holding]:
        """One entry for all other tenants, then one for each tenant of the settings."""
        names = [OTHERS, *(tenant.name for tenant in self._tenants)]
        held = self._table.held[0].tolist()
        return [Holding(*one) for one in zip(names, held, promised, self.evicted, strict=True)]

    def _above(self, group: int, promised: list[int]) -> list[int]:
        above = {
            other: int(nbytes) - promised[other]
            for other, nbytes in enumerate(self._table.held[0].tolist())
            if other != group and nbytes > promised[other]
        }
        return sorted(above, key=lambda other: -above[other])
