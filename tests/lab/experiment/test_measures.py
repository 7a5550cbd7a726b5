"""The figures: equality, tiers, bytes and ratios, computed from requests made up here."""

from __future__ import annotations

import pytest

from sgl_kvtier.lab.experiment.machine import CpuWatch
from sgl_kvtier.lab.experiment.measures import Round, arm_figures, left_out, ratios, sample_rows
from sgl_kvtier.lab.outside.client import Cached, Completion, Metrics
from sgl_kvtier.lab.outside.replay import Sample


def make_round(
    arm: str,
    number: int,
    ttfts_s: list[float | None],
    *,
    ids: tuple[int, ...] = (1, 2, 3),
    cached: Cached | None = None,
    before: str = "",
    after: str = "",
) -> Round:
    samples = []
    for turn, ttft in enumerate(ttfts_s, 1):
        if ttft is None:
            done = Completion(0.0, 1.0, error="HTTP 500")
        else:
            times = tuple(ttft + 0.01 * i for i in range(len(ids)))
            done = Completion(
                0.0, times[-1], ids, times, prompt_tokens=100, cached=cached or Cached()
            )
        samples.append(Sample("s", turn, done))
    return Round(
        arm, number, samples, Metrics.parse(before), Metrics.parse(after), wall_s=2.0, complete=True
    )


def figures(arm: str, rounds: list[Round]) -> dict:
    return arm_figures(arm, rounds, sample_rows(rounds))


def test_percentiles_are_over_the_requests_that_ended_well() -> None:
    result = figures("kvtier", [make_round("kvtier", 1, [0.1, 0.2, 0.3, None])])
    assert result["ttft_ms"]["p50"] == pytest.approx(200)
    assert result["ttft_ms"]["n"] == 3
    assert result["tpot_ms"]["p50"] == pytest.approx(10)
    assert result["e2e_ms"]["p50"] == pytest.approx(220)
    assert result["token_gap_ms"]["p99"] == pytest.approx(10)
    assert result["token_gap_ms"]["n"] == 6
    assert (result["requests"], result["errors"], result["error_messages"]) == (4, 1, ["HTTP 500"])
    assert result["throughput_tokens_per_s"] == pytest.approx(9 / 2)


def test_outputs_are_compared_with_what_recompute_answered_first() -> None:
    rounds = [
        make_round("kvtier", 1, [0.1, 0.1]),
        make_round("recompute", 1, [0.1, 0.1]),
        make_round("kvtier", 2, [0.1, 0.1], ids=(1, 2, 4)),
        make_round("recompute", 2, [0.1, None]),
    ]
    assert figures("kvtier", rounds)["equal_tokens_fraction"] == 0.5
    assert figures("recompute", rounds)["equal_tokens_fraction"] == 1.0
    equal = [row["equal"] for row in sample_rows(rounds)]
    assert equal == [True, True, None, None, False, False, True, None]


def test_without_recompute_nothing_is_said_about_equality() -> None:
    assert figures("kvtier", [make_round("kvtier", 1, [0.1])])["equal_tokens_fraction"] is None


def test_tiers_are_summed_and_responses_that_do_not_add_up_are_counted() -> None:
    rounds = [
        make_round("kvtier", 1, [0.1, 0.1], cached=Cached(16, 32, 48, 96)),
        make_round("kvtier", 2, [0.1], cached=Cached(16, 0, 0, 32)),
    ]
    result = figures("kvtier", rounds)
    assert result["cached_tokens"] == {"device": 48, "host": 64, "storage": 96}
    assert result["cached_tokens_check"]["requests_whose_tiers_do_not_sum"] == 1
    assert result["cached_tokens_check"]["requests_checked"] == 3


def test_storage_bytes_are_the_servers_tokens_times_its_bytes_per_token_within_the_rounds() -> None:
    before = (
        'sglang:backuped_tokens_total{tp_rank="0"} 100\nsglang:prefetched_tokens_total 10\n'
        "sglang:hicache_backup_tokens_total 100\nsglang:hicache_backup_bytes_total 1600\n"
    )
    after = (
        'sglang:backuped_tokens_total{tp_rank="0"} 150\nsglang:prefetched_tokens_total 40\n'
        "sglang:hicache_backup_tokens_total 200\nsglang:hicache_backup_bytes_total 3200\n"
    )
    result = figures("kvtier", [make_round("kvtier", 1, [0.1], before=before, after=after)])
    assert result["bytes"] == {"read": 30 * 16, "written": 50 * 16}


def test_an_arm_without_storage_moved_no_bytes_and_one_that_cannot_tell_says_so() -> None:
    assert figures("hicache", [make_round("hicache", 1, [0.1])])["bytes"] == {
        "read": 0,
        "written": 0,
    }
    unknown = make_round("kvtier", 1, [0.1], after="sglang:backuped_tokens_total 5\n")
    assert figures("kvtier", [unknown])["bytes"] == {"read": None, "written": None}


RANKS = 'tp_rank="0",pp_rank="0",dp_rank="0"'


def test_restorations_are_what_one_ranks_counters_grew_by() -> None:
    before = f'kvtier:restore_computed_tokens_total{{{RANKS}}} 100\nkvtier:restore_ended_total{{{RANKS},how="met"}} 1\n'
    after = (
        f"kvtier:restore_computed_tokens_total{{{RANKS}}} 400\n"
        f'kvtier:restore_loaded_tokens_total{{{RANKS},tier="host"}} 300\n'
        f'kvtier:restore_loaded_tokens_total{{{RANKS},tier="storage"}} 600\n'
        f'kvtier:restore_loaded_bytes_total{{{RANKS},link="storage-device"}} 5000\n'
        f'kvtier:restore_ended_total{{{RANKS},how="met"}} 3\n'
        f'kvtier:restore_ended_total{{{RANKS},how="aborted"}} 7\n'
        'kvtier:restore_computed_tokens_total{tp_rank="1",pp_rank="0",dp_rank="0"} 400\n'
    )
    found = figures("kvtier", [make_round("kvtier", 1, [0.1], before=before, after=after)])
    restore = found["restore"]
    assert (restore["computed_tokens"], restore["loaded_tokens"], restore["met"]) == (300, 900, 2)
    assert restore["computed_fraction"] == 0.25
    assert found["bytes"]["read"] == 5000


def test_a_server_without_restorations_has_no_figures_of_them() -> None:
    assert figures("hicache", [make_round("hicache", 1, [0.1])])["restore"] is None


def test_ratios_pair_the_same_round_of_two_arms() -> None:
    rounds = [
        make_round("kvtier", 1, [0.1]),
        make_round("hicache-file", 1, [0.2]),
        make_round("kvtier", 2, [0.4]),
        make_round("hicache-file", 2, [0.4]),
        make_round("kvtier", 3, [None]),
        make_round("hicache-file", 3, [0.4]),
    ]
    found = ratios(rounds, sample_rows(rounds), ["hicache-file", "kvtier"])
    assert found["kvtier/hicache-file"]["ttft_ms"]["median"] == pytest.approx(0.75)
    assert found["kvtier/hicache-file"]["ttft_ms"]["n"] == 2


def test_a_round_that_is_not_complete_makes_no_pair_and_is_named() -> None:
    rounds = [
        make_round(arm, number, [seconds])
        for number in (1, 2)
        for arm, seconds in (("kvtier", 0.1), ("hicache-file", 0.2))
    ]
    torn = make_round("kvtier", 3, [0.9])
    torn.complete = False
    rounds += [torn, make_round("hicache-file", 3, [0.1])]
    ratio = ratios(rounds, sample_rows(rounds), ["hicache-file", "kvtier"])["kvtier/hicache-file"][
        "ttft_ms"
    ]
    assert (ratio["n"], ratio["median"]) == (2, pytest.approx(0.5))
    assert left_out(rounds) == ["Not complete, and so in no ratio: round 3 of kvtier."]
    assert left_out(rounds[:2]) == []
    assert figures("kvtier", rounds)["ttft_ms"]["n"] == 3


def test_means_may_say_the_opposite_of_medians_and_stand_beside_them() -> None:
    rounds = [
        make_round("kvtier", 1, [0.2, 0.2, 0.2]),
        make_round("hicache-file", 1, [0.1, 0.1, 1.0]),
    ]
    found = ratios(rounds, sample_rows(rounds), ["hicache-file", "kvtier"])["kvtier/hicache-file"]
    assert found["ttft_ms"]["median"] == pytest.approx(2.0)
    assert found["ttft_ms_mean"]["median"] == pytest.approx(0.5)
    assert found["ttft_ms_p90"]["median"] == pytest.approx(0.2 / 0.82)


def test_later_turns_and_the_time_of_a_round_are_paired_too() -> None:
    rounds = [
        make_round("kvtier", 1, [9.0, 0.1, 0.3]),
        make_round("hicache-file", 1, [1.0, 0.8, 0.8]),
        make_round("kvtier", 2, [9.0, 0.1, 0.3]),
        make_round("hicache-file", 2, [1.0, 0.4, 0.4]),
    ]
    for one in rounds:
        one.wall_s = 1.0 if one.arm == "kvtier" else 4.0
    found = ratios(rounds, sample_rows(rounds), ["hicache-file", "kvtier"])["kvtier/hicache-file"]
    mean = found["ttft_later_ms_mean"]
    assert (mean["median"], mean["n"]) == (pytest.approx((0.25 + 0.5) / 2), 2)
    assert (mean["a"], mean["b"]) == (pytest.approx(200), pytest.approx(600))
    assert found["ttft_later_ms_p99"]["a"] == pytest.approx(298)
    assert found["ttft_later_ms"]["a"] == pytest.approx(200)
    assert found["wall_s"]["median"] == pytest.approx(0.25)
    assert found["throughput_tokens_per_s"]["median"] == pytest.approx(4.0)


def test_without_our_arm_there_are_no_ratios() -> None:
    rounds = [make_round("hicache", 1, [0.1])]
    assert ratios(rounds, sample_rows(rounds), ["hicache"]) == {}


def test_foreign_use_is_never_negative_even_if_our_processes_vanish() -> None:
    readings = iter([50.0, 1.0])
    share = CpuWatch(lambda: next(readings)).stop()
    assert share.own_cores >= 0
    assert share.foreign_cores >= 0
    assert share.wall_s > 0


def test_later_turns_are_summed_up_beside_all_of_them() -> None:
    result = figures("kvtier", [make_round("kvtier", 1, [9.0, 0.1, 0.3])])
    assert result["ttft_later_ms"]["mean"] == pytest.approx(200)
    assert result["ttft_later_ms"]["n"] == 2


STEP = {"step": "prefill", "at": 0.0, "seconds": 1.0, "late_s": 0.0, "gap_s": 0.02}


def test_an_arm_on_a_paced_device_says_how_well_it_kept_pace() -> None:
    one = make_round("kvtier", 1, [0.1])
    one.steps = [STEP, {"mismatch": "1 of 8", "at": 0.5, "rid": "r", "tier": "storage"}]
    pace = figures("kvtier", [one])["pace"]
    assert pace["overrun"] == pytest.approx(0.02)
    assert (pace["mismatches"], pace["valid"]) == (1, False)


def test_another_device_has_no_pace() -> None:
    assert "pace" not in figures("kvtier", [make_round("kvtier", 1, [0.1])])


def test_seconds_that_a_dilated_server_counted_are_divided() -> None:
    after = "kvtier:restore_parked_s_total 4.0\nkvtier:restore_computed_tokens_total 8\n"
    one = make_round("kvtier", 1, [0.1], after=after)
    one.dilation = 2.0
    assert one.counted("kvtier:restore_parked_s_total") == 2.0
    assert one.counted("kvtier:restore_computed_tokens_total") == 8.0


def test_on_a_paced_device_without_recompute_the_arms_are_compared_with_the_first() -> None:
    rounds = [
        make_round("hicache-file", 1, [0.1, 0.1]),
        make_round("kvtier", 1, [0.1, 0.1], ids=(1, 2, 4)),
    ]
    rounds[0].steps = rounds[1].steps = [STEP]
    assert figures("kvtier", rounds)["equal_tokens_fraction"] == 0.0
    assert figures("hicache-file", rounds)["equal_tokens_fraction"] is None
