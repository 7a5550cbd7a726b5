"""A real server with classes of one's own: rules from the laboratory, eviction from the examples."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ahead_lab import looking_ahead
from restore_lab import GBPS, change
from serving import prompts

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE, PAGES = 16, 80
POLICY = {
    "restore": "both",
    "min_restore_tokens": 64,
    "rules": "sgl_kvtier.lab.rules:FixedSplit",
    "eviction": "own_eviction:SegmentedLRU",
}


def test_a_fixed_split_is_what_is_loaded_and_pages_leave_by_an_own_rule(tmp_path: Path) -> None:
    found = os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))
    sections = {"throttle": {"read_gbps": GBPS}}
    with looking_ahead(tmp_path, POLICY, sections, {"PYTHONPATH": found}) as served:
        first, *others = prompts(4, PAGES * PAGE + 8, seed=5)
        told = served.ask(first)
        for ids in others:  # the device holds 128 pages: the rule says which leave
            served.ask(ids, 1)
        for share in (0.5, 0.25):
            served.flush()
            assert change(served, rules__share=share)
            again = served.ask(first)
            assert again.tokens == told.tokens
            assert again.storage == (1 - share) * PAGES * PAGE
        assert not change(served, rules__share=1.5)
        assert not change(served, rules__load_patience=1)
    log = (tmp_path / "server.log").read_text(errors="replace")
    assert "eviction own_eviction:SegmentedLRU" in log
