"""The transfers in flight on each link, and when they should be over."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.types import Link, Span


class LinkQueues:
    """Transfers begun and not ended, per link, in that order. Seconds of the executor's clock."""

    def __init__(self, bandwidth: Bandwidth, page_bytes: int) -> None:
        self._bandwidth = bandwidth
        self._page_bytes = page_bytes
        self._queued: dict[Link, list[tuple[str, int, int]]] = {}
        """Request, first page and the page behind the last."""
        self._nbytes: dict[Link, int] = {}
        self._since: dict[Link, float] = {}

    def asked(self, link: Link, rid: str, spans: Sequence[Span], now: float) -> list[float]:
        """Transfers begin, in this order; returns the link's backlog in seconds with each."""
        queue = self._queued.setdefault(link, [])
        if not queue:
            self._since[link] = now
            self._nbytes[link] = 0
            queue.append((rid, spans[0].start, spans[0].stop))
            head_s, rest, spans = self._head_s(link, now), 0, spans[1:]
            backlogs_s = [0.0 + head_s]
        else:
            head_s, rest, backlogs_s = (
                self._head_s(link, now),
                self._nbytes[link] - self._bytes(queue[0]),
                [],
            )
        page_bytes, rate = self._page_bytes, self._bandwidth.bytes_per_second(link)
        latency_s = self._bandwidth.latency_s(link)
        for span in spans:
            queue.append((rid, span.start, span.stop))
            rest += (span.stop - span.start) * page_bytes
            backlogs_s.append(latency_s + rest / rate + head_s)
        self._nbytes[link] = rest + self._bytes(queue[0])
        return backlogs_s

    def wanted(self, link: Link, now: float, horizon_s: float, group: int, probes: int) -> int:
        """Number of pages to load, in transfers of `group` pages, until the link has `horizon_s`
        seconds of work. A link that was never measured gets up to `probes` transfers to measure it.
        """
        if not self._bandwidth.known(link):
            return max(0, probes - self.transfers(link)) * group
        left_s = horizon_s - self.backlog_seconds(link, now)
        if left_s <= 0:
            return 0
        return (
            max(1, math.ceil(left_s / self._bandwidth.seconds(link, group * self._page_bytes)))
            * group
        )

    def ended(self, link: Link, rid: str, span: Span, now: float) -> int:
        """A transfer of this request's pages ended, well or not, in whole or in part; returns the
        number of pages it freed.
        """
        queue = self._queued.get(link)
        if not queue:
            return 0
        pages, place = 0, 0
        # Transfers end in about the order they were begun.
        while place < len(queue) and pages < len(span):
            other, start, stop = queue[place]
            low, high = max(start, span.start), min(stop, span.stop)
            if other != rid or low >= high:
                place += 1
                continue
            pages += high - low
            left = [(rid, *part) for part in ((start, low), (high, stop)) if part[0] < part[1]]
            queue[place : place + 1] = left
            place += len(left)
        self._nbytes[link] -= pages * self._page_bytes
        if pages:
            self._since[link] = now
        return pages

    def backlog_seconds(self, link: Link, now: float) -> float:
        """Seconds until all transfers have landed. A first one that is late is expected to take as
        long again as it has taken.
        """
        queue = self._queued.get(link)
        if not queue:
            return 0.0
        # Bandwidth.seconds and _head_s, written out: a step asks several times.
        rate, latency_s = self._bandwidth.bytes_per_second(link), self._bandwidth.latency_s(link)
        head = queue[0]
        head_nbytes = (head[2] - head[1]) * self._page_bytes
        rest = self._nbytes[link] - head_nbytes
        whole_s = latency_s + head_nbytes / rate
        elapsed_s = now - self._since[link]
        head_s = whole_s - elapsed_s if elapsed_s < whole_s else elapsed_s
        return latency_s + rest / rate + head_s if rest > 0 else 0.0 + head_s

    def _bytes(self, queued: tuple[str, int, int]) -> int:
        return (queued[2] - queued[1]) * self._page_bytes

    def _head_s(self, link: Link, now: float) -> float:
        whole_s = self._bandwidth.seconds(link, self._bytes(self._queued[link][0]))
        elapsed_s = now - self._since[link]
        return whole_s - elapsed_s if elapsed_s < whole_s else elapsed_s

    def backlogs(self, now: float) -> dict[Link, float]:
        """The backlog in seconds of every link with transfers in flight."""
        return {
            link: self.backlog_seconds(link, now) for link, queue in self._queued.items() if queue
        }

    def whole_below(self, rid: str, start: int, stop: int) -> int:
        """The end of this request's last transfer within pages [start, stop); else `start`."""
        within = [
            last
            for queue in self._queued.values()
            for other, first, last in queue
            if other == rid and first >= start and last <= stop
        ]
        return max(within, default=start)

    def clear(self) -> None:
        """Forgets all transfers: none is in flight any more, as far as is known here."""
        self._queued.clear()

    def transfers(self, link: Link) -> int:
        """Number of transfers in flight on a link."""
        return len(self._queued.get(link, ()))
