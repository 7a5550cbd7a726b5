"""The grid against a fake server: which arms, what order, what is stored, continued, repeated and
refused, and what the cells say of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_restore import PAGE, PAGE_BYTES, RestoringServer, measure, trials_of

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.machine import CpuShare
from sgl_kvtier.lab.experiment.restore import trial as restore_trial
from sgl_kvtier.lab.experiment.restore.bound import (
    ComputeCurve,
    best_split,
    curve_points,
    optimal,
    request_seconds,
)
from sgl_kvtier.lab.experiment.restore.cells import (
    cells,
    failures,
    is_sound,
    results_of,
    summary_of,
)
from sgl_kvtier.lab.experiment.restore.plan import RestorePlan, order
from sgl_kvtier.lab.experiment.restore.trial import (
    CURVE,
    DISCARDED,
    FIRST,
    GRID,
    PRIME,
    RESIDENT,
    RestoreLog,
    Scale,
    Trial,
)
from sgl_kvtier.lab.outside.client import Client

SMALL = RestorePlan("fake", page=PAGE, chunk=256, lengths=(512,), ratios=(0.5, 1.0), rounds=2)
ONE = dataclasses.replace(SMALL, ratios=(1.0,), rounds=1)
LONG = 512 + PAGE


def made(log: RestoreLog, kind: str = GRID) -> list[tuple[int, float | None, str]]:
    return [(t.round, t.load_over_compute, t.arm) for t in log.of("fake", 512, kind)]


@pytest.fixture(scope="module")
def measured() -> tuple[RestoringServer, RestoreLog]:
    server, log = RestoringServer(), RestoreLog()
    measure(server, SMALL, log)
    return server, log


def test_every_arm_is_measured_at_every_bandwidth_and_every_second_round_goes_backwards(
    measured: tuple[RestoringServer, RestoreLog],
) -> None:
    found = made(measured[1])
    assert found == [(n, ratio, arm) for n in (1, 2) for ratio, _, arm in order(SMALL, n)]
    assert found[-1] == (2, 0.5, "compute")


def test_an_arm_is_two_settings_of_the_server_and_the_bandwidth_comes_from_the_ratio(
    measured: tuple[RestoringServer, RestoreLog],
) -> None:
    server, log = measured
    scale = log.scale("fake", 512)
    assert scale is not None
    assert scale.prefix_bytes == 512 // PAGE * PAGE_BYTES
    last = server.states[-4:]  # the last round goes backwards and ends with the lowest ratio
    assert [(restore, prefetch) for restore, prefetch, _ in last] == [
        ("auto", "timeout"), ("off", "timeout"), ("off", "wait_complete"), ("compute", "timeout"),
    ]  # fmt: skip
    assert {gbps for _, _, gbps in last} == {scale.gbps(0.5)}
    assert scale.gbps(0.5) == pytest.approx(2 * scale.gbps(1.0))


def test_caches_are_emptied_before_every_trial_but_those_of_a_resident_prompt(
    measured: tuple[RestoringServer, RestoreLog],
) -> None:
    log = measured[1]
    assert all(t.cached is not None and t.cached.device == 0 for t in log.of("fake", 512, GRID))
    resident = log.of("fake", 512, RESIDENT)
    assert [t.cached.device for t in resident if t.cached is not None] == [512, 512, 512]


def test_an_arm_that_estimates_the_bandwidth_restores_once_before_it_is_measured(
    measured: tuple[RestoringServer, RestoreLog],
) -> None:
    log = measured[1]
    assert made(log, FIRST) == [
        (1, 0.5, "kvtier"), (1, 1.0, "kvtier"), (2, 1.0, "kvtier"), (2, 0.5, "kvtier"),
    ]  # fmt: skip
    for row in cells(log):
        assert row["first_ttft_ms"]["kvtier"] > 0
        assert row["first_ttft_ms"]["load"] is None


def test_a_restored_answer_that_differs_is_counted() -> None:
    log = RestoreLog()
    measure(RestoringServer(wrong_when_loaded=True), SMALL, log)
    for row in cells(log):
        # two of ten: only the arm that computes is right
        assert row["equal_tokens_fraction"] == row["equal_logprobs_fraction"] == 0.2
    assert not is_sound(summary_of(cells(log)))


def test_a_run_is_continued_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first = RestoreLog.open(path, {})
    measure(RestoringServer(), dataclasses.replace(SMALL, rounds=1), first)
    continued = RestoreLog.open(path, {})
    assert continued.continued == len(first.trials) + len(first.scales)
    assert continued.trials == first.trials
    measure(RestoringServer(), SMALL, continued)
    assert sorted(made(continued)) == sorted(
        (n, ratio, arm) for n in (1, 2) for ratio, _, arm in order(SMALL, n)
    )
    assert len(continued.scales) == 1, "the bandwidths of a continued run are those it began with"


def test_slow_arms_are_measured_in_the_first_rounds_only() -> None:
    class Slow(RestoringServer):
        async def cached(self, input_ids: list[int]) -> dict[str, int]:
            await asyncio.sleep(0.5 if self.prefetch == "wait_complete" else 0.05)
            return await super().cached(input_ids)

    log = RestoreLog()
    measure(Slow(), dataclasses.replace(ONE, rounds=2, slow_rounds=1), log)
    assert [arm for number, _, arm in made(log) if number == 1].count("load") == 1
    assert "load" not in [arm for number, _, arm in made(log) if number == 2]
    assert "compute" in [arm for number, _, arm in made(log) if number == 2]


def test_a_server_that_refuses_a_setting_is_an_error_that_names_it() -> None:
    with pytest.raises(BenchError, match=r"policy\.restore is fixed"):
        measure(RestoringServer(refuses=("restore",)), SMALL, RestoreLog())


class Holed(RestoringServer):
    """The first page is gone whenever the store is asked: SGLang's own load brings nothing."""

    async def cached(self, input_ids: list[int]) -> dict[str, int]:
        found = await super().cached(input_ids)
        return found | ({"storage": 0} if self.restore == "off" else {})


def test_with_a_hole_nothing_is_loaded_by_sglang_and_there_is_no_bound() -> None:
    log = RestoreLog()
    measure(Holed(), dataclasses.replace(SMALL, hole=True), log)
    for row in cells(log):
        assert row["loaded_tokens"] == {"compute": 0, "load": 0, "stock_timeout": 0, "kvtier": 256}
        assert row["bound_ms"] is row["bound_fraction"] is None
        assert row["speedup_vs_best_single"] is not None


@pytest.mark.parametrize("hole", [False, True])
def test_a_server_that_brings_nothing_back_is_refused(hole: bool) -> None:
    class Forgetful(RestoringServer):
        async def cached(self, input_ids: list[int]) -> dict[str, int]:
            return await super().cached(input_ids) | {"storage": 0}

    with pytest.raises(BenchError, match="0 tokens of a stored prefix of 512 tokens"):
        measure(Forgetful(), dataclasses.replace(SMALL, hole=hole), RestoreLog())


# What fails


def failing(when: Callable[[RestoringServer], bool]) -> RestoringServer:
    """A server that refuses whole prompts when that is true of it."""
    server = RestoringServer()
    server.fail_when = lambda ids: "refuse" if len(ids) == LONG and when(server) else None
    return server


def stock_in_the_round(server: RestoringServer) -> bool:
    """SGLang's own way with its timeout, once the grid has begun: the warm-up has asked for it once
    before.
    """
    asked = [state[:2] for state in server.states].count(("off", "timeout"))
    return (server.restore, server.prefetch) == ("off", "timeout") and asked > 0


def test_a_request_that_fails_is_counted_and_is_no_equal_answer_until_it_is_made_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.jsonl"
    log = RestoreLog.open(path, {})
    measure(failing(stock_in_the_round), ONE, log)
    (row,) = cells(log)
    assert row["errors"] == {"compute": 0, "load": 0, "kvtier": 0, "stock_timeout": 1}
    assert row["rounds"] == {"compute": 1, "load": 1, "kvtier": 1, "stock_timeout": 0}
    assert row["ttft_ms"]["stock_timeout"] is None
    assert row["compared"] == 5
    assert row["equal_tokens_fraction"] == row["equal_logprobs_fraction"] == pytest.approx(0.8)
    summary = results_of(log)["summary"]
    assert (summary["errors"], is_sound(summary)) == (1, False)
    (note,) = failures(log.trials, 1)
    assert note.startswith("1 requests failed") and "the prompt is too long" in note

    again = RestoreLog.open(path, {})
    measure(RestoringServer(), ONE, again)
    (row,) = cells(again)
    assert (sum(row["errors"].values()), row["rounds"]["stock_timeout"]) == (0, 1)
    assert row["equal_tokens_fraction"] == 1.0
    assert is_sound(results_of(again)["summary"])
    assert sum(trial.error is not None for trial in again.trials) == 1, "the failure stays there"


def test_a_cell_in_which_everything_failed_is_a_cell() -> None:
    log = RestoreLog()
    log.add("scale", Scale("fake", 512, PAGE, 32768, 1.0))
    log.keep(Trial("fake", 512, PRIME, "compute", 0, 0.0, output_ids=(1,), logprobs=(-0.5,)))
    log.keep(Trial("fake", 512, GRID, "load", 1, 0.5, 1.0, LONG, error="HTTP 500"))
    (row,) = cells(log)
    assert (row["errors"], row["ttft_ms"]) == ({"load": 1}, {"load": None})
    assert (row["equal_tokens_fraction"], row["foreign_cores"]) == (0.0, None)


@pytest.mark.parametrize(
    ("kind", "arm"), [(FIRST, "kvtier"), (RESIDENT, "compute"), (CURVE, "compute")]
)
def test_what_failed_beside_the_rounds_counts_and_is_made_again(kind: str, arm: str) -> None:
    log = RestoreLog()
    measure(RestoringServer(), ONE, log)
    place = [(trial.kind, trial.arm) for trial in log.trials].index((kind, arm))
    log.trials[place] = dataclasses.replace(log.trials[place], error="HTTP 500", ttft_s=None)
    assert results_of(log)["summary"]["errors"] == 1
    before = len(log.of("fake", 512, GRID))
    measure(RestoringServer(), ONE, log)
    assert results_of(log)["summary"]["errors"] == 0
    assert len(log.of("fake", 512, GRID)) == before


# What is disturbed


def attempts(
    server: RestoringServer,
    monkeypatch: pytest.MonkeyPatch,
    shares: tuple[float, ...] = (0.0, 0.0, 0.0),
    paces: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
) -> tuple[Trial, list[Trial]]:
    """A trial beside which others use so many cores, attempt by attempt, on a machine as slow as
    that before and after each; and what was discarded.
    """
    left, slow, discarded = iter(shares), iter(paces), list[Trial]()

    class Watch:
        def __init__(self, _: object) -> None:
            pass

        def stop(self) -> CpuShare:
            return CpuShare(1.0, 0.0, next(left), 0.0)

    monkeypatch.setattr(restore_trial, "CpuWatch", Watch)

    async def go() -> Trial:
        async with server.up(), Client(server.url, admin_key="secret") as client:
            quiet = {"quiet_foreign": 0.1, "discard": discarded.append}
            trials = trials_of(client, pace=lambda: next(slow), **quiet)
            return await trials.run(Trial("fake", 512, GRID, "compute", 1, 0.5, 1.0), [1] * LONG)

    return asyncio.run(go()), discarded


def test_a_trial_that_others_disturb_is_repeated_and_the_least_disturbed_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, discarded = attempts(RestoringServer(), monkeypatch, shares=(3.0, 1.0, 2.0))
    assert (kept.kind, kept.foreign_cores, kept.repeats) == (GRID, 1.0, 2)
    assert [(one.kind, one.foreign_cores, one.load_over_compute) for one in discarded] == [
        (DISCARDED, 3.0, 1.0),
        (DISCARDED, 2.0, 1.0),
    ]


def test_a_trial_on_a_slow_machine_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = attempts(RestoringServer(), monkeypatch, paces=(1.0, 3.0, 3.0, 4.0, 1.0, 1.1))
    assert (kept.repeats, kept.slowness) == (2, pytest.approx(1.1))


def test_a_repeat_that_fails_is_the_trial_however_disturbed_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = failing(lambda server: len(server.requests) == 2)
    kept, discarded = attempts(server, monkeypatch, shares=(1.0, 9.0))
    assert kept.error is not None and (kept.repeats, kept.foreign_cores) == (1, 9.0)
    assert [(one.foreign_cores, one.error) for one in discarded] == [(1.0, None)]


def test_a_discarded_answer_that_differs_is_seen_and_is_not_the_trial() -> None:
    log = RestoreLog()
    measure(RestoringServer(), ONE, log)
    (row,) = cells(log)
    good = next(trial for trial in log.of("fake", 512, GRID) if trial.arm == "kvtier")
    log.keep(dataclasses.replace(good, kind=DISCARDED, output_ids=(9, 9, 9, 9), ttft_s=1e6))
    (worse,) = cells(log)
    assert worse["compared"] == row["compared"] + 1
    assert worse["equal_tokens_fraction"] == pytest.approx(5 / 6)
    assert worse["ttft_ms"] == row["ttft_ms"]


# The bound that a restoration is measured against.

STRAIGHT = ComputeCurve({4096: 2.0}, 0.0)


def test_with_a_straight_curve_the_optimum_is_the_half() -> None:
    best = optimal(4096, 1, STRAIGHT, load_only_s=2.0, resident_s=0.0)
    assert best.seconds == pytest.approx(1.0, rel=1e-3)
    assert best.computed_tokens == pytest.approx(2048, abs=1)


def test_with_dearer_tokens_at_the_back_the_optimum_computes_more_than_half() -> None:
    curve = ComputeCurve({n: 2.0 * (n / 4096) ** 2 for n in range(512, 4097, 512)}, 0.0)
    best = optimal(4096, 16, curve, load_only_s=2.0, resident_s=0.0)
    assert best.seconds < 1.0
    assert best.computed_tokens > 2048


def test_what_follows_the_prefix_is_part_of_every_split() -> None:
    best = optimal(4096, 1, STRAIGHT, load_only_s=2.3, resident_s=0.3)
    assert best.seconds == pytest.approx(1.0 + 0.3, rel=1e-3)


def test_the_curve_is_straight_between_points_and_loses_what_the_request_costs() -> None:
    curve = ComputeCurve({512: 1.1, 1024: 3.1}, request_s=0.1)
    found = [curve.seconds(tokens) for tokens in (0, 256, 768, 1280)]
    assert found == pytest.approx([0.0, 0.5, 2.0, 4.0])


def test_the_best_split_takes_the_measured_times_of_both() -> None:
    best = best_split(100, 10, lambda n: n * 1.0, lambda n: n * 4.0, rest_s=2.0)
    assert (best.computed_tokens, best.seconds) == (80, 82.0)


def test_a_request_costs_what_is_left_of_one_page_after_a_decoding_step() -> None:
    assert request_seconds([0.03, 0.05, 0.04], [0.01, 0.03, 0.02]) == pytest.approx(0.02)
    assert request_seconds([0.01], [0.02]) == 0.0


@pytest.mark.parametrize(
    ("prefix", "points"),
    [
        (2048, [512, 1024, 1536, 2048]),
        (8192, [1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192]),
        (1000, [512, 1000]),
        (256, [256]),
    ],
)
def test_the_curve_is_measured_at_multiples_of_the_chunk_and_at_the_end(
    prefix: int, points: list[int]
) -> None:
    assert curve_points(prefix, 512) == points
