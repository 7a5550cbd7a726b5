"""From batches to figures: means, makespans, shares, ratios, and which aims were met."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sgl_kvtier.lab.experiment.batches.batch import Batch, BatchLog
from sgl_kvtier.lab.experiment.batches.figures import batch_results
from sgl_kvtier.lab.experiment.restore.log import GRID, PRIME
from sgl_kvtier.lab.experiment.restore.trial import DISCARDED, Trial
from sgl_kvtier.lab.outside.client import Cached


def request(ttft_s: float, loaded: int = 512, tokens: tuple[int, ...] = (1, 2)) -> Trial:
    return Trial(
        "m", 1024, GRID, "kvtier", 1, 8.0, prompt_tokens=1040, ttft_s=ttft_s,
        cached=Cached(storage=loaded, total=loaded), output_ids=tokens, logprobs=(-0.5, -0.5),
    )  # fmt: skip


def batch(arm: str, number: int, *times: float, **more: Any) -> Batch:
    found: dict[str, Any] = {
        "requests": tuple(map(request, times)),
        "makespan_s": max(times),
        "kind": GRID,
        **more,
    }
    kind = found.pop("kind")
    return Batch("m", 2048, kind, arm, number, 8.0, 1.0, at_once=len(times), **found)


def log_of(*batches: Batch) -> BatchLog:
    log = BatchLog()
    for number, size in dict.fromkeys((one.round, one.at_once) for one in batches):
        log.keep(batch("compute", number, *[1.0] * size, kind=PRIME))
    for one in batches:
        log.keep(one)
    return log


def cell_of(*batches: Batch) -> dict[str, Any]:
    (cell,) = batch_results(log_of(*batches))["cells"]
    return cell


def test_an_arm_has_the_times_of_all_its_requests_and_the_middle_makespan() -> None:
    arm = cell_of(
        batch("kvtier", 1, 1.0, 2.0), batch("kvtier", 2, 3.0, 4.0), batch("kvtier", 3, 2.0, 9.0)
    )["arms"]["kvtier"]
    assert (arm["ttft_ms"]["mean"], arm["ttft_ms"]["p50"]) == (3500.0, 2500.0)
    assert arm["makespan_s"] == 4.0
    assert (arm["prompt_tokens"], arm["computed_tokens"], arm["rounds"]) == (2080, 1056, 3)


def test_busy_shares_are_of_the_makespans_and_unknown_where_no_step_was_seen() -> None:
    one = batch("kvtier", 1, 1.0, 2.0, read_bytes=1e9, computing_s=1.5)
    other = batch("load", 1, 1.0, 2.0, read_bytes=2e9)
    arms = cell_of(one, other)["arms"]
    assert (arms["kvtier"]["link_busy_fraction"], arms["load"]["link_busy_fraction"]) == (0.5, 1.0)
    assert arms["kvtier"]["compute_busy_fraction"] == 0.75
    assert arms["load"]["compute_busy_fraction"] is None


def test_gaps_of_all_rounds_are_taken_together() -> None:
    arm = cell_of(
        batch("kvtier", 1, 1.0, gaps_s=(0.01,) * 50), batch("kvtier", 2, 1.0, gaps_s=(0.5,))
    )["arms"]["kvtier"]
    assert arm["token_gap_ms"]["max"] == 500.0
    assert (arm["token_gap_ms"]["p50"], arm["token_gap_ms"]["n"]) == (10.0, 51)
    assert 10.0 < arm["token_gap_ms"]["p99"] <= 500.0


def test_ratios_pair_the_rounds() -> None:
    cell = cell_of(
        batch("kvtier", 1, 1.0, 3.0), batch("cake", 1, 4.0, 4.0),
        batch("kvtier", 2, 3.0, 3.0), batch("cake", 2, 4.0, 6.0),
    )  # fmt: skip
    ratio = cell["ratios"]["kvtier/cake"]
    assert (ratio["ttft_ms_mean"]["median"], ratio["ttft_ms_mean"]["n"]) == (0.55, 2)
    assert ratio["makespan_s"]["median"] == (0.75 + 0.5) / 2


def test_ours_is_held_against_the_better_of_the_papers_rules_in_each_measure() -> None:
    batches = (
        batch("kvtier", 1, 1.5, 2.1), batch("cake", 1, 1.0, 3.0), batch("cacheflow", 1, 2.0, 2.0),
    )  # fmt: skip
    cell = cell_of(*batches)
    assert cell["vs_best_paper"]["ttft_ms_mean"] == pytest.approx(0.9)
    assert cell["vs_best_paper"]["makespan_s"] == pytest.approx(1.05)
    missed = batch_results(log_of(*batches))["summary"]["missed"]
    assert len(missed) == 1
    assert "2 at once: makespan 1.050" in missed[0]


def stream(*arms: tuple[str, tuple[float, ...]]) -> dict[str, Any]:
    return batch_results(
        log_of(
            *[batch(arm, number, *times, poisson=1.0) for arm, times in arms for number in (1, 2)]
        )
    )


def test_a_stream_is_held_against_the_order_of_arrival() -> None:
    result = stream(("kvtier", (1.0, 5.0)), ("by-arrival", (3.0, 3.5)), ("cake", (1.0, 1.0)))
    (cell,) = result["cells"]
    assert cell["arms"]["kvtier"]["ttft_ms"]["max"] == 5000.0
    assert cell["vs_variants"] == {
        "by-arrival": {
            "ttft_ms_mean": pytest.approx(6.0 / 6.5),
            "ttft_ms_max": pytest.approx(5.0 / 3.5),
        }
    }
    assert result["summary"]["missed"] == [
        "2 at once as a stream of load 1: mean time to first token 0.923 of by-arrival, the aim is 0.88",
        "2 at once as a stream of load 1: longest time to first token 1.429 of by-arrival, the aim is 1.25",
    ]


def test_a_stream_that_meets_its_aims_or_has_no_order_of_arrival_misses_none() -> None:
    for arms in ((("by-arrival", (2.0, 2.5)),), (("cake", (1.0, 1.0)),), ()):
        assert stream(("kvtier", (1.0, 2.9)), *arms)["summary"]["missed"] == []


def test_what_the_bound_of_gaps_costs_is_ours_over_ours_without_it() -> None:
    cell = cell_of(batch("kvtier", 1, 2.0, 4.0), batch("stall-any", 1, 1.0, 4.0))
    assert cell["vs_variants"] == {"stall-any": {"ttft_ms_mean": 1.2, "ttft_ms_max": 1.0}}


def test_a_batch_that_was_made_again_counts_once_and_its_answers_twice() -> None:
    wrong = batch("kvtier", 1, 9.0, kind=DISCARDED, requests=(request(9.0, tokens=(1, 3)),))
    arm = cell_of(wrong, batch("kvtier", 1, 1.0))["arms"]["kvtier"]
    assert (arm["ttft_ms"]["mean"], arm["rounds"]) == (1000.0, 1)
    assert arm["equal_tokens_fraction"] == 0.5


def test_equality_beside_is_as_far_as_both_went() -> None:
    arms = cell_of(
        batch("cake", 1, 1.0, decoded=((5, 6, 7),)),
        batch("kvtier", 1, 1.0, decoded=((5, 6),)),
        batch("load", 1, 1.0, decoded=((5, 9, 7, 8),)),
    )["arms"]
    assert [arms[name]["beside_equal_fraction"] for name in ("cake", "kvtier", "load")] == [1, 1, 0]


def test_two_models_have_their_own_answers() -> None:
    mine = batch("kvtier", 1, 1.0, decoded=((5, 6),))
    other = dataclasses.replace(
        mine, model="n", requests=(request(1.0, tokens=(8, 9)),), decoded=((7, 7),)
    )
    log = log_of(mine)
    log.keep(dataclasses.replace(other, kind=PRIME, arm="compute"))
    log.keep(other)
    arms = [cell["arms"]["kvtier"] for cell in batch_results(log)["cells"]]
    assert [arm["equal_tokens_fraction"] for arm in arms] == [1.0, 1.0]
    assert [arm["beside_equal_fraction"] for arm in arms] == [1.0, 1.0]


def test_what_the_planner_answered_is_summed_over_rounds() -> None:
    arm = cell_of(
        batch("kvtier", 1, 1.0, answers={"both: split is faster": 2.0}),
        batch("kvtier", 2, 1.0, answers={"both: split is faster": 1.0, "declined: no room": 1.0}),
    )["arms"]["kvtier"]
    assert arm["answers"] == {"both: split is faster": 3.0, "declined: no room": 1.0}
