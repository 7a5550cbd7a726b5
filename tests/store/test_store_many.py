"""Many pages: what grows with their number stays in proportion, and all of them are found again
with the index log and without.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from store_pages import aligned, io_settings, key, open_at

from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup

PAGES = 20_000
BATCH = 500
NBYTES = 512
KEYS = [key(i) for i in range(PAGES)]


def contents(first: int) -> np.ndarray:
    """A row per page, none like another."""
    numbers = np.arange(first, first + BATCH, dtype=np.uint64)[:, None]
    return numbers * np.uint64(0x9E3779B97F4A7C15) + np.arange(NBYTES // 8, dtype=np.uint64)


def found(store: DiskStore) -> set[int]:
    """The pages that are there. Fails when one is not as it was put."""
    whole: set[int] = set()
    memory = aligned(BATCH * NBYTES)
    rows = np.frombuffer(memory, np.uint64).reshape(BATCH, -1)
    for first in range(0, PAGES, BATCH):
        job = store.read(
            [
                PageRead(KEYS[first + i], [memory[i * NBYTES : (i + 1) * NBYTES]])
                for i in range(BATCH)
            ]
        )
        assert job.wait(60)
        here = [i for i, outcome in enumerate(job.outcomes) if outcome is ReadOutcome.OK]
        assert (rows[here] == contents(first)[here]).all()
        whole.update(first + i for i in here)
    return whole


def test_many_pages_are_found_again_with_the_log_and_without(tmp_path: Path) -> None:
    settings = {
        "capacity_bytes": 256 << 20,
        "segment_bytes": 32 << 20,
        "io_threads": 4,
        "direct_io": "off",
    } | io_settings("threads")
    store = open_at(tmp_path, **settings)
    for first in range(0, PAGES, BATCH):
        rows = contents(first)
        pages = [PageWrite(KEYS[first + i], [memoryview(rows[i]).cast("B")]) for i in range(BATCH)]
        assert store.put(pages) == [PutOutcome.STORED] * BATCH
    assert store.stats().pages == PAGES and store.index_bytes < 200 * PAGES
    gone = set(range(0, PAGES, 100))
    assert store.delete([KEYS[i] for i in sorted(gone)]) == len(gone)
    folder = store.folder
    left = set(range(PAGES)) - gone
    store.close()

    store = open_at(tmp_path, **settings)
    assert store.lookup(KEYS).count(Lookup.HIT) == len(left) and found(store) == left
    store.close()

    os.unlink(os.path.join(folder, "index.log"))
    store = open_at(tmp_path, **settings)
    assert store.stats().pages == len(left) and found(store) == left
    assert store.clear() == len(left)
    store.close()
    store = open_at(tmp_path, **settings)
    assert store.stats().pages == 0
    store.close()
