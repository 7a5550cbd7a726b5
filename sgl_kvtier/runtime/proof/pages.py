"""Pages on the device compared with the host pages that they were loaded from, after their copy has
ended and before anything may read them.

A page is one of all pools that a load goes through: keys and values, a draft's, index keys, and the
windows or the state that come with it. A copy's device pages are read back by another way than they
went: torch's own indexing of each layer on a stream of its own, then over the bus into pinned
memory. They are compared in C, without the interpreter, with the load's host pages, which the store
has just verified and which are the load's until its pages have ended. A page that differs is lost,
so the front computes it and no token was emitted from it.

All pages are compared of the first loads, then a few (`Sampling`). While all are, one page of a
request is looked at a second time when its prefill has ended (`SecondLook`): that sees a write over
pages that had landed, but for windows, which SGLang frees once they have been passed, and states,
which forwards write. It comes too late for that answer.
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
"""Most bytes that are read back at once. There are two such pieces on the device and two in pinned
memory: one is compared while the next is on the bus. This is smaller on a device whose pages are
those of a real one at scale.
"""
THIN_BYTES = 64 << 30
"""Bytes of loads after which still fewer pages are compared."""
_MOST_KEPT = 8
"""Host pages that are copied for a second look at a time."""
_CLOSE_S = 10.0
EVERY, THIN_EVERY = 64, 1024
"""Of as many pages one is compared, once all of the first were equal, and from `THIN_BYTES` on."""


class Sampling:
    """Which pages are compared: all of the first loads, then some. Counted, not drawn, so that the
    same loads have the same pages compared. One thread.
    """

    def __init__(self, *, every_page: bool, proven: bool) -> None:
        """`every_page`: always all of them. `proven`: an earlier server has compared the first."""
        self._every_page, self._proven = every_page, proven
        self._loads = self._newest = self._pages = self._nbytes = 0

    def take(self, load: int, pages: int, page_bytes: int) -> list[int]:
        """Of a copy of `pages` pages of a load, known by its number, those to be compared."""
        if load > self._newest:  # numbers grow: a load that is counted late is looked at longer
            self._newest, self._loads = load, self._loads + 1
        every = 1 if self.looks_again else EVERY if self._nbytes < THIN_BYTES else THIN_EVERY
        first, self._pages = self._pages, self._pages + pages
        self._nbytes += pages * page_bytes
        return list(range(-first % every, pages, every))

    @property
    def looks_again(self) -> bool:
        """Whether all pages are compared: then one of a request is looked at a second time, too."""
        few = self._loads <= record.FIRST_LOADS or self._nbytes < record.FIRST_BYTES
        return self._every_page or (few and not self._proven)


class _Part(NamedTuple):
    """What is read back at once: a half of pages [first, stop) in layers [low, high)."""

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
        """Where each page's pieces begin in memory, int64 [piece]: as the store is told where it
        reads them to.
        """
        addresses, _ = self.pool.get_page_buffer_meta(host_slots)
        return np.array(addresses, dtype=np.int64) - self.base


@dataclass(frozen=True, eq=False)
class _Half:
    """K, V, the latents or the index keys of a pool. `layers`: bytes [row, byte] of each on the
    device, where a token or a page is a row. `steps`: in host memory, from one layer, row, head to
    the next.
    """

    name: str
    host: _HostPages
    piece: int
    """Its place among the pieces of a host page."""
    page_rows: int
    """Rows of a page on the device: as many as it has tokens, or one."""
    layers: list[torch.Tensor]
    row_bytes: int
    head_bytes: int
    steps: dict[str, int]
    every: int = 1
    """`layers` are one of as many of the model's."""

    def thinned(self, every: int) -> _Half:
        """One layer of `every`."""
        steps = {**self.steps, "layer": self.steps["layer"] * every}
        return replace(self, layers=self.layers[::every], steps=steps, every=every)

    def rows(self, device_slots: torch.Tensor, page: int) -> torch.Tensor:
        """The rows of whole pages with these slots."""
        return device_slots if self.page_rows > 1 else device_slots[::page] // page

    def page_bytes(self) -> int:
        """Of all its layers."""
        return len(self.layers) * self.page_rows * self.row_bytes

    def axes(self, layers: int, pages: int) -> tuple[tuple[Any, ...], int]:
        """Axes for `differing`, of `pages` that were read back in `layers`, and the bytes that lie
        together in both.
        """
        row, head, steps = self.row_bytes, self.head_bytes, self.steps
        found = [
            (layers, steps["layer"], pages * self.page_rows * row),
            (self.page_rows, steps["token"], row),
            (row // head, steps["head"], head),
        ]
        run = head
        for inner in (2, 1):  # heads of a token, then tokens of a layer, where they lie together
            count, in_host, read_back = found[inner]
            if count > 1 and (in_host, read_back) != (run, run):
                break
            found[inner], run = (1, 0, 0), run * count
        return tuple(found), run


class _Piece:
    """Device memory and pinned memory of what is read back at once."""

    def __init__(self, nbytes: int, device: Any, memory: CardMemory | None) -> None:
        self.raw: torch.Tensor | None = None
        """None where the device's memory is the host's."""
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
    """Reads pages of a HiCache controller's device pool back and compares them with its host pool.
    Built on the scheduler's thread, used by one thread.
    """

    def __init__(self, controller: Any, page_tokens: int, memory: CardMemory | None) -> None:
        """Raises ValueError, which says why, where its pages cannot be compared. Raises
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
        """Without the window or state that came with it."""
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
        """Of these pages those that differ, by their place among them: in which half (`keys`,
        `draft latents`), and the first layer. `anchor`: slots of the windows, or of the state, that
        have come with the last ones. Blocks its thread, without the interpreter while it waits and
        compares. Nothing may write the pages meanwhile.
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
        """`page`: slots of a page."""
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
        """Where each page's part of a half begins in its pool's memory, int64 [page]."""
        pages = len(host_slots) // page
        by_pool = {half.host: half.host.starts(host_slots) for half in halves}
        return {half: by_pool[half.host].reshape(pages, -1)[:, half.piece] for half in halves}

    def _parts(self, halves: list[_Half], pages: int) -> Iterator[_Part]:
        """All of these pages, in parts that fit a piece: whole pages, or layers of one."""
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
        """Device memory over the bus into pinned memory, on the current stream."""
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
    """Of each page the first layer that differs, or -1; see `differing` in native/pages.c."""
    layers: list[int] = _differing(found, host, starts, page_step, axes, run)
    return layers


def _gather(layers: Sequence[torch.Tensor], slots: torch.Tensor, out: torch.Tensor) -> None:
    """Rows of these slots in each layer, on the current stream: [layer, token, byte]."""
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
    """What the mover asks of every copy that has ended. One thread: the copies', or on a CPU the
    mover's.
    """

    def __init__(
        self, back: ReadBack, sampling: Sampling, proof: Proof, again: SecondLook | None = None
    ) -> None:
        self._back, self._sampling, self._proof, self._again = back, sampling, proof, again

    def look(self, load: Load, first: int, stop: int) -> list[int]:
        """Of the pages [first, stop) of a load, whose copy has ended, those that must not land.

        After a difference was found anywhere on this rank no page lands any more: so the other
        ranks, and the engine, learn of it with the next page that ends. Never raises: what cannot
        be compared counts as skipped.
        """
        if self._proof.difference is not None:
            return list(range(first, stop))
        taken = self._sampling.take(load.poll.number, stop - first, self._back.page_bytes)
        try:
            return self._look(load, [first + place for place in taken]) if taken else []
        except Exception as error:
            # Whatever a driver or a pool raises: the copy itself has ended well.
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
    """Rows on their way to a second comparison. `slots` are those that the page was loaded into,
    `row` those that the request had for it at the end.
    """

    rid: str
    kept: Kept
    slots: torch.Tensor
    row: torch.Tensor
    event: Any


class SecondLook:
    """Compares one page of a request again when its prefill has ended, with a copy of the host page
    that was made at the first look.

    The scheduler's thread (`attached`, `look`) only launches: it gathers the rows on the stream
    that every later writer of these slots comes behind, a forward or, by its fence, a load. So
    whoever owns the slots afterwards does no harm. A thread of its own waits and compares. A page
    whose slots are not those that it was loaded into any more, since the tree had it already, is
    left out.
    """

    def __init__(
        self, controller: Any, rows: torch.Tensor, back: ReadBack, proof: Proof,
        memory: CardMemory | None,
    ) -> None:  # fmt: skip
        """`rows`: SGLang's slots by request and token. Scheduler's thread."""
        self._controller, self._rows, self._proof, self._memory = controller, rows, proof, memory
        self._back, self._at_once = back, works_at_once(controller.device)
        every = -(-back.page_bytes // PIECE_BYTES)  # of a page that fits no piece some layers
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
        """A page of a load was compared and is equal: the first of its request is kept. Thread of
        the first look.
        """
        r = load.restoration
        if r.to_look_at_again is None and len(self._kept) < _MOST_KEPT:
            halves = self._back.host_page(load.host_slots, offset)
            r.to_look_at_again = kept = Kept(load.span.start + offset, halves)
            self._kept.add(kept)

    def attached(self, rid: str, kept: Kept, slots: torch.Tensor) -> None:
        """The kept page was attached to its request: from now on its row has these slots."""
        self._attached[rid] = kept, slots

    @property
    def waits(self) -> bool:
        """Whether a page is to be looked at again."""
        return bool(self._attached)

    def forget(self, rid: str) -> None:
        """The request is gone."""
        self._attached.pop(rid, None)

    def prefilled(self, req: Any) -> None:
        """A result of this request was processed: it may have been that of its last chunk. Its row
        is still its own.
        """
        if req.rid in self._attached and len(req.output_ids):
            self.look(req)

    def look(self, req: Any) -> None:
        """Takes the rows of a request that is about to give back its row. Never raises, and never
        waits for the device; one at a time, others are left out.
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
        """Ends the thread after what it was given. Idempotent."""
        self._taken.put(None)
        self._thread.join(_CLOSE_S)

    def _take(self, req: Any, kept: Kept, slots: torch.Tensor) -> _Taken:
        first = kept.page * self._back.page
        # SGLang rewrites rows on this thread's stream.
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
        """Each half, its bytes, and where it begins in what is read back."""
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
        """The two lists of slots in host memory; the rows have come there as well."""
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
    """What compares the pages of this HiCache controller, or None, and a line in the log, where
    they cannot be compared. `rows` as for `SecondLook`. A server whose `proof` begins as proven
    compares fewer. Scheduler's thread.
    """
    try:
        back = ReadBack(controller, page_tokens, memory)
        again = SecondLook(controller, rows, back, proof, memory)
    except Exception as error:
        # Whatever a pool of another kind or a driver raises: the server serves all the same.
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
