"""A bench that cannot go on reports what it had measured, and only then fails; and nothing
interrupts a report.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment import comparison, frame
from sgl_kvtier.lab.experiment.frame import undisturbed, work_folder
from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.experiment.restore.server import Target
from sgl_kvtier.lab.experiment.restore.trial import GRID, PRIME, RestoreLog, Scale, Trial
from sgl_kvtier.lab.experiment.rounds import Outcome, Plan
from sgl_kvtier.lab.experiment.scenarios.restore import Restoring
from sgl_kvtier.lab.outside.client import Completion
from sgl_kvtier.lab.outside.replay import Sample
from sgl_kvtier.lab.outside.server import end_on_signals
from sgl_kvtier.lab.stress.server import command as fuzz_command
from sgl_kvtier.lab.stress.server.log import Attempt

DEATH = "kvtier: the server was killed by signal 9 while it was measured. Last lines of /x/server.log:\n  the end"
NOTE = "Ended by a failure: kvtier: the server was killed by signal 9 while it was measured. Figures are from what had been measured."


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where SGLang is installed, with models written into a folder of the test."""
    monkeypatch.setattr(frame, "missing_packages", lambda: [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def restore_trials(log: RestoreLog, logprobs: tuple[float, ...] = (-0.5,)) -> None:
    log.add("scale", Scale("tiny-qwen3", 512, 16, 32768, 1.0))
    log.keep(Trial("tiny-qwen3", 512, PRIME, "compute", 0, 0.0, output_ids=(1,), logprobs=(-0.5,)))
    for arm, seconds in (("compute", 1.0), ("load", 1.0), ("kvtier", 0.6)):
        answer: dict[str, Any] = {"output_ids": (1,), "logprobs": logprobs}
        place = ("tiny-qwen3", 512, GRID, arm, 1, 0.25, 1.0)
        log.keep(Trial(*place, prompt_tokens=528, ttft_s=seconds, **answer))


def restore(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measure: Any, *extra: str
) -> tuple[int, dict[str, Any]]:
    @contextlib.contextmanager
    def target(*_: object) -> Iterator[Target]:
        yield Target("http://nowhere", "key", None)

    monkeypatch.setattr(Restoring, "_target", target)
    monkeypatch.setattr(Restoring, "measure_on", lambda self, *_: measure(self.log))
    out = tmp_path / "out.json"
    words = "compare restore --device cpu --models tiny-qwen3 --lengths 512 --json"
    return main([*words.split(), str(out), *extra]), json.loads(
        out.read_text()
    ) if out.exists() else {}


def dying(log: RestoreLog) -> None:
    restore_trials(log)
    raise BenchError(DEATH)


def test_trials_are_reported_when_the_server_dies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = restore(monkeypatch, tmp_path, dying)
    printed = capsys.readouterr()
    assert (status, len(result["cells"]), NOTE in result["notes"]) == (1, 1, True)
    assert "Time to first token of a stored prompt" in printed.out and NOTE in printed.out
    assert "the end" in printed.err


def test_nothing_is_written_where_nothing_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refusing(_: RestoreLog) -> None:
        raise BenchError(DEATH)

    assert restore(monkeypatch, tmp_path, refusing) == (1, {})


@pytest.mark.parametrize(("logprobs", "status"), [((-0.5,), 0), ((-0.9,), 1)])
def test_log_probs_that_differ_end_with_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logprobs: tuple[float, ...], status: int
) -> None:
    def measure(log: RestoreLog) -> None:
        restore_trials(log, logprobs)

    found, result = restore(monkeypatch, tmp_path, measure)
    assert (found, result["summary"]["equal_tokens"], result["summary"]["equal_logprobs"]) == (
        status,
        True,
        status == 0,
    )


def test_a_log_gets_more_of_the_same_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ["--log", str(tmp_path / "log.jsonl")]

    def measure(log: RestoreLog) -> None:
        if not log.trials:
            restore_trials(log)

    assert restore(monkeypatch, tmp_path, measure, *log)[0] == 0
    more = ["--rounds", "9", "--load-over-compute", "4", "--arms", "compute,load", "--foreign", "2"]
    assert restore(monkeypatch, tmp_path, measure, *log, *more)[0] == 0
    for other in (["--seed", "1"], ["--chunk", "128"], ["--server-arg=--x"]):
        assert restore(monkeypatch, tmp_path, measure, *log, *other)[0] == 1
        assert "Name another --log" in capsys.readouterr().err


def test_rounds_are_reported_when_a_server_dies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dying:
        def __init__(self, plan: Plan, _work: object, outcome: Outcome, *_: object) -> None:
            done = Completion(0.0, 0.3, (1, 2, 3), (0.1, 0.2, 0.3))
            outcome.rounds += [
                Round(arm, 1, [Sample("0", 1, done)], complete=True) for arm in plan.arms
            ]

        def run(self) -> None:
            raise BenchError(DEATH)

    monkeypatch.setattr(comparison, "Rounds", Dying)
    out = tmp_path / "out.json"
    words = "--device cpu --model tiny-qwen3 --arms recompute,kvtier --trace generated:swe-mini"
    assert main(["compare", *words.split(), "--json", str(out)]) == 1
    result = json.loads(out.read_text())
    assert {name: len(arm["rounds"]) for name, arm in result["arms"].items()} == {
        "recompute": 1,
        "kvtier": 1,
    }
    assert NOTE in result["notes"]
    assert "the end" in capsys.readouterr().err


@pytest.mark.parametrize("known", [True, False])
def test_requests_are_reported_when_the_server_cannot_be_fuzzed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], known: bool
) -> None:
    """`known`: the server has said how its restorations ended, before it could not any more."""

    def fuzz(of: fuzz_command.Fuzzing, _folder: Path) -> None:
        log = of.log
        log.keep(Attempt("0", 0, "p", 100, "both", "answered", 1.0, tokens=(1,), complete=True))
        if known:
            log.add("ends", {"met": 3, "aborted": 1})
        raise BenchError(DEATH)

    monkeypatch.setattr(fuzz_command, "_reference", lambda *_: None)
    monkeypatch.setattr(fuzz_command, "_fuzz", fuzz)
    out = tmp_path / "out.json"
    load = "--trace generated:swe-mini --sessions 2 --turns 2 --divisor 16 --device cpu"
    assert main(["bench", "restore-fuzz", *load.split(), "--json", str(out)]) == 1
    result = json.loads(out.read_text())
    assert (result["counts"]["requests"], result["notes"][-1]) == (1, NOTE)
    printed = capsys.readouterr()
    assert "the end" in printed.err
    assert "completed no restoration" not in printed.out
    met = "3" if known else "0"
    assert any(
        line.split() == ["restored", "by", "kvtier", met] for line in printed.out.splitlines()
    )


def test_an_emulated_gpu_is_not_blamed_for_a_round_that_was_interrupted() -> None:
    plan: Any = SimpleNamespace(setup=SimpleNamespace(paced=object()))
    sample = Sample("0", 1, Completion(0.0, 0.3, (1, 2, 3), (0.1, 0.2, 0.3)))

    def said(**of_round: bool) -> list[str]:
        outcome = Outcome(rounds=[Round("kvtier", 1, [sample], **of_round)])
        return comparison.Cell({}, "", plan, plan, outcome=outcome).lost_pace()

    assert said(complete=True) == ["INVALID: kvtier: the paced device wrote no step."]
    assert said() == []


@pytest.mark.parametrize(
    ("mismatches", "ends"), [(0, "repeat with --dilation 4."), (2, "2 mismatches.")]
)
def test_a_machine_that_is_too_slow_for_an_emulated_gpu_is_told_what_helps(
    mismatches: int, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Any = SimpleNamespace(setup=SimpleNamespace(paced=SimpleNamespace(dilation=2.0)))
    pace = {"valid": False, "overrun": 0.16, "mismatches": mismatches}
    monkeypatch.setattr(comparison, "arm_figures", lambda *_: {"pace": pace})
    outcome = Outcome(rounds=[Round("kvtier", 1, [], complete=True)])
    (note,) = comparison.Cell({}, "", plan, plan, outcome=outcome).lost_pace()
    assert note.startswith("INVALID: kvtier lost 16% of its steps' time") and note.endswith(ends)


def test_nothing_interrupts_a_report() -> None:
    with end_on_signals():
        with undisturbed():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


# The folder of logs: kept where they say why something failed.


@pytest.mark.parametrize(
    ("error", "needed", "kept"),
    [(None, False, False), (None, True, True), (BenchError, False, True), (KeyboardInterrupt, False, False)],
)  # fmt: skip
def test_logs_in_a_temporary_folder_are_kept_when_something_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException] | None,
    needed: bool,
    kept: bool,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def go() -> None:
        with work_folder(None, lambda: needed) as folder:
            (folder / "server.log").write_text("why")
            if error is not None:
                raise error("a server did not start")

    if error is None:
        go()
    else:
        with pytest.raises(error):
            go()
    assert bool(list(tmp_path.glob("**/server.log"))) is kept
