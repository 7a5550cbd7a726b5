"""Offers that were left to the engine, and whether that was right in hindsight."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.sim.declined import Declined, Hindsight, by_reason
from sgl_kvtier.lab.sim.replay import MOST_LINE, whole_lines
from sgl_kvtier.policy.decision_log import (
    Header,
    LinesDropped,
    Query,
    Record,
    encode,
    encode_header,
)
from sgl_kvtier.policy.messages import ChunkDone, LeftToEngine, RestoreOffered, StepView
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Span, Tier

CONFIG = PolicyConfig()
ENGINE = EngineShape(page_tokens=16, page_bytes=4096, chunk_tokens=256)
PROFILE = {
    # 1 ms a token computed, and 1,000 pages a second over each link
    "prefill": {"fixed_s": 0.0, "per_token_s": 0.001, "per_token_position_s": 0.0},
    "links": {"storage-device": 4.096e6, "storage-host": 4.096e6, "host-device": 4.096e6},
}


def asked(rid: str, now: float, answer: str | None, pages: int = 60) -> Query:
    """An offer of a prompt that ends 24 tokens behind its stored pages."""
    sources = ((Span(0, pages), Tier.STORAGE),)
    offer = RestoreOffered(rid, 0.0, pages * 16 + 24, 0, pages, sources)
    view = StepView(now, (rid,), free_pages={Tier.DEVICE: 500, Tier.HOST: 500})
    return Query(LeftToEngine(offer, view), answer)


def computed(rid: str, stop: int, now: float) -> ChunkDone:
    return ChunkDone(rid, Span(stop - 24, stop), 0.024, now)


def declined(*records: Record) -> list[Declined]:
    """The offers that a log with these records left to the engine."""
    hindsight, planner = Hindsight(), make_planner(CONFIG, ENGINE, PROFILE)
    for record in records:
        hindsight.see(planner, record)
    return hindsight.found


def log_of(*records: Record) -> list[str]:
    return [encode_header(Header(CONFIG, ENGINE, PROFILE)), *map(encode, records)]


def test_an_offer_is_judged_by_when_its_prompt_was_computed() -> None:
    query = asked("a", 10.0, "no room")
    promised_s = make_planner(CONFIG, ENGINE, PROFILE).promised_s(query.question)  # type: ignore[arg-type]
    # 60 pages, of which almost all are loaded in the time that computing them takes 16 times over
    assert 0.024 < promised_s < 60 / 1000 + 0.024
    late, soon = (
        declined(query, computed("a", 984, 10.0 + took_s))[0]
        for took_s in (promised_s + 0.01, promised_s - 0.01)
    )
    assert late.promised_s == soon.promised_s == promised_s
    assert (late.right, soon.right) == (False, True)


def test_a_chunk_in_the_middle_of_a_prompt_is_not_its_end() -> None:
    chunks = computed("a", 256, 11.0), computed("a", 984, 13.0)
    assert declined(asked("a", 10.0, "no room"), *chunks)[0].took_s == 3.0


def test_what_was_offered_to_us_and_what_never_ended_is_not_judged() -> None:
    (found,) = declined(asked("a", 10.0, None), asked("b", 10.0, "loading is faster"))
    assert (found.rid, found.took_s, found.right) == ("b", None, None)


def test_an_offer_that_was_taken_later_is_not_judged() -> None:
    left, taken = asked("a", 10.0, "no room"), asked("a", 10.5, None)
    other = asked("b", 10.2, "no room")
    found = declined(left, other, taken, computed("a", 984, 11.0))
    assert [(one.rid, one.took_s) for one in found] == [("b", None)]


def test_behind_a_gap_nothing_is_judged() -> None:
    records = asked("a", 1.0, "no room"), LinesDropped(3), computed("a", 984, 2.0)
    assert declined(*records)[0].took_s is None


def test_reasons_are_counted_with_the_share_that_was_right() -> None:
    found = [
        Declined("a", "no room", 0.0, 100, promised_s=1.0, took_s=4.0),
        Declined("a", "no room", 1.0, 100, promised_s=3.0, took_s=2.0),
        Declined("b", "no room", 2.0, 100, promised_s=9.0),
        Declined("c", "loading is faster", 2.0, 100, promised_s=9.0),
    ]
    reasons = by_reason(found)
    assert list(reasons) == ["no room", "loading is faster"]
    assert reasons["no room"] == {
        "offers": 3,
        "requests": 2,
        "known": 2,
        "right_fraction": 0.5,
        "promised_ms": 2000.0,
        "took_ms": 3000.0,
    }
    assert reasons["loading is faster"]["right_fraction"] is None


def test_the_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planner, query = make_planner(CONFIG, ENGINE, PROFILE), asked("a", 10.0, None)
    answer = planner.query(query.question)
    log = tmp_path / "log"
    records = (Query(query.question, answer), computed("a", 984, 11.0))  # type: ignore[arg-type]
    log.write_text("\n".join(log_of(*records)) + "\n")
    assert main(["sim", "replay-log", str(log)]) == 0
    assert "Offers left to SGLang" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("x" * (MOST_LINE + 1), "line 1 .* longer than 64 MiB"),
        (b"a\n\xff\n", "line . .* not UTF-8"),
    ],
    ids=[0, 1],
)
def test_lines_that_cannot_be_read_are_named(
    tmp_path: Path, content: str | bytes, says: str
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with path.open(encoding="utf-8") as file, pytest.raises(TraceError, match=says):
        list(whole_lines(file))
