"""What an index says is there. That deleted and dropped pages are not is in test_store_erasing.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from sgl_kvtier.store.disk.format import PUT, RECORD, slot_bytes
from sgl_kvtier.store.recovery import latest

NEWEST = 10**6


def put(key: bytes, pool: bytes, sequence: int, slot: int, nbytes: int = 100) -> Any:
    return key, pool, sequence, 1, slot, nbytes, PUT


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


def test_records_that_cannot_be_true_are_passed_over() -> None:
    rows = put(b"a", b"kv", 5, 3), put(b"later", b"kv", 9, 4), put(b"beyond", b"kv", 5, 10)
    assert there(*rows, put(b"long", b"kv", 6, 5, nbytes=1 << 20), newest=8) == [
        (b"a", b"kv", 5, 3)
    ]
