"""`kvtier top`: a line for the time since the line before."""

from __future__ import annotations

import json
import re
import weakref
from typing import Any

import pytest
from explained import page_of, serving

from sgl_kvtier.cli import main
from sgl_kvtier.runtime.tools import schemas, top_command
from sgl_kvtier.runtime.tools.top_command import row_of

PAGES = [
    page_of(prompt=1000, requests=1, cached={"device": 500}, read_bytes_total=1 << 20),
    page_of(
        prompt=3000, requests=5, cached={"device": 1000, "storage": 500}, read_bytes_total=5 << 20,
        device_written_bytes_total=2 << 20, pages_evicted_total=7, store_bytes_on_disk=9 << 30,
    ),
]  # fmt: skip


def test_each_line_is_of_the_time_since_the_one_before(capsys):
    with serving([*PAGES, PAGES[1]]) as url:
        assert main(["top", url, "--every", "0.05", "--lines", "2"]) == 0
    (heading, first, second) = capsys.readouterr().out.splitlines()
    assert [word in heading for word in ("device", "storage", "read/s", "on disk")] == [True] * 4
    assert "25.0 %" in first and "50.0 %" in first and first.split()[-2:] == ["9.0", "GiB"]
    assert "–" in second and "0 B" in second
    assert len(heading) == len(first) == len(second)


def test_all_lines_become_one_result(capsys):
    with serving([*PAGES]) as url:
        assert main(["top", url, "--every", "0.05", "--lines", "2", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == schemas.TOP.name
    (first, second) = result["rows"]
    assert (first["storage_fraction"], first["computed_fraction"]) == (0.25, 0.5)
    assert first["read_bytes_per_s"] == pytest.approx(4 * (1 << 20) / first["seconds"])
    assert (first["pages_evicted"], second["pages_evicted"]) == (7, 0)
    assert second["device_fraction"] is None


def test_lines_that_were_printed_are_not_kept(monkeypatch):
    class Row(dict[str, Any]):
        """A row that can be watched."""

    rows: list[weakref.ref[Row]] = []
    kept = []

    def watched(*figures):
        kept.append(sum(row() is not None for row in rows))
        row = Row(row_of(*figures))
        rows.append(weakref.ref(row))
        return row

    monkeypatch.setattr(top_command, "row_of", watched)
    with serving([*PAGES]) as url:
        assert main(["top", url, "--every", "0.05", "--lines", "4"]) == 0
    assert kept == [0, 1, 1, 1]


@pytest.mark.parametrize("missing", ["", None], ids=["closed", "not found"])
def test_a_missing_answer_is_a_line_and_the_next_one_is_compared_with_the_last_that_came(
    missing, capsys
):
    with serving([PAGES[0], missing, PAGES[1]]) as url:
        assert main(["top", url, "--every", "0.05", "--lines", "2"]) == 0
    (heading, without, after) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d no answer", without)
    assert "25.0 %" in after and len(after) == len(heading)


def test_a_server_that_was_restarted_has_no_negative_rates(capsys):
    with serving([PAGES[1], "", PAGES[0], PAGES[1]]) as url:
        assert main(["top", url, "--every", "0.05", "--lines", "3", "--json", "-"]) == 0
    (restarted, after) = json.loads(capsys.readouterr().out)["rows"]
    assert all(value is None or value >= 0 for value in restarted.values())
    assert (after["storage_fraction"], after["pages_evicted"]) == (0.25, 7)


def test_a_server_that_is_not_there_is_named(capsys):
    assert main(["top", "http://127.0.0.1:9"]) == 1
    assert "no answer from http://127.0.0.1:9/metrics" in capsys.readouterr().err
