"""Reading "printed": the accounting of page faults that gives TierKV's Tables 5 to 7.

Inferred from the numbers, not stated in the paper:

1. A running request faults in a step with the probability that a block of the batch is not in HBM.
   That is 1 - HBM / footprint, whatever the policy keeps there.
2. A fault costs one block, not all blocks that are missing, at the contended rate
   `BW / min(n, lanes)` of appendix A. Faults are served one after the other: n faults cost n times
   the time of a stream that shares the link with n - 1 others.
3. A policy is a constant share of that cost. Prefetch and Oracle pay next to nothing whenever one
   single block passes Algorithm 1's condition; the bytes of all the other blocks are not charged to
   the link.
"""

from __future__ import annotations

from sgl_kvtier.lab.papers.tierkv.load import Request
from sgl_kvtier.lab.papers.tierkv.lookahead import brings_one_block
from sgl_kvtier.lab.papers.tierkv.machine import Batch, Paging, Running, Server

LOOKS_AHEAD = ("Prefetch", "Oracle")
"""Policies whose share holds only while lookahead brings the block in time."""


class PrintedPager:
    """Charges faults as printed. `share` is the policy's part of a fault's cost; `lookahead_steps`
    is TierKV's K.
    """

    def __init__(self, server: Server, policy: str, share: float, lookahead_steps: int = 1) -> None:
        self._server = server
        self._share = share
        self._steps = lookahead_steps if policy in LOOKS_AHEAD else None

    def admits(self, request: Request, batch: Batch) -> bool:
        """Admits every request, up to the largest batch."""
        del request, batch
        return True

    def started(self, request: Request, batch: Batch) -> None:
        """Nothing is kept per request."""

    def ended(self, running: Running, batch: Batch) -> None:
        """Nothing is kept per request."""

    def step(self, batch: Batch, compute_s: float) -> Paging:
        """All requests' faults, one after the other."""
        missing = max(0.0, 1 - self._server.hbm_tokens / batch.tokens)
        faults = len(batch) * missing
        share = self._share
        if faults and self._steps is not None and not self._brings_in_time(faults, compute_s):
            share = 1.0
        return Paging(stall_s=share * faults * fault_s(self._server, faults), hit_share=1 - missing)

    def _brings_in_time(self, faults: float, compute_s: float) -> bool:
        assert self._steps is not None
        server = self._server
        rate = server.link_bytes_per_s / lanes_taken(server, faults)
        return brings_one_block(server, rate, compute_s, self._steps)


def lanes_taken(server: Server, faults: float) -> float:
    """The number of streams the link divides itself between when `faults` streams are on it: at
    most `link_lanes`.
    """
    return min(max(faults, 1.0), server.link_lanes)


def fault_s(server: Server, faults: float) -> float:
    """Seconds one block takes when `faults` streams are on the link."""
    return (
        server.link_latency_s
        + server.block_bytes * lanes_taken(server, faults) / server.link_bytes_per_s
    )
