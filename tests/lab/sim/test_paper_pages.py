"""What commands write into results pages stands between markers; the text around them stays."""

from __future__ import annotations

import pytest

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.papers.pages import put


def test_only_what_stands_between_the_markers_of_a_name_is_replaced() -> None:
    page = "# Title\n\n<!-- a: begin -->\nold\n<!-- a: end -->\n\n<!-- b: begin -->\nb\n<!-- b: end -->\n"
    new = page.replace("\nold\n", "\n\nnew\n\n")
    assert put(page, "a", "new") == new
    assert put(put(page, "a", "other"), "a", "new") == new


def test_a_page_without_markers_is_left_alone() -> None:
    with pytest.raises(TraceError, match="a: begin"):
        put("# Title\n", "a", "new")
