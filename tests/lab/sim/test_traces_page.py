"""The tables of docs/results/simulator.md have the columns that the generator gives."""

import re
from pathlib import Path

from sgl_kvtier.lab.papers.traces_page import SCENES
from sgl_kvtier.lab.sim.pictures import draws_table

PAGE = Path(__file__).parents[3] / "docs" / "results" / "simulator.md"


def test_the_tables_on_the_page_have_the_generators_columns():
    heads = [column.heading for column in draws_table([], "none").columns]
    assert len(heads) <= 8
    text = PAGE.read_text("utf-8")
    for name in SCENES:
        shown = re.search(rf"<!-- {name}: begin -->[^|]*^\| ([^\n]*) \|$", text, flags=re.M)
        assert shown is not None and shown[1].split(" | ") == heads
