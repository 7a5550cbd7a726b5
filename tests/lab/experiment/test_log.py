"""Logs of trials: what a later run goes on from, what a kill leaves behind, and what is somebody
else's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commands import parsed

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment import machine
from sgl_kvtier.lab.experiment.arms import Setup
from sgl_kvtier.lab.experiment.load import Load
from sgl_kvtier.lab.experiment.log import Log
from sgl_kvtier.lab.experiment.machine import CpuShare
from sgl_kvtier.lab.experiment.measures import Round, arm_figures, sample_rows
from sgl_kvtier.lab.experiment.restore.plan import RestoreOptions
from sgl_kvtier.lab.experiment.restore.trial import PRIME, RestoreLog, Trial
from sgl_kvtier.lab.experiment.rounds import KeptRound, RoundLog
from sgl_kvtier.lab.experiment.scenarios import compare, restore
from sgl_kvtier.lab.outside.client import Cached, Completion, Metrics
from sgl_kvtier.lab.outside.replay import ReplayOptions, Sample
from sgl_kvtier.lab.outside.server import Usage
from sgl_kvtier.lab.stress.server import command as fuzz
from sgl_kvtier.lab.stress.server.log import FuzzLog
from sgl_kvtier.lab.stress.trouble import Finding
from sgl_kvtier.lab.workload.encoder import ByteEncoder

ABOUT = {
    "workload": {"source": "generated:swe-mini", "requests": 3},
    "page_size": 16,
    "extra": ("--x",),
}
COUNTED = (
    "sglang:hicache_backup_tokens_total 1000\nsglang:hicache_backup_bytes_total 10000\n"
    'kvtier:lookahead_moved_bytes_total{tp_rank="0",pp_rank="0",link="storage-host"} 1000\n'
)
HEAD = '{"about": {}}\n'


class Notes(Log):
    """A log of texts."""

    kinds: ClassVar = {"note": str}

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self.notes: list[str] = []

    def take(self, kind: str, record: str) -> None:
        assert kind == "note"
        self.notes.append(record)


def notes(path: Path) -> list[str]:
    return Notes.open(path, {}).notes


def kept(arm: str, number: int) -> KeptRound:
    one = Round(arm, number, after=Metrics.parse(COUNTED), wall_s=1.0, complete=True)
    cached = Cached(device=40, storage=20, total=60)
    for turn in (1, 2, 3):
        times = (0.2 * turn, 0.2 * turn + 0.01)
        one.samples.append(Sample("s", turn, Completion(0.0, 1.0, (7, 8), times, 100, cached)))
    one.occupancy = [{"t_s": 0.0, "device": 0.0}, {"t_s": 1.0, "device": 64.0}]
    one.cpu, one.usage = CpuShare(1.0, 0.5, 0.1, 0.0), Usage(1, 2, 3, 4.0, 5)
    one.disk_bytes = (6, 7)
    return KeptRound("3x, pause 0.5 s", arm, number, one, 30.0, ("python", "-m", "x"))


def restore_log(path: Path) -> list[Trial]:
    log = RestoreLog.open(path, {"seed": 0})
    log.keep(Trial("fake", 512, PRIME, "compute", 0, 0.0))
    return log.trials


def round_log(path: Path) -> list[Any]:
    log = RoundLog.open(path, ABOUT)
    log.add("round", kept("kvtier", len(log.rounds) + 1))
    return list(log.rounds)


def fuzz_log(path: Path) -> list[str]:
    log = FuzzLog.open(path, {})
    log.find(Finding.LEAK, "16 tokens")
    return log.findings


@pytest.mark.parametrize("run", [restore_log, round_log, fuzz_log])
def test_runs_go_on_behind_a_line_that_was_torn(
    run: Callable[[Path], list[Any]], tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    run(path)
    run(path)
    for count in (3, 4):
        with path.open("a") as file:
            file.write('{"trial": {"mod')
        assert len(run(path)) == count
    assert len(run(path)) == 5


def test_figures_of_a_log_are_those_of_its_rounds(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    made = [kept("recompute", 1), kept("kvtier", 1), kept("kvtier", 2)]
    log = RoundLog.open(path, ABOUT)
    for one in made:
        log.add("round", one)
    read = list(RoundLog.open(path, ABOUT).rounds.values())
    assert [(one.arm, one.number, one.start_s, one.command) for one in read] == [
        (one.arm, one.number, one.start_s, one.command) for one in made
    ]
    for arm in ("recompute", "kvtier"):
        before, after = ([one.one for one in rounds] for rounds in (made, read))
        assert arm_figures(arm, after, sample_rows(after)) == arm_figures(
            arm, before, sample_rows(before)
        )
    assert read[1].one.samples == made[1].one.samples
    assert read[1].one.occupancy == made[1].one.occupancy


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    RoundLog.open(path, ABOUT)
    with pytest.raises(
        BenchError, match=r"made with page_size = 16, and now it is 64\. Name another --log"
    ):
        RoundLog.open(path, {**ABOUT, "page_size": 64})


def of_restore() -> dict[str, Any]:
    return restore.about(RestoreOptions.of(parsed(restore, "--device", "cuda")))


def of_fuzz() -> dict[str, Any]:
    return fuzz.about(Setup("/m", "m", device="cuda", page_size=16, chunk_tokens=256))


def of_compare(servers: str = "auto") -> dict[str, Any]:
    setup = Setup("/m", "m", device="cuda", page_size=16, chunk_tokens=256)
    sizes = ("calls", "prompt_tokens", "output_tokens", "longest_tokens")
    chosen = Load("generated:swe-mini", "", [], ByteEncoder(1 << 10), [dict.fromkeys(sizes, 1)], [])
    return compare.about(compare.CompareOptions(servers=servers), setup, chosen, ReplayOptions())


@pytest.mark.parametrize("about", [of_restore, of_fuzz, of_compare])
@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("cards", lambda: ["NVIDIA H200"]),
        ("planner_build", lambda: "compiled"),
        ("package_version", lambda name: f"{name} 2"),
        ("__version__", "0.0.0"),
    ],
)
def test_trials_of_another_card_or_build_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    about: Callable[[], dict[str, Any]],
    what: str,
    other: Any,
) -> None:
    path = tmp_path / "log.jsonl"
    monkeypatch.setattr(machine, "cards", lambda: ["NVIDIA H100 80GB HBM3"])
    monkeypatch.setattr(machine, "planner_build", lambda: "source")
    FuzzLog.open(path, about())
    FuzzLog.open(path, about())
    monkeypatch.setattr(machine, what, other)
    with pytest.raises(BenchError, match="Name another --log"):
        FuzzLog.open(path, about())


def test_rounds_on_servers_started_otherwise_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    RoundLog.open(path, of_compare("fresh"))
    with pytest.raises(BenchError, match="made with servers = fresh, and now it is together"):
        RoundLog.open(path, of_compare("together"))


@pytest.mark.parametrize("other", [{"served_name": "n"}, {"device": "cpu"}, {"dtype": "bfloat16"}])
def test_answers_of_another_model_are_no_references(tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "log.jsonl"
    setup = Setup("/m", "m", device="cuda", page_size=16, chunk_tokens=256)
    FuzzLog.open(path, fuzz.about(setup))
    with pytest.raises(BenchError, match="Name another --log"):
        FuzzLog.open(path, fuzz.about(replace(setup, **other)))


def test_a_log_that_does_not_say_what_it_was_made_with_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"trial": {"model": "m"}}\n')
    with pytest.raises(BenchError, match=r"does not say what its trials were made with.*another"):
        RestoreLog.open(path, {})


def test_a_torn_end_is_cut_off_only_when_something_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(HEAD + '{"note": "a"}\n{"no')
    log = Notes.open(path, {})
    assert log.notes == ["a"]
    assert path.read_text() == HEAD + '{"note": "a"}\n{"no'
    log.add("note", "c")
    log.add("note", "d")
    assert path.read_text() == HEAD + '{"note": "a"}\n{"note": "c"}\n{"note": "d"}\n'


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(HEAD + '{"note": "a"}')
    Notes.open(path, {}).add("note", "c")
    assert notes(path) == ["a", "c"]


def test_what_is_not_known_is_refused_with_its_place_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("buy milk")
    with pytest.raises(
        BenchError, match=r"notes\.txt:1: not a line of this bench.*Name another --log"
    ):
        notes(path)
    assert path.read_text() == "buy milk"
    for damage in ("[" * 200_000, "1" * 5000, "buy milk", '{"fire": 1}', '{"note": "a", "b": 2}'):
        path.write_text(f'{HEAD}{damage}\n{{"note": "c"}}\n')
        with pytest.raises(BenchError, match=r"notes\.txt:2") as found:
            notes(path)
        assert len(str(found.value)) < 500
