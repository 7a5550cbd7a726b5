"""The bandwidth of each link, learned from completed transfers, and the transfers in flight on each
link, with the time they should take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sgl_kvtier.types import Link, Span

_KEEP: Final = 0.9
"""Weight that earlier transfers keep when one of the same size ends: about the last ten count."""
_UNKNOWN: Final = 1e9
_NEWS: Final = 4
"""The link has changed if this many transfers in a row are all faster, or all slower."""
_CHANGED: Final = 1.25
"""A transfer differs from the estimate if it does so by at least this factor."""


@dataclass(slots=True)
class _Seen:
    nbytes: float
    """Decayed sum of the transfers' bytes."""
    seconds: float
    """Decayed sum of the seconds for which they kept the link busy."""
    news: list[tuple[int, float]] = field(default_factory=list)
    """(bytes, seconds) of the last transfers that all differ from the estimate in one direction."""

    def changed(self, nbytes: int, seconds: float) -> bool:
        """Whether this transfer shows that the link has changed. Small ones, mostly latency, are
        ignored.
        """
        if nbytes < self.nbytes * (1 - _KEEP) / 2:
            self.news.clear()
            return False
        known = self.nbytes / self.seconds
        faster, slower = nbytes > _CHANGED * known * seconds, nbytes * _CHANGED < known * seconds
        if self.news and (self.news[-1][0] > known * self.news[-1][1]) != faster:
            self.news.clear()
        if not (faster or slower):
            self.news.clear()
            return False
        self.news.append((nbytes, seconds))
        return len(self.news) == _NEWS


class Bandwidth:
    """Bytes per second of each link: decayed bytes over decayed seconds, so that short transfers
    weigh less than long ones. If several transfers in a row contradict the estimate, only those
    count from then on.

    `initial`: first guesses in bytes per second. `latency_s`: added to each transfer. Times are
    those of the executor's clock.
    """

    def __init__(
        self, initial: dict[Link, float], latency_s: dict[Link, float] | None = None
    ) -> None:
        self._latency_s = dict(latency_s or {})
        self._initial = dict(initial)
        self._seen: dict[Link, _Seen] = {}
        self._rates = dict(initial)

    def saw(self, link: Link, nbytes: int, seconds: float) -> None:
        """A transfer ended: `seconds` is the time the link was busy with it."""
        if nbytes <= 0 or seconds <= 0:
            return
        seen = self._seen.get(link)
        if seen is None:
            # The first guess weighs as much as this transfer, so a single outlier does not replace
            # it.
            self._seen[link] = seen = (
                _Seen(float(nbytes), nbytes / self._initial[link])
                if link in self._initial
                else _Seen(0.0, 0.0)
            )
        if seen.seconds and seen.changed(nbytes, seconds):
            # Otherwise many more transfers would have to pass before the old ones lost their
            # weight: those of a slow link weigh most.
            seen.nbytes, seen.seconds = (float(sum(each)) for each in zip(*seen.news, strict=True))
            seen.news.clear()
        else:
            seen.nbytes = seen.nbytes * _KEEP + nbytes
            seen.seconds = seen.seconds * _KEEP + seconds
        self._rates[link] = seen.nbytes / seen.seconds

    def bytes_per_second(self, link: Link) -> float:
        """The estimate; before any transfer has ended the first guess, or 1 GB/s without one."""
        return self._rates.get(link, _UNKNOWN)

    def latency_s(self, link: Link) -> float:
        """Seconds that each transfer takes in addition to its bytes."""
        return self._latency_s.get(link, 0.0)

    def seconds(self, link: Link, nbytes: float) -> float:
        """Seconds that a transfer takes on an idle link (TierKV Eq. 2)."""
        return (
            self._latency_s.get(link, 0.0) + nbytes / self._rates.get(link, _UNKNOWN)
            if nbytes > 0
            else 0.0
        )

    def known(self, link: Link) -> bool:
        """Whether the link was measured, in this run or in a profile."""
        return link in self._rates

    def profile(self) -> dict[str, float]:
        """The estimates as plain data: link name to bytes per second."""
        return {link.value: rate for link, rate in self._rates.items()}


class Transfer(NamedTuple):
    """A transfer in flight."""

    rid: str
    first: int
    """The first page of the request's prompt in it."""
    stop: int
    """One past the last page."""


class LinkQueues:
    """Transfers in flight by link, in order of their start. Seconds of the executor's clock."""

    def __init__(self, bandwidth: Bandwidth, page_bytes: int) -> None:
        self._bandwidth = bandwidth
        self._page_bytes = page_bytes
        self._queued: dict[Link, list[Transfer]] = {}
        self._nbytes: dict[Link, int] = {}
        """Bytes of all transfers on each link."""
        self._since: dict[Link, float] = {}
        """When each link began the first transfer of its queue."""

    def begin(self, link: Link, rid: str, spans: Sequence[Span], now: float) -> list[float]:
        """Transfers begin, in this order. Returns the link's backlog in seconds as of each one."""
        queue = self._queued.setdefault(link, [])
        if not queue:
            self._since[link] = now
            self._nbytes[link] = 0
            queue.append(Transfer(rid, spans[0].start, spans[0].stop))
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
            queue.append(Transfer(rid, span.start, span.stop))
            rest += (span.stop - span.start) * page_bytes
            backlogs_s.append(latency_s + rest / rate + head_s)
        self._nbytes[link] = rest + self._bytes(queue[0])
        return backlogs_s

    def refill(self, link: Link, now: float, horizon_s: float, group: int, probes: int) -> int:
        """Number of pages to load, in transfers of `group` pages, until the link has `horizon_s`
        seconds of work. A link that was never measured gets up to `probes` transfers.
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
        """A transfer of this request's pages ended, successfully or not, whole or in part. Returns
        the number of pages that are no longer in flight.
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
            ends = ((start, low), (high, stop))
            left = [Transfer(rid, first, end) for first, end in ends if first < end]
            queue[place : place + 1] = left
            place += len(left)
        self._nbytes[link] -= pages * self._page_bytes
        if pages:
            self._since[link] = now
        return pages

    def backlog_seconds(self, link: Link, now: float) -> float:
        """Seconds until all transfers are done. A late first one should take as long again."""
        queue = self._queued.get(link)
        if not queue:
            return 0.0
        # Bandwidth.seconds and _head_s, inlined because a step calls this several times.
        rate, latency_s = self._bandwidth.bytes_per_second(link), self._bandwidth.latency_s(link)
        _, first, stop = queue[0]
        head_nbytes = (stop - first) * self._page_bytes
        rest = self._nbytes[link] - head_nbytes
        whole_s = latency_s + head_nbytes / rate
        elapsed_s = now - self._since[link]
        head_s = whole_s - elapsed_s if elapsed_s < whole_s else elapsed_s
        return latency_s + rest / rate + head_s if rest > 0 else 0.0 + head_s

    def _bytes(self, transfer: Transfer) -> int:
        return (transfer.stop - transfer.first) * self._page_bytes

    def _head_s(self, link: Link, now: float) -> float:
        whole_s = self._bandwidth.seconds(link, self._bytes(self._queued[link][0]))
        elapsed_s = now - self._since[link]
        return whole_s - elapsed_s if elapsed_s < whole_s else elapsed_s

    def backlogs(self, now: float) -> dict[Link, float]:
        """Backlog in seconds of each link with transfers in flight."""
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
        """Forgets all transfers."""
        self._queued.clear()

    def transfers(self, link: Link) -> int:
        """Number of transfers in flight on a link."""
        return len(self._queued.get(link, ()))
