"""The format is what its document says: sizes, its example byte for byte, and nothing read
past its end.
"""

from __future__ import annotations

from pathlib import Path

import format_example as example
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.store.disk import format
from sgl_kvtier.store.disk.format import BLOCK, RECORD, SlotHead, unpack_log, unpack_segment_head

DOCUMENT = Path(__file__).parents[2] / "docs" / "design" / "store-format.txt"


def test_the_worked_example_in_the_document_is_what_the_code_writes() -> None:
    if not DOCUMENT.exists():
        pytest.skip("the documents are not installed with the package")
    assert example.example() in DOCUMENT.read_text()


def test_the_example_reads_back() -> None:
    segment = example.segment_bytes()
    head = unpack_segment_head(segment[:BLOCK], example.IDENTITY.fingerprint)
    assert head == (1, len(segment) - BLOCK, 1)
    assert SlotHead.unpack(segment[BLOCK:]) == example.HEAD
    records, whole = unpack_log(example.log_bytes(), example.IDENTITY.fingerprint)
    assert whole and len(records) == 1 and bytes(records["key"][0]) == example.KEY


def test_the_checksum_is_xxh3_of_the_header_with_zeros_in_its_place_and_the_payload() -> None:
    slot = example.segment_bytes()[BLOCK:]
    blank = slot[:136] + bytes(16) + slot[152:BLOCK]
    assert slot[136:152] == xxhash.xxh3_128(blank + example.PAYLOAD).digest()


@pytest.mark.parametrize("other", [b"\0" * 32, b"\xff" * 32])
def test_heads_of_another_identity_are_not_ours(other: bytes) -> None:
    assert unpack_segment_head(example.segment_bytes()[:BLOCK], other) is None
    assert len(unpack_log(example.log_bytes(), other)[0]) == 0


@given(st.binary(max_size=400))
def test_any_bytes_can_be_read_as_a_log_without_harm(data: bytes) -> None:
    records, whole = unpack_log(data, example.IDENTITY.fingerprint)
    assert len(records) == 0 and (not whole or data == b"")
    records, whole = unpack_log(example.log_bytes() + data, example.IDENTITY.fingerprint)
    assert len(records) >= 1 and (whole or data)


@given(st.binary(max_size=160), st.integers(0, 150))
def test_any_block_can_be_read_as_a_header_without_harm(noise: bytes, at: int) -> None:
    sound = example.HEAD.pack()
    block = sound[:at] + noise + sound[at + len(noise) :]
    assert len(block) == BLOCK
    SlotHead.unpack(block)
    assert unpack_segment_head(block, example.IDENTITY.fingerprint) is None


def test_a_log_cut_anywhere_keeps_the_frames_before_the_cut() -> None:
    identity = example.IDENTITY.fingerprint
    record = np.zeros(3, RECORD)
    record["sequence"] = [1, 2, 3]
    whole = format.pack_log_head(identity) + b"".join(
        format.pack_frame(record[i : i + 1]) for i in range(3)
    )
    frame = format.FRAME_HEAD_BYTES + RECORD.itemsize
    for cut in range(len(whole) + 1):
        records, complete = unpack_log(whole[:cut], identity)
        body = cut - format.LOG_HEAD_BYTES
        assert len(records) == max(0, body // frame)
        assert complete == (body >= 0 and body % frame == 0)
