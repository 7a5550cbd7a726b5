"""The pages keep what is written by hand, have the numbers that the code computes, and say where the
papers contradict themselves.
"""

from pathlib import Path

import pytest

from sgl_kvtier.lab.papers import pages, parts
from sgl_kvtier.lab.papers.tierkv import page as tierkv
from sgl_kvtier.lab.sim.cells import Cell
from sgl_kvtier.lab.workload.catalogue import trace_files

PAPERS = Path(__file__).parents[3] / "docs" / "results" / "papers"
COMPUTED = {
    "cake": pages.cake_markdown,
    "cacheflow": pages.cacheflow_markdown,
    "tierkv": tierkv.markdown,
}


def test_only_what_stands_between_the_markers_is_replaced():
    page = f"# Title\n\n{parts.BEGIN}\nold\n{parts.END}\n\nend\n"
    assert (
        parts.replaced(page, "new\n") == f"# Title\n\n{parts.BEGIN}\n\nnew\n\n{parts.END}\n\nend\n"
    )
    assert parts.replaced(parts.replaced(page, "a\n"), "b\n") == parts.replaced(page, "b\n")


def test_a_page_without_markers_is_left_alone():
    with pytest.raises(ValueError, match="computed: begin"):
        parts.replaced("# Title\n", "new\n")


@pytest.mark.parametrize("paper", ["cake", "cacheflow", "tierkv"])
def test_every_contradiction_has_a_reading(paper):
    rows = parts.contradictions(paper).rows
    assert len(rows) >= 8
    assert all(row[name] for row in rows for name in ("place", "printed", "conflict", "reading"))


def test_a_range_is_shown_as_printed_and_a_value_inside_it_as_inside():
    cells = [
        Cell("t", "in", "c", 1.5, 1.5, "x", reading="printed 1.1 to 1.7; over vLLM"),
        Cell("t", "above", "c", 1.7, 2.0, "x", reading="printed 1.1 to 1.7; over vLLM"),
        Cell("t", "one number", "c", 2.0, 1.999, "x", reading="over vLLM"),
    ]
    shown = [(row["paper"], row["deviation"], row["reading"]) for row in parts.rows(cells)]
    assert shown == [
        ("1.1 to 1.7", "inside", "over vLLM"),
        ("1.1 to 1.7", "+18 %", "over vLLM"),
        ("2", "+0 %", "over vLLM"),
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("paper", COMPUTED)
def test_no_number_of_a_papers_tables_is_stale(paper):
    """The same as `scripts/reproduce --check papers`; a minute or two each."""
    if paper == "cacheflow" and "swe_mini_deepseek" not in trace_files():
        pytest.skip("needs the trace swe_mini_deepseek in ../shared/traces")
    shown = (PAPERS / f"{paper}.md").read_text("utf-8")
    computed = parts.replaced(shown, COMPUTED[paper]())
    assert set(computed.splitlines()) ^ set(shown.splitlines()) == set()
    assert computed == shown
