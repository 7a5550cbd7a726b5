"""The check at start: copies pages between the real pools during a simulated forward, before any
answer depends on a copy.

All pages are free at that time. Host pages get one byte pattern, their target pages on the device
and the neighbours of these another. A forward stream is kept busy, then reads the target pages and
overwrites them. Meanwhile the copy is begun, and placed when its fence is reached. The forward must
have read the old bytes, which proves the fence; afterwards the pages must hold the host's bytes,
which proves the copy. They are read back by torch's own indexing. Then follow single pages, through
every staging room twice, and a load that is cut in two. In the end all bytes are zero again.
Windows and states are checked alike, together with free KV pages.

Where copies go over the bus, the check also measures how long SGLang's own small copies wait during
a load, and limits what a load may queue there (`bus_window`).

Scheduler's thread, and one in place of the page mover's; blocks until the device is done.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sgl_kvtier.runtime.backend.host_pages import buffer_of
from sgl_kvtier.runtime.backend.loaded_pools import LoadedPool, anchor_pools, loaded_pools
from sgl_kvtier.runtime.cuda.bus_window import CHOICES, Trial, window_for
from sgl_kvtier.runtime.cuda.card_memory import registration_borders
from sgl_kvtier.runtime.cuda.page_shape import host_pool_of

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_MOST_PAGES, _MOST_BYTES = 8, 32 << 20
"""Limits of the load that is compared as a whole; never fewer than `_FEWEST_PAGES` pages."""
_FEWEST_PAGES = 4
_BUSY_S, _MOST_BUSY_S = 0.02, 1.0
"""Seconds that a stream is kept busy: longer than a simultaneous copy takes, on an idle host."""
_BUSY_WAITS = 20
"""On a host where a wait for the device takes long: busy for as many waits."""
_LOOK_S = 5e-4
"""Seconds between two queries of a fence."""
_EARLY = "a fence came before the forward {} the scheduler's stream"
_CYCLES_PER_S = 2e9
"""Higher than a GPU's clock, so that a sleep is never shorter than requested."""
_OLD, _SCRIBBLE = 0x5A, 0xC3
"""Byte values of pages before a copy, and of what a forward writes over them."""
_CODE = 2654435761
"""Odd, so that different row numbers get different codes of 32 bits."""
_STEP = 0x01030507
"""Added from one word of a row to the next."""
_BURST_BYTES = 64 << 20
_SMALL_NUMBERS = 512
"""Number of int64: 4 KiB, as SGLang uploads for a batch."""


class StartDiffers(Exception):
    """Copied bytes are wrong. The text says where."""


class StartUnreadable(Exception):
    """Pages of these pools cannot be read back, so no way of copying them can be checked. The text
    says why.
    """


@dataclass(frozen=True)
class StartResult:
    """Results of the check for one way of copying."""

    pages: int
    """Pages that were copied and equal."""
    gbytes_per_s: float | None
    """Bandwidth of a load on its link; None if its duration is not known."""
    small_copy_us: float | None
    """Duration of a copy of 4 KiB during a load; None if not measured."""
    window_bytes: int | None
    """Most bytes that a load may have queued on the bus; None: no limit."""
    seconds: float
    """Duration of the check."""

    @property
    def line(self) -> str:
        """As text, for a log or a terminal."""
        parts = [f"{self.pages} pages equal"]
        if self.gbytes_per_s is not None:
            parts.append(f"{self.gbytes_per_s:.1f} GB/s")
        if self.small_copy_us is not None:
            parts.append(f"small copies take {self.small_copy_us:.0f} µs beside a load")
        if self.window_bytes is not None:
            parts.append(f"{self.window_bytes / 2**20:g} MiB in flight")
        return ", ".join([*parts, f"checked in {self.seconds:.2f} s"])


def check(copies: Any, controller: Any, rows: Rows | None = None) -> StartResult:
    """Checks one way of copying, a `CopyDevice` of this HiCache controller, and limits its use of
    the bus. Raises StartDiffers if copied bytes are wrong, StartUnreadable if nothing can be
    compared, and whatever a driver raises.

    `rows`: the pools, if they are not those of the controller.
    """
    began = time.monotonic()
    anchors = None
    if rows is None:
        rows = Rows.of(controller)
        anchors = Rows.of_anchors(controller, rows)
    scene = _Scene(copies, controller, rows)
    seconds, beside = scene.play(), 0
    if anchors is not None:
        more = _Scene(_WithAnchors(copies, scene, anchors.page), controller, anchors)
        more.play()
        beside = more.compared
    trials = measure(copies, controller)
    if trials:
        copies.bound_bus(window_for(trials))
    used = next((t for t in trials if t.window_bytes == copies.window_bytes), None)
    rate = used.gbytes_per_s if used else scene.nbytes / seconds / 1e9 if seconds else None
    return StartResult(
        pages=scene.compared + beside,
        gbytes_per_s=rate,
        small_copy_us=used.small_copy_s * 1e6 if used else None,
        window_bytes=getattr(copies, "window_bytes", None),
        seconds=time.monotonic() - began,
    )


class Rows:
    """The pools of a load as rows of bytes by half (K and V, or latents; then those of side pools),
    layer, page and row. A row is a token, or a whole page of index keys. Device work goes to the
    calling thread's current stream.
    """

    def __init__(self, module: Any, pools: Sequence[LoadedPool]):
        """Raises StartUnreadable if rows cannot be read back."""
        self.module = module
        self.page = int(pools[0].host.page_size)
        halves = [half for pool in pools for half in pool.halves]
        self.names = [half.name for half in halves]
        self.device = [half.layers for half in halves]
        self.page_rows = [pool.page_rows for pool in pools for _ in pool.halves]
        self.host = [layers for pool in pools for layers in _host_layers(pool)]
        self.row_bytes = [layers[0][0, 0].numel() for layers in self.host]
        buffer = buffer_of(pools[0].host)
        assert buffer is not None, "a pool whose pages are loaded has one"
        self.buffer: torch.Tensor = buffer
        """The host tensor of the KV pages."""
        self.host_pages = len(self.host[0][0])
        self.device_pages = len(self.device[0][0]) // self.page_rows[0]
        for layers, nbytes in zip(self.device, self.row_bytes, strict=True):
            if any(layer[0].nbytes != nbytes for layer in layers):
                raise StartUnreadable("device rows that lie apart")

    @classmethod
    def of(cls, controller: Any) -> Rows:
        """The pools that this controller's loads use. Raises StartUnreadable if SGLang does not
        tell how their pages lie.
        """
        page = int(host_pool_of(controller).page_size)
        try:
            pools = loaded_pools(controller, page)
        except ValueError as error:
            raise StartUnreadable(str(error)) from error
        return cls(torch.get_device_module(controller.device), pools)

    @classmethod
    def of_anchors(cls, controller: Any, rows: Rows) -> Rows | None:
        """The pools of the windows or states that come with loads of these rows, or None; a slot of
        a state is a page. Raises as `of` does.
        """
        try:
            pools = anchor_pools(controller, rows.page)
        except ValueError as error:
            raise StartUnreadable(f"windows or states: {error}") from error
        return cls(rows.module, pools) if pools else None

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all halves and layers."""
        return sum(
            len(layers) * rows * nbytes
            for layers, rows, nbytes in zip(
                self.device, self.page_rows, self.row_bytes, strict=True
            )
        )

    def _at(self, half: int, slots: torch.Tensor) -> torch.Tensor:
        """The row numbers, in this half, of whole pages with these slots."""
        return slots if self.page_rows[half] > 1 else slots[:: self.page] // self.page

    def slots(self, pages: Sequence[int], *, on_device: bool) -> torch.Tensor:
        """The token slots (int64) of these pages."""
        slots = (torch.tensor(pages)[:, None] * self.page + torch.arange(self.page)).flatten()
        return slots.to(self.device[0][0].device) if on_device else slots

    def fill(self, slots: torch.Tensor, byte: int) -> None:
        """Sets all bytes of these device slots."""
        for half, layers in enumerate(self.device):
            rows = self._at(half, slots)
            for layer in layers:
                layer.view(torch.uint8)[rows] = byte

    def read(self, half: int, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """The bytes in these device slots when the current stream gets there, on the device."""
        return self.device[half][layer].view(torch.uint8)[self._at(half, slots)].flatten(1)

    def all_are(self, half: int, layer: int, slots: torch.Tensor, byte: int) -> torch.Tensor:
        """Whether all bytes of these device slots have this value when the current stream gets
        there: a bool on the device.
        """
        return (self.device[half][layer].view(torch.uint8)[self._at(half, slots)] == byte).all()

    def fetch(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows in host memory. Waits for the current stream."""
        return rows.cpu()

    def busy(self, seconds: float) -> None:
        """Keeps the current stream busy for at least about `seconds`."""
        sleep = getattr(self.module, "_sleep", None)
        if sleep is not None:
            sleep(int(seconds * _CYCLES_PER_S))
            return
        some = torch.zeros(4 << 20, device=self.device[0][0].device)
        for _ in range(int(seconds / 25e-6)):
            some.add_(1)


def _host_layers(pool: LoadedPool) -> list[list[torch.Tensor]]:
    """Views [page, row, head, byte] of a pool's host memory, by half and layer."""
    buffer, page = buffer_of(pool.host), int(pool.host.page_size)
    assert buffer is not None, "a pool whose pages are loaded has one"
    pieces = list(buffer) if len(pool.halves) == 2 else [buffer]
    found = []
    for piece, half in zip(pieces, pool.halves, strict=True):
        layout = pool.host.layout if pool.page_rows > 1 else "page_first_direct"
        rows = piece.view(torch.uint8)
        if pool.page_rows == 1:  # page, layer, one row, one head, byte
            rows = rows.view(*rows.shape[:2], 1, 1, -1)
        found.append([_host_rows(layout, rows, n, page) for n in range(len(half.layers))])
    return found


def _host_rows(layout: str, piece: torch.Tensor, layer: int, page: int) -> torch.Tensor:
    """A layer of K, V or latents in host memory: a view [page, token, head, byte]."""
    if layout == "page_first":  # slot, layer, head, byte
        return piece[:, layer].unflatten(0, (-1, page))
    if layout == "page_first_direct":  # page, layer, token, head, byte
        return piece[:, layer]
    if layout == "page_head":  # page, head, token, layer, byte
        return piece[:, :, :, layer].transpose(1, 2)
    if layout == "layer_first":  # layer, slot, head, byte
        return piece[layer].unflatten(0, (-1, page))
    raise StartUnreadable(f"host pages of layout {layout}")


@dataclass(frozen=True)
class _Chosen:
    """Pages that the check uses."""

    host: list[int]
    targets: list[int]
    """Device pages, as many as host pages."""
    neighbours: list[int]
    """Device pages next to the targets, and page 0, which takes SGLang's padding."""
    singles: list[int]
    """Device pages for pages that are copied one by one."""


def _choose(rows: Rows, singles: int) -> _Chosen:
    """Chooses first, middle and last device pages; the first and the last host page, and those at
    both sides of registration borders.
    """
    most = max(_FEWEST_PAGES, min(_MOST_PAGES, _MOST_BYTES // rows.page_bytes))
    last = rows.device_pages - 1
    room = max(1, (last + 1) // 2)  # so that each target has a neighbour that is none
    host = _host_pages(rows, min(most, room))
    targets = _spread(1, last, len(host))
    beside = {page + step for page in targets for step in (-1, 1)} - set(targets)
    neighbours = [0, *sorted(page for page in beside if 0 < page <= last)[: 2 * _FEWEST_PAGES]]
    return _Chosen(host, targets, neighbours, _spread(1, last, min(singles, room)))


def _host_pages(rows: Rows, most: int) -> list[int]:
    last, first = rows.host_pages - 1, rows.buffer.data_ptr()
    half_bytes = rows.page_rows[0] * len(rows.device[0]) * rows.row_bytes[0]
    beside: list[int] = []
    for border in registration_borders(rows.buffer):
        at = (border - first) // half_bytes % rows.host_pages
        beside += [max(0, at - 1), at]
    wanted = dict.fromkeys([0, last, *beside[:4], *beside[-2:], 1, last // 2, 2])
    return sorted([page for page in wanted if page <= last][:most])


def _spread(first: int, last: int, count: int) -> list[int]:
    if count < 2:
        return [last]
    return [first + (last - first) * n // (count - 1) for n in range(count)]


class _WithAnchors:
    """Copies windows or states with as many KV pages, which another scene has set to zero."""

    def __init__(self, copies: Any, scene: _Scene, page: int) -> None:
        """`page`: slots per page of windows or states."""
        self._copies, self._rows, self._pages = copies, scene._rows, scene._pages
        self._page = page

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copies, name)

    @property
    def most_tokens(self) -> int | None:
        """Most slots of windows or states in one copy, so that their KV pages fit, too."""
        most = getattr(self._copies, "most_tokens", None)
        return None if most is None else most // self._rows.page * self._page

    def begin(self, host_slots: torch.Tensor, device_slots: torch.Tensor, fence: Any) -> Any:
        """Begins a copy of slots of windows or states."""
        rows, pages = self._rows, len(host_slots) // self._page
        zero, free = ((some * pages)[:pages] for some in (self._pages.host, self._pages.targets))
        host, device = rows.slots(zero, on_device=False), rows.slots(free, on_device=True)
        return self._copies.begin(host, device, fence, (host_slots, device_slots))


class _Scene:
    """The copies between the pages of one check."""

    def __init__(self, copies: Any, controller: Any, rows: Rows) -> None:
        self._copies, self._controller, self._rows = copies, controller, rows
        self._module = rows.module
        self._rooms = int(getattr(copies, "rooms", 2))
        self._pages = _choose(rows, 2 * self._rooms)
        self._fence_stream = controller.load_fence_stream
        counts = [len(layers) for layers in rows.device]
        self._all = [(half, n) for half, count in enumerate(counts) for n in range(count)]
        self._some = [(h, n) for h, n in self._all if n in (0, counts[h] // 2, counts[h] - 1)]
        """Halves and layers that are compared where not all are."""
        self._zero: list[torch.Tensor] = []
        self.compared = 0
        self._busy_s = _BUSY_S
        self.nbytes = len(self._pages.host) * rows.page_bytes

    def play(self) -> float | None:
        """Runs all checks below and cleans up. Returns the seconds of a load on its link."""
        try:
            self.prepare()
            seconds = None
            for overlap in (True, False):
                self.fence_beside_a_forward(overlap=overlap)
                took = self.load_beside_a_forward(overlap=overlap)
                seconds = took if overlap else seconds
            self.load_cut_in_two()
            self.load_page_by_page()
        finally:
            self.clean_up()
        return seconds

    # --- the pools ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Writes the pattern into host pages, reads page 0, and measures a wait for the device."""
        zero = self._rows.slots([0], on_device=True)
        self._zero = [self._rows.fetch(self._rows.read(*one, zero)) for one in self._all]
        event, began = self._module.Event(), time.monotonic()
        event.record()
        event.synchronize()
        waited_s = time.monotonic() - began
        self._busy_s = min(_MOST_BUSY_S, max(_BUSY_S, _BUSY_WAITS * waited_s))
        for half, layer in self._all:
            view, pages = self._rows.host[half][layer], self._pages.host
            wanted = self._wanted(half, layer, pages)
            view[pages] = wanted.reshape(len(pages), *view.shape[1:])

    def clean_up(self) -> None:
        """Sets everything that was written to zero. Never raises: a device that fails here fails
        its next user as well.
        """
        self._controller.load_fence_stream = self._fence_stream
        try:
            self._module.synchronize()  # a simulated forward may still write after a failed check
            touched = {*self._pages.targets, *self._pages.neighbours, *self._pages.singles} - {0}
            self._rows.fill(self._rows.slots(sorted(touched), on_device=True), 0)
            for half, layer in self._all:
                self._rows.host[half][layer][self._pages.host] = 0
            self._module.current_stream().synchronize()
        except Exception:
            logger.exception("kvtier: the pages of the check at start could not be cleaned")

    def _wanted(self, half: int, layer: int, pages: Sequence[int]) -> torch.Tensor:
        """The pattern of these host pages: bytes [row of a page, byte of a row]."""
        rows, of_page = self._rows, self._rows.page_rows[half]
        first = self._all.index((half, layer)) * rows.host_pages
        number = (torch.tensor(pages)[:, None] + first) * of_page + torch.arange(of_page)
        code = ((number.flatten() + 1) * _CODE).to(torch.int32)
        words = torch.arange(-(-rows.row_bytes[half] // 4), dtype=torch.int32) * _STEP
        return (code[:, None] + words).view(torch.uint8)[:, : rows.row_bytes[half]]

    def _make_old(self, pages: Sequence[int]) -> None:
        """Writes the old bytes to these device pages and the neighbours."""
        rows = self._rows
        written = [*pages, *(page for page in self._pages.neighbours if page)]
        rows.fill(rows.slots(written, on_device=True), _OLD)
        self._module.current_stream().synchronize()

    # --- checks ---------------------------------------------------------------------------------

    def fence_beside_a_forward(self, *, overlap: bool) -> None:
        """Watches a fence while a forward launched before it is running: it must not be reached
        before the forward's end. `overlap` as below.
        """
        module = self._module
        current, other = module.current_stream(), module.Stream()
        self._controller.load_fence_stream = other
        forward = other if overlap else current
        with module.stream(forward):
            self._rows.busy(self._busy_s)
            behind = module.Event()
            behind.record()
        fence, end = self._copies.fence(), time.monotonic() + 2 * self._busy_s
        while fence is not None and not behind.query() and time.monotonic() < end:
            if fence.query() and not behind.query():
                raise StartDiffers(_EARLY.format("beside" if overlap else "on"))
            time.sleep(_LOOK_S)
        behind.synchronize()

    def load_beside_a_forward(self, *, overlap: bool) -> float | None:
        """Loads all pages at once while a forward still uses their slots. `overlap`: the forward
        has a stream of its own, as in SGLang's overlapped loop. Returns the seconds on the link.
        """
        rows, pages, module = self._rows, self._pages, self._module
        host = rows.slots(pages.host, on_device=False)
        targets = rows.slots(pages.targets, on_device=True)
        self._make_old(pages.targets)
        current, other = module.current_stream(), module.Stream()
        self._controller.load_fence_stream = other
        forward = other if overlap else current
        forward.wait_stream(current)
        with module.stream(forward):
            rows.busy(self._busy_s)
            read = [rows.read(half, layer, targets) for half, layer in self._some]
            rows.fill(targets, _SCRIBBLE)
            behind = module.Event()
            behind.record()
        fence = self._copies.fence()

        def load() -> float | None:
            parts = self._parts(host, targets)
            begun = [self._begun(*part, fence) for part in parts[:2]]
            if fence is not None:
                fence.synchronize()
            if not behind.query():
                raise StartDiffers(_EARLY.format(how))
            self._ended([*begun], fence)
            for part in parts[2:]:
                more = self._begun(*part, fence)
                self._ended([more], fence)
                begun.append(more)
            self._compare(pages.host, targets, self._all if overlap else self._some)
            seconds = [copy.seconds for copy in begun]
            return None if None in seconds else sum(seconds)

        how = "beside" if overlap else "on"
        took = _on_thread(self._copies, load)
        forward.synchronize()
        with module.stream(forward):
            old = all(bool((rows.fetch(one) == _OLD).all()) for one in read)
        if not old:
            raise StartDiffers(
                f"a copy wrote over pages that a forward {how} the scheduler's stream still read"
            )
        self._compare(pages.host, targets, self._some)
        self._look_beside(some=not overlap)
        self.compared += len(pages.host)
        return took

    def load_cut_in_two(self) -> None:
        """Begins two parts of one load, then places the second one before the first."""
        rows, pages = self._rows, self._pages
        host = rows.slots(pages.host, on_device=False)
        targets = rows.slots(pages.targets, on_device=True)
        self._make_old(pages.targets)
        fence = self._copies.fence()
        cut = (len(pages.host) + 1) // 2 * rows.page

        def load() -> None:
            most = getattr(self._copies, "most_tokens", None) or len(host)
            first, stop = max(0, cut - most), min(len(host), cut + most)
            parts = [(host[first:cut], targets[first:cut]), (host[cut:stop], targets[cut:stop])]
            begun = [self._begun(*part, fence) for part in parts if len(part[0])]
            self._ended(begun[::-1], fence)
            copied = pages.host[first // rows.page : stop // rows.page]
            self._compare(copied, targets[first:stop], self._some)

        _on_thread(self._copies, load)
        self._look_beside(some=True)
        self.compared += len(pages.host)

    def load_page_by_page(self) -> None:
        """Copies pages one by one, through every room twice. If they leave a room on a stream of
        its own, that stream is kept busy first, so that the bus could overtake it.
        """
        rows, pages = self._rows, self._pages
        count = 2 * self._rooms
        into = [pages.singles[n % len(pages.singles)] for n in range(count)]
        sources = [pages.host[n % len(pages.host)] for n in range(count)]
        self._make_old(pages.singles)
        fence, slots_stream = self._copies.fence(), getattr(self._copies, "slots_stream", None)
        if slots_stream is not None:
            with self._module.stream(slots_stream):
                rows.busy(self._busy_s)

        def load() -> None:
            begun = []
            for source, target in zip(sources, into, strict=True):
                slots = rows.slots([source], on_device=False)
                begun.append(self._begun(slots, rows.slots([target], on_device=True), fence))
                if fence is not None:
                    fence.synchronize()
                begun[-1].place()
            for copy in begun:
                _wait(copy)
            last = dict(zip(into, sources, strict=True))
            slots = rows.slots(list(last), on_device=True)
            self._compare(list(last.values()), slots, self._some)

        _on_thread(self._copies, load)
        self._look_beside(some=True, but=set(into))
        self.compared += count

    # --- helpers of the checks ------------------------------------------------------------------

    def _parts(
        self, host: torch.Tensor, device: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A load cut as the mover does it: no copy has more tokens than it may have."""
        most = getattr(self._copies, "most_tokens", None) or len(host)
        return list(zip(host.split(most), device.split(most), strict=True))

    def _begun(self, host: torch.Tensor, device: torch.Tensor, fence: Any) -> Any:
        copy = self._copies.begin(host, device, fence)
        if copy is None and fence is not None:  # staging is full of pages that wait for the fence
            fence.synchronize()
            copy = self._copies.begin(host, device, fence)
        if copy is None:
            raise StartDiffers("there is no room of staging for a page")
        return copy

    def _ended(self, begun: Sequence[Any], fence: Any) -> None:
        if fence is not None:
            fence.synchronize()
        for copy in begun:
            copy.place()
        for copy in begun:
            _wait(copy)

    def _compare(
        self, pages: Sequence[int], slots: torch.Tensor, layers: Sequence[tuple[int, int]]
    ) -> None:
        """Checks that these device slots hold those host pages; the last layer first: it comes
        last.
        """
        for half, layer in reversed(layers):
            found = self._rows.fetch(self._rows.read(half, layer, slots))
            wanted = self._wanted(half, layer, pages)
            if not torch.equal(found, wanted):
                wrong = (found != wanted).any(1).nonzero()
                page, row = divmod(int(wrong[0]), self._rows.page_rows[half])
                raise StartDiffers(
                    f"{self._rows.names[half]} of layer {layer} of host page {pages[page]} are not "
                    f"what is on the device, from row {row} on ({len(wrong)} of {len(found)} rows)"
                )

    def _look_beside(self, *, some: bool = False, but: set[int] | None = None) -> None:
        """Raises StartDiffers unless the neighbours and page 0 are unchanged."""
        rows = self._rows
        pages = [page for page in self._pages.neighbours if page and page not in (but or ())]
        slots, zero = rows.slots(pages, on_device=True), rows.slots([0], on_device=True)
        for number, (half, layer) in enumerate(self._all):
            if some and (half, layer) not in self._some:
                continue
            if pages and not bool(rows.fetch(rows.all_are(half, layer, slots, _OLD))):
                raise StartDiffers(f"a copy wrote into a page beside its own, in layer {layer}")
            if not torch.equal(rows.fetch(rows.read(half, layer, zero)), self._zero[number]):
                raise StartDiffers(f"a copy wrote into page 0, SGLang's padding, in layer {layer}")


def _wait(copy: Any) -> None:
    copy.wait()
    if not copy.done():
        raise StartDiffers("a copy that was waited for has not ended")


def _on_thread(copies: Any, work: Callable[[], _T]) -> _T:
    """Runs `work` on a thread like the mover's; returns its result or raises its exception."""
    found: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            torch.set_grad_enabled(False)
            copies.enter()
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="kvtier-start")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


# --- the bus --------------------------------------------------------------------------------------


def measure(copies: Any, controller: Any, windows: Sequence[int] = CHOICES) -> list[Trial]:
    """Bandwidth of loads and delay of small copies for each window of bytes in flight; empty if
    these copies queue nothing on the bus. The pages stay in staging.
    """
    if getattr(copies, "window_bytes", None) is None:
        return []
    _trial(copies, controller, windows[-1])  # warm-up
    return [_trial(copies, controller, window) for window in windows]


def _trial(copies: Any, controller: Any, window: int) -> Trial:
    copies.bound_bus(window)
    module = torch.get_device_module(controller.device)
    page = int(host_pool_of(controller).page_size)
    pages = min(copies.most_tokens // page, copies.host_pages)
    nbytes = pages * copies.page_bytes
    count = max(1, min(copies.rooms - 1, _BURST_BYTES // nbytes))
    host = torch.arange(pages * page)
    ready = copies.fence()
    ready.synchronize()
    taken: list[float] = []

    def burst() -> None:
        begun = [copies.begin(host, host, ready) for _ in range(count)]
        for copy in begun:
            copy.drop()  # waits for the bus
        taken.extend(copy.seconds for copy in begun)

    over = threading.Event()
    thread = threading.Thread(
        target=lambda: _then(over, lambda: _on_thread(copies, burst)), name="kvtier-burst"
    )
    stream, memory = module.Stream(), copies.memory
    source, target = memory.pinned(_SMALL_NUMBERS), memory.indices(_SMALL_NUMBERS)
    waits: list[float] = []
    thread.start()
    while not over.is_set() or not waits:
        before, after = (module.Event(enable_timing=True) for _ in range(2))
        with module.stream(stream):
            before.record()
            memory.copy(target, source)
            after.record()
        after.synchronize()
        waits.append(before.elapsed_time(after) / 1e3)
    thread.join()
    if len(taken) != count:
        raise StartDiffers("a load in the largest pieces failed")
    return Trial(window, count * nbytes / max(sum(taken), 1e-9) / 1e9, statistics.median(waits))


def _then(over: threading.Event, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        logger.exception("kvtier: a load of the check at start failed")
    finally:
        over.set()
