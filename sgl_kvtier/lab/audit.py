"""Whether loaded pages equal their sources, bit for bit: for tests on a device whose copies were
never checked (`lab.audit`).

At a splice the pages are read back from the device, waiting for it. Pages of storage are compared
with what the store has under their keys, read once more and checked by its own checksum; so a page
that went to another page's slots is found too. Pages of host memory are compared with the tree's
host pages, which stay pinned until then. This slows a server down, and a throttled store is
charged. Nothing here raises into the scheduler: what cannot be compared is counted as that.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.runtime.backend.host_pages import (
    CONTIGUOUS,
    PAGE_AXES,
    bytes_of,
    device_buffers,
    parts_of,
)
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.sglang import slot_pools
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import PageKey, Span, Tier

logger = logging.getLogger(__name__)

EQUAL, DIFFERS, UNREAD, SKIPPED = "equal", "differs", "not read", "skipped"
"""What came of a page: `UNREAD` is no longer in the store, or cannot be read; `SKIPPED` came while
too much was waiting to be compared, or could not be read back.
"""

_MOST_WAITING = 64
"""Splices whose pages wait in memory for the store's bytes."""
_PATIENCE_S = 30.0
_CLOSE_S = 10.0


class _Page(NamedTuple):
    rid: str
    page: int
    key: PageKey
    parts: tuple[torch.Tensor, ...]


class Audit:
    """Compares pages at the splice: `look` on the scheduler's thread, reads of the store on one of
    its own.
    """

    def __init__(self, controller: Any, page_tokens: int, counters: RestoreCounters) -> None:
        """Raises ConfigError for pools whose pages cannot be read back."""
        some = torch.zeros(page_tokens, dtype=torch.int64)  # of none, SGLang describes no transfer
        transfers = slot_pools.transfers(controller, some, some)
        if len(transfers) != 1 or not _is_known(transfers[0]):
            kinds = ", ".join(type(transfer.host_pool).__name__ for transfer in transfers)
            raise ConfigError(
                f"lab.audit: pages of {kinds or 'these pools'} cannot be read back. Leave "
                "lab.audit away"
            )
        self._controller = controller
        self._host, self._device = transfers[0].host_pool, transfers[0].device_pool
        self._page = page_tokens
        self._counted, self._lock = counters.audited_pages, threading.Lock()
        self._waiting: queue.Queue[list[_Page] | None] = queue.Queue(_MOST_WAITING)
        self._hung: list[Any] = []
        self._thread = threading.Thread(target=self._run, name="kvtier-audit", daemon=True)
        self._thread.start()

    def look(self, r: Restoration, span: Span, device_slots: torch.Tensor) -> None:
        """Scheduler's thread, when these slots were taken for the pages of `span`. Never raises."""
        try:
            pages = pages_of(self._device, self._host, device_slots, self._page)
            self._look(r, span, pages)
        except Exception:
            logger.exception("kvtier: %s: pages %s could not be audited", r.rid, span)
            self._count(SKIPPED, len(span))

    def close(self) -> None:
        """Ends the thread after what waits, within `_CLOSE_S`. What is left then is counted as
        skipped, and a read under way is left behind. Idempotent.
        """
        end = time.monotonic() + _CLOSE_S
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._waiting.put(None, timeout=_CLOSE_S)
            self._thread.join(max(0.0, end - time.monotonic()))
        if not self._thread.is_alive():
            return
        with suppress(queue.Empty):
            while True:
                self._count(SKIPPED, len(self._waiting.get_nowait() or ()))
        self._waiting.put(None)  # it ends once the store has answered

    def _look(self, r: Restoration, span: Span, pages: list[tuple[torch.Tensor, ...]]) -> None:
        stored: list[_Page] = []
        first_key = r.pages - len(r.keys)
        for page, parts in zip(range(span.start, span.stop), pages, strict=True):
            if r.tier_of(page) > Tier.HOST:
                stored.append(_Page(r.rid, page, r.keys[page - first_key], parts))
            else:
                first = (page - r.resident) * self._page
                slots = r.host_slots[first : first + self._page]
                self._compare(r.rid, page, parts, parts_of(self._host, 1, slots)[0])
        if not stored:
            return
        try:
            self._waiting.put_nowait(stored)
        except queue.Full:
            self._count(SKIPPED, len(stored))

    def _run(self) -> None:
        while (pages := self._waiting.get()) is not None:
            try:
                self._read(pages)
            except Exception:
                logger.exception("kvtier: the store could not be asked for an audit")
                self._count(UNREAD, len(pages))

    def _read(self, pages: list[_Page]) -> None:
        buffers = [[bytearray(part.nbytes) for part in page.parts] for page in pages]
        storage = store_of(self._controller)
        job = storage and storage.begin_read_into(
            [page.key for page in pages],
            [[memoryview(buffer) for buffer in buffers_of_page] for buffers_of_page in buffers],
        )
        if job is None:
            self._count(UNREAD, len(pages))
            return
        if not job.wait(_PATIENCE_S):
            job.cancel()
            self._hung.append((job, buffers))  # the store may still write into them
            self._count(UNREAD, len(pages))
            return
        for page, found, outcome in zip(pages, buffers, job.outcomes, strict=True):
            if outcome is ReadOutcome.OK:
                self._compare(page.rid, page.page, page.parts, found)
            else:
                self._count(UNREAD)

    def _compare(
        self,
        rid: str,
        page: int,
        parts: tuple[torch.Tensor, ...],
        wanted: Sequence[bytearray | memoryview],
    ) -> None:
        if [bytes_of(part) for part in parts] == [memoryview(piece) for piece in wanted]:
            self._count(EQUAL)
            return
        self._count(DIFFERS)
        logger.error(
            "kvtier: %s: page %d on the device is not the page it was loaded from", rid, page
        )

    def _count(self, result: str, pages: int = 1) -> None:
        with self._lock:
            self._counted[result] += pages


def pages_of(
    device: Any, host: Any, slots: torch.Tensor, page_tokens: int
) -> list[tuple[torch.Tensor, ...]]:
    """The pages in these device slots as the host pool would lay them: per page one uint8 tensor in
    host memory for each of its pieces (K and V, or latents). Waits for the device.
    """
    whole = []
    for buffers in device_buffers(device):
        # As bytes: not every number type of a KV cache can be indexed.
        rows = [
            layer.view(torch.uint8).index_select(0, slots.to(layer.device)) for layer in buffers
        ]
        both = torch.stack(rows).cpu()
        layers, tokens = both.shape[:2]
        both = both.reshape(layers, tokens // page_tokens, page_tokens, -1, both.shape[-1])
        whole.append(both.permute(*_order(host.layout)).contiguous().flatten(1))
    return list(zip(*(pages.unbind(0) for pages in whole), strict=True))


_AXES = ("layer", "page", "token", "head")


def _order(layout: str) -> tuple[int, ...]:
    """From layer, page, token, head, number to the order of a page in this layout."""
    return (1, *(_AXES.index(axis) for axis in PAGE_AXES[layout]), len(_AXES))


def _is_known(transfer: Any) -> bool:
    host, device = transfer.host_pool, transfer.device_pool
    has_rows = hasattr(device, "k_buffer") or hasattr(device, "kv_buffer")
    whole = isinstance(getattr(host, "kv_buffer", None), torch.Tensor)
    return has_rows and whole and host.layout in CONTIGUOUS
