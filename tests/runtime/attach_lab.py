"""A request whose last page is computed after loaded ones, over SGLang's pools and without a server."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import device_pools
import torch
from device_pools import controller, slots

from sgl_kvtier.runtime.backend.host_pages import parts_of
from sgl_kvtier.runtime.proof.attach import AttachProof, comparable
from sgl_kvtier.runtime.proof.record import Proof
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import PageKey, Span, Tier

PAGE, PAGES = 16, 6
pools = partial(device_pools.pools, heads=2, dim=32)
KEYS = tuple(PageKey(bytes([n]) * 32) for n in range(PAGES))
HOST = [2, 9, 4, 7, 11, 5]
"""Host pages that hold the stored bytes of a prompt's pages."""
ROW = [5, 3, 7, 12, 6, 9]
"""Device pages of the request's row."""


class Store:
    """A backend that has pages in memory."""

    def __init__(self, pages: dict[PageKey, list[bytes]]) -> None:
        self.pages = pages
        self.reads = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def begin_read(self) -> None:
        """By this it is known as ours."""

    def begin_read_into(self, keys: Any, parts: Any) -> Any:
        self.reads += 1
        assert self.go_on.wait(60)
        outcomes = []
        for key, into in zip(keys, parts, strict=True):
            outcomes.append(ReadOutcome.OK if key in self.pages else ReadOutcome.MISS)
            for view, data in zip(into, self.pages.get(key, []), strict=False):
                view[:] = data
        return SimpleNamespace(wait=lambda _s: True, outcomes=outcomes, cancel=lambda: None)


class Scene:
    """A request of six stored pages whose KV is in its row, as a right forward leaves it."""

    def __init__(
        self, pair: tuple[Any, Any] | None = None, every: int = 1, tree: Any = None
    ) -> None:
        self.device, self.host = pair or pools("cpu", "page_first")
        self.controller = controller(self.device, self.host, "direct")
        device_pools.put(
            self.device, slots(ROW, PAGE), device_pools.wanted_rows(self.host, slots(HOST, PAGE))
        )
        parts = parts_of(self.host, PAGES, slots(HOST, PAGE))
        self.store = Store(
            {key: [bytes(p) for p in page] for key, page in zip(KEYS, parts, strict=True)}
        )
        self.controller.storage_backend = self.store
        self.pinned: list[Any] = []
        self.reqs: dict[str, Any] = {}
        rows = torch.zeros(3, 4096, dtype=torch.int32)
        rows[1, : PAGES * PAGE] = slots(ROW, PAGE)
        rows = rows.to(self.device.device)
        self.tree = SimpleNamespace(
            page_size=PAGE,
            cache_controller=self.controller,
            token_to_kv_pool_allocator=SimpleNamespace(size=1024),
            req_to_token_pool=SimpleNamespace(req_to_token=rows),
            inc_host_lock_ref=self.pin,
            dec_host_lock_ref=self.unpin,
            unlock=lambda lock: None,
            **(tree or {}),
        )
        self.context = StepContext(self.tree, alone=tree is None)
        self.proof = Proof("a device", "a way")
        found = comparable(self.controller, PAGE)
        assert not isinstance(found, str)
        self.attach = AttachProof(self.context, self.proof, found, every)

    def pin(self, node: int) -> Any:
        self.pinned.append(node)
        return SimpleNamespace(to_dec_params=lambda: None)

    def unpin(self, node: int, params: Any) -> None:
        self.pinned.remove(node)

    def restoration(self, rid: str = "r", host_pages: int = 0) -> Restoration:
        """One of all six pages, the first `host_pages` of them in host memory."""
        parts = ((Span(0, host_pages), Tier.HOST), (Span(host_pages, PAGES), Tier.STORAGE))
        self.reqs[rid] = SimpleNamespace(rid=rid, best_match_node=8)
        return Restoration(
            rid,
            self.reqs[rid],
            PAGES * PAGE + 1,
            0,
            PAGES,
            tuple((span, tier) for span, tier in parts if span),
            KEYS[host_pages:],
            slots(HOST[:host_pages], PAGE),
        )

    def attached(self, rid: str = "r", host_pages: int = 0) -> Restoration:
        """One that has met: its first page was computed, the others but the last were loaded."""
        r = self.restoration(rid, host_pages)
        self.attach.leave_out(r, 0)
        self.attach.attached(r, Span(1, 3))
        self.attach.attached(r, Span(3, PAGES - 1))
        self.attach.closed(r, "met")
        return r

    def run(self, rid: str, start: int, stop: int, row: int = 1) -> None:
        """A prefill of these tokens of a request in this row, which has ended."""
        req = self.reqs.get(rid) or SimpleNamespace(rid=rid)
        self.attach.launched(self.attach.launching(batch_of(req, start, stop, row)), None)

    def finish(self, rid: str = "r", row: int = 1) -> None:
        """The rest of its prompt."""
        self.run(rid, (PAGES - 1) * PAGE, PAGES * PAGE + 1, row)

    def settle(self) -> bool:
        """Ticks until all is compared; whether one differs."""
        until, differs = time.monotonic() + 60, False
        while self.attach.polls():
            assert time.monotonic() < until, "nothing was compared"
            differs |= self.attach.settle([bytes(poll.local) for poll in self.attach.polls()])
            time.sleep(0.001)
        return differs

    def layer(self, number: int = 1) -> torch.Tensor:
        """One layer of the device's values, or of its latents."""
        return (getattr(self.device, "v_buffer", None) or self.device.kv_buffer)[number]


def batch_of(req: Any, start: int, stop: int, row: int = 1) -> Any:
    """A batch that computes tokens [start, stop) of a request in this row."""
    req.kv = SimpleNamespace(req_pool_idx=row)
    return SimpleNamespace(reqs=[req], prefix_lens=[start], extend_lens=[stop - start])
