"""The grid against a fake server: which arms, what order, what is stored, continued, refused, and
what the cells say.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from fake_restore import PAGE, PAGE_BYTES, RestoringServer

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.restore.cells import cells, summary_of
from sgl_kvtier.lab.experiment.restore.log import GRID, RestoreLog
from sgl_kvtier.lab.experiment.restore.plan import RestorePlan, curve_rounds, order, planned
from sgl_kvtier.lab.experiment.restore.run import Grid
from sgl_kvtier.lab.experiment.restore.trial import ServerCpu, Trial, Trials
from sgl_kvtier.lab.outside.client import Client

SMALL = RestorePlan("fake", page=PAGE, chunk=256, lengths=(512,), ratios=(0.5, 1.0), rounds=2)


def measure(server: RestoringServer, options: RestorePlan, log: RestoreLog) -> None:
    async def go() -> None:
        async with server.up(), Client(server.url, admin_key="secret", timeout_s=30) as client:
            trials = Trials(
                client,
                ServerCpu(None),
                quiet_foreign=1e9,
                look_every_s=0.0,
                pace=lambda: 1.0,
                discard=log.keep,
            )
            await Grid(options, trials, log).run()

    asyncio.run(go())


def test_every_arm_is_measured_at_every_bandwidth_in_every_round() -> None:
    log = RestoreLog()
    measure(RestoringServer(), SMALL, log)
    made = [(t.round, t.load_over_compute, t.arm) for t in log.of("fake", 512, GRID)]
    assert made == [(n, ratio, arm) for n in (1, 2) for ratio, _, arm in order(SMALL, n)]
    assert made[-1] == (2, 0.5, "compute")


def test_an_arm_is_two_settings_of_the_server_and_the_bandwidth_comes_from_the_ratio() -> None:
    server, log = RestoringServer(), RestoreLog()
    measure(server, SMALL, log)
    scale = log.scale("fake", 512)
    assert scale is not None
    assert scale.prefix_bytes == 512 // PAGE * PAGE_BYTES
    last = server.states[-4:]  # the last round goes backwards and ends with the lowest ratio
    assert [(restore, prefetch) for restore, prefetch, _ in last] == [
        ("auto", "timeout"), ("off", "timeout"), ("off", "wait_complete"), ("compute", "timeout"),
    ]  # fmt: skip
    assert {gbps for _, _, gbps in last} == {scale.gbps(0.5)}
    assert scale.gbps(0.5) == pytest.approx(2 * scale.gbps(1.0))


def test_caches_are_emptied_before_every_trial_but_those_of_a_resident_prompt() -> None:
    log = RestoreLog()
    measure(RestoringServer(), SMALL, log)
    assert all(t.cached is not None and t.cached.device == 0 for t in log.of("fake", 512, GRID))
    resident = log.of("fake", 512, "resident")
    assert [t.cached.device for t in resident if t.cached is not None] == [512, 512, 512]


def test_an_arm_that_estimates_the_bandwidth_restores_once_before_it_is_measured() -> None:
    log = RestoreLog()
    measure(RestoringServer(), SMALL, log)
    first = [(t.round, t.load_over_compute, t.arm) for t in log.of("fake", 512, "first")]
    assert first == [(1, 0.5, "kvtier"), (1, 1.0, "kvtier"), (2, 1.0, "kvtier"), (2, 0.5, "kvtier")]
    assert all(
        row["first_ttft_ms"]["kvtier"] > 0 and row["first_ttft_ms"]["load"] is None
        for row in cells(log)
    )


def test_a_trial_on_a_slow_machine_is_repeated_and_the_least_disturbed_kept() -> None:
    paces = iter(
        [1.0, 1.0, 3.0, 3.0, 4.0, 1.0, 1.1, 1.0]
    )  # before and after: the second trial is disturbed twice

    async def go() -> list[Trial]:
        server = RestoringServer()
        async with server.up(), Client(server.url, admin_key="secret") as client:
            trials = Trials(
                client,
                ServerCpu(None),
                quiet_foreign=1e9,
                look_every_s=0.0,
                pace=lambda: next(paces),
            )
            base = Trial("fake", 64, GRID, "compute", 1, 0.0)
            return [await trials.run(base, [1] * 64) for _ in range(2)]

    quiet, disturbed = asyncio.run(go())
    assert (quiet.repeats, disturbed.repeats) == (0, 2)
    assert disturbed.slowness == pytest.approx(1.1)


def test_a_restored_answer_that_differs_is_counted() -> None:
    log = RestoreLog()
    measure(RestoringServer(wrong_when_loaded=True), SMALL, log)
    for row in cells(log):
        assert (
            row["equal_tokens_fraction"] == 0.2
        )  # two of ten: only the arm that computes is right
        assert row["equal_logprobs_fraction"] == 0.2
    assert summary_of(cells(log))["equal_tokens"] is False


def test_a_run_is_continued_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first = RestoreLog.open(path, {})
    measure(RestoringServer(), dataclasses.replace(SMALL, rounds=1), first)
    continued = RestoreLog.open(path, {})
    assert continued.continued == len(first.trials) + len(first.scales)
    assert continued.trials == first.trials
    measure(RestoringServer(), SMALL, continued)
    made = [(t.round, t.load_over_compute, t.arm) for t in continued.of("fake", 512, GRID)]
    assert sorted(made) == sorted(
        (n, ratio, arm) for n in (1, 2) for ratio, _, arm in order(SMALL, n)
    )
    assert len(continued.scales) == 1, "the bandwidths of a continued run are those it began with"


def test_a_length_that_is_complete_is_not_measured_again() -> None:
    server, log = RestoringServer(), RestoreLog()
    measure(server, SMALL, log)
    asked = len(server.requests)
    again = RestoringServer()
    measure(again, SMALL, log)
    assert asked > 0
    assert again.requests == []


def test_slow_arms_are_measured_in_the_first_rounds_only() -> None:
    log = RestoreLog()
    options = dataclasses.replace(SMALL, rounds=3, slow_rounds=1)
    for number in (1, 2):
        for ratio, _, arm in order(options, number):
            slow = ratio == 1.0 and arm == "load"
            one = Trial("fake", 512, GRID, arm, number, 1.0, ratio, ttft_s=9.0 if slow else 1.0)
            if not (slow and number == 2):
                log.keep(one)
    grid = Grid(options, Trials(Client("http://nowhere"), ServerCpu(None)), log)
    spared = [
        (r, a)
        for r, _, a in order(options, 3)
        if grid._is_spared(Trial("fake", 512, GRID, a, 3, 1.0, r))
    ]
    assert spared == [(1.0, "load")]
    assert not any(
        grid._is_spared(Trial("fake", 512, GRID, a, 1, 1.0, r)) for r, _, a in order(options, 1)
    )


def test_a_server_that_refuses_a_setting_is_an_error_that_names_it() -> None:
    with pytest.raises(BenchError, match=r"kvtier\.policy\.restore"):
        measure(RestoringServer(refuses=("kvtier.policy.restore",)), SMALL, RestoreLog())


def test_a_server_that_brings_nothing_back_is_refused() -> None:
    class Forgetful(RestoringServer):
        async def cached(self, input_ids: list[int]) -> dict[str, int]:
            await super().cached(input_ids)
            return {"device": 0, "host": 0, "storage": 0}

    with pytest.raises(BenchError, match="0 tokens of a stored prefix of 512 tokens"):
        measure(Forgetful(), SMALL, RestoreLog())


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
        assert row["bound_ms"] is row["link_bound_ms"] is row["tstar_ms"] is None
        assert row["speedup_vs_best_single"] is not None

    class Forgetful(Holed):
        async def cached(self, input_ids: list[int]) -> dict[str, int]:
            return await super().cached(input_ids) | {"storage": 0}

    with pytest.raises(BenchError, match="0 tokens of a stored prefix"):
        measure(Forgetful(), dataclasses.replace(SMALL, hole=True), RestoreLog())


def test_what_is_planned_is_what_is_made() -> None:
    log = RestoreLog()
    measure(RestoringServer(), SMALL, log)
    assert all(log.has(trial) for trial in planned(SMALL, 512))
    assert curve_rounds(1) == [1]
    assert curve_rounds(5) == [1, 3, 5]


def test_a_cell_that_misses_an_aim_is_named() -> None:
    row = {
        "model": "fake", "length": 512, "load_over_compute": 1.0, "speedup_vs_load": 1.9, "speedup_vs_compute": 1.8,
        "speedup_vs_best_single": 1.8, "bound_fraction": 0.96, "link_bound_fraction": 0.9, "errors": {}, "equal_tokens_fraction": 1.0,
        "equal_logprobs_fraction": 1.0,
    }  # fmt: skip
    missed = summary_of([row])["missed"]
    assert len(missed) == 1
    assert "1.800 times as fast as either resource alone, the aim is 1.85" in missed[0]
    assert summary_of([{**row, "speedup_vs_compute": 1.85}])["missed"] == []
