"""Which page is evicted: the one used longest ago, or a whole segment of another slot size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from sgl_kvtier.store.disk.segment import Segment
from sgl_kvtier.store.index.slots import Rows, SlotTable, State

_SHARE = 64
"""One refill sorts out 1/64 of the pages, so that its cost is spread over as many evictions."""
_AT_LEAST = 256


class LeastRecentlyUsed:
    """Victims among the segments of one slot size, exactly in the order of last use. The engine's
    lock guards it.

    The oldest few rows are found at once and kept in order. A row used since then is skipped: every
    row used or written after the refill is younger than all of them.
    """

    def __init__(self, table: SlotTable, group: int | None = None) -> None:
        """`group`: only pages of these tenants (`SlotTable.group`); None: all."""
        self._table = table
        self._group = group
        self._queue: deque[tuple[int, int]] = deque()

    def victims(self, count: int, segments: Iterable[Segment]) -> Rows:
        """Up to `count` unpinned live rows, oldest first. Fewer only when there are no more."""
        table = self._table
        chosen: list[int] = []
        refilled = False
        while len(chosen) < count:
            if not self._queue:
                if refilled:
                    break
                self._refill(count, list(segments), chosen)
                refilled = True
                continue
            row, used = self._queue.popleft()
            if table.state[row] == State.LIVE and not table.pins[row] and table.used[row] == used:
                # A use has a moment of its own: a row that another tenant's page has by now has
                # another one.
                chosen.append(row)
        return np.array(chosen, np.int64)

    def oldest(self, segments: Iterable[Segment]) -> int | None:
        """Last use of the first victim, on the table's own clock; None when there is none."""
        rows = self.victims(1, segments)
        if not len(rows):
            return None
        used = int(self._table.used[rows[0]])
        self._queue.appendleft((int(rows[0]), used))
        return used

    def _refill(self, count: int, segments: list[Segment], taken: list[int]) -> None:
        table = self._table
        spans = [np.arange(s.base, s.base + s.slots) for s in segments]
        rows = np.concatenate(spans) if spans else np.empty(0, np.int64)
        rows = rows[(table.state[rows] == State.LIVE) & (table.pins[rows] == 0)]
        if self._group is not None:
            rows = rows[table.group[table.tenant[rows]] == self._group]
        if taken:
            rows = rows[~np.isin(rows, taken)]
        want = max(count, _AT_LEAST, len(rows) // _SHARE)
        if want < len(rows):
            rows = rows[np.argpartition(table.used[rows], want)[:want]]
        # Among pages of one batch the lower slot goes first, so that neighbours are freed together
        # and written together.
        rows = rows[np.lexsort((rows, table.used[rows]))]
        self._queue.extend(zip(rows.tolist(), table.used[rows].tolist(), strict=True))


def coldest_segment(table: SlotTable, segments: Iterable[Segment]) -> tuple[Segment, int] | None:
    """(segment, last use) of the segment unused for longest that has no I/O."""
    best: tuple[Segment, int] | None = None
    for segment in segments:
        rows = slice(segment.base, segment.base + segment.slots)
        state = table.state[rows]
        if (
            table.pins[rows].any()
            or (state == State.WRITING).any()
            or (state == State.DOOMED).any()
        ):
            continue
        live = table.used[rows][state >= State.LIVE]
        used = int(live.max()) if len(live) else -1
        if best is None or used < best[1]:
            best = (segment, used)
    return best
