"""What restoring takes from requests that run, and that kvtier's own rules take little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_kvtier.lab.papers import beside
from sgl_kvtier.lab.papers.beside import POLICIES, measure


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, float], dict[str, float]]:
    """Sessions that come back when others have pushed them out of memory, without chats and beside them."""
    small = replace(beside.MACHINE, device_bytes=20 << 30, host_bytes=20 << 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beside, "MACHINE", small)
        return {
            (name, chats): measure(chats, config, seeds=(1,), sessions=16)
            for chats in (0.0, 4.0)
            for name, config in POLICIES.items()
        }


def test_where_nothing_else_runs_a_restoration_brings_the_first_token_sooner(rows) -> None:
    loads, ours = rows["loads alone", 0.0], rows["kvtier", 0.0]
    assert ours["ttft_s"] < loads["ttft_s"] and ours["computed"] > loads["computed"] + 10
    assert ours["chats_s"] is None


def test_a_lower_bound_on_gaps_makes_them_shorter(rows) -> None:
    loads, ours, bounded, _ = (rows[name, 0.0]["gap_ms"] for name in POLICIES)
    assert loads < bounded < 40 < ours


def test_beside_chats_only_rules_that_do_not_count_them_make_them_wait(rows) -> None:
    loads, ours, _, eager = (rows[name, 4.0] for name in POLICIES)
    assert eager["ttft_s"] < loads["ttft_s"]
    assert eager["chats_s"] > 1.05 * loads["chats_s"]
    assert ours["chats_s"] < 1.02 * loads["chats_s"]


def test_the_table_has_a_line_for_each_row(rows) -> None:
    found = [{"chats_per_s": chats, "policy": name, **row} for (name, chats), row in rows.items()]
    assert len(beside.table(found).rows) == len(found)
