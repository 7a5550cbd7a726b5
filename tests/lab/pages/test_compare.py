"""The tables and the page of a comparison."""

from __future__ import annotations

import copy
import re
import sys
from html.parser import HTMLParser

import pytest

from sgl_kvtier.console import MISSING
from sgl_kvtier.console.table import format_share
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.lab.pages.compare.page import compare_page
from sgl_kvtier.lab.pages.compare.result import prompt_parts
from sgl_kvtier.lab.pages.compare.tables import detail_tables
from sgl_kvtier.sizes import format_bytes

VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """What a page consists of; fails on a tag closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def two_arms(ours: float, theirs: float, **more: object) -> dict:
    """A result with one metric of two arms."""
    return {
        "arms": {
            "hicache-file": {"ttft_ms": {"p50": theirs}},
            "kvtier": {"ttft_ms": {"p50": ours}},
        },
        **more,
    }


def test_the_page_is_well_formed_and_every_entry_of_its_contents_leads_somewhere(
    compare_text: str,
) -> None:
    page = Page(compare_text)
    assert page.open == []
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert [link.removeprefix("#") for link in links if link] == [
        attrs["id"] for tag, attrs in page.tags if tag == "section"
    ]


def test_bytes_of_an_emulated_gpu_are_those_of_the_model_as_in_the_plot(
    compare_result: dict,
) -> None:
    compare_result["device"] = {"paced": {"profile": "h100-llama8b", "bytes_scale": 512.0}}
    (table,) = [one for one in detail_tables(compare_result) if one.title.startswith("Where the")]
    *_, ours = table.cells()
    assert ours[-2:] == [format_bytes((412 << 20) * 512), format_bytes((777 << 20) * 512)]
    assert (
        "Bytes are those of the modelled machine; the result has those moved here." in table.notes
    )


def test_the_page_refers_to_nothing_outside_itself_and_has_no_script(compare_text: str) -> None:
    page = Page(compare_text)
    for tag, attrs in page.tags:
        assert tag not in ("script", "iframe", "object", "embed", "img")
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            value = attrs.get(name)
            assert value is None or value.startswith("#") or value == "data:,"
    assert "@import" not in compare_text
    assert not re.search(r"url\((?!#)", compare_text)


def test_text_from_outside_stays_text(compare_result: dict) -> None:
    result = copy.deepcopy(compare_result)
    result["arms"] = {
        f"<i>{name}" if name == "hicache" else name: arm for name, arm in result["arms"].items()
    }
    result["notes"].append("<img src=x onerror=alert(1)>")
    result["environment"]["cpu"]["model"] = "</dd><script>"
    text = compare_page(result)
    page = Page(text)
    assert page.count("script") == page.count("img") == page.count("i") == 0
    assert not any(attrs.get("id") == "hostile" for _, attrs in page.tags)
    assert compare_result["settings"]["model"] in page.text
    assert "<img src=x onerror=alert(1)>" in page.text


def test_without_matplotlib_the_page_has_the_tables_and_says_how_to_get_plots(
    compare_result: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Page(compare_page(compare_result))
    assert page.count("svg") == 0
    assert page.count("table") == 7
    assert how_to_install("bench") in page.text


def test_unequal_outputs_and_failures_stand_out_at_the_top(compare_text: str) -> None:
    page = Page(compare_text)
    leads = [attrs for tag, attrs in page.tags if tag == "p" and "class" in attrs]
    assert leads[0]["class"] == "lead bad"
    said = "UNEQUAL ANSWERS: other tokens than recompute's first ones: hicache 1 of 96. FAILED:"
    assert said in page.text
    assert page.text.index(said) < page.text.index("First turns mean")


def test_an_arm_that_failed_and_an_early_end_stand_out(
    compare_result: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take seconds
    compare_result["arms"]["hicache"]["failure"] = "no memory\nLast lines"
    compare_result["interrupted"] = True
    text = compare_page(compare_result)
    page = Page(text[: text.index('<section id="plots"')])
    bad = [attrs for tag, attrs in page.tags if tag == "li" and attrs.get("class") == "bad"]
    assert len(bad) == 2
    assert "hicache failed: no memory" in page.text


def test_a_result_with_hardly_anything_in_it_still_makes_a_page() -> None:
    page = Page(compare_page({"arms": {"kvtier": {}}}))
    assert page.open == []
    assert MISSING in page.text
    assert "There are no samples to plot" in page.text
    assert "Nothing to compare" in page.text


def test_without_samples_computed_tokens_are_unknown_and_not_zero() -> None:
    assert set(prompt_parts({"arms": {"kvtier": {}}}, "kvtier").values()) == {None}


def losing(result: dict) -> str:
    """The section of the page on what others do better."""
    text = Page(compare_page(result)).text
    return text[text.rindex("Losing cells") : text.rindex("Configuration")]


def test_what_another_arm_does_better_is_listed_but_for_the_arm_with_memory_for_everything() -> (
    None
):
    arms = {
        "oracle": {"ttft_ms": {"p50": 1.0}},
        "hicache": {"ttft_ms": {"p50": 20, "p99": 20}, "throughput_tokens_per_s": 100},
        "hicache-file": {"ttft_ms": {"p50": 20, "p99": None}, "throughput_tokens_per_s": 50},
        "kvtier": {"ttft_ms": {"p50": 20, "p99": 30}, "throughput_tokens_per_s": 80},
    }
    for arm, later in (("hicache", 40), ("hicache-file", 70), ("kvtier", 60)):
        arms[arm]["ttft_later_ms"] = {"p50": later}
    said = losing({"arms": arms})
    assert "TTFT p99: kvtier 30.0 ms, hicache 20.0 ms." in said
    assert "TTFT of later turns p50: kvtier 60.0 ms, hicache 40.0 ms." in said
    assert "output tokens/s: kvtier 80.0, hicache 100.0." in said
    assert "oracle" not in said and "hicache-file" not in said


def test_an_arm_that_wins_everywhere_has_no_losing_cell_and_the_page_says_how_many_were_compared() -> (
    None
):
    assert "None: in none of 1 figures is another configuration better than kvtier." in losing(
        two_arms(1, 2)
    )


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1, "100 %"),
        (0, "0 %"),
        (0.99999, "> 99.9 %"),
        (0.00001, "< 0.1 %"),
        (0.5, "50.0 %"),
        (0.999, "99.9 %"),
    ],
)
def test_a_share_is_never_rounded_up_to_all_or_down_to_none(share: float, text: str) -> None:
    assert format_share(share) == text
