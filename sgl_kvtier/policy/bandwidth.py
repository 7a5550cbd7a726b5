"""How fast each link is, learned from the transfers that ended."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvtier.types import Link

_KEEP = 0.9
"""Weight an earlier transfer keeps when another of the same size ends: about the last ten transfers count."""
_UNKNOWN = 1e9


@dataclass(slots=True)
class _Seen:
    nbytes: float
    seconds: float


class Bandwidth:
    """Bytes per second of each link: decayed bytes over decayed seconds, so that short transfers do not weigh as long ones.

    `initial` are first guesses in bytes per second; `latency_s` is added to every transfer. Seconds are of the hands' clock.
    """

    def __init__(self, initial: dict[Link, float], latency_s: dict[Link, float] | None = None) -> None:
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
            # The first guess is worth one transfer like this one: a single outlier does not replace it.
            self._seen[link] = seen = _Seen(float(nbytes), nbytes / self._initial[link]) if link in self._initial else _Seen(0.0, 0.0)
        seen.nbytes = seen.nbytes * _KEEP + nbytes
        seen.seconds = seen.seconds * _KEEP + seconds
        self._rates[link] = seen.nbytes / seen.seconds

    def bytes_per_second(self, link: Link) -> float:
        """The present estimate; the first guess while nothing was seen, 1 GB/s where there is none."""
        return self._rates.get(link, _UNKNOWN)

    def latency_s(self, link: Link) -> float:
        """What every transfer takes beside its bytes."""
        return self._latency_s.get(link, 0.0)

    def seconds(self, link: Link, nbytes: float) -> float:
        """How long a transfer takes on an idle link (TierKV Eq. 2)."""
        return self._latency_s.get(link, 0.0) + nbytes / self._rates.get(link, _UNKNOWN) if nbytes > 0 else 0.0

    def known(self, link: Link) -> bool:
        """Whether the link has been measured, here or in a profile."""
        return link in self._rates

    def profile(self) -> dict[str, float]:
        """The estimates as plain data: link name to bytes per second."""
        return {link.value: rate for link, rate in self._rates.items()}
