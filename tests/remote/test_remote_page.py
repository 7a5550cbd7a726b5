"""What a page says of itself, and that nothing else passes for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from remote_pages import NAMESPACE
from store_pages import key

from sgl_kvtier.errors import StoreError
from sgl_kvtier.remote.page import (
    HEAD_BYTES,
    SUM_AT,
    Namespace,
    checksum,
    is_this_page,
    object_names,
)
from sgl_kvtier.remote.ring import Ring

FINGERPRINT = bytes(range(32))


def sealed(head: bytes, data: bytes) -> bytes:
    return head[:SUM_AT] + checksum(head, [memoryview(data)])


def test_an_objects_name_says_whose_page_it_is() -> None:
    prefix = Namespace(FINGERPRINT, "tp0-pp1").prefix
    assert prefix == f"kvt1/{FINGERPRINT.hex()[:32]}/tp0-pp1/"
    assert object_names(prefix, "kv", [key(1)]) == [f"{prefix}kv/{key(1).hex()}"]


def test_a_pool_with_a_slash_stays_one_part_of_the_name() -> None:
    (name,) = object_names(NAMESPACE.prefix, "a/b", [key(1)])
    assert name.count("/") == 4


@given(st.binary(max_size=600))
def test_a_page_is_itself(data: bytes) -> None:
    head = NAMESPACE.head(key(1), "kv", len(data))
    assert len(head) == HEAD_BYTES
    assert is_this_page(head, sealed(head, data), [memoryview(data)])


@given(st.binary(min_size=1, max_size=600), st.data())
def test_a_flipped_bit_anywhere_is_noticed(data: bytes, draw: st.DataObject) -> None:
    head = NAMESPACE.head(key(1), "kv", len(data))
    value = bytearray(sealed(head, data) + data)
    bit = draw.draw(st.integers(0, 8 * len(value) - 1))
    value[bit // 8] ^= 1 << bit % 8
    found, landed = bytes(value[:HEAD_BYTES]), memoryview(value)[HEAD_BYTES:]
    assert not is_this_page(head, found, [landed])


@pytest.mark.parametrize(
    "other",
    [
        Namespace(b"\0" * 32, "tp0").head(key(1), "kv", 9),
        Namespace(FINGERPRINT, "tp1").head(key(1), "kv", 9),
        Namespace(FINGERPRINT, "tp0").head(key(2), "kv", 9),
        Namespace(FINGERPRINT, "tp0").head(key(1), "swa", 9),
        Namespace(FINGERPRINT, "tp0").head(key(1), "kv", 8),
    ],
    ids=["identity", "rank", "key", "pool", "length"],
)
def test_a_whole_page_of_another_is_not_this_one(other: bytes) -> None:
    expected = Namespace(FINGERPRINT, "tp0").head(key(1), "kv", 9)
    data = b"123456789"
    assert not is_this_page(expected, sealed(other, data), [memoryview(data)])


@pytest.mark.parametrize("rank", ["", "a/b", "tp 0", "x" * 33, "tp0\n"])
def test_a_rank_that_no_name_can_hold_is_refused(rank: str) -> None:
    with pytest.raises(StoreError, match="not a rank's name"):
        Namespace(FINGERPRINT, rank)


# Extents of the ring never overlap, and all of it can be taken again.


BYTES = 1 << 14


class Extents(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(BYTES)
        self.taken: dict[int, int] = {}

    def teardown(self) -> None:
        self.ring.close()

    @rule(nbytes=st.integers(0, BYTES + 1))
    def take(self, nbytes: int) -> None:
        offset = self.ring.take(nbytes)
        if offset is not None:
            assert offset % 64 == 0
            assert offset + nbytes <= BYTES
            assert all(offset + nbytes <= o or o + n <= offset for o, n in self.taken.items())
            self.taken[offset] = nbytes

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.ring.give(offset)
        del self.taken[offset]

    @precondition(lambda self: not self.taken)
    @rule()
    def take_all(self) -> None:
        assert self.ring.take(BYTES) == 0
        assert self.ring.take(1) is None
        self.ring.give(0)

    @invariant()
    def counts_what_is_taken(self) -> None:
        assert self.ring.taken_bytes >= sum(self.taken.values())
        assert bool(self.ring.taken_bytes) == bool(self.taken)


Extents.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
test_extents_are_apart_and_come_back = Extents.TestCase
