"""Pagers that never move a block: static placement, an oracle that packs, and the accounting that
gives the printed numbers.
"""

from __future__ import annotations

from sgl_kvtier.lab.papers.tierkv.load import Request
from sgl_kvtier.lab.papers.tierkv.machine import Batch, Paging, Running, Server


class StaticPager:
    """Static-Tiering: a request's tokens take what room HBM has when they come, the others stay in
    DRAM for good.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._in_hbm: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._used = 0

    def admits(self, request: Request, batch: Batch) -> bool:
        """Admits every request, up to the largest batch."""
        del request, batch
        return True

    def started(self, request: Request, batch: Batch) -> None:
        """It takes what is free."""
        del batch
        self._place(request.rid, request.context)

    def ended(self, running: Running, batch: Batch) -> None:
        """It gives its room back."""
        del batch
        self._used -= self._in_hbm.pop(running.request.rid)
        del self._known[running.request.rid]

    def step(self, batch: Batch, compute_s: float) -> Paging:
        """Blocks in DRAM are read in every step, while no request computes."""
        del compute_s
        for rid, running in batch.running.items():
            self._place(rid, running.tokens(batch.step))
        missing = batch.tokens - self._used
        return Paging(
            demand_bytes=missing * self._server.kv_bytes_per_token,
            hit_share=1 - missing / batch.tokens,
        )

    def _place(self, rid: int, tokens: int) -> None:
        taken = min(tokens - self._known.get(rid, 0), self._server.hbm_tokens - self._used)
        self._known[rid] = tokens
        self._in_hbm[rid] = self._in_hbm.get(rid, 0) + taken
        self._used += taken


class PackingPager:
    """Oracle as section 4.1 defines it: it knows every length.

    It starts a request only if no fetch will ever be on the critical path. Then all that the batch
    will hold fits into HBM and the link's transfers during a step.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def admits(self, request: Request, batch: Batch) -> bool:
        """Only a request that fits in to its end beside the others to theirs."""
        server = self._server
        hidden = (
            server.link_bytes_per_s * server.compute_s(len(batch) + 1) / server.kv_bytes_per_token
        )
        final = sum(one.request.context + one.request.generate for one in batch.running.values())
        return final + request.context + request.generate <= server.hbm_tokens + hidden

    def started(self, request: Request, batch: Batch) -> None:
        """Nothing is kept per request."""

    def ended(self, running: Running, batch: Batch) -> None:
        """Nothing is kept per request."""

    def step(self, batch: Batch, compute_s: float) -> Paging:
        """Tokens that do not fit are fetched while the step computes."""
        del compute_s
        missing = max(0, batch.tokens - self._server.hbm_tokens)
        return Paging(
            ahead_bytes=missing * self._server.kv_bytes_per_token,
            hit_share=1 - missing / batch.tokens,
        )


class OneBlockPager:
    """The accounting inferred from the print: a running request faults with the probability that a
    block of the batch is not in HBM, and pays for one block at the contended rate of appendix A.
    Faults are paid one after the other, and a policy is a constant `share` of that. At most `lanes`
    streams share the link. No byte of what is missing is charged.
    """

    def __init__(self, server: Server, share: float, lanes: int) -> None:
        self._server = server
        self._share = share
        self._lanes = lanes

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
        del compute_s
        server = self._server
        missing = max(0.0, 1 - server.hbm_tokens / batch.tokens)
        faults = len(batch) * missing
        streams = min(max(faults, 1.0), self._lanes)
        block_s = server.link_latency_s + server.block_bytes * streams / server.link_bytes_per_s
        return Paging(stall_s=self._share * faults * block_s, hit_share=1 - missing)
