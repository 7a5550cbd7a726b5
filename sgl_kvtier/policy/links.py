"""What is under way on each link, and when it should be over."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvtier.policy.bandwidth import Bandwidth
from sgl_kvtier.types import Link, Span


@dataclass(slots=True)
class _Queued:
    rid: str
    span: Span
    nbytes: int


class LinkQueues:
    """Transfers asked for and not ended, per link, in the order they were asked for. Seconds of the hands' clock."""

    def __init__(self, bandwidth: Bandwidth, page_bytes: int) -> None:
        self._bandwidth = bandwidth
        self._page_bytes = page_bytes
        self._queued: dict[Link, list[_Queued]] = {}
        self._nbytes: dict[Link, int] = {}
        self._since: dict[Link, float] = {}

    def asked(self, link: Link, rid: str, span: Span, now: float) -> None:
        """A transfer was handed out."""
        queue = self._queued.setdefault(link, [])
        if not queue:
            self._since[link] = now
        queue.append(_Queued(rid, span, len(span) * self._page_bytes))
        self._nbytes[link] = self._nbytes.get(link, 0) + queue[-1].nbytes

    def ended(self, link: Link, rid: str, span: Span, now: float) -> int:
        """A transfer of this request's pages ended, well or not, in whole or in part; returns how many pages it freed."""
        queue = self._queued.get(link)
        if not queue:
            return 0
        pages, place = 0, 0
        while place < len(queue) and pages < len(span):  # transfers end in about the order they were asked for
            item = queue[place]
            low, high = max(item.span.start, span.start), min(item.span.stop, span.stop)
            if item.rid != rid or low >= high:
                place += 1
                continue
            pages += high - low
            left = [part for part in (Span(item.span.start, low), Span(high, item.span.stop)) if part]
            queue[place : place + 1] = [_Queued(rid, part, len(part) * self._page_bytes) for part in left]
            place += len(left)
        self._nbytes[link] -= pages * self._page_bytes
        if pages:
            self._since[link] = now
        return pages

    def backlog_seconds(self, link: Link, now: float) -> float:
        """Until all of it has landed. A head that is late is expected to take as long again as it has taken."""
        queue = self._queued.get(link)
        if not queue:
            return 0.0
        head_s = self._bandwidth.seconds(link, queue[0].nbytes)
        elapsed = now - self._since[link]
        rest_s = self._bandwidth.seconds(link, self._nbytes[link] - queue[0].nbytes)
        return rest_s + (head_s - elapsed if elapsed < head_s else elapsed)

    def backlogs(self, now: float) -> dict[Link, float]:
        """The same of every link with something under way."""
        return {link: self.backlog_seconds(link, now) for link, queue in self._queued.items() if queue}

    def transfers(self, link: Link) -> int:
        """Transfers under way on a link."""
        return len(self._queued.get(link, ()))
