"""The table of ways to copy host pages into device slots.

It has bytes per second, time to begin a load, what a GEMM beside it loses, and how long a small
copy of SGLang's takes beside it. A way is anything that has the interface of `CopyDevice`. The
bytes on the device are compared with the host's before a way is timed. One that copies wrongly has
`wrong` in its row and no figures.

A row is appended to the log at once, and says what it was measured on: the device by its name, the
shape, torch. Rows of anything else in a log are not known. Nor are those that failed: a later run
measures them again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch

from sgl_kvtier.console import Column, Table, check_target, envelope, print_table, write_json
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.audit import pages_of
from sgl_kvtier.lab.experiment.log import Log
from sgl_kvtier.lab.gpu.pools import CPU_WAYS, WAYS, controller, pools
from sgl_kvtier.runtime.backend.host_pages import bytes_of, parts_of
from sgl_kvtier.runtime.cuda.all_layers import all_layers_of
from sgl_kvtier.runtime.cuda.card_memory import CardMemory
from sgl_kvtier.runtime.cuda.flashinfer_scatter import FlashInferScatter
from sgl_kvtier.runtime.cuda.page_shape import LAYOUTS, host_pool_of, unfit
from sgl_kvtier.runtime.cuda.scatter import TritonScatter
from sgl_kvtier.runtime.proof.start import measure
from sgl_kvtier.runtime.restore.copy_device import MakeScatter, StreamCopies, copies_for, staged_by

SCHEMA = "kvtier.copy-table/1"
SHAPE = {"layers": 32, "heads": 8, "head_dim": 128}
"""Of the KV cache: that of Llama 3.1 8B."""
ROUNDS = 7
_GEMM = 8192
_GEMMS = 40
_FIGURES = ("gbps", "begin_us", "gemm_slower", "small_copy_us")
CEILING = "one copy of as many bytes (ceiling)"
_Name: TypeAlias = tuple[str, int, int]
"""Of a row: way, tokens of a page, MiB of a load."""


@dataclass(frozen=True)
class Way:
    """One way to copy: SGLang's I/O backend and host layout, and what makes the copies."""

    name: str
    io: str
    layout: str
    make: Callable[[Any], Any]


def ways_on(device: str) -> list[Way]:
    """Every way there is. The product's own choice is among them for each layout: on a card that is
    the first of it.
    """
    if device == "cpu":
        return [
            Way(f"chosen by the product, {layout}", io, layout, copies_for)
            for io, layout in CPU_WAYS
        ]
    io_of = {layout: io for io, layout in WAYS}
    named = [
        *((f"staged, our kernel, {layout}", layout, _staged(TritonScatter)) for layout in LAYOUTS),
        ("staged, FlashInfer's append, page_first", "page_first", _staged(FlashInferScatter)),
        ("SGLang's kernel of all layers, page_first", "page_first", _all_layers),
        *((f"SGLang's {io} copies, {layout}", layout, StreamCopies) for io, layout in WAYS),
    ]
    return [Way(name, io_of[layout], layout, make) for name, layout, make in named]


def _staged(make: MakeScatter) -> Callable[[Any], Any]:
    def made(controller: Any) -> Any:
        memory = _memory()
        reason = unfit(controller) or memory.unread(host_pool_of(controller))
        if reason is not None:
            raise BenchError(f"not staged: {reason}")
        return staged_by(make, controller, memory)

    return made


def _all_layers(controller: Any) -> Any:
    whole = all_layers_of(controller)
    if whole is None:
        raise BenchError("SGLang has not compiled a kernel of all layers for this shape")
    return StreamCopies(controller, _memory(), whole)


def _memory() -> CardMemory:
    return CardMemory(torch.cuda.current_device())


def run(args: argparse.Namespace) -> int:
    """Measures what is not in the log yet; 1 where a way copied wrongly or failed, or rows are
    missing because the time was over.
    """
    if args.json is not None:
        check_target(args.json)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BenchError("torch sees no CUDA device. --device cpu shows the machinery alone")
    measured_on, log = _measured_on(args), _Rows.open(args.log, {"schema": SCHEMA})
    until = time.monotonic() + args.seconds
    for row in _measured(args, log.of(measured_on), until):
        print(row, file=sys.stderr, flush=True)
        log.add("row", row | measured_on)
    rows, wanted = log.of(measured_on), _wanted(args)
    found = [rows[name] for name in wanted if name in rows]
    missing = len(wanted) - len(found)
    _report(args, found, missing, measured_on)
    return 1 if missing or any(row["note"] for row in found) else 0


def _report(
    args: argparse.Namespace, rows: list[dict[str, Any]], missing: int, measured_on: dict[str, Any]
) -> None:
    shown = sys.stderr if args.json == "-" else sys.stdout
    columns = [
        Column(name, name.replace("_", " ")) for name in ("way", "page", "mib", *_FIGURES, "note")
    ]
    print_table(Table("Copies from host pages", tuple(columns), rows), shown)
    if missing:
        again = "the same --log goes on" if args.log is not None else "--log FILE lets a run go on"
        print(
            f"{missing} rows are missing: --seconds {args.seconds} were over; {again}", file=shown
        )
    if args.json is not None:
        found = {"settings": {**measured_on, "rounds": ROUNDS}, "rows": rows}
        command = ["kvtier", *sys.argv[1:]]
        write_json(envelope(SCHEMA, command, {**found, "missing": missing}), args.json)


def _measured_on(args: argparse.Namespace) -> dict[str, Any]:
    """What a row's figures belong to."""
    name = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    return {"device": name, "torch": torch.__version__, **SHAPE}


def _name(row: dict[str, Any]) -> _Name:
    return row["way"], row["page"], row["mib"]


def _wanted(args: argparse.Namespace) -> list[_Name]:
    """All rows, in the order in which they are measured."""
    wanted: list[_Name] = []
    for page in args.pages:
        wanted += [(way.name, page, mib) for way in ways_on(args.device) for mib in args.mib]
        if page == args.pages[0]:
            wanted += [(CEILING, page, mib) for mib in args.mib]
    return wanted


class _Rows(Log):
    """Rows by name, the last of each, of one device and shape; a file may have others."""

    kinds: ClassVar = {"row": dict}

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self._all: list[dict[str, Any]] = []

    def take(self, kind: str, record: dict[str, Any]) -> None:
        """Adds a row. Raises KeyError for what is none."""
        assert kind in self.kinds, "there is one kind"
        _name(record)
        self._all.append(record)

    def of(self, measured_on: dict[str, Any]) -> dict[_Name, dict[str, Any]]:
        """Those that were measured on this."""
        return {_name(row): row for row in self._all if measured_on.items() <= row.items()}


def _measured(
    args: argparse.Namespace, known: dict[_Name, dict[str, Any]], until: float
) -> Iterator[dict[str, Any]]:
    done = {name for name, row in known.items() if not row["note"]}
    for page in args.pages:
        for way in ways_on(args.device):
            wanted = [mib for mib in args.mib if (way.name, page, mib) not in done]
            if not wanted or time.monotonic() > until:
                continue
            row = _rows_of(args, way, page)
            for mib in wanted:
                if time.monotonic() < until:
                    yield {"way": way.name, "page": page, "mib": mib, **row(mib)}
        for mib in args.mib if page == args.pages[0] else ():
            if (CEILING, page, mib) not in done and time.monotonic() < until:
                found = _ceiling(args.device, mib, ROUNDS)
                yield {"way": CEILING, "page": page, "mib": mib, **found}


def _rows_of(args: argparse.Namespace, way: Way, page: int) -> Callable[[int], dict[str, Any]]:
    """Figures by MiB of a load."""
    try:
        return _Bench(args, way, page, max(args.mib)).row
    except Exception as error:  # whatever a driver or a compiler raises is the row's
        failed = _failed(error)
        return lambda _mib: failed


class _Bench:
    """Pools with room for two of the largest loads, in shuffled pages, and one way to copy."""

    def __init__(self, args: argparse.Namespace, way: Way, page: int, most_mib: int) -> None:
        self._per_token = 2 * SHAPE["layers"] * SHAPE["heads"] * SHAPE["head_dim"] * 2
        self._page, self._rounds = page, ROUNDS
        tokens = max(1, (most_mib << 20) // self._per_token // page) * page
        self._device, self._host = pools(
            args.device,
            way.layout,
            page=page,
            tokens=2 * tokens,
            heads=SHAPE["heads"],
            dim=SHAPE["head_dim"],
            layers=SHAPE["layers"],
        )
        self._card = args.device == "cuda"
        forward = torch.cuda.Stream() if self._card else None
        found = controller(self._device, self._host, way.io, forward)
        if self._card:
            found.device = "cuda"
        self._copies, self._forward, self._controller = way.make(found), forward, found
        order = torch.randperm(2 * tokens // page, generator=torch.Generator().manual_seed(1)) + 1
        self._order = order.tolist()

    def row(self, mib: int) -> dict[str, Any]:
        """Figures of loads of `mib` MiB."""
        count = max(1, (mib << 20) // self._per_token // self._page)
        host = self._slots(range(count))
        device = self._slots(self._order[:count])
        device = device.cuda() if self._card else device
        try:
            self._once(host, device)
            if not self._right(host, device):
                return _row(note="wrong")
            times = [self._once(host, device) for _ in range(self._rounds)]
            slower = self._gemm_slower(host, device) if self._card else None
            small = self._small_copy_us() if self._card else None
        except Exception as error:  # whatever a kernel raises is the row's
            return _failed(error)
        nbytes = count * self._page * self._per_token
        return _row(
            gbps=round(nbytes / statistics.median(whole for whole, _ in times) / 1e9, 2),
            begin_us=round(statistics.median(begun for _, begun in times) * 1e6, 1),
            gemm_slower=slower,
            small_copy_us=small,
        )

    def _small_copy_us(self) -> float | None:
        """Of a copy of 4 KiB beside loads with the bytes in flight that a server begins with; None
        for ways that have no use for the copy engine.
        """
        window = getattr(self._copies, "window_bytes", None)
        if window is None:
            return None
        [trial] = measure(self._copies, self._controller, (window,))
        return round(trial.small_copy_s * 1e6, 1)

    def _slots(self, pages: Any) -> torch.Tensor:
        return (
            torch.tensor(list(pages))[:, None] * self._page + torch.arange(self._page)
        ).flatten()

    def _once(self, host: torch.Tensor, device: torch.Tensor) -> tuple[float, float]:
        """Seconds of one load, and of them those until it was begun."""
        most = getattr(self._copies, "most_tokens", None) or len(host)
        fence, started, begun = self._copies.fence(), time.perf_counter(), 0.0
        for first in range(0, len(host), most):
            before, copy = time.perf_counter(), None
            while copy is None:  # no room yet
                copy = self._copies.begin(
                    host[first : first + most], device[first : first + most], fence
                )
            if hasattr(copy, "place"):
                copy.place()
            begun += time.perf_counter() - before
            while not copy.done():
                time.sleep(0)
        return time.perf_counter() - started, begun

    def _right(self, host: torch.Tensor, device: torch.Tensor) -> bool:
        pages = len(host) // self._page
        found = pages_of(self._device, self._host, device, self._page)
        wanted = parts_of(self._host, pages, host)
        return all(
            [bytes_of(piece) for piece in page] == list(other)
            for page, other in zip(found, wanted, strict=True)
        )

    def _gemm_slower(self, host: torch.Tensor, device: torch.Tensor) -> float:
        """By what share products on another stream take longer while loads go on all the time."""
        a = torch.randn(_GEMM, _GEMM, device="cuda", dtype=torch.bfloat16)
        compute = torch.cuda.Stream()

        def products(beside: bool) -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            with torch.cuda.stream(compute):
                begin.record()
                for _ in range(_GEMMS):
                    torch.mm(a, a)
                end.record()
            while beside and not end.query():
                self._once(host, device)
            end.synchronize()
            return float(begin.elapsed_time(end))

        products(False)
        alone = statistics.median(products(False) for _ in range(3))
        return round(statistics.median(products(True) for _ in range(3)) / alone - 1, 4)


def _ceiling(device: str, mib: int, rounds: int) -> dict[str, Any]:
    host = torch.ones(mib << 20, dtype=torch.uint8)
    if device == "cuda":
        host = host.pin_memory()
    target, times = torch.empty_like(host, device=device), []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        target.copy_(host, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return _row(gbps=round((mib << 20) / statistics.median(times[1:]) / 1e9, 2))


def _row(**figures: float | str | None) -> dict[str, Any]:
    """Those of `_FIGURES` that were measured, None for others, and a note."""
    return {**dict.fromkeys(_FIGURES), "note": "", **figures}


def _failed(error: Exception) -> dict[str, Any]:
    return _row(note=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200])
