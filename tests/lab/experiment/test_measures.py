"""The figures: equality, tiers, bytes and ratios, computed from requests made up here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvtier.lab.experiment.load import Load, LoadOptions, load, undisturbed_tokens
from sgl_kvtier.lab.experiment.machine import CpuWatch
from sgl_kvtier.lab.experiment.measures import Round, arm_figures, left_out, ratios, sample_rows
from sgl_kvtier.lab.experiment.rounds import not_cold
from sgl_kvtier.lab.experiment.scenarios.compare import answers_of
from sgl_kvtier.lab.outside.client import Cached, Completion, Metrics
from sgl_kvtier.lab.outside.replay import ReplayOptions, Sample
from sgl_kvtier.lab.workload.encoder import ByteEncoder


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


def test_an_arm_without_storage_moved_no_bytes_and_one_that_cannot_tell_says_so() -> None:
    for after, moved in (
        ("sglang:num_requests_total 1\n", 0),
        ("sglang:backuped_tokens_total 5\n", None),
        ("vllm:num_requests_running 1\n", None),
        ("", None),
    ):
        one = make_round("hicache", 1, [0.1], after=after)
        assert figures("hicache", [one])["bytes"] == {"read": moved, "written": moved}


@pytest.mark.parametrize(
    ("cached", "tokens"), [(None, None), (Cached(total=40), None), (Cached(), 0)]
)
def test_tiers_that_no_response_names_are_not_known(
    cached: Cached | None, tokens: int | None
) -> None:
    one = make_round("server", 1, [0.1])
    done = replace(one.samples[0].completion, cached=cached)
    one.samples = [replace(one.samples[0], completion=done)]
    found = figures("server", [one])
    for name in ("cached_tokens", "hit_tokens_at_schedule"):
        assert found[name] == {"device": tokens, "host": tokens, "storage": tokens}


RANKS = 'tp_rank="0",pp_rank="0",dp_rank="0"'


def test_bytes_are_those_that_the_store_moved_where_it_says_so_and_else_all_that_were_offered() -> (
    None
):
    sglang = (
        "sglang:prefetched_tokens_total 100\nsglang:backuped_tokens_total 50\n"
        "sglang:hicache_backup_tokens_total 10\nsglang:hicache_backup_bytes_total 20\n"
    )
    ours = f"kvtier:read_bytes_total{{{RANKS}}} 230\nkvtier:written_bytes_total{{{RANKS}}} 30\n"
    for after, moved in (
        (sglang, {"read": 100 * 2, "written": 50 * 2}),
        (sglang + ours, {"read": 230, "written": 30}),
    ):
        made = make_round("kvtier", 1, [0.1], after=after)
        assert figures("kvtier", [made])["bytes"] == moved


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


def test_foreign_use_is_never_negative_even_if_our_processes_vanish() -> None:
    readings = iter([50.0, 1.0])
    share = CpuWatch(lambda: next(readings)).stop()
    assert share.own_cores >= 0
    assert share.foreign_cores >= 0
    assert share.wall_s > 0


STEP = {"step": "prefill", "at": 0.0, "seconds": 1.0, "late_s": 0.0, "gap_s": 0.02}


def test_an_arm_on_a_paced_device_says_how_well_it_kept_pace() -> None:
    one = make_round("kvtier", 1, [0.1])
    one.steps = [STEP, {"mismatch": "1 of 8", "at": 0.5, "rid": "r", "tier": "storage"}]
    pace = figures("kvtier", [one])["pace"]
    assert pace["overrun"] == pytest.approx(0.02)
    assert (pace["mismatches"], pace["valid"]) == (1, False)


def test_seconds_that_a_dilated_server_counted_are_divided() -> None:
    after = "kvtier:restore_parked_seconds_total 4.0\nkvtier:restore_computed_tokens_total 8\n"
    one = make_round("kvtier", 1, [0.1], after=after)
    one.dilation = 2.0
    assert one.counted("kvtier:restore_parked_seconds_total") == 2.0
    assert one.counted("kvtier:restore_computed_tokens_total") == 8.0


def test_on_a_paced_device_without_recompute_the_arms_are_compared_with_the_first() -> None:
    rounds = [
        make_round("hicache-file", 1, [0.1, 0.1]),
        make_round("kvtier", 1, [0.1, 0.1], ids=(1, 2, 4)),
    ]
    rounds[0].steps = rounds[1].steps = [STEP]
    assert figures("kvtier", rounds)["equal_tokens_fraction"] == 0.0
    assert figures("hicache-file", rounds)["equal_tokens_fraction"] is None


# The note on a round that did not begin with empty caches.


def sample(sent_s: float, first_s: float | None, cached: int) -> Sample:
    times = () if first_s is None else (first_s,)
    tiers = Cached(cached, 0, 0, cached)
    return Sample("a", 1, Completion(sent_s, 9.0, token_times_s=times, cached=tiers))


def notes(*samples: Sample) -> list[str]:
    one: Any = SimpleNamespace(arm="kvtier", number=2, samples=list(samples))
    return not_cold(one)


def test_the_first_answer_says_whether_a_round_was_cold() -> None:
    found = notes(sample(1.0, 2.0, 64), sample(2.0, 3.0, 0))
    assert found == [
        "kvtier, round 2: the first answer had 64 cached tokens; the round was not cold."
    ]


def test_who_was_sent_first_and_served_later_shares_pages_with_others() -> None:
    assert notes(sample(1.0, 5.0, 64), sample(1.1, 2.0, 0)) == []


def test_a_round_without_an_answer_says_nothing() -> None:
    assert notes() == notes(sample(1.0, None, 64)) == []


# What an emulated GPU answers where nothing is wrong, and the pool of the oracle.

PAGE = 16
OPTIONS = ReplayOptions(concurrency=None, gap_cap_s=1.0, most_output_tokens=4)


@pytest.fixture(scope="module")
def sessions() -> Load:
    options = LoadOptions("generated:swe-mini", sessions=3, turns=3, divisor=4)
    return load(options, ByteEncoder(512, 4))


def turns_of(load: Load) -> list[tuple[str, int]]:
    """All requests, turn by turn."""
    return [(one.session_id, turn) for turn in (1, 2, 3) for one in load.sessions]


def test_every_request_is_compared_with_what_computing_answers(sessions: Load) -> None:
    computed = answers_of(sessions, OPTIONS)
    assert computed is not None
    assert sorted(computed) == sorted(turns_of(sessions))
    wrong = turns_of(sessions)[4]
    samples = [
        Sample(*key, Completion(0.0, 1.0, output_ids=(1,) if key == wrong else computed[key]))
        for key in turns_of(sessions)
    ]
    rows = sample_rows([Round("kvtier", 1, samples, wall_s=1.0, complete=True)], computed)
    assert [(row["session"], row["turn"]) for row in rows if row["equal"] is False] == [wrong]
    assert sum(row["equal"] is True for row in rows) == len(samples) - 1
    assert answers_of(sessions, replace(OPTIONS, feedback="server")) is None
    assert answers_of(sessions, replace(OPTIONS, route="openai")) is None


def test_a_pool_for_everything_has_room_for_all_contexts(sessions: Load) -> None:
    tokens = undisturbed_tokens(sessions, PAGE)
    assert tokens % PAGE == 0
    assert tokens > sessions.context_tokens + sessions.longest_tokens
