"""Recorded decision logs decided again: the same plan and answer in every step, and every line
written as it was. `tests/golden/record.py` says what they are.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sgl_kvtier.lab.sim.replay import replay
from sgl_kvtier.policy.decision_log import NUMBERED, Reader, Writer, decode_header, encode_header

LOGS = sorted(Path(__file__).parents[1].glob("golden/decisions/*.jsonl.gz"))


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name.removesuffix(".jsonl.gz"))
def test_a_recorded_run_is_decided_and_written_as_it_was(log: Path) -> None:
    lines = gzip.decompress(log.read_bytes()).decode().splitlines()
    replayed = replay(lines)
    assert replayed.difference is None
    assert replayed.steps > 100
    reader, writer = Reader(), Writer()
    assert encode_header(decode_header(lines[0]), NUMBERED) == lines[0]
    assert [writer.encode(reader.decode(line)) for line in lines[1:]] == lines[1:]


def test_there_are_logs() -> None:
    assert len(LOGS) > 15
