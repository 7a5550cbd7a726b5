"""Two real servers on one `store.path`: what one of them wrote comes back on the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from serving import TOKENS, config_file, flags, prompts, serving

pytestmark = pytest.mark.server
PAGE = 16
WHOLE = (TOKENS - 1) // PAGE * PAGE
"""Tokens of a prompt that can come from a cache: whole pages, and at least one is computed."""


def test_two_servers_on_one_folder_find_what_the_other_wrote(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    before, after, later = (prompts(2, seed=seed) for seed in (1, 2, 3))
    with serving(tmp_path / "first", flags(), config) as first:
        told = [first.ask(ids) for ids in before]
        first.settle()
        with serving(tmp_path / "second", flags(), config) as second:
            found = [second.ask(ids) for ids in before]
            assert [a.storage for a in found] == [WHOLE] * 2
            assert [a.tokens for a in found] == [a.tokens for a in told]
            told = [second.ask(ids) for ids in after]
            second.settle()
            found = [first.ask(ids) for ids in after]
            assert [a.storage for a in found] == [WHOLE] * 2
            assert [a.tokens for a in found] == [a.tokens for a in told]
            told = [first.ask(ids) for ids in later]
            first.settle()
            os.killpg(first.server.pid, signal.SIGKILL)
            found = [second.ask(ids) for ids in later]
            assert [a.storage for a in found] == [WHOLE] * 2
            assert [a.tokens for a in found] == [a.tokens for a in told]
            assert second.metric("kvtier:pages_corrupt_total") == 0
