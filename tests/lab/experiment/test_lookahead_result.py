"""Figures of looking ahead, from servers' counters as they are read from /metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvtier.console.table import to_markdown
from sgl_kvtier.lab.experiment.arms import Setup
from sgl_kvtier.lab.experiment.lookahead.arms import Pools
from sgl_kvtier.lab.experiment.lookahead.result import Cell, make_results, notes_of
from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.experiment.rounds import Outcome, Plan
from sgl_kvtier.lab.outside.client import Cached, Completion, Metrics
from sgl_kvtier.lab.outside.replay import Sample
from sgl_kvtier.lab.pages.lookahead import lookahead_page, lookahead_tables, losing, statements

RANKS = 'tp_rank="{rank}",pp_rank="0",dp_rank="0"'
BEFORE = "sglang:hicache_backup_tokens_total 0\nsglang:hicache_backup_bytes_total 0\n"
ARMS = ("recompute", "kvtier", "oracle")


def counted(moved: int, wasted: int, pages: int, *, second_rank: bool = False) -> str:
    """Counters of a server: 10 bytes a token; with a second rank that counts the same."""
    text = "sglang:hicache_backup_tokens_total 1000\nsglang:hicache_backup_bytes_total 10000\n"
    for rank in ("0", "1") if second_rank else ("0",):
        own = RANKS.format(rank=rank)
        text += f'kvtier:lookahead_moved_bytes_total{{{own},link="storage-host"}} {moved}\n'
        text += f'kvtier:lookahead_moved_bytes_total{{{own},link="host-device"}} {moved}\n'
        text += f"kvtier:lookahead_wasted_bytes_total{{{own}}} {wasted}\nkvtier:pages_read_total{{{own}}} {pages}\n"
        text += (
            f"kvtier:lookahead_victims_total{{{own}}} 3\nkvtier:lookahead_drift_total{{{own}}} 0\n"
        )
        for how, turns in (
            ("held", 4),
            ("failed", 2),
            ("held_right", 3),
            ("held_wrong", 1),
            ("failed_right", 2),
        ):
            text += f'kvtier:lookahead_overlap_total{{{own},result="{how}"}} {turns}\n'
        for tier, tokens in (("device", 60), ("host", 20), ("storage", 10), ("none", 10)):
            text += f'kvtier:lookahead_hit_tokens_total{{{own},tier="{tier}"}} {tokens}\n'
    return text


def round_of(arm: str, number: int, ttft_s: float, after: str, storage: int = 0) -> Round:
    one = Round(
        arm,
        number,
        before=Metrics.parse(BEFORE),
        after=Metrics.parse(after),
        wall_s=1.0,
        complete=True,
    )
    cached = Cached(device=40, storage=storage, total=40 + storage)
    for turn in (1, 2, 3):
        times = (ttft_s * turn, ttft_s * turn + 0.01)
        one.samples.append(Sample("s", turn, Completion(0.0, 1.0, (7, 8), times, 100, cached)))
    one.occupancy = [{"t_s": 0.0, "device": 0.0}, {"t_s": 1.0, "device": 64.0}]
    return one


def result(after: str, *, kvtier_s: float = 0.2, storage: int = 20, oracle: str = BEFORE) -> dict:
    setup = Setup("model", "m", "cpu", 16, 512)
    plan = Plan(ARMS, setup, Path("folder"), rounds=1)
    cells = []
    for number, gap_s in ((1, 0.0), (2, 0.5)):
        rounds = [
            round_of("recompute", number, 1.0, BEFORE),
            round_of("kvtier", number, kvtier_s, after, storage),
        ]
        rounds.append(round_of("oracle", number, 0.1, oracle))
        cells.append(Cell(3.0, gap_s, Pools(900, 300, 600, 1200), plan, Outcome(rounds)))
    found = {**make_results(cells, ARMS), "notes": notes_of(cells, ARMS)}
    about = {"arms": {"oracle": {"about": "large", "policy": {}}}, "page_size": 16}
    return {**found, "settings": about, "rounds": 1, "command": ["kvtier"], "interrupted": False}


@pytest.mark.parametrize("second_rank", [False, True])
def test_figures_are_of_one_rank_and_added_up_over_cells(second_rank: bool) -> None:
    ours = result(counted(1000, 100, 30, second_rank=second_rank))["arms"]["kvtier"]
    assert ours["moved_bytes"] == {"storage-host": 2000, "host-device": 2000}
    assert (ours["wasted_bytes"], ours["wasted_fraction"]) == (200, 0.05)
    assert ours["hit_tokens_at_schedule"] == {"device": 120, "host": 40, "storage": 20}
    assert ours["hit_tokens_counted_by"] == "server"
    overlap = {
        "held": 8,
        "failed": 4,
        "held_right": 6,
        "held_wrong": 2,
        "failed_right": 4,
        "failed_wrong": 0,
    }
    assert ours["lookahead"] == {"victims": 6, "drift": 0, "hints": None, "overlap": overlap}


def test_what_was_read_and_used_by_nobody_is_left_over() -> None:
    # 30 pages of 16 tokens are 4,800 bytes; 3 requests used 20 tokens each, 600; 900 were moved
    # ahead and not wasted.
    cell = result(counted(1000, 100, 30))["cells"][0]["arms"]["kvtier"]
    assert (cell["storage_read_bytes"], cell["surplus_read_bytes"]) == (4800, 4800 - 600 - 900)
    assert result(counted(1000, 100, 9))["cells"][0]["arms"]["kvtier"]["surplus_read_bytes"] == 0
    assert result(BEFORE)["cells"][0]["arms"]["kvtier"]["surplus_read_bytes"] is None


def test_the_distance_to_the_oracle_is_that_of_the_same_cell() -> None:
    cell = result(counted(1, 0, 0))["cells"][1]
    assert cell["over_oracle"]["kvtier"] == {q: pytest.approx(2.0) for q in ("p50", "p90", "p99")}
    assert cell["over_oracle"]["recompute"]["p50"] == pytest.approx(10.0)
    assert "oracle" not in cell["over_oracle"]


def test_first_turns_of_sessions_are_told_from_later_ones() -> None:
    found = result(counted(1, 0, 0))["cells"][0]["arms"]["kvtier"]
    assert (found["ttft_ms"]["n"], found["ttft_ms"]["p50"]) == (3, pytest.approx(400.0))
    assert (found["ttft_later_ms"]["n"], found["ttft_later_ms"]["p50"]) == (2, pytest.approx(500.0))


def test_an_arm_that_moved_nothing_and_one_that_counts_nothing_are_named() -> None:
    assert "kvtier: its server moved no page ahead." in result(counted(0, 0, 0))["notes"]
    assert (
        "kvtier: its server counts nothing of looking ahead, so nothing shows that it did."
        in result(BEFORE)["notes"]
    )
    assert not [note for note in result(counted(1, 0, 0))["notes"] if note.startswith("kvtier")]


def test_an_oracle_that_evicted_is_no_oracle() -> None:
    notes = result(counted(1, 0, 0), oracle="sglang:evicted_tokens_total 5\n")["notes"]
    assert (
        "3x, pause 0.5 s: the oracle's device pool was too small after all: 5 tokens were evicted."
        in notes
    )
    assert not [note for note in result(counted(1, 0, 0))["notes"] if "too small" in note]


def test_the_page_says_what_missed_its_aim_and_where_others_are_faster() -> None:
    slow = result(counted(1000, 500, 30), kvtier_s=2.0)
    bad = [text for text, wrong in statements(slow) if wrong]
    assert len([text for text in bad if "20.00 times the oracle's" in text]) == 2
    assert any("25.0" in text and "never used" in text for text in bad)
    assert any("kvtier 4000.0 ms, recompute 2000.0 ms" in text for text, _ in losing(slow))
    assert losing(result(counted(1, 0, 0)))[0][1] is False
    page = lookahead_page(slow)
    assert "Losing cells" in page
    assert "kvtier 4000.0 ms" in page


def test_tables_have_a_row_per_cell_and_arm_and_dashes_for_what_is_not_known() -> None:
    times, hits, moved, overlap, rounds = lookahead_tables(result(counted(1000, 100, 30)))
    assert [row["share"] for row in overlap.rows] == [
        {"held": 2 / 3, "right": 0.75, "failed_right": 1.0}
    ] * 2
    ratios = [(row["round"], row["arm"], row["over"]["oracle"]) for row in rounds.rows]
    assert [row[:2] for row in ratios] == [(number, arm) for number in (1, 2) for arm in ARMS]
    assert [row[2] for row in ratios] == [pytest.approx(ratio) for ratio in (10.0, 2.0, 1.0) * 2]
    assert len(times.rows) == len(hits.rows) == 6
    assert [row["arm"] for row in moved.rows] == ["kvtier", "kvtier"]
    lines = to_markdown(times).splitlines()
    assert sum("| oracle |" in line for line in lines) == 2
