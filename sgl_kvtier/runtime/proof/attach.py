"""Checks the attach: in some restorations the last page is computed after the loaded pages instead
of loaded, and its KV is compared with the stored page.

The prefill of that page reads the loaded pages through the request's row, SGLang's page table and
the attention kernels. So rows with wrong slots, missing pages and wrong positions show in its KV,
which comparing only the loaded pages does not reveal. On a GPU, two prefills of the same tokens
differ slightly, because chunk borders and therefore kernels differ. This noise is measured with the
page right before the loaded ones, if the prefill has computed it: the last chunk before the attach
is cut, and ends elsewhere than when the page was stored.

Attention does not depend on the order of pages in a row, since keys contain their positions. But a
request that shares a part of the prefix would depend on it. So the first and the last loaded page
are also read at their places in the row, and must equal the stored pages byte by byte.

    scheduler's thread   leaves the page out (`leave_out`); copies the computed rows right after
                         their forward was launched and on its stream, so that later writes to
                         these slots come after the copy (`launching`, `launched`)
    kvtier-attach        waits for the forward, reads the stored page, compares, marks the poll
    scheduler's thread   applies the result that all ranks agreed on (`settle`)

Page indices count from the start of the prompt; a page has `StepContext.page` tokens.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sgl_kvtier.runtime.backend.host_pages import PAGE_AXES, parts_of
from sgl_kvtier.runtime.backend.loaded_pools import loaded_pools
from sgl_kvtier.runtime.proof.record import Difference, Proof, State
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.host_tier import Pin
from sgl_kvtier.runtime.sglang.types import Req
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.polls import DIFFERS, LANDED, LOST, Poll
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import PageKey, Span

logger = logging.getLogger(__name__)

EVERY = 256
"""Every restoration is checked until `Proof.attaches_are_shown`; then one in so many."""
FLOOR, FLOOR_32 = 0.03, 0.004
"""Relative L2 distance of a layer's K or V that never counts as a difference; the second one is for
KV in float32. Both are about eight times the rounding of one number: a float32 matrix product may
round to the 10 bits of TF32. Rounding of earlier layers adds up, so from `SHALLOW` layers on both
grow with the square root of the layers.
"""
SHALLOW = 8
TIMES_NOISE = 4.0
"""A distance of more than so many times the noise of its layer is a difference. Until noise was
measured, because no restoration had a computed page before the loaded ones, the floor counts as
noise.
"""
MOST_NOISE = 0.125
"""With more noise than this in a layer, wrong pages would pass: no verdict."""
UNRELATED = 0.5
"""A page before the loaded ones with a larger distance is not noisy, but another page than the
stored one.
"""

_NOISES = 16
"""Noise is the largest distance of this many pages before loaded ones."""
_MOST = 4
_MOST_BYTES = 64 << 20
_ROWS = 4
"""Restorations checked at a time; bytes of device memory for their rows; pages of each restoration
that have rows.
"""
_PATIENCE_S = 30.0
"""Timeout, in seconds, for reading a stored page."""
_CLOSE_S = 10.0
_SKIPPED = LOST[ReadOutcome.CANCELLED]


class Pools(NamedTuple):
    """SGLang's pools of keys and values, whose pages can be compared. `halves`: device buffers by
    half and layer, those of a draft in the same pages last.
    """

    device: Any
    host: Any
    halves: list[list[torch.Tensor]]


@dataclass(frozen=True)
class _Stored:
    """A page and its stored bytes: under a key in the store, else in host memory."""

    page: int
    key: PageKey | None
    host_slots: torch.Tensor


@dataclass(eq=False)
class _Check:
    """One restoration that is checked."""

    req: Req
    last: _Stored
    """The page that was left out."""
    loaded: int = 0
    """Number of pages attached before the last one."""
    ends: tuple[_Stored, ...] = ()
    """The first and the last of these pages."""
    front: _Stored | None = None
    """The page before the first of these, if the prefill has computed it."""
    pin: Pin | None = None
    """Pins the host pages of all of these."""
    rows: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Computed rows by page: uint8 tensors [layer, token, head, byte] of K and V, or of latents."""
    ready: Any = None
    """An event after which the rows are complete; None: they are."""
    poll: Poll | None = None
    """Set when the last page's forward is launched."""
    cancelled: bool = False
    """The pools were emptied: host pages may hold other data now."""


class AttachProof:
    """Checks restorations and counts results in `Proof.attaches`. One per scheduler process;
    scheduler's thread. Nothing here raises into the scheduler: what cannot be compared counts as
    `skipped`.
    """

    def __init__(
        self, context: StepContext, proof: Proof, pools: Pools, every: int = EVERY
    ) -> None:
        """With `every` 1, every restoration is always checked."""
        self._context, self._proof, self._pools, self._every = context, proof, pools, every
        self._most = max(1, min(_MOST, _MOST_BYTES // (_ROWS * max(1, context.agreed_page_bytes))))
        self._seen = 0
        self._waiting: dict[str, _Check] = {}
        """By request id, until the forward of the last page is launched."""
        self._open: list[_Check] = []
        """Checks after that, until all ranks know the result. The same on every rank."""
        self._comparing = _Comparing(context, proof, pools)

    # --- choosing pages to compare ----------------------------------------------------------------

    def leave_out(self, r: Restoration, min_tokens: int) -> None:
        """Called before a restoration begins: leaves its last page out if it is to be checked. All
        ranks decide alike.
        """
        page, last = self._context.page, r.pages - 1
        whole = r.sources and len(r.sources[-1][0]) > 1 and r.sources[-1][0].stop == r.pages
        if not whole or r.tokens(page) - page < max(page, min_tokens):
            return
        self._seen += 1
        if self._has_shown_enough and self._seen % self._every:
            return
        if len(self._waiting) + len(self._open) >= self._most or r.rid in self._waiting:
            return
        check = _Check(r.req, self._stored(r, last))
        if len(r.host_slots):
            check.pin = self._context.host.pin(r.req.best_match_node)
        self._waiting[r.rid] = check
        r.pages, r.keys = last, r.keys[:-1]
        span, tier = r.sources[-1]
        r.sources = (*r.sources[:-1], (Span(span.start, last), tier))

    @property
    def _has_shown_enough(self) -> bool:
        return self._proof.state is State.PROVEN or self._proof.attaches_are_shown

    def _stored(self, r: Restoration, page: int) -> _Stored:
        place = page - (r.pages - len(r.keys))
        if place >= 0:
            return _Stored(page, r.keys[place], r.host_slots[:0])
        first = (page - r.resident) * self._context.page
        return _Stored(page, None, r.host_slots[first : first + self._context.page])

    def attached(self, r: Restoration, span: Span) -> None:
        """Loaded pages were attached to the request, in ascending order."""
        check = self._waiting.get(r.rid)
        if check is not None and check.last.page == r.pages:
            first = check.ends[0] if check.ends else self._stored(r, span.start)
            if not check.ends and span.start > r.resident:
                check.front = self._stored(r, span.start - 1)
            check.loaded += len(span)
            last = self._stored(r, span.stop - 1)
            check.ends = (first,) if first.page == last.page else (first, last)

    def closed(self, r: Restoration, how: str) -> None:
        """A restoration has ended. Unless pages of it were attached, there is nothing to check."""
        check = self._waiting.get(r.rid)
        if check is None or check.last.page != r.pages:
            return
        if how != "met" or not check.loaded:
            self.forget(r.rid)

    def forget(self, rid: str) -> None:
        """A request is gone, or has no pages attached. If its last page was launched, it is still
        compared, since its rows were copied.
        """
        check = self._waiting.pop(rid, None)
        if check is not None:
            self._unpin(check)

    def reset(self) -> None:
        """Called before the pools are emptied."""
        for check in [*self._waiting.values(), *self._open]:
            check.cancelled = True  # before its host pages are unpinned
            self._unpin(check)
        self._waiting.clear()

    def _unpin(self, check: _Check) -> None:
        pin, check.pin = check.pin, None
        if pin is not None:
            self._context.host.unpin(pin)

    # --- around a forward -------------------------------------------------------------------------

    def launching(self, batch: Any) -> list[tuple[_Check, int, torch.Tensor | None]]:
        """Called before a prefill batch is launched, on the current stream, after the allocation of
        its slots. If the batch completes a page that was left out: returns the pages to be compared
        and copies of their slots from the request's row, the left-out page last.
        """
        found: list[tuple[_Check, int, torch.Tensor | None]] = []
        if not self._waiting:
            return found
        lengths = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=False)
        for req, prefix, length in lengths:
            check = self._waiting.get(req.rid)
            if check is None or check.req is not req:
                continue
            stop = (check.last.page + 1) * self._context.page
            if not prefix < stop <= prefix + length:
                continue
            front = () if check.front is None else (check.front,)
            for stored in (*front, *check.ends, check.last):
                found.append((check, stored.page, self._slots(req, stored.page)))
        return found

    def _slots(self, req: Any, page: int) -> torch.Tensor | None:
        try:
            rows, tokens = self._context.tree.req_to_token_pool.req_to_token, self._context.page
            row = rows[req.kv.req_pool_idx, page * tokens : (page + 1) * tokens]
            return row.to(torch.int64, copy=True)
        except Exception:
            logger.exception("kvtier: %s: the row of a page could not be read", req.rid)
            return None

    def launched(
        self, found: Iterable[tuple[_Check, int, torch.Tensor | None]], stream: Any
    ) -> None:
        """Called after it was launched on this stream; None: it has ended."""
        for check, page, slots in found:
            try:
                if slots is not None:
                    self._copy_aside(check, page, slots, stream)
            except Exception:  # for example out of device memory
                logger.exception("kvtier: %s: a computed page was not copied aside", check.req.rid)
            if page == check.last.page:
                self._submit(check)

    def _copy_aside(self, check: _Check, page: int, slots: torch.Tensor, stream: Any) -> None:
        if stream is None:
            check.rows[page] = rows_of(self._pools.halves, slots)
            return
        module = torch.get_device_module(stream.device)
        if slots.device.type != "cpu":
            # The copies are on the scheduler's stream, which the forward has waited for.
            slots.record_stream(stream)
        with module.stream(stream):
            check.rows[page] = rows_of(self._pools.halves, slots)
            check.ready = module.Event()
            check.ready.record(stream)

    def _submit(self, check: _Check) -> None:
        """The last page is being computed, on every rank in the same step."""
        del self._waiting[check.req.rid]
        check.poll = Poll(self._context.next_number(), 1)
        self._open.append(check)
        if check.last.page in check.rows:
            self._comparing.submit(check)
        else:
            check.poll.mark(0, _SKIPPED, time.monotonic())

    # --- the result -------------------------------------------------------------------------------

    def polls(self) -> list[Poll]:
        """The polls that all ranks have to agree on: one page for each comparison in flight."""
        return [check.poll for check in self._open if check.poll is not None]

    def settle(self, states: Sequence[bytes]) -> bool:
        """Applies the agreed states of `polls`, in their order; returns whether one differs."""
        differs = False
        for check, state in zip(list(self._open), states, strict=True):
            code = state[0]
            if not code:
                continue
            self._open.remove(check)
            self._unpin(check)
            result = {LANDED: "equal", DIFFERS: "differs"}.get(code, "skipped")
            self._proof.attaches[result] += 1
            differs |= code == DIFFERS
        return differs

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._comparing.close()


class _Comparing:
    """The thread that compares, kvtier-attach."""

    def __init__(self, context: StepContext, proof: Proof, pools: Pools) -> None:
        self._context, self._proof, self._pools = context, proof, pools
        self._checks: queue.SimpleQueue[_Check | None] = queue.SimpleQueue()
        self._noises: deque[torch.Tensor] = deque(maxlen=_NOISES)
        self._hung: list[Any] = []
        """Reads that were given up, with the memory that the store may still write to."""
        self._stream: Any = None
        self._pinned: torch.Tensor | None = None
        self._is_loud = False
        if torch.device(context.tree.cache_controller.device).type != "cpu":
            # At the start, because CUDA may stop every stream to pin memory.
            self._pinned = torch.empty(context.page_bytes, dtype=torch.uint8, pin_memory=True)
        self._thread = threading.Thread(target=self._run, name="kvtier-attach", daemon=True)
        self._thread.start()

    def submit(self, check: _Check) -> None:
        self._checks.put(check)

    def close(self) -> None:
        if self._thread.is_alive():
            self._checks.put(None)
            self._thread.join(_CLOSE_S)

    @torch.inference_mode()
    def _run(self) -> None:
        torch.set_num_threads(1)
        while (check := self._checks.get()) is not None:
            state = _SKIPPED
            try:
                state = self._state(check)
            except Exception:
                logger.exception("kvtier: %s: a computed page was not compared", check.req.rid)
            check.rows.clear()
            if check.poll is not None:
                check.poll.mark(0, state, time.monotonic())

    def _state(self, check: _Check) -> int:
        front = None if check.front is None else self._distance(check, check.front)
        last = self._distance(check, check.last)
        ends = {end.page: self._distance(check, end) for end in check.ends}
        if last is None or check.cancelled:
            return _SKIPPED
        found = None
        for page, apart in ends.items():
            if apart is not None and not bool((apart == 0).all()):
                found = f"page {page} of a prompt, a loaded one, is another page in the row"
        if found is not None:
            self._proof.differs(Difference("attach", found))
            return DIFFERS
        if front is not None:
            found = unrelated(front)
            if found is None:
                self._noises.append(front)
        noise = torch.stack(list(self._noises)).amax(0) if self._noises else None
        if found is not None and check.front is not None:
            found = f"page {check.front.page} of a prompt, computed before loaded ones, {found}"
        if found is None:
            if noise is not None and float(noise.max()) > MOST_NOISE:
                self._warn(float(noise.max()))
                return _SKIPPED
            found = judge(last, noise, self._pools.device.dtype)
            found = found and (
                f"page {check.last.page} of a prompt, computed after {check.loaded} loaded pages, "
                f"{found}"
            )
        logger.debug(
            "kvtier: %s: page %d computed after loaded ones is %.3g from the stored one, the one "
            "before them %s", check.req.rid, check.last.page, float(last.max()),
            "was not computed" if front is None else f"{float(front.max()):.3g}",
        )  # fmt: skip
        if found is None:
            return LANDED
        self._proof.differs(Difference("attach", found))
        return DIFFERS

    def _warn(self, noise: float) -> None:
        if not self._is_loud:
            logger.warning(
                "kvtier: KV of the same tokens computed twice is %.2g apart on this device "
                "(relative L2), too much to tell a wrong attach from a right one by it",
                noise,
            )
        self._is_loud = True

    def _distance(self, check: _Check, stored: _Stored) -> torch.Tensor | None:
        """Distance between the computed and the stored page, by layer; None if one is missing."""
        rows = check.rows.pop(stored.page, None)
        data = None if rows is None else self._read(check, stored)
        if rows is None or data is None:
            return None
        computed = self._on_host(rows, check.ready)
        pieces = [
            layered(torch.frombuffer(piece, dtype=torch.uint8), like, self._pools.host.layout)
            for piece, like in zip(data, computed, strict=True)
        ]
        dtype = self._pools.device.dtype
        return torch.stack(
            [distance(a, b, dtype) for a, b in zip(computed, pieces, strict=True)]
        ).amax(0)

    def _on_host(self, rows: list[torch.Tensor], ready: Any) -> list[torch.Tensor]:
        """The rows in host memory once they were computed, valid until the next call. Waits with
        the GIL released.
        """
        if ready is None or self._pinned is None:
            if ready is not None:
                ready.synchronize()
            return rows
        device = rows[0].device
        module = torch.get_device_module(device)
        if self._stream is None:
            module.set_device(device)
            self._stream = module.Stream()
        found, used = list[torch.Tensor](), 0
        with module.stream(self._stream):
            self._stream.wait_event(ready)
            for piece in rows:
                place = self._pinned[used : used + piece.nbytes].view(piece.shape)
                place.copy_(piece, non_blocking=True)
                piece.record_stream(self._stream)
                found.append(place)
                used += piece.nbytes
        self._stream.synchronize()
        return found

    def _read(self, check: _Check, stored: _Stored) -> list[bytearray] | None:
        if stored.key is None:
            views = parts_of(self._pools.host, 1, stored.host_slots)[0]
            data = [bytearray(view) for view in views]
            return None if check.cancelled else data
        storage = store_of(self._context.tree.cache_controller)
        slots = torch.arange(self._context.page)
        buffers = [bytearray(view.nbytes) for view in parts_of(self._pools.host, 1, slots)[0]]
        job = storage and storage.begin_read_into(
            [stored.key], [[memoryview(buffer) for buffer in buffers]]
        )
        if job is None:
            return None
        if not job.wait(_PATIENCE_S):
            job.cancel()
            self._hung.append((job, buffers))
            return None
        return buffers if job.outcomes[0] is ReadOutcome.OK else None


def comparable(controller: Any, page_tokens: int) -> Pools | str:
    """The pools of this HiCache controller, or the reason why their pages cannot be compared. Side
    pools are not included: they share the slots, which is what is checked.
    """
    try:
        kv = loaded_pools(controller, page_tokens)[0]
    except ValueError as error:
        return str(error)
    return Pools(kv.device, kv.host, [half.layers for half in kv.halves])


def rows_of(halves: list[list[torch.Tensor]], slots: torch.Tensor) -> list[torch.Tensor]:
    """Copies the rows in these device slots, on the current stream: a uint8 tensor [layer, token,
    head, byte] of K and one of V, or one of latents.
    """
    # As bytes, because not every dtype of a KV cache can be indexed.
    return [
        torch.stack(
            [layer.view(torch.uint8).index_select(0, slots.to(layer.device)) for layer in half]
        )
        for half in halves
    ]


def layered(piece: torch.Tensor, like: torch.Tensor, layout: str) -> torch.Tensor:
    """The bytes of a host page's piece as [layer, token, head, byte], the shape of `like`."""
    sizes = dict(zip(("layer", "token", "head"), like.shape, strict=False))
    axes = PAGE_AXES[layout]
    page = piece.view(*(sizes[axis] for axis in axes), like.shape[-1])
    return page.permute(*(axes.index(axis) for axis in ("layer", "token", "head")), 3)


def distance(computed: torch.Tensor, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Relative L2 distance by layer of two pieces [layer, token, head, byte] with numbers of
    `dtype`. 0 if all bytes are equal; NaN if a number is NaN.
    """
    same = (computed == stored).flatten(1).all(1)
    ours, theirs = (
        piece.contiguous().view(dtype).to(torch.float32).flatten(1) for piece in (computed, stored)
    )
    apart, size = (
        torch.linalg.vector_norm(numbers, dim=1, dtype=torch.float64)
        for numbers in (ours - theirs, theirs)
    )
    return torch.where(same, 0.0, apart / size)


def unrelated(front: torch.Tensor) -> str | None:
    """Why a page computed before loaded ones does not measure noise, but is another page than the
    stored one; or None. `front`: its distance by layer.
    """
    if bool((front <= UNRELATED).all()):
        return None
    layer = int(torch.where(front <= UNRELATED, -1.0, 1.0).argmax())
    return (
        f"is {float(front[layer]):.3g} (relative L2) from the stored page in layer {layer}: what "
        "is stored is of another model or prompt"
    )


def judge(last: torch.Tensor, noise: torch.Tensor | None, dtype: torch.dtype) -> str | None:
    """Why a page computed after loaded ones is not the stored page, or None. `last` and `noise` are
    distances by layer, of KV in `dtype`.
    """
    deep = torch.arange(1, len(last) + 1, dtype=last.dtype) / SHALLOW
    floor = (FLOOR if dtype.itemsize < torch.float32.itemsize else FLOOR_32) * torch.clamp(
        deep, min=1.0
    ).sqrt()
    bound = torch.maximum(TIMES_NOISE * (floor if noise is None else noise), floor)
    if bool((last <= bound).all()):
        return None
    layer = int(torch.where(last <= bound, -1.0, 1.0).argmax())
    measured = "not measured" if noise is None else f"{float(noise[layer]):.3g}"
    return (
        f"is {float(last[layer]):.3g} (relative L2) from the stored page in layer {layer}, where "
        f"the noise is {measured} and the bound {float(bound[layer]):.3g}"
    )
