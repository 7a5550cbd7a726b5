"""Eviction: the least recently used page that nobody retains, or a segment of another slot size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from sgl_kvtier.store.disk.segment import Segment
from sgl_kvtier.store.index.retention import Retention
from sgl_kvtier.store.index.slots import Rows, SlotTable, State

_SHARE = 64
"""A refill finds at least 1/64 of the pages, so that its cost is spread over as many evictions."""
_AT_LEAST = 256


class LeastRecentlyUsed:
    """LRU victims among the segments of one slot size; retained pages come after all others. The
    core's lock guards it.

    A refill finds the oldest rows at once and queues them in order. A queued row that was used or
    retained since then is skipped: all queued rows are older than any row used or written after the
    refill. Once a skipped row is no longer retained, a later refill finds it.
    """

    def __init__(self, table: SlotTable, retention: Retention, group: int | None = None) -> None:
        """`group`: evict only pages of this group of tenants (`SlotTable.group`); None: of all."""
        self._table = table
        self._retention = retention
        self._group = group
        self._queue: deque[tuple[int, int]] = deque()

    def victims(self, count: int, segments: Iterable[Segment]) -> Rows:
        """Up to `count` unpinned live rows, oldest first. Fewer only if there are no more."""
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
            # Every use has its own timestamp: if the row holds another page by now, it differs.
            same = table.used[row] == used
            if table.state[row] != State.LIVE or table.pins[row] or not same:
                continue
            if not len(retention) or table.key_of(row) not in retention:
                chosen.append(row)
        return np.array(chosen, np.int64)

    def oldest(self, segments: Iterable[Segment]) -> int | None:
        """Last use of the first victim, on the table's own clock; None if there is none."""
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
        # Pages of one batch have the same timestamp. Their lower slots go first, so that neighbours
        # are freed and later written together.
        ordered: Rows = rows[np.lexsort((rows, self._table.used[rows]))]
        return ordered


def coldest_segment(table: SlotTable, segments: Iterable[Segment]) -> tuple[Segment, int] | None:
    """(segment, last use) of the least recently used segment without I/O in flight."""
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
