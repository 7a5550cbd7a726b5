"""What a planner takes of memory, as the command measures it."""

from __future__ import annotations

import re

import pytest

from sgl_kvtier.lab.papers import step_time


def test_a_page_takes_more_than_its_key_and_less_than_a_kilobyte(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert step_time.main(["memory", str(1 << 15)]) == 0
    rows = re.findall(r"^(stored|sessions) .* (\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert [kind for kind, _ in rows] == ["stored", "sessions"]
    assert all(72 < int(each) < 1024 for _, each in rows)
