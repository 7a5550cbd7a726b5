"""What restoring takes from requests that run, and that kvtier's own rules take little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sgl_kvtier.lab.papers import beside
from sgl_kvtier.lab.papers.beside import POLICIES, measure


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, float], dict[str, float]]:
    """Sessions that come back when others have pushed them out of memory, without chats and beside them."""
    memory = {"device_bytes": 20 << 30, "host_bytes": 20 << 30}
    return {
        (name, chats): measure(chats, config, replace(machine, **memory), seeds=(1,), sessions=16)
        for chats in (0.0, 4.0)
        for name, (config, machine) in POLICIES.items()
    }


def test_where_nothing_else_runs_a_restoration_brings_the_first_token_sooner(rows) -> None:
    loads, ours = rows["loads alone", 0.0], rows["kvtier", 0.0]
    assert ours["ttft_s"] < loads["ttft_s"] and ours["computed"] > loads["computed"] + 10
    assert ours["chats_s"] is None


def test_gaps_are_shorter_where_requests_decode_in_steps_that_restore(rows) -> None:
    loads, apart, ours = (
        rows[name, 0.0]["gap_ms"] for name in ("loads alone", "kvtier, not mixed", "kvtier")
    )
    assert loads < ours < 25 < 40 < apart
    whole = [rows[name, 0.0]["whole_s"] for name in ("kvtier", "kvtier, not mixed")]
    assert whole[0] < whole[1]


def test_beside_chats_only_rules_that_do_not_count_them_make_them_wait(rows) -> None:
    loads, ours, eager = (rows[name, 4.0] for name in ("loads alone", "kvtier", "TTFT alone"))
    assert eager["ttft_s"] < loads["ttft_s"]
    assert eager["chats_s"] > 1.05 * loads["chats_s"]
    assert ours["chats_s"] < 1.02 * loads["chats_s"]


def test_the_table_has_a_line_for_each_row(rows) -> None:
    found = [{"chats_per_s": chats, "policy": name, **row} for (name, chats), row in rows.items()]
    assert len(beside.table(found).rows) == len(found)
