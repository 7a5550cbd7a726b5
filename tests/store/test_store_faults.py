"""Every system call fails once, and from then on: no call raises, no page is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_pages import IDENTITY, aligned, content, key

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.errors import StoreError
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import open_store
from sgl_kvtier.store.failing_env import FAULT_KINDS, FailingEnv, Fault

SIZES = (3000, 20_000)


def work(root: Path, env: FailingEnv) -> dict[str, int]:
    """A store's whole life, twice, every read compared; returns what happened. Raises only if something is wrong."""
    seen = {"opened": 0, "stored": 0, "read": 0}
    config = StoreConfig(str(root), capacity_bytes=1 << 20, min_free_bytes=0, segment_bytes=128 << 10, io_threads=1, durable=True)
    for life in range(2):
        try:
            store = open_store(config, IDENTITY, "tp0", env=env)
        except StoreError:
            continue
        seen["opened"] += 1
        for batch in range(4):
            names = [(life, batch, i) for i in range(10)]
            pages = [PageWrite(key(n), [memoryview(content(n, SIZES[n[2] % 2]))]) for n in names]
            seen["stored"] += store.put(pages).count(PutOutcome.STORED)
            store.lookup([p.key for p in pages])
        asked = [(was, b, i) for was in range(life + 1) for b in range(4) for i in range(10)]
        buffers = [aligned(SIZES[n[2] % 2]) for n in asked]
        job = store.read([PageRead(key(n), [b]) for n, b in zip(asked, buffers, strict=True)])
        assert job.wait(60)
        for name, buffer, outcome in zip(asked, buffers, job.outcomes, strict=True):
            if outcome is ReadOutcome.OK:
                assert buffer == content(name, len(buffer))
                seen["read"] += 1
        store.delete([key((life, 0, i)) for i in range(5)])
        if life == 0:
            store.close()
        else:
            store.clear()
            store.close()
    return seen


def test_the_work_succeeds_when_nothing_fails(tmp_path: Path) -> None:
    seen = work(tmp_path, FailingEnv())
    assert seen["opened"] == 2
    assert seen["stored"] == 80
    assert seen["read"] > 60


@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize("kind", FAULT_KINDS, ids=str)
def test_no_failing_call_raises_or_spoils_a_page(tmp_path: Path, kind: int | str, forever: bool) -> None:
    # Every call in turn is the torture benchmark's work; here each run takes other ones, and all kinds of call are hit.
    number, stride = (FAULT_KINDS.index(kind), 31 if forever else 13)
    while True:
        env = FailingEnv(Fault(number, kind, forever))
        work(tmp_path / str(number), env)
        if env.failed == 0:
            break
        number += stride
    assert number > 100
