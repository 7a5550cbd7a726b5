"""Whatever is done to the bytes on disk, a page is the one that was put or it is not there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from store_pages import Open, content, found, key, named, put, read, segments

from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.format import BLOCK, SlotHead
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.recovery import scan
from sgl_kvtier.types import PageKey

NBYTES = 6000
SLOT = BLOCK + 2 * BLOCK
PAGES = named(range(12), NBYTES)


@pytest.fixture
def filled(opened: Open) -> DiskStore:
    store = opened()
    put(store, PAGES)
    return store


def outcomes(store: DiskStore) -> list[ReadOutcome]:
    found = read(store, dict.fromkeys(PAGES, NBYTES))
    for (outcome, data), page in zip(found, PAGES.values(), strict=True):
        assert outcome is not ReadOutcome.OK or data == page
    return [outcome for outcome, _ in found]


def slot(number: int) -> slice:
    return slice(BLOCK + number * SLOT, BLOCK + (number + 1) * SLOT)


def place(store: DiskStore, wanted: PageKey) -> slice:
    """The slot that holds the newest page of a key."""
    (path,) = segments(store)
    data = path.read_bytes()
    heads = [(SlotHead.unpack(data[slot(i)]), slot(i)) for i in range((len(data) - BLOCK) // SLOT)]
    return max(
        (head.sequence, where.start, where) for head, where in heads if head and head.key == wanted
    )[2]


def edit(store: DiskStore, change: Callable[[bytearray], None]) -> None:
    (path,) = segments(store)
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def swap(data: bytearray) -> None:
    data[slot(1)], data[slot(2)] = data[slot(2)], data[slot(1)]


def test_every_flipped_bit_of_a_header_or_payload_is_found(filled: DiskStore) -> None:
    chance = random.Random(7)
    (path,) = segments(filled)
    whole = path.read_bytes()
    for _ in range(50):
        at = place(filled, key(3)).start + chance.choice(
            [chance.randrange(176), chance.randrange(BLOCK + NBYTES)]
        )
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        assert read(filled, {key(3): NBYTES})[0][0] is ReadOutcome.CORRUPT
        path.write_bytes(whole)
        assert put(filled, named([3], NBYTES)) == [PutOutcome.STORED]
        whole = path.read_bytes()
    assert filled.stats().pages_corrupt == 50


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "headers alone"])
def test_swapped_slots_are_found(opened: Open, verify: bool) -> None:
    store = opened(verify_reads=verify)
    put(store, PAGES)
    edit(store, swap)
    found = outcomes(store)
    assert found[1] is found[2] is ReadOutcome.CORRUPT
    assert found.count(ReadOutcome.OK) == 10


def test_an_older_page_of_the_same_key_in_the_right_slot_is_found(filled: DiskStore) -> None:
    (path,) = segments(filled)
    older = path.read_bytes()[place(filled, key(0))]
    filled.delete([key(0)])
    assert put(filled, {key(0): content("newer", NBYTES)}) == [PutOutcome.STORED]
    edit(filled, lambda data: data.__setitem__(place(filled, key(0)), older))
    ((outcome, _),) = read(filled, {key(0): NBYTES})
    assert outcome is ReadOutcome.CORRUPT


def test_a_torn_slot_is_found_wherever_it_is_torn(filled: DiskStore) -> None:
    for cut in range(512, BLOCK + NBYTES, 512):
        put(filled, named([cut], NBYTES))
        where = place(filled, key(cut))

        def tear(data: bytearray, start: int = where.start + cut, stop: int = where.stop) -> None:
            data[start:stop] = bytes(stop - start)

        edit(filled, tear)
        ((outcome, _),) = read(filled, {key(cut): NBYTES})
        assert outcome is ReadOutcome.CORRUPT


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "headers alone"])
def test_a_segment_that_ends_early_loses_its_tail_and_nothing_else(
    opened: Open, verify: bool
) -> None:
    store = opened(verify_reads=verify)
    put(store, PAGES)
    edit(store, lambda data: data.__delitem__(slice(slot(7).start + BLOCK + 1000, None)))
    assert outcomes(store) == [ReadOutcome.OK] * 7 + [ReadOutcome.CORRUPT] * 5


def test_a_damaged_page_is_also_found_by_a_store_opened_later(
    filled: DiskStore, opened: Open
) -> None:
    filled.damage(key(5), bit=1)
    filled.close()
    again = opened()
    assert outcomes(again) == [ReadOutcome.OK] * 5 + [ReadOutcome.CORRUPT] + [ReadOutcome.OK] * 6


def test_deleted_pages_do_not_come_back_with_a_rebuilt_index(
    filled: DiskStore, opened: Open
) -> None:
    filled.delete([key(0), key(1)])
    filled.close()
    (Path(filled.folder) / "index.log").unlink()
    again = opened()
    assert again.stats().pages == 10
    assert outcomes(again)[:2] == [ReadOutcome.MISS] * 2


def test_an_index_that_lies_costs_pages_but_never_correctness(
    filled: DiskStore, opened: Open
) -> None:
    filled.close()
    order = list(range(12))
    random.Random(3).shuffle(order)

    def shuffle(data: bytearray) -> None:
        whole = bytes(data)
        for to, come_from in enumerate(order):
            data[slot(to)] = whole[slot(come_from)]

    edit(filled, shuffle)
    right = [outcome is ReadOutcome.OK for outcome in outcomes(opened())]
    assert right == [place == page for place, page in enumerate(order)]


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        bytes(BLOCK),
        b"kvtsegm\x01" + bytes(BLOCK),
        bytes(BLOCK) + b"kvtslot\x01" + bytes(BLOCK),
    ],
    ids=["never finished", "without slots", "given up", "given up by an earlier version"],
)
def test_a_segment_that_holds_no_page_of_ours_is_put_away(
    filled: DiskStore, opened: Open, beginning: bytes
) -> None:
    filled.close()
    left = Path(filled.folder) / "seg-0000002a"
    left.write_bytes(beginning)
    again = opened()
    assert not left.exists()
    assert outcomes(again) == [ReadOutcome.OK] * 12


@pytest.mark.parametrize(
    "content_", [b"not a segment" * 1000, b"x", bytes(BLOCK) + b"an image of a disk" * 500]
)
def test_a_strangers_file_with_a_segments_name_is_left_alone(
    filled: DiskStore, opened: Open, content_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    filled.close()
    strange = Path(filled.folder) / "seg-00000002"
    strange.write_bytes(content_)
    again = opened()
    assert outcomes(again) == [ReadOutcome.OK] * 12
    # The next segment goes by another name.
    assert set(put(again, named((("more", i) for i in range(200)), NBYTES))) == {PutOutcome.STORED}
    again.close()
    assert strange.read_bytes() == content_
    (line,) = [r.getMessage() for r in caplog.records if "seg-00000002" in r.getMessage()]
    assert "move it away" in line


def test_a_segment_whose_head_is_damaged_is_still_known_by_its_pages(
    filled: DiskStore, opened: Open
) -> None:
    filled.close()
    edit(filled, lambda data: data.__setitem__(slice(0, BLOCK), b"\xff" * BLOCK))
    assert outcomes(opened()) == [ReadOutcome.MISS] * 12
    assert not segments(filled)


def test_a_damaged_page_is_the_one_reported_whichever_way_the_file_is_read(
    filled: DiskStore,
) -> None:
    for wanted in (list(PAGES), list(reversed(PAGES))):
        assert filled.damage(wanted[2], bit=99)
        found = [outcome for outcome, _ in read(filled, dict.fromkeys(wanted, NBYTES))]
        assert [i for i, o in enumerate(found) if o is not ReadOutcome.OK] == [2]
        assert put(filled, {wanted[2]: PAGES[wanted[2]]}) == [PutOutcome.STORED]


def test_a_header_in_a_slot_that_it_does_not_name_is_none(filled: DiskStore) -> None:
    edit(filled, lambda data: data.__setitem__(slot(5), data[slot(1)]))
    core, (segment,) = filled._core, filled._room.segments.values()
    there = scan(core.env, segment, core.identity)["slot"].tolist()
    assert there == [number for number in range(12) if number != 5]


def test_what_lies_behind_a_page_that_is_read_does_not_get_behind_one_that_is_written(
    opened: Open,
) -> None:
    store = opened(io_threads=1)
    put(store, named(["old"], NBYTES))
    behind = slice(slot(0).start + BLOCK + NBYTES, slot(0).stop)
    assert len(range(*behind.indices(1 << 20))) == 2 * BLOCK - NBYTES
    edit(store, lambda data: data.__setitem__(behind, b"x" * (2 * BLOCK - NBYTES)))
    assert found(store, named(["old"], NBYTES)) == 1
    put(store, named(["new"], NBYTES))
    (path,) = segments(store)
    where = place(store, key("new"))
    assert path.read_bytes()[where.start + BLOCK + NBYTES : where.stop] == bytes(2 * BLOCK - NBYTES)
