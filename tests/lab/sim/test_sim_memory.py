"""What a tier holds and gives up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import keys

from sgl_kvtier.lab.sim.memory import Caches, TierMemory
from sgl_kvtier.policy.messages import Fact, Move, PagesPlaced, TransferDone
from sgl_kvtier.types import Link, PageKey, Span, Tier


def _with(memory: TierMemory, names: tuple[PageKey, ...]) -> None:
    memory.claim(len(names))
    for name in names:
        memory.name_private(name)
    memory.unpin(names)


@pytest.mark.parametrize(
    ("asked_for", "named", "left"),
    [
        ((), (), ["b1", "b0"]),  # the end of a chain before its beginning
        (("b0", "b1"), (), ["a1", "a0"]),  # what was asked for last is the last to leave
        ((), ("a0", "b0"), ["a0", "b0"]),  # those named by an eviction order are the first
    ],
)
def test_pages_leave_in_the_order_that_serves_prefixes(
    asked_for: tuple[str, ...], named: tuple[str, ...], left: list[str]
) -> None:
    memory = TierMemory(Tier.DEVICE, 4)
    by_name = dict(zip(("a0", "a1", "b0", "b1"), keys("a", 2) + keys("b", 2), strict=True))
    _with(memory, keys("b", 2))
    _with(memory, keys("a", 2))
    memory.touch([by_name[name] for name in asked_for])
    memory.evict_first([by_name[name] for name in named])
    memory.claim(2)
    assert memory.dropped == [by_name[name] for name in left]


def test_room_is_made_in_the_planners_order_and_no_page_leaves_before_one_behind_it() -> None:
    memory = TierMemory(Tier.DEVICE, 6)
    fronts, prefetched, pinned = keys("a", 2), keys("b", 2), keys("c", 2)
    for chain in (fronts, prefetched, pinned):
        memory.chain(chain)
        _with(memory, chain)
    memory.pin(pinned[1:])
    asked: list[int] = []

    def victims(count: int) -> tuple[PageKey, ...]:
        asked.append(count)
        return (*pinned, *prefetched, *fronts)

    memory.victims = victims
    memory.claim(1)
    assert asked[0] >= 1
    assert memory.dropped == [prefetched[1]], "the page before a pinned one stays"
    memory.claim(2)
    assert memory.dropped == [prefetched[1], prefetched[0], fronts[1]]


def test_a_pinned_page_stays_and_is_not_counted_available() -> None:
    memory = TierMemory(Tier.DEVICE, 3)
    chain = keys("a", 3)
    _with(memory, chain)
    memory.pin(chain[:2])
    assert memory.available == 1
    with pytest.raises(AssertionError, match="2 pages of device claimed, 1 available"):
        memory.claim(2)


def test_a_prefetched_page_dropped_without_a_hit_counts_as_unused_and_a_used_one_does_not() -> None:
    memory = TierMemory(Tier.HOST, 4)
    used, unused = keys("u", 2), keys("n", 2)
    _with(memory, used)
    _with(memory, unused)
    memory.mark_prefetched((*used, *unused), Link.STORAGE_TO_HOST)
    memory.touch(used)
    memory.claim(4)
    memory.finish()
    assert memory.unused_prefetches == {Link.STORAGE_TO_HOST: 2}


@given(st.lists(st.tuples(st.sampled_from("cnrpu"), st.integers(0, 7)), max_size=60))
def test_a_tier_never_holds_more_than_fits(operations: list[tuple[str, int]]) -> None:
    memory = TierMemory(Tier.DEVICE, 5)
    names = keys("k", 8)
    private, pinned = 0, []
    for kind, number in operations:
        if kind == "c" and memory.available >= 1:
            memory.claim(1)
            private += 1
        elif kind == "n" and private:
            private -= 1
            memory.name_private(names[number])
            pinned.append(names[number])
        elif kind == "r" and private:
            private -= 1
            memory.release(1)
        elif kind == "p" and names[number] in memory:
            memory.pin((names[number],))
            pinned.append(names[number])
        elif kind == "u" and pinned:
            memory.unpin((pinned.pop(0),))
        assert 0 <= memory.used <= 5
        assert memory.available == 5 - private - len(set(pinned))
        assert all(name in memory for name in pinned)


class _Transfers:
    """Every transfer ends at once."""

    def submit(self, transfer: Any) -> None:
        assert transfer.begin(transfer)
        transfer.done(transfer, 0.5)


def test_a_moves_end_is_not_taken_for_that_of_a_load_of_the_same_request() -> None:
    told: list[Fact] = []
    caches = Caches(
        {Tier.DEVICE: 8, Tier.HOST: 8, Tier.STORAGE: None},
        _Transfers(),
        100,
        told.append,
        lambda: 1.0,
    )  # type: ignore[arg-type]
    chain = keys("a", 3)
    _with(caches.storage, chain)
    caches.carry_out(Move(chain, Tier.STORAGE, Tier.HOST, "r"))
    assert told == [
        TransferDone("", Link.STORAGE_TO_HOST, Span(0, 0), 300, 0.5, 1.0),
        PagesPlaced(chain, Tier.HOST, 1.0),
    ]
