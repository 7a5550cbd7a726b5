"""The `kvtier bench remote` command: verified reads beside a busy thread against Mooncake's own
client in a process of its own, in turns; writes with and without the remote store; and reads with
injected faults.

`mooncake_busy` is that client while the other process is busy: what the processors have left.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from sgl_kvtier.arguments import positive
from sgl_kvtier.config import StoreConfig
from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    print_table,
    progress,
    write_json,
)
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.remotebench.faults import IN_A_READ, read_with_faults
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.servers import Servers
from sgl_kvtier.remote.store import RemoteStore, open_remote
from sgl_kvtier.sizes import parse_bytes
from sgl_kvtier.store.base import PageRead, PageStore, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.engine import open_store
from sgl_kvtier.store.tiered.store import TieredStore
from sgl_kvtier.types import PageKey

SCHEMA = "kvtier.bench.remote/1"
_IN_A_ROW = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier bench remote`."""
    parser.add_argument(
        "--page", default="256KiB", metavar="SIZE", help="bytes of a page (default %(default)s)"
    )
    parser.add_argument(
        "--pages", type=positive, default=128, help="pages of a read or write (default %(default)s)"
    )
    parser.add_argument(
        "--pairs", type=positive, default=20, help="rounds of all sides (default %(default)s)"
    )
    parser.add_argument(
        "--reads",
        type=positive,
        metavar="N",
        help="instead: N page reads with a fault each and N clean ones, without Mooncake",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for standard output"
    )


def run(args: argparse.Namespace) -> int:
    """Measures; 1 when a page was wrong. Raises KVTierError."""
    if args.json is not None:
        check_target(args.json)
    if args.reads:
        with progress("faults", 2 * args.reads // IN_A_READ, "reads") as bar:
            result = read_with_faults(args.reads, bar.advance)
    else:
        result = _speed(parse_bytes(args.page), args.pages, args.pairs)
    if args.json != "-":
        rows = [{"what": name.replace("_", " "), "value": value} for name, value in result.items()]
        shown = [row for row in rows if not isinstance(row["value"], (list, dict))]
        columns = [Column("what", "what"), Column("value", "value")]
        print_table(Table("The remote store", columns, shown))
    if args.json is not None:
        write_json(envelope(SCHEMA, ["kvtier", *sys.argv[1:]], result), args.json)
    return int(bool(result.get("wrong_pages")))


def _speed(nbytes: int, pages: int, pairs: int) -> dict[str, Any]:
    identity = Identity({"bench": nbytes})
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(Servers(8 * nbytes * pages + (64 << 20)))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        settings = RemoteSettings(engine="mooncake", master=servers.master)
        remote = open_remote(settings, identity, "tp0")
        both = TieredStore(_local(f"{folder}/both", identity), remote)
        stack.callback(both.close)
        local = _local(f"{folder}/local", identity)
        stack.callback(local.close)
        if not remote.wait_usable(20):
            raise BenchError(f"the remote store is not usable: {remote.condition().trouble}")
        with _peer(servers.master, pages, nbytes) as peer:
            found = _rates(_Reads(remote, nbytes, pages), peer, nbytes * pages, pairs)
        return {**found, **_writes(local, both, nbytes, pages, pairs)}


def _local(folder: str, identity: Identity) -> PageStore:
    config = StoreConfig(path=folder, capacity_bytes=4 << 30, min_free_bytes=0)
    return open_store(config, identity, "tp0")


def _writes(
    local: PageStore, both: TieredStore, nbytes: int, pages: int, pairs: int
) -> dict[str, Any]:
    """Milliseconds of a write of new pages, three in a row, without and with a remote store. What
    is sent to it meanwhile is done before the next round.
    """
    sides: dict[str, list[float]] = {"local": [], "with_remote": []}
    stores: dict[str, PageStore] = {"local": local, "with_remote": both}
    data = [memoryview(os.urandom(nbytes)) for _ in range(pages)]
    before = both.tiered_stats().uploaded
    with progress("writes", pairs, "rounds") as shown:
        for number in range(pairs):
            for side in sorted(stores, reverse=bool(number % 2)):
                keys = [PageKey(os.urandom(32)) for _ in range(_IN_A_ROW * pages)]
                for at in range(0, len(keys), pages):
                    batch = [
                        PageWrite(key, [page])
                        for key, page in zip(keys[at : at + pages], data, strict=True)
                    ]
                    begun = time.perf_counter()
                    outcomes = stores[side].put(batch)
                    sides[side].append(1e3 * (time.perf_counter() - begun))
                    if any(outcome is not PutOutcome.STORED for outcome in outcomes):
                        raise BenchError("the local store refused pages: is its disk full?")
                if not both.settle(60):
                    raise BenchError("pages were not sent to the remote store in 60 s")
                stores[side].delete(keys)
            shown.advance()
    stats = both.tiered_stats()
    sent = stats.uploaded - before
    if sent != _IN_A_ROW * pages * pairs:
        raise BenchError(f"{sent} pages were sent to the remote store, {stats.refused} refused")
    median = {f"write_{side}_ms": statistics.median(found) for side, found in sides.items()}
    return {
        **median,
        "write_with_remote_over_local": median["write_with_remote_ms"] / median["write_local_ms"],
        "all_write_ms": sides,
    }


def _rates(reads: _Reads, peer: subprocess.Popen[str], nbytes: int, pairs: int) -> dict[str, Any]:
    sides: dict[str, list[float]] = {
        name: [] for name in ("mooncake_quiet", "mooncake_busy", "quiet", "busy")
    }
    with progress("remote store", pairs, "rounds") as shown:
        for _ in range(pairs):
            for _ in range(_IN_A_ROW):
                sides["mooncake_quiet"].append(nbytes / _peer_get(peer) / 1e9)
            for _ in range(_IN_A_ROW):
                sides["quiet"].append(nbytes / reads.time() / 1e9)
            with _busy_thread():
                for _ in range(_IN_A_ROW):
                    sides["mooncake_busy"].append(nbytes / _peer_get(peer) / 1e9)
                for _ in range(_IN_A_ROW):
                    sides["busy"].append(nbytes / reads.time() / 1e9)
            shown.advance()
    median = {f"{name}_gbps": statistics.median(rates) for name, rates in sides.items()}
    own = median["mooncake_quiet_gbps"]
    return {
        "page_bytes": reads.nbytes,
        "pages": len(reads.keys),
        **median,
        "busy_over_mooncake_quiet": median["busy_gbps"] / own,
        "busy_over_mooncake_busy": median["busy_gbps"] / median["mooncake_busy_gbps"],
        "quiet_over_mooncake_quiet": median["quiet_gbps"] / own,
        "all_gbps": sides,
    }


class _Reads:
    """Reads of the same pages through a store, each checked byte for byte."""

    def __init__(self, store: RemoteStore, nbytes: int, pages: int) -> None:
        self.nbytes = nbytes
        self.keys = [
            PageKey(hashlib.sha256(bytes([i % 256, i >> 8])).digest()) for i in range(pages)
        ]
        self._store = store
        self._data = [os.urandom(nbytes) for _ in self.keys]
        put = store.put(
            [PageWrite(k, [memoryview(d)]) for k, d in zip(self.keys, self._data, strict=True)]
        )
        if any(outcome is PutOutcome.REFUSED for outcome in put):
            raise BenchError("the engine refused pages: is its memory large enough?")
        self._into = [bytearray(nbytes) for _ in self.keys]

    def time(self) -> float:
        """Seconds of one read of all pages. Raises BenchError unless all are right."""
        pages = [
            PageRead(key, [memoryview(into)])
            for key, into in zip(self.keys, self._into, strict=True)
        ]
        begun = time.perf_counter()
        job = self._store.read(pages)
        job.wait(60)
        took = time.perf_counter() - begun
        if any(outcome is not ReadOutcome.OK for outcome in job.outcomes):
            raise BenchError(f"pages were not read: {self._store.condition().trouble}")
        if self._into != self._data:
            raise BenchError("a page is wrong")
        return took


@contextlib.contextmanager
def _busy_thread() -> Iterator[None]:
    """A Python thread that computes without a pause."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def _peer(master: str, pages: int, nbytes: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "sgl_kvtier.lab.remotebench.peer"]
    process = subprocess.Popen(
        [*command, master, str(pages), str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        if _line(process) is not True:
            raise BenchError("Mooncake's own client could not put its pages")
        yield process
    finally:
        process.kill()
        process.wait()


def _peer_get(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    took = _line(process)
    if took is None:
        raise BenchError("Mooncake's own client could not get its pages")
    return float(took)


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else None
