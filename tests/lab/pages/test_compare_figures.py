"""The plots of a comparison over time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from sgl_kvtier.lab.pages.compare.figures import (
    COMPUTING,
    DECODING,
    FAILED,
    GAP,
    LOADING,
    QUEUED,
    WAITING,
    figures,
    session_bars,
)
from sgl_kvtier.lab.pages.plots import Bar

pytest.importorskip("matplotlib", reason="the plots need the extra [bench]")

LANES = {"a": "1", "b": "2"}


def request(session: str, begin: float, first: float | None, end: float, *spans: list) -> dict:
    return {
        "session": session,
        "turn": 1,
        "begin_s": begin,
        "first_s": first,
        "end_s": end,
        "computing_s": list(spans),
    }


def test_a_request_waits_where_its_prompt_is_not_computed_and_then_decodes() -> None:
    assert session_bars([request("a", 0, 4, 5, [1, 2], [3, 3.5])], LANES) == [
        Bar("1", 0, 1, WAITING),
        Bar("1", 1, 2, COMPUTING),
        Bar("1", 2, 3, WAITING),
        Bar("1", 3, 3.5, COMPUTING),
        Bar("1", 3.5, 4, WAITING),
        Bar("1", 4, 5, DECODING),
    ]


def test_what_a_request_waits_for_is_told_apart_where_its_loads_are_known() -> None:
    known = request("a", 0, 6, 7, [2, 3], [5, 6]) | {"loading_s": [[1, 2.5], [4, 9]]}
    assert session_bars([known], LANES) == [
        Bar("1", 0, 1, QUEUED),
        Bar("1", 1, 2, LOADING),
        Bar("1", 2, 3, COMPUTING),
        Bar("1", 3, 4, QUEUED),
        Bar("1", 4, 5, LOADING),
        Bar("1", 5, 6, COMPUTING),
        Bar("1", 6, 7, DECODING),
    ]
    nothing = request("a", 0, 2, 3, [1, 2]) | {"loading_s": []}
    assert session_bars([nothing], LANES)[0] == Bar("1", 0, 1, QUEUED)


def test_a_session_has_a_tool_gap_between_its_requests_and_a_row_of_its_own() -> None:
    made = [request("b", 0, 1, 2), request("a", 1, 2, 3), request("b", 5, 6, 7)]
    bars = session_bars(made, LANES)
    assert Bar("2", 2, 5, GAP) in bars
    assert [bar.lane for bar in bars] == ["1"] * 2 + ["2"] * 5


def test_spans_outside_of_a_request_are_cut_to_it_and_bars_never_overlap() -> None:
    bars = session_bars([request("a", 1, 3, 4, [0, 1.5], [1.2, 1.4], [2, 9])], LANES)
    assert all(one.stop <= two.start for one, two in itertools.pairwise(bars))
    assert (bars[0].start, bars[-1].stop) == (1, 4)
    assert sum(bar.stop - bar.start for bar in bars if bar.kind == COMPUTING) == 1.5


def test_a_request_without_a_token_failed() -> None:
    assert session_bars([request("a", 1, None, 4, [2, 3])], LANES) == [Bar("1", 1, 4, FAILED)]


def titles(drawn: Iterable[tuple[str, str]]) -> list[str]:
    return [svg.split('aria-label="')[1].split('"')[0] for svg, _ in drawn]


def test_what_a_result_does_not_have_is_not_drawn(
    compare_result: dict, compare_figures: list[tuple[str, str]]
) -> None:
    whole = titles(compare_figures)
    assert len(whole) == 7
    traffic = [svg for svg, _ in compare_figures if "Traffic of storage" in svg]
    assert all(f">{what}<" in traffic[0] for what in ("storage read", "host to device"))
    assert [title.split(":")[0] for title in whole[3:]] == [
        "Tokens in each tier",
        "Traffic of storage, and between host and device (MB/s)",
        "Sessions over time",
        "Sessions over time",
    ]
    del compare_result["timeline"]
    assert titles(figures(compare_result)) == whole[:3]


def test_storage_traffic_of_a_paced_device_is_that_of_the_model(compare_result: dict) -> None:
    paced = {"profile": "h100-llama8b", "bytes_scale": 512.0}
    scaled = {**compare_result, "device": {"paced": paced}}
    drawn = list(figures(scaled))
    assert any("between host and device (GB/s)" in svg for svg, _ in drawn)
    assert any("times 512" in caption and "device's clock" in caption for _, caption in drawn)


def test_a_gantt_says_whether_its_server_tells_loading_from_queueing(
    compare_figures: list[tuple[str, str]],
) -> None:
    stock, ours = [svg + caption for svg, caption in compare_figures][-2:]
    assert ">queued or loading<" in stock and "does not say when" in stock
    assert ">queued or loading<" not in ours and "does not say when" not in ours
    assert ">queued<" in ours and ">loading<" in ours
