"""Pages kept in parts: whole to SGLang, and readable part by part."""

from __future__ import annotations

import pytest
from store_pages import aligned, content, key, put, read

from sgl_kvtier.lab.front.wrappers import LayerParts, cut, pool_of
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup

PARTS, NBYTES = 4, 8192
PAGES = {key(i): content(i, NBYTES) for i in range(5)}


@pytest.fixture
def parts(store: DiskStore) -> LayerParts:
    return LayerParts(store, PARTS)


def test_whole_pages_come_back_and_are_counted_as_pages(parts: LayerParts) -> None:
    assert set(put(parts, PAGES)) == {PutOutcome.STORED}
    assert set(put(parts, PAGES)) == {PutOutcome.KEPT}
    assert read(parts, dict.fromkeys(PAGES, NBYTES)) == [
        (ReadOutcome.OK, d) for d in PAGES.values()
    ]
    assert parts.lookup([*PAGES, key("none")]) == [Lookup.HIT] * len(PAGES) + [Lookup.MISS]
    found = parts.stats()
    assert (found.pages, found.pages_written, found.bytes_written) == (5, 5, 5 * NBYTES)
    assert parts.delete(list(PAGES)) == len(PAGES)
    assert parts.stats().pages == 0


def test_a_part_alone_is_these_layers_of_keys_and_of_values(parts: LayerParts) -> None:
    keys, values = (memoryview(content(name, NBYTES)) for name in "kv")
    parts.put([PageWrite(key("page"), [keys, values])])
    into = [aligned(NBYTES // PARTS), aligned(NBYTES // PARTS)]
    job = parts.read([PageRead(key("page"), into, pool_of(2))])
    assert job.wait(10)
    assert job.outcomes == [ReadOutcome.OK]
    assert [bytes(one) for one in into] == [
        bytes(one[NBYTES // 2 : NBYTES * 3 // 4]) for one in (keys, values)
    ]
    assert [len(one) for one in cut([keys, values], 2, PARTS)] == [NBYTES // PARTS] * 2


def test_a_page_with_a_damaged_part_is_corrupt_and_then_missing(
    store: DiskStore, parts: LayerParts
) -> None:
    put(parts, PAGES)
    one, other = list(PAGES)[:2]
    assert store.damage(one, pool_of(3), bit=77)
    ended: list[tuple[int, ReadOutcome]] = []
    job = parts.read(
        [PageRead(name, [aligned(NBYTES)]) for name in (one, other)],
        on_page=lambda index, outcome: ended.append((index, outcome)),
    )
    assert job.wait(10)
    assert job.outcomes == [ReadOutcome.CORRUPT, ReadOutcome.OK]
    assert sorted(ended) == sorted(job.drain()) == list(enumerate(job.outcomes))
    assert parts.lookup([one, other]) == [Lookup.MISS, Lookup.HIT]
    part = parts.read([PageRead(one, [aligned(NBYTES // PARTS)], pool_of(0))])
    assert part.wait(10)
    assert part.outcomes == [ReadOutcome.OK]
