"""Compares pages on the device with the host pages that they were loaded from, after their copy has
ended and before anything may read them.

A page has parts in all pools that a load covers: keys and values, a draft's, index keys, and the
windows or the state that come with it. Device pages are read back by another way than they were
written: torch's own indexing of each layer on a separate stream, then over the bus into pinned
memory. They are compared in C, with the GIL released, with the load's host pages, which the store
has just verified and which belong to the load until its pages have ended. A page that differs is
lost, so it is computed, and no token was generated from it.

All pages of the first loads are compared, then a few (`Sampling`). In the first phase, one page of
each request is compared again after its prefill (`SecondLook`). This detects later writes over
landed pages, except in windows, which SGLang frees once they have been passed, and states, which
forwards write. It comes too late for that request's answer.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from sgl_kvtier.runtime.backend.host_pages import buffer_of, bytes_of
from sgl_kvtier.runtime.backend.loaded_pools import LoadedPool, anchor_pools, loaded_pools
from sgl_kvtier.runtime.cpu.platform import works_at_once
from sgl_kvtier.runtime.cuda.card_memory import CardMemory
from sgl_kvtier.runtime.cuda.fences import sleeping_event
from sgl_kvtier.runtime.proof import record
from sgl_kvtier.runtime.proof.record import Difference, Proof, State
from sgl_kvtier.runtime.sglang.slot_pools import Slots
from sgl_kvtier.runtime.step.restoration import Load

_differing: Any
try:
    from sgl_kvtier.runtime.cuda._native import differing as _differing  # type: ignore[no-redef, import-not-found, unused-ignore]
except ImportError:
    _differing = None

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Most bytes that are read back at once. There are two such buffers on the device and two in pinned
memory: one is compared while the next is on the bus. Smaller on a scaled-down device.
"""
THIN_BYTES = 64 << 30
"""Bytes of loads after which even fewer pages are compared."""
_MOST_KEPT = 8
"""Most host pages that are kept for a second comparison at a time."""
_CLOSE_S = 10.0
EVERY, THIN_EVERY = 64, 1024
"""One of so many pages is compared: after the first phase, and from `THIN_BYTES` on."""


class Sampling:
    """Chooses the pages that are compared: all of the first loads, then some. By counting instead
    of at random, so that the choice is the same for the same loads. One thread.
    """

    def __init__(self, *, every_page: bool, proven: bool) -> None:
        """`every_page`: always all of them. `proven`: an earlier server compared the first
        loads.
        """
        self._every_page, self._proven = every_page, proven
        self._loads = self._newest = self._pages = self._nbytes = 0

    def take(self, load: int, pages: int, page_bytes: int) -> list[int]:
        """The pages to be compared of a copy of `pages` pages of the load with this number."""
        if load > self._newest:  # numbers grow: a load that comes late is not counted
            self._newest, self._loads = load, self._loads + 1
        every = 1 if self.looks_again else EVERY if self._nbytes < THIN_BYTES else THIN_EVERY
        first, self._pages = self._pages, self._pages + pages
        self._nbytes += pages * page_bytes
        return list(range(-first % every, pages, every))

    @property
    def looks_again(self) -> bool:
        """Whether all pages are compared at present, and one of each request a second time."""
        few = self._loads <= record.FIRST_LOADS or self._nbytes < record.FIRST_BYTES
        return self._every_page or (few and not self._proven)


class _Part(NamedTuple):
    """What is read back at once: layers [low, high) of a half of pages [first, stop)."""

    half: _Half
    first: int
    stop: int
    low: int
    high: int


class _HostPages:
    """The pages of a host pool in memory."""

    def __init__(self, host: Any) -> None:
        buffer = buffer_of(host)
        assert buffer is not None, "a pool whose pages are loaded has one"
        self.flat = buffer.view(-1).view(torch.uint8)
        self.base, self.bytes = buffer.data_ptr(), bytes_of(self.flat)
        self.pool = host

    def starts(self, host_slots: torch.Tensor) -> np.ndarray:
        """The byte offset of each page's pieces, int64 [piece], from the addresses that the store
        reads to.
        """
        addresses, _ = self.pool.get_page_buffer_meta(host_slots)
        return np.array(addresses, dtype=np.int64) - self.base


@dataclass(frozen=True, eq=False)
class _Half:
    """K, V, the latents or the index keys of a pool. `layers`: bytes [row, byte] of each layer on
    the device; a row is a token or a page. `steps`: bytes from one layer, token, head to the next
    in host memory.
    """

    name: str
    host: _HostPages
    piece: int
    """Its index among the pieces of a host page."""
    page_rows: int
    """Rows of a page on the device: one per token, or one."""
    layers: list[torch.Tensor]
    row_bytes: int
    head_bytes: int
    steps: dict[str, int]
    every: int = 1
    """`layers` has one of `every` layers of the model."""

    def thinned(self, every: int) -> _Half:
        """This half with one of `every` layers."""
        steps = {**self.steps, "layer": self.steps["layer"] * every}
        return replace(self, layers=self.layers[::every], steps=steps, every=every)

    def rows(self, device_slots: torch.Tensor, page: int) -> torch.Tensor:
        """The rows of whole pages with these slots."""
        return device_slots if self.page_rows > 1 else device_slots[::page] // page

    def page_bytes(self) -> int:
        """Bytes of a page in all these layers."""
        return len(self.layers) * self.page_rows * self.row_bytes

    def axes(self, layers: int, pages: int) -> tuple[tuple[Any, ...], int]:
        """Axes for `differing`, for `pages` pages read back in `layers` layers, and the number of
        bytes that are contiguous on both sides.
        """
        row, head, steps = self.row_bytes, self.head_bytes, self.steps
        found = [
            (layers, steps["layer"], pages * self.page_rows * row),
            (self.page_rows, steps["token"], row),
            (row // head, steps["head"], head),
        ]
        run = head
        for inner in (2, 1):  # heads of a token, then tokens of a layer, if contiguous
            count, in_host, read_back = found[inner]
            if count > 1 and (in_host, read_back) != (run, run):
                break
            found[inner], run = (1, 0, 0), run * count
        return tuple(found), run


class _Piece:
    """Device and pinned memory for what is read back at once."""

    def __init__(self, nbytes: int, device: Any, memory: CardMemory | None) -> None:
        self.raw: torch.Tensor | None = None
        """None where device memory is host memory."""
        self.event: Any = None
        if works_at_once(device):
            self.pinned = torch.empty(nbytes, dtype=torch.uint8)
        elif memory is not None:
            self.raw = memory.raw(nbytes)
            self.pinned = memory.pinned(-(-nbytes // 8)).view(torch.uint8)
        else:
            self.raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class ReadBack:
    """Reads pages back from a HiCache controller's device pool and compares them with its host
    pool. Constructed on the scheduler's thread, used by one thread.
    """

    def __init__(self, controller: Any, page_tokens: int, memory: CardMemory | None) -> None:
        """Raises ValueError with the reason if its pages cannot be compared, and
        torch.OutOfMemoryError.
        """
        if _differing is None:
            raise ValueError("sgl_kvtier.runtime.cuda._native is not compiled")
        self.page = page_tokens
        self.halves = _halves_of(loaded_pools(controller, page_tokens))
        anchors = anchor_pools(controller, page_tokens)
        self._anchors = _halves_of(anchors)
        self._anchor_page = int(anchors[0].host.page_size) if anchors else 0
        self.page_bytes = sum(half.page_bytes() for half in self.halves)
        """Bytes of a page, without its window or state."""
        self.anchor_bytes = sum(half.page_bytes() for half in self._anchors)
        self._at_once = works_at_once(controller.device)
        self._module = torch.get_device_module(controller.device)
        self._stream = None if self._at_once else self._module.Stream()
        self.index = None if self._at_once else self._module.current_device()
        self._memory = memory
        every = [*self.halves, *self._anchors]
        whole = max(len(half.host.bytes) for half in every)
        layer = max(half.row_bytes * half.page_rows for half in every)
        nbytes = max(min(PIECE_BYTES, whole), layer)
        self._pieces = [_Piece(nbytes, controller.device, memory) for _ in range(2)]
        self._nbytes = nbytes

    def differing(
        self, host_slots: torch.Tensor, device_slots: torch.Tensor, anchor: Slots | None = None
    ) -> dict[int, tuple[str, int]]:
        """Those of these pages that differ, by their index: the half (`keys`, `draft latents`) and
        the first layer. `anchor`: slots of the windows or the state that came with the last pages.
        Blocks its thread, with the GIL released while it waits and compares. Nothing may write to
        the pages meanwhile.
        """
        found = self._differing(self.halves, host_slots, device_slots, self.page)
        if anchor is not None:
            page = self._anchor_page
            before = len(host_slots) // self.page - len(anchor[0]) // page
            for place, where in self._differing(self._anchors, *anchor, page).items():
                found.setdefault(before + place, where)
        return found

    def _differing(
        self, halves: list[_Half], host_slots: torch.Tensor, device_slots: torch.Tensor, page: int
    ) -> dict[int, tuple[str, int]]:
        """`page`: slots per page."""
        starts = self._starts(halves, host_slots, page)
        parts = list(self._parts(halves, len(host_slots) // page))
        found: dict[int, tuple[str, int]] = {}
        for number, part in enumerate(parts):
            self._begin(part, self._pieces[number % 2], device_slots, page)
            if number:
                self._end(parts[number - 1], self._pieces[1 - number % 2], starts, found)
        if parts:
            self._end(parts[-1], self._pieces[1 - len(parts) % 2], starts, found)
        return found

    def host_page(self, host_slots: torch.Tensor, offset: int) -> list[torch.Tensor]:
        """A copy of one of these host pages: the bytes of each half."""
        slots = host_slots[offset * self.page : (offset + 1) * self.page]
        return [
            half.host.flat[start[0] : start[0] + half.page_bytes()].clone()
            for half, start in self._starts(self.halves, slots, self.page).items()
        ]

    def _starts(
        self, halves: list[_Half], host_slots: torch.Tensor, page: int
    ) -> dict[_Half, np.ndarray]:
        """Offset in its pool's memory of each page's part of a half, int64 [page]."""
        pages = len(host_slots) // page
        by_pool = {half.host: half.host.starts(host_slots) for half in halves}
        return {half: by_pool[half.host].reshape(pages, -1)[:, half.piece] for half in halves}

    def _parts(self, halves: list[_Half], pages: int) -> Iterator[_Part]:
        """All of these pages, in parts that fit into a buffer: whole pages, or layers of one."""
        for half in halves:
            layer_bytes, layers = half.row_bytes * half.page_rows, len(half.layers)
            at_once = max(1, self._nbytes // (layer_bytes * layers))
            deep = layers if at_once > 1 else max(1, min(layers, self._nbytes // layer_bytes))
            for first in range(0, pages, at_once):
                for low in range(0, layers, deep):
                    stop = min(pages, first + at_once)
                    yield _Part(half, first, stop, low, min(layers, low + deep))

    def _begin(self, part: _Part, piece: _Piece, device_slots: torch.Tensor, page: int) -> None:
        half = part.half
        slots = device_slots[part.first * page : part.stop * page]
        layers = half.layers[part.low : part.high]
        shape = (len(layers), (part.stop - part.first) * half.page_rows, half.row_bytes)
        nbytes = shape[0] * shape[1] * shape[2]
        if self._at_once:
            _gather(layers, half.rows(slots, page), piece.pinned[:nbytes].view(shape))
            return
        assert piece.raw is not None
        with self._module.stream(self._stream):
            _gather(layers, half.rows(slots, page), piece.raw[:nbytes].view(shape))
            self.copy_back(piece.pinned[:nbytes], piece.raw[:nbytes])
            piece.event = sleeping_event(self._module)
            piece.event.record(self._stream)

    def copy_back(self, pinned: torch.Tensor, raw: torch.Tensor) -> None:
        """Copies device memory into pinned memory, on the current stream."""
        if self._memory is None:
            pinned.copy_(raw, non_blocking=True)
        else:
            self._memory.copy_back(pinned, raw)

    def _end(
        self,
        part: _Part,
        piece: _Piece,
        starts: dict[_Half, np.ndarray],
        found: dict[int, tuple[str, int]],
    ) -> None:
        half, pages = part.half, part.stop - part.first
        if piece.event is not None:
            piece.event.synchronize()
        layers, page_step = part.high - part.low, half.page_rows * half.row_bytes
        axes, run = half.axes(layers, pages)
        begin = starts[half][part.first : part.stop] + part.low * half.steps["layer"]
        read_back = piece.pinned[: layers * pages * page_step].numpy()
        host = half.host.bytes
        first = compare(read_back, host, np.ascontiguousarray(begin), page_step, axes, run)
        for place, layer in enumerate(first):
            if layer >= 0:
                found.setdefault(part.first + place, (half.name, part.low + layer))


def compare(
    found: Any, host: Any, starts: Any, page_step: int, axes: tuple[Any, ...], run: int
) -> list[int]:
    """For each page the first layer that differs, or -1; see `differing` in native/pages.c."""
    layers: list[int] = _differing(found, host, starts, page_step, axes, run)
    return layers


def _gather(layers: Sequence[torch.Tensor], slots: torch.Tensor, out: torch.Tensor) -> None:
    """Gathers these rows of each layer, on the current stream: [layer, token, byte]."""
    for layer, into in zip(layers, out, strict=True):
        torch.index_select(layer, 0, slots, out=into)


def _halves_of(pools: Sequence[LoadedPool]) -> list[_Half]:
    return [half for pool in pools for half in _halves(pool)]


def _halves(pool: LoadedPool) -> list[_Half]:
    """The halves of a pool's pages."""
    halves, host = [], _HostPages(pool.host)
    for piece, half in enumerate(pool.halves):
        rows = [layer.view(torch.uint8).view(len(layer), -1) for layer in half.layers]
        row = rows[0].shape[1]
        heads = half.layers[0].shape[1] if pool.page_rows > 1 and half.layers[0].dim() > 2 else 1
        if row % heads:
            raise ValueError(f"rows of {row} bytes of {heads} heads")
        count, steps, step = (
            {"layer": len(rows), "token": pool.page_rows, "head": heads}, {}, row // heads
        )  # fmt: skip
        for axis in reversed(pool.axes):
            steps[axis], step = step, step * count[axis]
        halves.append(_Half(half.name, host, piece, pool.page_rows, rows, row, row // heads, steps))
    return halves


class PageCheck:
    """The page mover's check of every copy that has ended. One thread: that of the copies, or on a
    CPU the mover's.
    """

    def __init__(
        self, back: ReadBack, sampling: Sampling, proof: Proof, again: SecondLook | None = None
    ) -> None:
        self._back, self._sampling, self._proof, self._again = back, sampling, proof, again

    def look(self, load: Load, first: int, stop: int) -> list[int]:
        """Returns those of the pages [first, stop) of a load, whose copy has ended, that must not
        land.

        After any difference on this rank, no page lands any more, so that the other ranks and the
        engine learn of it with the next page that ends. Never raises: pages that cannot be compared
        count as skipped.
        """
        if self._proof.difference is not None:
            return list(range(first, stop))
        taken = self._sampling.take(load.poll.number, stop - first, self._back.page_bytes)
        try:
            return self._look(load, [first + place for place in taken]) if taken else []
        except Exception as error:
            # A driver or a pool may raise anything. The copy itself has succeeded.
            self._skip(len(taken), error)
            return []

    def _look(self, load: Load, pages: list[int]) -> list[int]:
        back, proof = self._back, self._proof
        wrong: dict[int, tuple[str, int]] = {}
        for low, high in _neighbours(pages):
            tokens = slice(low * back.page, high * back.page)
            beside = load.anchor_of(low, high)
            anchor = None if beside is None else (beside.host, beside.device)
            found = back.differing(load.host_slots[tokens], load.device_slots[tokens], anchor)
            wrong |= {low + place: where for place, where in found.items()}
        equal = [page for page in pages if page not in wrong]
        anchored = sum(load.anchor_of(page, page + 1) is not None for page in equal)
        nbytes = len(equal) * back.page_bytes + anchored * back.anchor_bytes
        proof.note_pages("equal", len(equal), nbytes)
        if not wrong:
            if self._again is not None and self._sampling.looks_again:
                self._again.keep(load, pages[-1])
            return []
        proof.note_pages("differs", len(wrong))
        page, (half, layer) = min(wrong.items())
        rid, number = load.restoration.rid, load.span.start + page
        what = f"{len(wrong)} of {len(pages)} pages, the first one page {number} of request {rid}, "
        proof.differs(Difference("page", f"{what}in the {half} of layer {layer}"))
        return sorted(wrong)

    def _skip(self, pages: int, error: Exception) -> None:
        if not self._proof.pages["skipped"]:
            logger.warning("kvtier: restored pages are not compared", exc_info=error)
        self._proof.note_pages("skipped", pages)


class Kept:
    """A page of a request as it was in host memory when it was loaded, to be compared again."""

    def __init__(self, page: int, halves: list[torch.Tensor]) -> None:
        """`page`: its number in the request's prompt. `halves`: its bytes by half."""
        self.page, self.halves = page, halves


class _Taken(NamedTuple):
    """Rows in flight to a second comparison. `slots` are those that the page was loaded into, `row`
    those that the request had for it in the end.
    """

    rid: str
    kept: Kept
    slots: torch.Tensor
    row: torch.Tensor
    event: Any


class SecondLook:
    """Compares one page of a request again after its prefill, with a copy of the host page that was
    made at the first comparison.

    The scheduler's thread (`attached`, `look`) only launches work: it gathers the rows on the
    stream that precedes every later writer of these slots, a forward or, by its fence, a load. So
    later owners of the slots do not interfere. A thread of its own waits and compares. A page whose
    slots have changed since it was loaded, because the tree had it already, is skipped.
    """

    def __init__(
        self, controller: Any, rows: torch.Tensor, back: ReadBack, proof: Proof,
        memory: CardMemory | None,
    ) -> None:  # fmt: skip
        """`rows`: SGLang's slots by request and token. Scheduler's thread."""
        self._controller, self._rows, self._proof, self._memory = controller, rows, proof, memory
        self._back, self._at_once = back, works_at_once(controller.device)
        every = -(-back.page_bytes // PIECE_BYTES)  # fewer layers if a page exceeds a piece
        self._halves = [half.thinned(every) for half in back.halves]
        nbytes = sum(half.page_bytes() for half in self._halves)
        self._piece = _Piece(nbytes, controller.device, memory)
        self._numbers = _Piece(2 * 8 * back.page, controller.device, memory)
        self._module = torch.get_device_module(controller.device)
        self._stream = None if self._at_once else self._module.Stream()
        self._kept: weakref.WeakSet[Kept] = weakref.WeakSet()
        self._attached: dict[str, tuple[Kept, torch.Tensor]] = {}
        self._free = threading.Event()
        self._free.set()
        self._taken: queue.SimpleQueue[_Taken | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtier-proof", daemon=True)
        self._thread.start()

    def keep(self, load: Load, offset: int) -> None:
        """A page of a load was compared and is equal: keeps the first one of its request. Called on
        the thread of the first comparison.
        """
        r = load.restoration
        if r.to_look_at_again is None and len(self._kept) < _MOST_KEPT:
            halves = self._back.host_page(load.host_slots, offset)
            r.to_look_at_again = kept = Kept(load.span.start + offset, halves)
            self._kept.add(kept)

    def attached(self, rid: str, kept: Kept, slots: torch.Tensor) -> None:
        """The kept page was attached to its request, whose row has these slots from now on."""
        self._attached[rid] = kept, slots

    @property
    def waits(self) -> bool:
        """Whether a page is waiting for its second comparison."""
        return bool(self._attached)

    def forget(self, rid: str) -> None:
        """The request is gone."""
        self._attached.pop(rid, None)

    def prefilled(self, req: Any) -> None:
        """A result of this request was processed, possibly that of its last chunk. The request
        still owns its row.
        """
        if req.rid in self._attached and len(req.output_ids):
            self.look(req)

    def look(self, req: Any) -> None:
        """Copies the rows of a request that is about to give up its row. Never raises and never
        waits for the device. One at a time; others are skipped.
        """
        found = self._attached.pop(req.rid, None)
        if found is None or not self._free.is_set() or req.kv.req_pool_idx is None:
            return
        try:
            self._free.clear()
            self._taken.put(self._take(req, *found))
        except Exception as error:
            self._leave_out(error)

    def close(self) -> None:
        """Ends the thread after the work it was given. Idempotent."""
        self._taken.put(None)
        self._thread.join(_CLOSE_S)

    def _take(self, req: Any, kept: Kept, slots: torch.Tensor) -> _Taken:
        first = kept.page * self._back.page
        # A copy on this thread's stream, on which SGLang rewrites rows.
        row = self._rows[req.kv.req_pool_idx, first : first + self._back.page].to(
            torch.int64, copy=True
        )
        if self._at_once:
            self._gather(self._piece.pinned, slots)
            return _Taken(req.rid, kept, slots, row, None)
        module, current = self._module, self._module.current_stream()
        stream = self._controller.load_fence_stream or current
        if stream != current:
            stream.wait_stream(current)
        assert self._piece.raw is not None
        with module.stream(stream):
            self._gather(self._piece.raw, slots)
            event = sleeping_event(module)
            event.record(stream)
        return _Taken(req.rid, kept, slots, row, event)

    def _gather(self, target: torch.Tensor, slots: torch.Tensor) -> None:
        for half, nbytes, at in self._places():
            shape, rows = (
                (len(half.layers), half.page_rows, half.row_bytes),
                half.rows(slots, self._back.page),
            )
            _gather(half.layers, rows, target[at : at + nbytes].view(shape))

    def _places(self) -> Iterator[tuple[_Half, int, int]]:
        """Each half, its bytes, and its offset in what is read back."""
        at = 0
        for half in self._halves:
            yield half, half.page_bytes(), at
            at += half.page_bytes()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        if not self._at_once:
            self._module.set_device(self._back.index)
        while (taken := self._taken.get()) is not None:
            try:
                self._compare(taken)
            except Exception as error:
                self._leave_out(error)
            self._free.set()

    def _compare(self, taken: _Taken) -> None:
        if taken.event is not None:
            taken.event.synchronize()
        row, slots = self._numbers_of(taken)
        if not torch.equal(row, slots):
            return
        for kept, (half, nbytes, at) in zip(taken.kept.halves, self._places(), strict=True):
            axes, run = half.axes(len(half.layers), 1)
            read_back = self._piece.pinned[at : at + nbytes].numpy()
            layer = compare(read_back, kept.numpy(), np.zeros(1, np.int64), 0, axes, run)[0]
            if layer >= 0:
                self._proof.note_pages("differs", 1)
                where = f"page {taken.kept.page} of request {taken.rid}, layer {layer * half.every}"
                self._proof.differs(Difference("second look", f"{where}, when its prefill ended"))
                return

    def _numbers_of(self, taken: _Taken) -> tuple[torch.Tensor, torch.Tensor]:
        """The two lists of slots in host memory; the rows are copied there as well."""
        if self._at_once:
            return taken.row, taken.slots
        page, piece, module = 8 * self._back.page, self._numbers, self._module
        assert self._piece.raw is not None
        with module.stream(self._stream):
            self._back.copy_back(self._piece.pinned, self._piece.raw)
            for place, numbers in enumerate((taken.row, taken.slots)):
                target = piece.pinned[place * page : (place + 1) * page].view(torch.int64)
                target.copy_(numbers, non_blocking=True)
            event = sleeping_event(module)
            event.record(self._stream)
        event.synchronize()
        both = piece.pinned.view(torch.int64)
        return both[: self._back.page], both[self._back.page :]

    def _leave_out(self, error: Exception) -> None:
        logger.warning("kvtier: a page could not be looked at a second time", exc_info=error)
        self._free.set()


def checks_of(
    controller: Any,
    rows: torch.Tensor,
    page_tokens: int,
    proof: Proof,
    memory: CardMemory | None,
    *,
    every_page: bool,
) -> tuple[PageCheck, SecondLook] | None:
    """The checks of this HiCache controller's pages; None, after a log line, if they cannot be
    compared. `rows` as for `SecondLook`. If `proof` starts as proven, fewer pages are compared.
    Scheduler's thread.
    """
    try:
        back = ReadBack(controller, page_tokens, memory)
        again = SecondLook(controller, rows, back, proof, memory)
    except Exception as error:
        # A pool of another kind or a driver may raise anything; the server runs all the same.
        logger.warning("kvtier: restored pages are not compared: %s", error)
        return None
    proof.looks = True
    sampling = Sampling(every_page=every_page, proven=proof.state is State.PROVEN)
    return PageCheck(back, sampling, proof, again), again


def _neighbours(pages: list[int]) -> list[tuple[int, int]]:
    """Ascending pages as runs [low, high)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][1] == page:
            runs[-1] = runs[-1][0], page + 1
        else:
            runs.append((page, page + 1))
    return runs
