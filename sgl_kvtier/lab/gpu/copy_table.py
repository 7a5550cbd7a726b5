"""The table of ways to copy host pages into device slots.

It has bytes per second, time to begin a load, and what a GEMM beside it loses. A way is anything
that has the interface of `CopyDevice`. The bytes on the device are compared with the host's before
a way is timed. One that copies wrongly has `wrong` in its row and no figures. A row is appended to
the log at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_kvtier.console import Column, Table, check_target, envelope, print_table, write_json
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.gpu.pools import CPU_WAYS, WAYS, controller, pools
from sgl_kvtier.runtime.backend.host_pages import bytes_of, parts_of
from sgl_kvtier.runtime.restore.audit import pages_of
from sgl_kvtier.runtime.restore.copy_device import StreamCopies, copies_for

SCHEMA = "kvtier.copy-table/1"
_GEMM = 8192
_GEMMS = 40
CEILING = "one copy of as many bytes (ceiling)"


@dataclass(frozen=True)
class Way:
    """One way to copy: SGLang's I/O backend and host layout, and what makes the copies."""

    name: str
    io: str
    layout: str
    make: Callable[[Any], Any]


def ways_on(device: str) -> list[Way]:
    """Every way there is. The product's own choice is among them for each layout."""
    chosen = [
        Way(f"chosen by the product, {layout}", io, layout, copies_for)
        for io, layout in (CPU_WAYS if device == "cpu" else WAYS)
    ]
    if device == "cpu":
        return chosen
    return chosen + [
        Way(f"SGLang's {io} copies, {layout}", io, layout, StreamCopies) for io, layout in WAYS
    ]


def run(args: argparse.Namespace) -> int:
    """Measures what is not in the log yet; 1 where a way copied wrongly or failed."""
    if args.json is not None:
        check_target(args.json)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BenchError("torch sees no CUDA device. --device cpu shows the machinery alone")
    rows = _known(args.log)
    done = {(row["way"], row["page"], row["mib"]) for row in rows}
    until = time.monotonic() + args.seconds
    for row in _measured(args, done, until):
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        if args.log is not None:
            with args.log.open("a") as file:
                file.write(json.dumps(row) + "\n")
    shown = sys.stderr if args.json == "-" else sys.stdout
    columns = [
        Column(name, name.replace("_", " "))
        for name in ("way", "page", "mib", "gbps", "begin_us", "gemm_slower", "note")
    ]
    print_table(Table("Copies from host pages", tuple(columns), rows), shown)
    if args.json is not None:
        settings = {
            key: getattr(args, key) for key in ("device", "layers", "heads", "head_dim", "rounds")
        }
        write_json(
            envelope(SCHEMA, ["kvtier", *sys.argv[1:]], {"settings": settings, "rows": rows}),
            args.json,
        )
    return 1 if any(row["note"] for row in rows) else 0


def _known(log: Path | None) -> list[dict[str, Any]]:
    if log is None or not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines()]


def _measured(
    args: argparse.Namespace, done: set[tuple[str, int, int]], until: float
) -> Iterator[dict[str, Any]]:
    for page in args.pages:
        for way in ways_on(args.device):
            wanted = [mib for mib in args.mib if (way.name, page, mib) not in done]
            if not wanted or time.monotonic() > until:
                continue
            bench = _Bench(args, way, page, max(args.mib))
            for mib in wanted:
                if time.monotonic() < until:
                    yield {"way": way.name, "page": page, "mib": mib, **bench.row(mib)}
        for mib in args.mib:
            if (CEILING, page, mib) not in done and page == args.pages[0]:
                yield {
                    "way": CEILING,
                    "page": page,
                    "mib": mib,
                    **_ceiling(args.device, mib, args.rounds),
                }


class _Bench:
    """Pools with room for two of the largest loads, in shuffled pages, and one way to copy."""

    def __init__(self, args: argparse.Namespace, way: Way, page: int, most_mib: int) -> None:
        self._per_token = 2 * args.layers * args.heads * args.head_dim * 2
        self._page, self._rounds = page, args.rounds
        tokens = max(1, (most_mib << 20) // self._per_token // page) * page
        self._device, self._host = pools(
            args.device,
            way.layout,
            page=page,
            tokens=2 * tokens,
            heads=args.heads,
            dim=args.head_dim,
            layers=args.layers,
        )
        self._card = args.device == "cuda"
        forward = torch.cuda.Stream() if self._card else None
        found = controller(self._device, self._host, way.io, forward)
        if self._card:
            found.device = "cuda"
        self._copies, self._forward = way.make(found), forward
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
        except Exception as error:  # whatever a kernel raises is the row's
            return _row(note=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200])
        nbytes = count * self._page * self._per_token
        return _row(
            gbps=round(nbytes / statistics.median(whole for whole, _ in times) / 1e9, 2),
            begin_us=round(statistics.median(begun for _, begun in times) * 1e6, 1),
            gemm_slower=slower,
        )

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


def _row(
    gbps: float | None = None,
    begin_us: float | None = None,
    gemm_slower: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    return {"gbps": gbps, "begin_us": begin_us, "gemm_slower": gemm_slower, "note": note}
