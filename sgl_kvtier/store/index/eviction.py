"""Which page is evicted: of those that nobody asked to keep the one used longest ago, or a whole
segment of another slot size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from sgl_kvtier.store.disk.segment import Segment
from sgl_kvtier.store.index.retention import Retention
from sgl_kvtier.store.index.slots import Rows, SlotTable, State

_SHARE = 64
"""One refill sorts out 1/64 of the pages, so that its cost is spread over as many evictions."""
_AT_LEAST = 256


class LeastRecentlyUsed:
    """Victims among the segments of one slot size, in the order of last use, retained pages after
    all others. The engine's lock guards it.

    The oldest few rows are found at once and kept in order. A row used since then is skipped: every
    row used or written after the refill is younger than all of them. So is one that is retained;
    once it is not any more, a later refill finds it.
    """

    def __init__(self, table: SlotTable, retention: Retention, group: int | None = None) -> None:
        """`group`: only pages of these tenants (`SlotTable.group`); None: all."""
        self._table = table
        self._retention = retention
        self._group = group
        self._queue: deque[tuple[int, int]] = deque()

    def victims(self, count: int, segments: Iterable[Segment]) -> Rows:
        """Up to `count` unpinned live rows, oldest first. Fewer only when there are no more."""
        table, retention = self._table, self._retention
        chosen: list[int] = []
        refilled = False
        while len(chosen) < count:
            if not self._queue:
                if refilled:
                    if len(retention):
                        rows = self._candidates(list(segments), chosen)
                        chosen += self._oldest_first(rows)[: count - len(chosen)].tolist()
                    break
                self._refill(count, list(segments), chosen)
                refilled = True
                continue
            row, used = self._queue.popleft()
            # A use has a moment of its own: a row that has another page by now has another one.
            same = table.used[row] == used
            if table.state[row] != State.LIVE or table.pins[row] or not same:
                continue
            if not len(retention) or table.key_of(row) not in retention:
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
        rows = self._candidates(segments, taken)
        if len(self._retention):
            rows = rows[~np.isin(rows, self._retention.rows())]
        want = max(count, _AT_LEAST, len(rows) // _SHARE)
        used = self._table.used
        if want < len(rows):
            rows = rows[np.argpartition(used[rows], want)[:want]]
        rows = self._oldest_first(rows)
        self._queue.extend(zip(rows.tolist(), used[rows].tolist(), strict=True))

    def _candidates(self, segments: list[Segment], taken: list[int]) -> Rows:
        table = self._table
        spans = [np.arange(s.base, s.base + s.slots) for s in segments]
        rows: Rows = np.concatenate(spans) if spans else np.empty(0, np.int64)
        rows = rows[(table.state[rows] == State.LIVE) & (table.pins[rows] == 0)]
        if self._group is not None:
            rows = rows[table.group[table.tenant[rows]] == self._group]
        if taken:
            rows = rows[~np.isin(rows, taken)]
        return rows

    def _oldest_first(self, rows: Rows) -> Rows:
        # Among pages of one batch the lower slot goes first, so that neighbours are freed together
        # and written together.
        ordered: Rows = rows[np.lexsort((rows, self._table.used[rows]))]
        return ordered


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
