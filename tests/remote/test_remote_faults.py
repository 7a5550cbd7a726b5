"""Reads with a fault each, and as many without, by the memory engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from remote_pages import STARTED_S, stored

from sgl_kvtier.remote.child.memory import set_faults
from sgl_kvtier.remote.store import RemoteStore
from sgl_kvtier.store.base import PageRead, ReadOutcome
from sgl_kvtier.types import PageKey

Opened = Callable[..., RemoteStore]
OK, MISS, CORRUPT = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.CORRUPT
FAULTS = {
    "late": 0.02,
    "fail": 0.02,
    "flip": 0.16,
    "flip_head": 0.16,
    "swap": 0.16,
    "other_identity": 0.16,
    "torn": 0.16,
    "truncate": 1.0,
}
"""Shares of pages with a fault. Every page has one: what is left of 1 is the last one's. `late` says
that the transfer failed, and writes 7s to its memory after that has been given to other pages.
"""
IN_A_READ, LENGTH = 64, 2048
MARK = b"\x55" * LENGTH


def unknowing(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows nothing, so that every read goes to the engine."""
    for name in ("found", "stored", "distrust"):
        monkeypatch.setattr(store._presence, name, lambda *_: None)


def read_many(store: RemoteStore, data: dict[PageKey, bytes], reads: int) -> Counter[object]:
    """Outcomes of so many reads that went to the engine, pages that were "wrong", and bytes that
    came late, into memory that was read into before, "foreign".
    """
    chance = Random(1)
    sets = [[bytearray(MARK) for _ in range(IN_A_READ)] for _ in range(2)]
    found: Counter[object] = Counter()
    while sum(found.values()) - found[MISS] < reads:
        assert store.wait_usable(STARTED_S), store.condition().trouble
        asked = chance.sample(list(data), IN_A_READ)
        into, watched = sets
        job = store.read([PageRead(k, [memoryview(m)]) for k, m in zip(asked, into, strict=True)])
        assert job.wait(60)
        for key, memory, outcome in zip(asked, into, job.outcomes, strict=True):
            found[outcome] += 1
            found["wrong"] += outcome is OK and memory != data[key]
            memory[:] = MARK
        for memory in watched:
            found["foreign"] += sum(a != b for a, b in zip(memory, MARK, strict=True))
            memory[:] = MARK
        sets.reverse()
    return found


@pytest.mark.parametrize("faulty", [True, False], ids=["faults", "none"])
def test_every_fault_is_noticed_and_no_page_is_wrong(
    opened: Opened, folder: Path, monkeypatch: pytest.MonkeyPatch, faulty: bool
) -> None:
    wait_s = 1.0 if faulty else 30.0
    store = opened(deadline_s=wait_s, hang_s=wait_s)
    unknowing(store, monkeypatch)
    faults: dict[str, Any] = {"get": FAULTS, "late_s": 1.2} if faulty else {}
    pages = stored(store, range(512), LENGTH)
    set_faults(folder, {"ignore": ["remove"], **faults})
    found = read_many(store, pages, 2000)
    assert found["wrong"] == found["foreign"] == 0
    if faulty:
        assert found[OK] == 0 and found[CORRUPT] > 1500
    else:
        assert found[OK] >= 2000 and found[CORRUPT] == 0
