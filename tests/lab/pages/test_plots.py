"""Plots as SVG text."""

from __future__ import annotations

import math
import re
import sys
from functools import cache
from xml.etree import ElementTree

import pytest

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.lab.pages.figure import colours, plots_available
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


@pytest.mark.parametrize("kind", ["lines", "cdf"])
def test_every_name_has_its_own_colour_and_stands_in_the_legend(kind: str) -> None:
    svg = drawn()[kind]
    for arm in ARMS:
        assert arm in texts(svg)
        assert colours(ARMS)[arm].lower() in svg.lower()


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
