"""Damage to the bytes on disk in eight ways, each to be found. Clean reads are made too, and none
may be called damaged.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sgl_kvtier.lab.stress.store.oracle import open_at, page_key, quick_pages
from sgl_kvtier.lab.stress.trouble import chance
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.format import BLOCK, SlotHead
from sgl_kvtier.store.disk.segment import segment_name
from sgl_kvtier.store.engine import DiskStore

PAGES = 64
NBYTES = 4096 + 512
SLOT = BLOCK + 2 * BLOCK
KINDS = (
    "flipped bit",
    "header field",
    "zeroed sector",
    "torn at 512 B",
    "torn at 4 KiB",
    "swapped",
    "stale",
    "misdirected",
    "truncated",
)


@dataclass(slots=True)
class Damage:
    """`undetected` damaged pages that were returned; `false_alarms` sound pages that were not."""

    corruptions: int = 0
    undetected: int = 0
    clean_reads: int = 0
    false_alarms: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    engine: str = ""
    """The store's I/O threads, as `DiskStore.io` calls them."""


class Bench:
    """A store of one segment whose file is also edited from outside."""

    def __init__(self, root: str, seed: int) -> None:
        self._chance = chance(seed, "damage")
        # The page cache, because the file is edited through it; io_uring all the same, where
        # threads would do for it.
        self._store: DiskStore = open_at(
            root, capacity_bytes=64 << 20, segment_bytes=4 << 20, direct_io="off", io="io_uring"
        )
        self._memory = memoryview(mmap.mmap(-1, PAGES * 2 * BLOCK))
        self._round = 0
        self._pages = quick_pages(PAGES, NBYTES, seed)
        self._put(range(PAGES))
        self._path = os.path.join(self._store.folder, segment_name(1))
        self._older: dict[int, bytes] = {}
        self._stale: dict[int, bytes] = {}
        self.result = Damage(engine=self._store.io)

    def close(self) -> None:
        self._store.close()

    def damage_all(self) -> None:
        """Damages half of the pages, one way each, reads all, and puts the lost ones anew."""
        with open(self._path, "r+b", buffering=0) as file:
            where = self._slots(file.read())
            size = os.fstat(file.fileno()).st_size
            bad: dict[int, str] = {}
            order = self._chance.sample(range(PAGES), PAGES // 2)
            while order:
                self._spoil(file.fileno(), where, order, bad)
            cut = self._truncate(file.fileno(), where, bad) if self._chance.random() < 0.05 else 0
            self._judge(bad)
            if cut:
                os.ftruncate(file.fileno(), size)
        self._put(bad)

    def read_clean(self) -> None:
        """Reads every page, none of them damaged."""
        outcomes = self._read()
        self.result.clean_reads += PAGES
        self.result.false_alarms += sum(o is not ReadOutcome.OK for o in outcomes)

    def _spoil(self, fd: int, where: dict[int, int], order: list[int], bad: dict[int, str]) -> None:
        page = order.pop()
        kind = self._chance.choice(KINDS[:-1])
        at = where[page]
        if kind == "swapped" and order:
            other = order.pop()
            a, b = os.pread(fd, SLOT, at), os.pread(fd, SLOT, where[other])
            os.pwrite(fd, b, at), os.pwrite(fd, a, where[other])
            bad[other] = kind
        elif kind == "misdirected" and order:
            source = self._chance.choice(order)
            os.pwrite(fd, os.pread(fd, SLOT, where[source]), at)
        elif kind == "stale" and at in self._stale:
            os.pwrite(fd, self._stale[at], at)
        elif kind in ("header field", "zeroed sector"):
            offset = at + (
                self._chance.randrange(0, 152, 8)
                if kind == "header field"
                else 512 * self._chance.choice((0, 8, 9, 12))
            )
            length = 8 if kind == "header field" else 512
            before = os.pread(fd, length, offset)
            fresh = bytes(length) if kind == "zeroed sector" else self._chance.randbytes(length)
            if before == fresh or (offset - at) + length > BLOCK + NBYTES:
                return
            os.pwrite(fd, fresh, offset)
        elif kind.startswith("torn") and at in self._stale:
            step = 512 if "512" in kind else 4096
            cut = self._chance.randrange(1, SLOT // step) * step
            old = self._stale[at]
            if cut >= BLOCK + NBYTES:
                return
            os.pwrite(fd, old[cut:], at + cut)
        else:
            kind = "flipped bit"
            offset = at + self._chance.choice(
                (self._chance.randrange(152), self._chance.randrange(BLOCK + NBYTES))
            )
            os.pwrite(
                fd, bytes([os.pread(fd, 1, offset)[0] ^ 1 << self._chance.randrange(8)]), offset
            )
        bad[page] = kind

    def _truncate(self, fd: int, where: dict[int, int], bad: dict[int, str]) -> int:
        cut = self._chance.choice(sorted(where.values())) + self._chance.randrange(BLOCK + NBYTES)
        os.ftruncate(fd, cut)
        for page, at in where.items():
            if at + BLOCK + NBYTES > cut:
                bad[page] = "truncated"
        return cut

    def _judge(self, bad: dict[int, str]) -> None:
        for page, outcome in enumerate(self._read()):
            same = bytes(self._into(page)) == self._pages[page].tobytes()
            if page in bad:
                self.result.corruptions += 1
                self.result.by_kind[bad[page]] += 1
                self.result.undetected += outcome is ReadOutcome.OK
            else:
                self.result.clean_reads += 1
                self.result.false_alarms += outcome is not ReadOutcome.OK or not same

    def _slots(self, data: bytes) -> dict[int, int]:
        """Where each page lies now, from the headers alone; and keeps the slots' images for later
        staleness.
        """
        names: dict[bytes, int] = {page_key(i): i for i in range(PAGES)}
        best: dict[int, tuple[int, int]] = {}
        for at in range(BLOCK, len(data) - SLOT + 1, SLOT):
            head = SlotHead.unpack(data[at : at + BLOCK])
            if head and head.key in names:
                best[names[head.key]] = max(best.get(names[head.key], (0, 0)), (head.sequence, at))
        for _, at in best.values():
            image = data[at : at + SLOT]
            if self._older.get(at, image) != image:
                self._stale[at] = self._older[at]
            self._older[at] = image
        return {page: at for page, (_, at) in best.items()}

    def _into(self, page: int) -> memoryview:
        return self._memory[page * 2 * BLOCK : page * 2 * BLOCK + NBYTES]

    def _read(self) -> list[ReadOutcome | None]:
        job = self._store.read([PageRead(page_key(i), [self._into(i)]) for i in range(PAGES)])
        job.wait(120)
        return job.outcomes

    def _put(self, pages: object) -> None:
        names = list(pages)  # type: ignore[call-overload]
        self._store.delete([page_key(i) for i in names])
        self._round += 1
        fresh = quick_pages(len(names), NBYTES, self._round)
        for i, page in zip(names, fresh, strict=True):
            self._pages[i] = page
        outcomes = self._store.put(
            [PageWrite(page_key(i), [memoryview(self._pages[i].tobytes())]) for i in names]
        )
        assert set(outcomes) <= {PutOutcome.STORED}


def torture_bytes(
    root: str,
    seed: int,
    corruptions: int,
    clean_reads: int,
    step: Callable[[int], None] = lambda _: None,
) -> Damage:
    """Damages and reads until both counts are reached. `step` is called with the operations
    done.
    """
    bench = Bench(root, seed)
    try:
        while bench.result.corruptions < corruptions:
            before = bench.result.corruptions
            bench.damage_all()
            step(bench.result.corruptions - before)
        while bench.result.clean_reads < clean_reads:
            bench.read_clean()
            step(PAGES)
    finally:
        bench.close()
    return bench.result
