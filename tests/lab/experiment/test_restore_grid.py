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
from sgl_kvtier.lab.experiment.restore.cells import cells, curves, results_of, summary_of
from sgl_kvtier.lab.experiment.restore.fluctuate import Fluctuation, FluctuationOptions
from sgl_kvtier.lab.experiment.restore.grid import (
    Grid,
    GridOptions,
    curve_rounds,
    order,
    planned,
    prompt,
)
from sgl_kvtier.lab.experiment.restore.log import GRID, RestoreLog
from sgl_kvtier.lab.experiment.restore.trial import ServerCpu, Trial, Trials
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.pages.restore.grid import restore_page, restore_tables

SMALL = GridOptions("fake", page=PAGE, chunk=256, lengths=(512,), ratios=(0.5, 1.0), rounds=2)


def measure(
    server: RestoringServer, options: GridOptions, log: RestoreLog, traces: int = 0
) -> None:
    async def go() -> None:
        async with server.up(), Client(server.url, admin_key="secret", timeout_s=30) as client:
            trials = Trials(
                client,
                ServerCpu(None),
                quiet_foreign=1e9,
                unwatched_s=0.0,
                pace=lambda: 1.0,
                discard=log.keep,
            )
            await Grid(options, trials, log).run()
            scale = log.scale("fake", options.lengths[0])
            if traces and scale is not None:
                wanted = FluctuationOptions(traces=traces, rounds=2)
                ids = prompt(options, scale.length)
                await Fluctuation(wanted, trials, log, scale, ids).run()

    asyncio.run(go())


def test_every_arm_is_measured_at_every_bandwidth_in_every_round() -> None:
    log = RestoreLog()
    measure(RestoringServer(), SMALL, log)
    made = [(t.round, t.load_over_compute, t.arm) for t in log.of("fake", 512, GRID)]
    assert made == [(n, ratio, arm) for n in (1, 2) for ratio, arm in order(SMALL, n)]
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


def test_the_cells_say_how_much_came_from_storage_in_which_arm() -> None:
    log = RestoreLog()
    measure(RestoringServer(), SMALL, log)
    rows = cells(log)
    assert [row["load_over_compute"] for row in rows] == [0.5, 1.0]
    for row in rows:
        assert row["loaded_tokens"] == {
            "compute": 0,
            "load": 512,
            "stock_timeout": 512,
            "kvtier": 256,
        }
        assert row["rounds"] == dict.fromkeys(row["loaded_tokens"], 2)
        assert row["equal_tokens_fraction"] == row["equal_logprobs_fraction"] == 1.0
        assert row["link_bound_ms"] <= row["bound_ms"]
        assert row["errors"] == dict.fromkeys(row["loaded_tokens"], 0)
        assert row["speedup_vs_best_single"] <= max(
            row["speedup_vs_load"], row["speedup_vs_compute"]
        )
    assert [point["tokens"] for point in curves(log)[0]["points"]] == [256, 512]


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
                unwatched_s=0.0,
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
    assert sorted(made) == sorted((n, ratio, arm) for n in (1, 2) for ratio, arm in order(SMALL, n))
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
        for ratio, arm in order(options, number):
            slow = ratio == 1.0 and arm == "load"
            one = Trial("fake", 512, GRID, arm, number, 1.0, ratio, ttft_s=9.0 if slow else 1.0)
            if not (slow and number == 2):
                log.keep(one)
    grid = Grid(options, Trials(Client("http://nowhere"), ServerCpu(None)), log)
    spared = [
        (r, a)
        for r, a in order(options, 3)
        if grid._is_spared(Trial("fake", 512, GRID, a, 3, 1.0, r))
    ]
    assert spared == [(1.0, "load")]
    assert not any(
        grid._is_spared(Trial("fake", 512, GRID, a, 1, 1.0, r)) for r, a in order(options, 1)
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


def test_fluctuation_is_measured_against_the_best_fixed_split() -> None:
    server, log = RestoringServer(), RestoreLog()
    measure(server, SMALL, log, traces=1)
    assert [(c["kind"], c["trace"]) for c in log.fluctuations] == [
        ("bandwidth", 0),
        ("compute", 0),
        ("both", 0),
    ]
    for cell in log.fluctuations:
        assert len(cell["over_hindsight_each"]) == 2
        assert cell["hindsight_ms"] > 0
        assert cell["equal_tokens_fraction"] == 1.0
        assert cell["over_fixed"] == pytest.approx(
            cell["kvtier_beside_fixed_ms"] / cell["fixed_ms"]
        )
        assert cell["fixed_ms"] == cell["fixed_splits_ms"][f"{cell['fixed_computed_share']:.4f}"]
        assert {f"{part / 8:.4f}" for part in range(9)} <= set(cell["fixed_splits_ms"])
        assert {name: len(traces) for name, traces in cell["applied"].items()} == {
            "kvtier": 2,
            "kvtier_beside_fixed": 2,
            "fixed": 2,
        }
        assert all(
            one["starts_s"][0] == 0.0 and one["gbps"][0] == cell["gbps"][0]
            for each in cell["applied"].values()
            for one in each
        )
        assert cell["errors"] == {"compute": 0, "load": 0, "kvtier": 0, "both": 0}
    assert {part / 8 for part in range(9)} <= set(server.splits)
    assert server.splits[-1] == -1.0 or log.trials[-1].fixed_split == server.splits[-1]
    assert len(set(log.fluctuations[0]["gbps"])) > 1
    assert len(log.fluctuations[1]["gbps"]) == 1
    measure(server, SMALL, log, traces=1)
    assert len(log.fluctuations) == 3, "traces that are in the log are not measured again"


def test_of_a_trace_measured_twice_the_log_gives_the_last(tmp_path: Path) -> None:
    log = RestoreLog.open(tmp_path / "log", {})
    for kind, ms in (("compute", 1.0), ("both", 2.0), ("compute", 3.0)):
        log.add(
            "fluctuation",
            {"model": "m", "length": 512, "kind": kind, "trace": 0, "hindsight_ms": ms},
        )
    for one in (log, RestoreLog.open(log.path, {})):
        assert [(cell["kind"], cell["hindsight_ms"]) for cell in one.fluctuations] == [
            ("both", 2.0),
            ("compute", 3.0),
        ]


def test_tables_and_page_are_made_from_the_result_alone() -> None:
    log = RestoreLog()
    measure(RestoringServer(), SMALL, log, traces=1)
    result = {**results_of(log), "settings": {"slow_rounds": 2}, "notes": ["a note"]}
    titles = [table.title for table in restore_tables(result)]
    assert len(titles) == 4
    assert len(restore_tables(result)[0].rows) == 2
    page = restore_page(result)
    assert "<svg" in page or "need matplotlib" in page
    assert "a note" in page


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
