"""What an index and slot headers say is there: the last page of a slot, the newest one of a key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from store_pages import key

from sgl_kvtier.store.disk.format import DROP, PUT, RECORD, settled, slot_bytes
from sgl_kvtier.store.recovery import believable, latest
from sgl_kvtier.store.siblings.gone import Deletes, gone_records

NEWEST = 10**6


def records(*rows: tuple[int, int, int]) -> np.ndarray:
    """Records as (sequence, slot, kind) of one segment and key."""
    made = [(b"k", b"kv", sequence, 1, slot, 100, kind) for sequence, slot, kind in rows]
    return np.array(made, RECORD)


def believed(found: np.ndarray, written: np.ndarray) -> list[int]:
    return believable(found, written, NEWEST)["sequence"].tolist()


def test_the_page_that_the_index_names_last_is_believed_and_newer_ones_are() -> None:
    written = records((5, 0, PUT), (7, 1, PUT))
    assert believed(records((5, 0, PUT), (9, 1, PUT), (6, 2, PUT)), written) == [5, 9, 6]


def test_a_page_that_was_dropped_is_not_although_its_header_is_there() -> None:
    written = records((5, 0, PUT), (5, 0, DROP))
    assert believed(records((5, 0, PUT)), written) == []
    assert believed(records((6, 0, PUT)), written) == [6], "written over since"


def test_a_header_older_than_the_last_page_of_its_slot_is_not() -> None:
    assert believed(records((4, 0, PUT)), records((5, 0, PUT))) == []


def test_a_header_from_before_the_index_was_complete_is_not_unless_it_is_named() -> None:
    written = np.concatenate([records((5, 0, PUT)), settled(8)])
    assert believed(records((5, 0, PUT), (7, 1, PUT), (8, 2, PUT), (9, 3, PUT)), written) == [5, 9]


def put(
    key: bytes, pool: bytes, sequence: int, slot: int, kind: int = PUT, nbytes: int = 100
) -> Any:
    return key, pool, sequence, 1, slot, nbytes, kind


def there(*rows: Any, newest: int = NEWEST) -> list[tuple[bytes, bytes, int, int]]:
    """What `latest` finds in one segment of ten slots: key, pool, sequence and slot."""
    segment: Any = SimpleNamespace(number=1, slots=10, slot_bytes=slot_bytes(100))
    found = latest(np.array(list(rows), RECORD), [segment], newest)
    names = [(bytes(f["key"]).rstrip(b"\0"), bytes(f["pool"])) for f in found]
    places = [(int(f["sequence"]), int(f["slot"])) for f in found]
    return [(*name, *place) for name, place in zip(names, places, strict=True)]


def test_of_a_key_in_two_slots_the_newest_page_is_there_wherever_it_lies() -> None:
    for slots in ((2, 7), (7, 2)):
        rows = [put(b"k", b"kv", 5, slots[0]), put(b"k", b"kv", 6, slots[1])]
        for given in (rows, rows[::-1]):
            assert there(*given) == [(b"k", b"kv", 6, slots[1])]


def test_a_key_of_two_pools_is_two_pages() -> None:
    rows = put(b"k", b"kv", 5, 0), put(b"k", b"draft", 6, 1)
    assert there(*rows) == [(b"k", b"kv", 5, 0), (b"k", b"draft", 6, 1)]


def test_of_a_slot_the_last_record_counts() -> None:
    rows = put(b"a", b"kv", 5, 3), put(b"b", b"kv", 6, 3), put(b"c", b"kv", 7, 4)
    assert there(*rows, put(b"c", b"kv", 7, 4, DROP)) == [(b"b", b"kv", 6, 3)]


def test_records_that_cannot_be_true_are_passed_over() -> None:
    rows = put(b"a", b"kv", 5, 3), put(b"later", b"kv", 9, 4), put(b"beyond", b"kv", 5, 10)
    assert there(*rows, put(b"long", b"kv", 6, 5, nbytes=1 << 20), newest=8) == [
        (b"a", b"kv", 5, 3)
    ]


def test_a_delete_is_for_pages_of_its_key_and_pool_written_up_to_its_moment() -> None:
    deletes = Deletes(gone_records([key("a")], "kv", 5))
    pages = [(key("a"), 5), (key("a"), 6), (key("b"), 5)]
    records = [put(bytes(name), b"kv", sequence, 0) for name, sequence in pages]
    records.append(put(bytes(key("a")), b"draft", 5, 0))
    assert deletes.hit(np.array(records, RECORD)).tolist() == [True, False, False, False]
    everything = Deletes(gone_records([], "kv", 5))
    assert everything.hit(np.array(records, RECORD)).tolist() == [True, False, True, True]
