"""Plots as SVG text, and those of a comparison over time."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterable
from functools import cache
from xml.etree import ElementTree

import pytest

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.extras import how_to_install
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
from sgl_kvtier.lab.pages.figure import plots_available
from sgl_kvtier.lab.pages.plots import Bar, Series, cdf, lines, stacked_bars, timeline

pytest.importorskip("matplotlib", reason="the plots need the extra [bench]")

ARMS = ("recompute", "hicache", "hicache-file", "kvtier")


@cache
def drawn() -> dict[str, str]:
    """One plot of each kind, with a missing value in each: drawn once."""
    series = [
        Series(arm, [1, 2, 3], [10.0 * (i + 1), None, 30], [9, None, 20], [11, None, 40])
        for i, arm in enumerate(ARMS)
    ]
    return {
        "lines": lines(series, "Lines", "turn", "TTFT (ms)", whole_x=True),
        "cdf": cdf(
            {arm: [1.0, math.nan, None, 100.0 * (i + 1)] for i, arm in enumerate(ARMS)},
            "CDF",
            "TTFT (ms)",
        ),
        "stacked": stacked_bars(
            {arm: {"device": 50, "host": None, "computed": 150} for arm in ARMS}, "Bars", "tokens"
        ),
        "timeline": timeline(
            [Bar("GPU", 0, 2, "compute"), Bar("SSD", 0.5, 1, "read")],
            {"compute": "#123456", "read": "#654321"},
            "Timeline",
            "time (s)",
        ),
    }


def texts(svg: str) -> list[str]:
    return [
        "".join(node.itertext()).strip()
        for node in ElementTree.fromstring(svg).iter()
        if node.tag.endswith("}text")
    ]


@pytest.mark.parametrize("kind", ["lines", "cdf", "stacked", "timeline"])
def test_a_plot_is_one_svg_element_that_needs_nothing_from_outside(kind: str) -> None:
    svg = drawn()[kind]
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("aria-label")
    links = [
        value
        for node in root.iter()
        for name, value in node.attrib.items()
        if name.endswith("href")
    ]
    assert all(link.startswith("#") for link in links)
    assert set(re.findall(r"https?://[^\"' ]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(script|image|foreignObject|metadata)\b", svg)


def test_stacked_bars_carry_names_parts_and_shares() -> None:
    found = texts(drawn()["stacked"])
    assert set(ARMS) <= set(found)
    assert {"device", "host", "computed", "25 %", "75 %"} <= set(found)


def test_a_share_in_a_bar_is_never_rounded_up_to_all() -> None:
    assert "> 99 %" in texts(stacked_bars({"kvtier": {"device": 1, "storage": 999}}, "T", "x"))


def test_ids_of_two_plots_never_clash_and_every_reference_is_answered() -> None:
    plots = drawn().values()
    ids = [re.findall(r' id="([^"]+)"', svg) for svg in plots]
    every = [one for found in ids for one in found]
    assert len(every) == len(set(every))
    for svg, found in zip(plots, ids, strict=True):
        assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg)) == set(found)


def test_a_gap_is_a_gap_and_not_a_line_through_zero() -> None:
    whole = lines([Series("a", [1, 2, 3], [1, 2, 3])], "T", "x", "y")
    gap = lines([Series("a", [1, 2, 3], [1, None, 3])], "T", "x", "y")
    uses = [svg.count("<use") for svg in (whole, gap)]
    assert uses[0] - uses[1] == 1


@pytest.mark.parametrize("name", ["$x_1^2$", "_hidden", "<b>&\"'", "$", "ünï"])
def test_a_name_is_shown_as_it_is(name: str) -> None:
    for svg in (
        lines([Series(name, [1], [1])], name, "x", "y"),
        stacked_bars({name: {"device": 1}}, "T", "x"),
    ):
        assert name in [text.lstrip("\u200b") for text in texts(svg)]


def test_plots_of_nothing_are_empty_plots() -> None:
    for svg in (
        lines([], "T", "x", "y"),
        cdf({"a": [None]}, "T", "x"),
        stacked_bars({}, "T", "x"),
        stacked_bars({"a": {"device": 0}}, "T", "x"),
        timeline([], {}, "T", "x"),
    ):
        assert "T" in texts(svg)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not plots_available()
    with pytest.raises(KVTierError, match=re.escape(how_to_install("bench"))):
        lines([], "T", "x", "y")


# A comparison over time


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
