"""Transfers per link: queued in order, a few at a time on the network, cancelled or given up where
not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import simpy

from sgl_kvtier.lab.sim.hardware import Route
from sgl_kvtier.lab.sim.links import Network
from sgl_kvtier.lab.sim.requests import LinkResult
from sgl_kvtier.policy.messages import CANCELLED
from sgl_kvtier.types import Link, Span


@dataclass(slots=True, eq=False)
class Transfer:
    """Pages on their way. `begin` is asked when its turn comes and says whether there is anything
    to move. Then exactly one of `done(seconds)` and `lost(span, reason)` is called for every page
    of it.
    """

    link: Link
    rid: str
    span: Span
    begin: Callable[[Transfer], bool]
    done: Callable[[Transfer, float], None]
    lost: Callable[[Transfer, Span, str], None]
    due_s: float | None = None
    """When it is given up unless it has begun, on the kernel's clock."""
    page_bytes: float | None = None
    """Of each of its pages, where that is not the model's."""


class _Share:
    """Busy time of one link, dealt out evenly among the transfers under way: their seconds add up
    to the link's.
    """

    def __init__(self) -> None:
        self.under_way = 0
        self.each_s = 0.0
        """Seconds a transfer under way since the beginning would have been given."""
        self.busy_s = 0.0
        self._as_of = 0.0

    def change(self, now: float, by: int) -> None:
        """A transfer began or ended."""
        if self.under_way:
            self.each_s += (now - self._as_of) / self.under_way
            self.busy_s += now - self._as_of
        self._as_of = now
        self.under_way += by


class Transfers:
    """The queues of all links. Calls back inside events of the kernel."""

    def __init__(
        self,
        env: simpy.Environment,
        network: Network,
        routes: Mapping[Link, Route],
        page_bytes: int,
    ) -> None:
        self._env = env
        self._network = network
        self._routes = routes
        self._page_bytes = page_bytes
        self._queued: dict[Link, list[Transfer]] = {link: [] for link in routes}
        self._shares = {link: _Share() for link in routes}
        self.results: dict[Link, LinkResult] = {link: LinkResult() for link in routes}
        self.on_end: Callable[[], None] = lambda: None
        """Called whenever a transfer is over, whichever way."""

    @property
    def pending(self) -> int:
        """Transfers queued or under way, on all links."""
        return sum(share.under_way for share in self._shares.values()) + sum(
            map(len, self._queued.values())
        )

    def nbytes(self, transfer: Transfer) -> int:
        """Bytes that it moves."""
        page_bytes = self._page_bytes if transfer.page_bytes is None else transfer.page_bytes
        return round(len(transfer.span) * page_bytes)

    def submit(self, transfer: Transfer) -> None:
        """Queues a transfer. One that has not begun when it is due is lost as late."""
        assert transfer.link in self._routes, (
            f"{transfer.rid}: this machine has no link {transfer.link.value}"
        )
        self._queued[transfer.link].append(transfer)
        self._watch(transfer)
        self._pump(transfer.link)

    def cancel(self, rid: str, span: Span) -> None:
        """Takes back what of these pages has not begun; each is lost as cancelled."""
        for link, queue in self._queued.items():
            for transfer in [item for item in queue if item.rid == rid]:
                low, high = max(transfer.span.start, span.start), min(transfer.span.stop, span.stop)
                if low < high:
                    self._cut(link, transfer, Span(low, high))

    def _cut(self, link: Link, transfer: Transfer, span: Span) -> None:
        rest = [Span(transfer.span.start, span.start), Span(span.stop, transfer.span.stop)]
        parts = [
            Transfer(
                link,
                transfer.rid,
                part,
                transfer.begin,
                transfer.done,
                transfer.lost,
                transfer.due_s,
                transfer.page_bytes,
            )
            for part in reversed(rest)
            if part
        ]
        at = self._queued[link].index(transfer)
        self._queued[link][at : at + 1] = parts
        for part in parts:
            self._watch(part)
        transfer.lost(transfer, span, CANCELLED)

    def _watch(self, transfer: Transfer) -> None:
        if transfer.due_s is not None:
            timer = self._env.timeout(max(0.0, transfer.due_s - self._env.now))
            assert timer.callbacks is not None
            timer.callbacks.append(lambda _: self._give_up(transfer))

    def _give_up(self, transfer: Transfer) -> None:
        if transfer in self._queued[transfer.link]:
            self._queued[transfer.link].remove(transfer)
            transfer.lost(transfer, transfer.span, "late")
            self.on_end()

    def _pump(self, link: Link) -> None:
        route, share = self._routes[link], self._shares[link]
        while self._queued[link] and share.under_way < route.depth:
            transfer = self._queued[link].pop(0)
            if not transfer.begin(transfer):
                self.on_end()
                continue
            share.change(self._env.now, +1)
            nbytes = self.nbytes(transfer)
            self._network.open(
                route.pipes, nbytes, self._ended(transfer, share.each_s), route.latency_s
            )

    def _ended(self, transfer: Transfer, each_s_before: float) -> Callable[[object], None]:
        def ended(_: object) -> None:
            share, result = self._shares[transfer.link], self.results[transfer.link]
            share.change(self._env.now, -1)
            result.nbytes += self.nbytes(transfer)
            result.transfers += 1
            result.busy_s = share.busy_s
            transfer.done(transfer, share.each_s - each_s_before)
            self.on_end()
            self._pump(transfer.link)

        return ended
