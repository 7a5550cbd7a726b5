"""The two pointers of a restoration, read from a decision log."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.pages.figure import plots_available
from sgl_kvtier.lab.pages.timeline import MOST_LINE, log_lines, read_timelines, timeline_plot

HEAD = {"log": "kvtier.decisions", "version": 2, "config": {}, "engine": {"page_tokens": 16}}
RUN = [
    {
        "type": "RestoreOffered",
        "rid": "a",
        "now": 10.0,
        "prompt_tokens": 176,
        "resident": 1,
        "pages": 10,
        "sources": [],
    },
    {"type": "StepPlan", "starts": [{"rid": "a", "mode": "both", "reason": "split is faster"}]},
    {"type": "ChunkStarted", "rid": "a", "tokens": [16, 80], "now": 10.1},
    {
        "type": "TransferDone",
        "rid": "a",
        "span": [8, 10],
        "now": 10.2,
        "link": "x",
        "nbytes": 1,
        "seconds": 0.1,
    },
    {"type": "ChunkDone", "rid": "a", "tokens": [16, 80], "seconds": 0.2, "now": 10.3},
    {
        "type": "TransferDone",
        "rid": "a",
        "span": [5, 8],
        "now": 10.4,
        "link": "x",
        "nbytes": 1,
        "seconds": 0.1,
    },
    {"type": "PagesLost", "rid": "a", "span": [4, 5], "reason": "late", "now": 10.4},
    {"type": "ChunkStarted", "rid": "a", "tokens": [160, 176], "now": 10.5},
    {"type": "ChunkDone", "rid": "a", "tokens": [160, 176], "seconds": 0.1, "now": 10.6},
    {"type": "ChunkDone", "rid": "stranger", "tokens": [0, 16], "seconds": 0.1, "now": 10.7},
]


def log(*records: dict) -> list[str]:
    return [json.dumps(one) for one in (HEAD, *records)]


def test_the_front_rises_and_the_back_falls_until_the_front_steps_over_what_landed() -> None:
    (one,) = read_timelines(log(*RUN))
    assert (one.first, one.stop, one.mode, one.reason) == (16, 160, "both", "split is faster")
    assert [place for _, place in one.computed] == [16, 80, 160, 176]
    assert [place for _, place in one.loaded] == [160, 128, 80]
    assert (one.computed_tokens, one.loaded_tokens, one.lost_tokens) == (64, 80, 16)
    assert one.seconds == pytest.approx(0.6)


def test_a_request_that_is_offered_again_is_another_restoration() -> None:
    again = {**RUN[0], "now": 12.0, "resident": 5}
    assert [one.first for one in read_timelines(log(*RUN, again))] == [16, 80]


def test_something_else_than_a_log_is_refused() -> None:
    with pytest.raises(TraceError, match="first line"):
        read_timelines(["{}"])
    with pytest.raises(TraceError, match="line 2"):
        read_timelines([json.dumps(HEAD), "{"])


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -1, 10**400, "x", None, [], {}, True, [1], [float("inf"), 2]],
    ids=str,
)
@pytest.mark.parametrize(
    "field", ["now", "pages", "resident", "prompt_tokens", "tokens", "span", "rid"]
)
def test_a_hostile_value_is_damage_or_passed_over(field: str, value: object) -> None:
    for number in range(len(RUN)):
        if field in RUN[number]:
            records = [*RUN[:number], {**RUN[number], field: value}, *RUN[number + 1 :]]
            try:
                found = read_timelines(log(*records))
            except TraceError as error:
                assert f"line {number + 2} of the decision log is damaged" in str(error)
            else:
                assert all(math.isfinite(one.seconds) for one in found)


def test_a_line_nested_without_end_is_damage() -> None:
    with pytest.raises(TraceError, match="line 2 of the decision log is damaged"):
        read_timelines([json.dumps(HEAD), "[" * 200_000])


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
        list(log_lines(file))


@pytest.mark.skipif(not plots_available(), reason="needs matplotlib")
def test_it_is_drawn_with_both_pointers() -> None:
    svg = timeline_plot(read_timelines(log(*RUN))[0])
    assert "computed from the front" in svg
    assert "loaded from the back" in svg
