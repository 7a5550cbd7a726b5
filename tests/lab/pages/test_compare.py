"""The tables and the page of a comparison."""

from __future__ import annotations

import copy
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from sgl_kvtier.console import MISSING, to_json
from sgl_kvtier.console.table import format_share
from sgl_kvtier.lab.pages.compare.losing import losing_cells
from sgl_kvtier.lab.pages.compare.page import compare_page
from sgl_kvtier.lab.pages.compare.result import prompt_parts
from sgl_kvtier.lab.pages.compare.tables import compare_tables, main_tables
from sgl_kvtier.lab.pages.html import flatten
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


BOUND = {
    "ttft_later_ms": 100.0,
    "ttft_later_on_demand_ms": 200.0,
    "makespan_s": 20.0,
    "wall_s": 30.0,
}


def test_the_least_time_stands_beside_what_was_measured() -> None:
    arm = {"ttft_later_ms": {"mean": 300.0, "p50": 1.0}, "bound": BOUND}
    result = {"arms": {"hicache-file": {"ttft_ms": {"p50": 1.0}}, "kvtier": arm}}
    note = main_tables(result)[0].notes[-1]
    assert "100 ms on average" in note
    assert "it took 3.0 and 1.5 times that, and 1.50 times the least of a whole round" in note
    table = next(one for one in compare_tables(result) if one.title.startswith("Beside the least"))
    assert table.rows[1]["over"] == {"alone": 3.0, "demand": 1.5, "round": 1.5}
    assert table.rows[0]["over"] == dict.fromkeys(("alone", "demand", "round"))
    assert len(main_tables(two_arms(1, 2))[0].notes) == 1


def test_the_arm_with_memory_for_everything_is_no_opponent() -> None:
    result = two_arms(10, 20)
    result["arms"]["oracle"] = {"ttft_ms": {"p50": 1.0}}
    table, _ = losing_cells(result)
    assert not table.rows


def test_the_page_is_well_formed_and_every_entry_of_its_contents_leads_somewhere(
    compare_text: str,
) -> None:
    page = Page(compare_text)
    assert page.open == []
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert [link.removeprefix("#") for link in links if link] == [
        attrs["id"] for tag, attrs in page.tags if tag == "section"
    ]


def test_the_page_has_results_first_and_settings_last(compare_text: str) -> None:
    page = Page(compare_text)
    assert [attrs["id"] for tag, attrs in page.tags if tag == "section"] == [
        "headline",
        "plots",
        "tables",
        "losing-cells",
        "configuration",
        "environment",
        "repeat",
    ]
    inside = [tag for tag, _ in page.tags]
    assert inside.index("table") < inside.index("svg")


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


def test_the_page_has_the_tables_the_plots_and_the_command(
    compare_result: dict, compare_text: str
) -> None:
    page = Page(compare_text)
    assert page.count("svg") == page.count("figure") == 8
    assert page.count("table") == 1 + 5 + 1 + 1  # printed, behind it, losing cells, workload
    assert "kvtier compare --model-path '</script><b id=hostile>" in page.text
    assert compare_result["environment"]["platform"] in page.text


def test_without_matplotlib_the_page_has_the_tables_and_says_how_to_get_plots(
    compare_result: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Page(compare_page(compare_result))
    assert page.count("svg") == 0
    assert page.count("table") == 8
    assert "pip install 'sgl-kvtier[lab]'" in page.text


def test_the_page_is_made_from_what_the_json_file_holds(compare_result: dict) -> None:
    assert compare_page(json.loads(to_json(compare_result))) == compare_page(compare_result)


def test_unequal_outputs_and_failures_stand_out_at_the_top(compare_text: str) -> None:
    page = Page(compare_text)
    leads = [attrs for tag, attrs in page.tags if tag == "p" and "class" in attrs]
    assert leads[0]["class"] == "lead bad"
    said = "UNEQUAL ANSWERS: other tokens than recompute's first ones: hicache 1 of 96. FAILED:"
    assert said in page.text
    assert page.text.index(said) < page.text.index("First turns mean")


def test_an_arm_that_failed_and_an_early_end_stand_out(compare_result: dict) -> None:
    compare_result["arms"]["hicache"]["failure"] = "no memory\nLast lines"
    compare_result["interrupted"] = True
    page = Page(compare_page(compare_result))
    bad = [attrs for tag, attrs in page.tags if tag == "li" and attrs.get("class") == "bad"]
    assert len(bad) == 2
    assert "hicache failed: no memory" in page.text


def test_a_result_with_hardly_anything_in_it_still_makes_a_page() -> None:
    page = Page(compare_page({"arms": {"kvtier": {}}}))
    assert page.open == []
    assert MISSING in page.text
    assert "There are no samples to plot" in page.text
    assert "Nothing to compare" in page.text


def test_one_table_of_at_most_nine_columns_is_printed(compare_result: dict) -> None:
    (table,) = main_tables(compare_result)
    assert len(table.columns) <= 9
    hicache_file = table.cells()[2]
    arm = compare_result["arms"]["hicache-file"]
    later = arm["ttft_later_ms"]
    assert hicache_file[1:4] == [f"{later[name]:,.1f}" for name in ("p50", "p99", "mean")]
    assert hicache_file[7:] == ["1", "100 %"]
    good = [
        sample
        for sample in compare_result["samples"]
        if sample["arm"] == "hicache-file" and sample["error"] is None
    ]
    prompts = sum(sample["prompt_tokens"] for sample in good)
    cached = sum(sum(sample["cached"].values()) for sample in good)
    stored = sum(sample["cached"]["storage"] for sample in good)
    shares = f"{100 * (prompts - cached) / prompts:.0f} % / {100 * stored / prompts:.0f} %"
    assert hicache_file[6] == shares
    first = [sample["ttft_ms"] for sample in good if sample["turn"] == 1]
    assert hicache_file[4] == f"{sum(first) / len(first):,.1f}"


def test_a_share_that_is_not_all_is_not_shown_as_all() -> None:
    cached = {"device": 0, "host": 0, "storage": 2}
    result = two_arms(1, 1, samples=[{"arm": "kvtier", "prompt_tokens": 1000, "cached": cached}])
    (table,) = main_tables(result)
    assert table.cells()[1][6] == "> 99 % / < 1 %"


def test_times_of_a_second_and_more_are_in_seconds() -> None:
    (table,) = main_tables(two_arms(1, 1))
    assert table.columns[1].unit == "ms"
    result = two_arms(1, 1)
    result["arms"]["kvtier"]["ttft_later_ms"] = {"p50": 80.0, "mean": 1520.0}
    (table,) = main_tables(result)
    assert table.cells()[1][1:4] == ["0.08", MISSING, "1.52"]
    assert table.columns[1].unit == "s"


def test_later_turns_of_an_older_result_are_taken_from_its_samples(compare_result: dict) -> None:
    (new,) = main_tables(compare_result)
    for arm in compare_result["arms"].values():
        del arm["ttft_later_ms"]
    (old,) = main_tables(compare_result)
    assert new.cells() == old.cells()


def test_arms_keep_their_order_and_missing_figures_are_dashes(compare_result: dict) -> None:
    _, first, _, _, tokens, ratios = compare_tables(compare_result)
    assert [row[0] for row in first.cells()] == ["recompute", "hicache", "hicache-file", "kvtier"]
    assert first.cells()[0][-1] == MISSING  # recompute is what the others are compared with
    assert tokens.cells()[0][-2:] == ["0 B", MISSING]
    assert ratios.cells()[-1][0] == "kvtier / hicache-file"


def test_cached_and_computed_tokens_sum_to_the_prompts_of_the_requests_that_ended_well(
    compare_result: dict,
) -> None:
    for arm in compare_result["arms"]:
        prompts = [
            s["prompt_tokens"]
            for s in compare_result["samples"]
            if s["arm"] == arm and s["error"] is None
        ]
        assert sum(value or 0 for value in prompt_parts(compare_result, arm).values()) == sum(
            prompts
        )


def test_without_samples_computed_tokens_are_unknown_and_not_zero() -> None:
    assert set(prompt_parts({"arms": {"kvtier": {}}}, "kvtier").values()) == {None}


def test_every_cell_that_is_worse_is_listed_worst_first() -> None:
    samples = [
        {"arm": arm, "round": number, "turn": turn, "ttft_ms": ms}
        for arm, times in {"kvtier": ((10, 30), (10, 90)), "hicache": ((20, 20), (20, 20)), "hicache-file": ((15, 25), (9, 95))}.items()
        for number, row in enumerate(times, 1)
        for turn, ms in enumerate(row, 1)
    ]  # fmt: skip
    arms = {
        "hicache": {"ttft_ms": {"p50": 20, "p99": 20}, "throughput_tokens_per_s": 100},
        "hicache-file": {"ttft_ms": {"p50": 20, "p99": None}, "throughput_tokens_per_s": 50},
        "kvtier": {"ttft_ms": {"p50": 20, "p99": 30}, "throughput_tokens_per_s": 80},
    }
    for arm, later in (("hicache", 40), ("hicache-file", 70), ("kvtier", 60)):
        arms[arm]["ttft_later_ms"] = {"p50": later}
    table, compared = losing_cells({"arms": arms, "samples": samples})
    assert [(row["cell"], row["other"], row["ratio"], row["rounds"]) for row in table.rows] == [
        ("TTFT p50, turn 2", "hicache", 3.0, "2 of 2"),
        ("TTFT p99", "hicache", 1.5, "2 of 2"),
        ("TTFT of later turns, p50", "hicache", 1.5, "2 of 2"),
        ("throughput", "hicache", 1.25, None),
    ]
    assert (
        compared == 2 + 1 + 2 + 2 + 2
    )  # TTFT p50 twice, p99 once, later and throughput twice, two turns


def test_an_arm_that_wins_everywhere_has_no_losing_cell_and_the_page_says_how_many_were_compared() -> (
    None
):
    result = two_arms(1, 2)
    table, compared = losing_cells(result)
    assert (list(table.rows), compared) == ([], 1)
    text = Page(compare_page(result)).text
    assert (
        "None: kvtier is at least as good as every other arm in everything compared (1 cell)."
        in text
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


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (412 << 20, "412.0 MiB"),
        (3 << 50, "3,072.0 TiB"),
    ],
)
def test_bytes_are_written_for_people(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_nested_settings_become_dotted_names() -> None:
    assert flatten(
        {
            "cpu": {"count": 2},
            "ram_bytes": 1024,
            "argv": ["--a", "b c"],
            "x": [],
            "y": None,
            "z": [1, 2],
        }
    ) == [
        ("cpu.count", "2"),
        ("ram", "1.0 KiB"),
        ("argv", "--a 'b c'"),
        ("x", MISSING),
        ("y", MISSING),
        ("z", "1, 2"),
    ]


def test_only_arms_that_restore_have_a_row_about_it_and_without_any_there_is_no_table(
    compare_result: dict,
) -> None:
    title = "Prefixes computed and loaded at once"
    assert title not in [table.title for table in compare_tables(compare_result)]
    compare_result["arms"]["kvtier"]["restore"] = {
        "started": 30.0,
        "met": 24.0,
        "computed_fraction": 0.25,
    }
    (table,) = [table for table in compare_tables(compare_result) if table.title == title]
    assert [row["arm"] for row in table.rows] == ["kvtier"]
