"""The bandwidth of each link, learned from the transfers that ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sgl_kvtier.types import Link

_KEEP: Final = 0.9
"""Weight an earlier transfer keeps when one of the same size ends: about the last ten count."""
_UNKNOWN: Final = 1e9
_NEWS: Final = 4
"""This many transfers in a row that are all faster, or all slower, than the estimate mean that the
link has changed.
"""
_CHANGED: Final = 1.25
"""A transfer differs from the estimate when it does so by at least this factor."""


@dataclass(slots=True)
class _Seen:
    nbytes: float
    seconds: float
    news: list[tuple[int, float]] = field(default_factory=list)
    """Bytes and seconds of the last transfers, all off the estimate in one direction."""

    def changed(self, nbytes: int, seconds: float) -> bool:
        """Whether this transfer shows that the link has changed. Small ones are dominated by
        latency and are ignored.
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
    weigh less than long ones. After several transfers in a row that contradict the estimate, only
    those count.

    `initial` are first guesses in bytes per second; `latency_s` is added to every transfer. Seconds
    are of the executor's clock.
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
            # The first guess weighs as much as this transfer: a single outlier does not replace it.
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
        """The estimate; the first guess until a transfer ended, 1 GB/s where there is none."""
        return self._rates.get(link, _UNKNOWN)

    def latency_s(self, link: Link) -> float:
        """Seconds that every transfer takes besides its bytes."""
        return self._latency_s.get(link, 0.0)

    def seconds(self, link: Link, nbytes: float) -> float:
        """Seconds that a transfer takes on an idle link (TierKV Eq. 2)."""
        return (
            self._latency_s.get(link, 0.0) + nbytes / self._rates.get(link, _UNKNOWN)
            if nbytes > 0
            else 0.0
        )

    def known(self, link: Link) -> bool:
        """Whether the link has been measured, here or in a profile."""
        return link in self._rates

    def profile(self) -> dict[str, float]:
        """The estimates as plain data: link name to bytes per second."""
        return {link.value: rate for link, rate in self._rates.items()}
