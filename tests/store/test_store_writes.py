"""A put that finds its page being written by another, or there already while room is made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from store_pages import content, key, put

from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.index.hashtable import EMPTY
from sgl_kvtier.types import Lookup

NBYTES = 30_000


@pytest.mark.parametrize(("written_over", "outcome"), [(False, "KEPT"), (True, "REFUSED")])
def test_a_page_that_another_was_writing_is_kept_only_if_it_is_what_its_slot_holds_now(
    opened: Callable[..., DiskStore], written_over: bool, outcome: str
) -> None:
    store = opened()
    put(store, {key("page"): content("page", NBYTES)})
    table = store._core.table
    with store._core.lock:
        (row,) = table.find([key("page")], "kv").tolist()
    assert row != EMPTY
    sequence = int(table.sequence[row]) - written_over
    outcomes = [PutOutcome.REFUSED]
    store._writer._await_others([(0, row, sequence)], outcomes)
    assert outcomes == [PutOutcome[outcome]]
    assert np.all(table.sequence[row] >= sequence)


def test_a_page_that_is_put_again_is_used_and_leaves_later_than_those_put_before_it(
    opened: Callable[..., DiskStore],
) -> None:
    store = opened(capacity_bytes=1 << 20)
    count = 0
    while store.stats().pages_evicted == 0:
        put(store, {key(count): content(count, NBYTES)})
        count += 1
    # Page 0 has left; page 1 is the next, if it is not used.
    assert put(store, {key(1): content(1, NBYTES)}) == [PutOutcome.KEPT]
    for name in ("new", "newer"):
        assert put(store, {key(name): content(name, NBYTES)}) == [PutOutcome.STORED]
    there = store.lookup([key(n) for n in range(4)])
    assert there == [Lookup.MISS, Lookup.HIT, Lookup.MISS, Lookup.MISS]
