"""Trials that fail, that are disturbed, and logs that are gone on from: nothing of what a server
did is lost sight of.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_restore import PAGE, RestoringServer
from test_restore_grid import SMALL, measure

from sgl_kvtier.lab.experiment.machine import CpuShare
from sgl_kvtier.lab.experiment.restore import trial as restore_trial
from sgl_kvtier.lab.experiment.restore.cells import (
    cells,
    failures,
    is_sound,
    results_of,
    summary_of,
)
from sgl_kvtier.lab.experiment.restore.log import (
    CURVE,
    FIRST,
    GRID,
    PRIME,
    RESIDENT,
    RestoreLog,
    Scale,
)
from sgl_kvtier.lab.experiment.restore.trial import DISCARDED, ServerCpu, Trial, Trials
from sgl_kvtier.lab.outside.client import Client

ONE = dataclasses.replace(SMALL, ratios=(1.0,), rounds=1)
LONG = 512 + PAGE


def failing(when: Callable[[RestoringServer], bool]) -> RestoringServer:
    """A server that refuses whole prompts when that is true of it."""
    server = RestoringServer()
    server.fail_when = lambda ids: "refuse" if len(ids) == LONG and when(server) else None
    return server


def result_of(log: RestoreLog) -> dict[str, Any]:
    found = results_of(log)
    return {**found, "notes": failures(log.trials, found["summary"]["errors"])}


def stock_in_the_round(server: RestoringServer) -> bool:
    """SGLang's own way with its timeout, once the grid has begun: the warm-up has asked for it once
    before.
    """
    asked = [state[:2] for state in server.states].count(("off", "timeout"))
    return (server.restore, server.prefetch) == ("off", "timeout") and asked > 0


def test_a_request_that_fails_is_counted_and_is_no_equal_answer() -> None:
    log = RestoreLog()
    measure(failing(stock_in_the_round), ONE, log)
    row = cells(log)[0]
    assert row["errors"] == {"compute": 0, "load": 0, "kvtier": 0, "stock_timeout": 1}
    assert row["rounds"] == {"compute": 1, "load": 1, "kvtier": 1, "stock_timeout": 0}
    assert row["ttft_ms"]["stock_timeout"] is None
    assert row["compared"] == 5
    assert row["equal_tokens_fraction"] == row["equal_logprobs_fraction"] == pytest.approx(0.8)
    found = result_of(log)
    assert (found["summary"]["errors"], found["summary"]["equal_tokens"]) == (1, False)
    assert not is_sound(found["summary"])
    assert any(
        note.startswith("1 requests failed") and "the prompt is too long" in note
        for note in found["notes"]
    )


def test_a_cell_in_which_everything_failed_is_a_cell() -> None:
    log = RestoreLog()
    log.add("scale", Scale("fake", 512, PAGE, 32768, 1.0))
    log.keep(Trial("fake", 512, PRIME, "compute", 0, 0.0, output_ids=(1,), logprobs=(-0.5,)))
    log.keep(Trial("fake", 512, GRID, "load", 1, 0.5, 1.0, LONG, error="HTTP 500"))
    row = cells(log)[0]
    assert (row["errors"], row["equal_tokens_fraction"], row["foreign_cores"]) == (
        {"load": 1},
        0.0,
        None,
    )
    assert row["ttft_ms"] == {"load": None}


def test_of_a_trial_that_was_made_again_only_the_last_attempt_counts(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    measure(failing(stock_in_the_round), ONE, RestoreLog.open(path, {}))
    again = RestoreLog.open(path, {})
    measure(RestoringServer(), ONE, again)
    row = cells(again)[0]
    assert (sum(row["errors"].values()), row["rounds"]["stock_timeout"]) == (0, 1)
    assert row["equal_tokens_fraction"] == 1.0
    assert is_sound(result_of(again)["summary"])
    assert sum(trial.error is not None for trial in again.trials) == 1, (
        "the failure stays in the log"
    )


@pytest.mark.parametrize(
    ("kind", "arm"), [(FIRST, "kvtier"), (RESIDENT, "compute"), (CURVE, "compute")]
)
def test_what_failed_beside_the_rounds_counts_and_is_made_again(kind: str, arm: str) -> None:
    log = RestoreLog()
    measure(RestoringServer(), ONE, log)
    place = next(
        place for place, trial in enumerate(log.trials) if (trial.kind, trial.arm) == (kind, arm)
    )
    log.trials[place] = dataclasses.replace(log.trials[place], error="HTTP 500", ttft_s=None)
    assert result_of(log)["summary"]["errors"] == 1
    before = len(log.of("fake", 512, GRID))
    measure(RestoringServer(), ONE, log)
    assert result_of(log)["summary"]["errors"] == 0
    assert len(log.of("fake", 512, GRID)) == before


def attempts(
    server: RestoringServer, shares: list[float], monkeypatch: pytest.MonkeyPatch
) -> tuple[Trial, list[Trial]]:
    """A trial beside which others use so many cores, attempt by attempt, and what was discarded."""
    left = iter(shares)

    class Watch:
        def __init__(self, _: object) -> None:
            pass

        def stop(self) -> CpuShare:
            return CpuShare(1.0, 0.0, next(left), 0.0)

    monkeypatch.setattr(restore_trial, "CpuWatch", Watch)
    discarded: list[Trial] = []

    async def go() -> Trial:
        async with server.up(), Client(server.url, admin_key="secret") as client:
            trials = Trials(
                client,
                ServerCpu(None),
                look_every_s=0.0,
                pace=lambda: 1.0,
                discard=discarded.append,
            )
            return await trials.run(Trial("fake", 512, GRID, "compute", 1, 0.5, 1.0), [1] * LONG)

    return asyncio.run(go()), discarded


def test_a_repeat_that_fails_is_the_trial_however_disturbed_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, discarded = attempts(
        failing(lambda server: len(server.requests) == 2), [1.0, 9.0], monkeypatch
    )
    assert kept.error is not None and (kept.repeats, kept.foreign_cores) == (1, 9.0)
    assert [(one.kind, one.foreign_cores, one.error) for one in discarded] == [
        (DISCARDED, 1.0, None)
    ]


def test_attempts_that_do_not_count_are_told_of_the_least_disturbed_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, discarded = attempts(RestoringServer(), [3.0, 1.0, 2.0], monkeypatch)
    assert (kept.kind, kept.foreign_cores, kept.repeats) == (GRID, 1.0, 2)
    assert [(one.kind, one.foreign_cores, one.load_over_compute) for one in discarded] == [
        (DISCARDED, 3.0, 1.0),
        (DISCARDED, 2.0, 1.0),
    ]


def test_a_discarded_answer_that_differs_is_seen_and_is_not_the_trial() -> None:
    log = RestoreLog()
    measure(RestoringServer(), ONE, log)
    row = cells(log)[0]
    good = next(trial for trial in log.of("fake", 512, GRID) if trial.arm == "kvtier")
    log.trials.remove(good)
    log.keep(dataclasses.replace(good, kind=DISCARDED, output_ids=(9, 9, 9, 9), ttft_s=1e6))
    assert not log.has(good)
    log.keep(good)
    worse = cells(log)[0]
    assert (worse["compared"], worse["equal_tokens_fraction"]) == (
        row["compared"] + 1,
        pytest.approx(5 / 6),
    )
    assert worse["ttft_ms"] == row["ttft_ms"]


def test_tokens_log_probs_and_failures_decide() -> None:
    equal = {"equal_tokens_fraction": 1.0, "equal_logprobs_fraction": 1.0, "errors": {"load": 0}}
    place = {
        "model": "fake",
        "length": 512,
        "load_over_compute": 8.0,
        "bound_fraction": None,
        "link_bound_fraction": None,
    }
    row = {
        **place,
        **equal,
        **dict.fromkeys(("speedup_vs_load", "speedup_vs_compute", "speedup_vs_best_single")),
    }
    assert is_sound(summary_of([row], [{"errors": 0}]))
    for worse in (
        {"equal_tokens_fraction": 0.9},
        {"equal_logprobs_fraction": 0.9},
        {"errors": {"load": 1}},
    ):
        assert not is_sound(summary_of([{**row, **worse}]))
    assert not is_sound(summary_of([row], [{"errors": 1}]))
    assert is_sound(summary_of([]))
