"""The decision log's file: complete or honest about holes, never in the scheduler's way."""

from __future__ import annotations

import stat
import threading
from typing import Any

import pytest

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import ConfigError, TraceError
from sgl_kvtier.lab.sim.replay import replay
from sgl_kvtier.policy.decision_log import (
    Header,
    LinesDropped,
    Query,
    Reader,
    Writer,
    decode_header,
    encode,
    encode_header,
)
from sgl_kvtier.policy.messages import (
    Evict,
    PagesPlaced,
    Queued,
    ReadsDue,
    RestoreOffered,
    StepPlan,
    StepView,
)
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.runtime.records.decision_file import DecisionFile, Recorded
from sgl_kvtier.types import PageKey, Span, Tier

CONFIG = PolicyConfig(restore="both")
ENGINE = EngineShape(page_tokens=16, page_bytes=4096, chunk_tokens=256)
HEADER = Header(CONFIG, ENGINE)


def play(planner: Any, steps: int) -> None:
    """Offers to a planner, one per step."""
    for number in range(steps):
        now = 1.0 + number
        planner.observe(
            RestoreOffered(f"r{number}", now, 1024, 0, 60, ((Span(0, 60), Tier.STORAGE),))
        )
        planner.step(
            StepView(now, (f"r{number}",), free_pages={Tier.DEVICE: 5000, Tier.HOST: 5000})
        )


def test_what_was_recorded_is_decided_again(tmp_path):
    log = DecisionFile(tmp_path / "log", HEADER)
    play(Recorded(make_planner(CONFIG, ENGINE), log.write), 20)
    log.close()
    replayed = replay((tmp_path / "log").read_text().splitlines())
    assert (replayed.difference, replayed.facts, replayed.steps) == (None, 20, 20)
    assert log.dropped == 0


def test_the_same_pages_in_step_after_step_take_little_room(tmp_path):
    keys = tuple(PageKey(bytes([k]) * 32) for k in range(200))
    records = [PagesPlaced(keys, Tier.HOST, 0.0)]
    records += [StepPlan(evictions=(Evict(keys[:k], Tier.HOST),)) for k in range(200)]
    log = DecisionFile(tmp_path / "log", HEADER)
    for record in records:
        log.write(record)
    log.close()
    header, *lines = (tmp_path / "log").read_text().splitlines()
    assert decode_header(header) == HEADER
    assert [*map(Reader().decode, lines)] == records
    assert sum(map(len, lines)) < sum(len(encode(record)) for record in records) / 30


def test_an_earlier_log_is_kept_once_and_files_are_private(tmp_path):
    for _ in range(3):
        DecisionFile(tmp_path / "deep" / "log", HEADER).close()
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["log", "log.old"]
    assert stat.S_IMODE((tmp_path / "deep" / "log").stat().st_mode) == 0o600


def test_a_path_that_cannot_be_written_stops_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"policy\.decision_log = .* cannot be written"):
        DecisionFile(tmp_path / "file" / "log", HEADER)


def test_a_full_queue_drops_lines_counts_them_and_the_file_says_where(tmp_path, monkeypatch):
    held = threading.Event()
    real = Writer.encode

    def slow(writer, record):
        held.wait(30)
        return real(writer, record)

    monkeypatch.setattr(Writer, "encode", slow)
    log = DecisionFile(tmp_path / "log", HEADER, most_queued=10)
    play(Recorded(make_planner(CONFIG, ENGINE), log.write), 40)
    held.set()
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()[1:]
    holes = [
        record.count for record in map(Reader().decode, lines) if isinstance(record, LinesDropped)
    ]
    assert log.dropped > 0
    assert sum(holes) == log.dropped
    assert len(lines) - len(holes) + log.dropped == 120
    with pytest.raises(TraceError, match="lines were dropped here"):
        replay((tmp_path / "log").read_text().splitlines())


def test_a_question_is_written_with_its_answer():
    written: list[Any] = []
    asked = ReadsDue(tuple(Queued(f"r{number}", 10, True) for number in range(9)), 35)
    assert Recorded(make_planner(CONFIG, ENGINE), written.append).query(asked) == ("r0", "r1", "r2")
    assert written == [Query(asked, ("r0", "r1", "r2"))]
    assert replay([encode_header(HEADER), encode(written[0])]).difference is None


def test_a_disk_that_fails_ends_the_log_and_not_the_server(tmp_path):
    log = DecisionFile(tmp_path / "log", HEADER)

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def flush(self):
            pass

    log._file = Full()
    play(Recorded(make_planner(CONFIG, ENGINE), log.write), 5)
    log.close()
    assert log.dropped == 15
