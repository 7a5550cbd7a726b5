"""`kvtier compare restore` on a paced device, with fakes for servers: what is refused, scaled,
repeated and marked.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Command, Done, parsed
from fake_restore import PAGE, PAGE_BYTES, RestoringServer
from fake_restore import measure as measure_with

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.restore.cells import pace_of, results_of
from sgl_kvtier.lab.experiment.restore.plan import RestoreOptions, RestorePlan
from sgl_kvtier.lab.experiment.restore.server import setup_for
from sgl_kvtier.lab.experiment.restore.trial import DISCARDED, GRID, WARM, RestoreLog, Trial
from sgl_kvtier.lab.experiment.scenarios import restore
from sgl_kvtier.lab.paced import pace
from sgl_kvtier.lab.paced.pace import PaceLog, Reader
from sgl_kvtier.lab.pages import kinds

PACED = ("--device", "paced:h100-llama8b")
DILATION, SCALE = 4.0, 512.0


def options_of(*words: str) -> RestoreOptions:
    return RestoreOptions.of(parsed(restore, *PACED, *words))


class Device(RestoringServer):
    """Writes what a paced device would of each request, which takes `step_s` on its clock. Of the
    first `slow` requests it loses half.
    """

    def __init__(self, path: Path, step_s: float = 0.01, slow: int = 0) -> None:
        super().__init__()
        self._log, self._step_s, self.slow = PaceLog(path), step_s, slow
        self.wrong_at: int | None = None

    async def cached(self, input_ids: list[int]) -> dict[str, int]:
        now = time.monotonic()
        await asyncio.sleep(self._step_s)
        lost = self._step_s / 2 if len(self.requests) <= self.slow else 0.0
        self._step("prefill", now, now + self._step_s - lost, now + self._step_s)
        self._step("decode", now, now + 0.001, now + 9.0)  # behind the first token
        if len(self.requests) == self.wrong_at:
            self._log.mismatch(now, "1 of 8 tokens checked are wrong", "r", "storage")
        return await super().cached(input_ids)

    def _step(self, kind: str, begin: float, end: float, returned: float) -> None:
        self._log.step(
            kind=kind, rids=["r"], waiting={"r"}, called=begin, begin=begin, end=end,
            returned=returned, checked=8,
        )  # fmt: skip


def measure(server: Device, path: Path, log: RestoreLog, **changed: Any) -> None:
    options = RestorePlan(
        "fake", page=PAGE, chunk=512, lengths=(512,), ratios=(1.0,), rounds=1, **changed
    )
    paced = {"bytes_scale": SCALE, "steps": Reader(path)}
    measure_with(server, options, log, dilation=DILATION, **paced)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Device, RestoreLog]:
    path = tmp_path_factory.mktemp("paced") / "pace.jsonl"
    server, log = Device(path, step_s=0.02), RestoreLog()
    measure(server, path, log, curve_step=128)
    return server, log


def test_bandwidths_are_the_modelled_machines_and_a_server_gets_what_it_moves(
    measured: tuple[Device, RestoreLog],
) -> None:
    server, log = measured
    scale = log.scale("fake", 512)
    assert scale is not None
    assert scale.prefix_bytes == 512 // PAGE * PAGE_BYTES * SCALE
    assert server.gbps == pytest.approx(scale.gbps(1.0) / SCALE / DILATION)
    assert {trial.gbps for trial in log.of("fake", 512, GRID)} == {scale.gbps(1.0)}


def test_times_are_divided_by_the_dilation(tmp_path: Path) -> None:
    path, log = tmp_path / "pace.jsonl", RestoreLog()
    server = Device(path, step_s=0.02)
    began = time.monotonic()
    measure(server, path, log)
    passed_s = time.monotonic() - began
    times = [trial.ttft_s or 0.0 for trial in log.trials]
    assert all(found >= 0.02 / DILATION for found in times)
    assert sum(times) * DILATION < passed_s


def test_the_curve_has_points_within_a_chunk(measured: tuple[Device, RestoreLog]) -> None:
    (curve,) = results_of(measured[1])["curves"]
    assert [point["tokens"] for point in curve["points"]] == [128, 256, 384, 512]


def test_pace_is_that_of_the_steps_until_the_first_token(
    measured: tuple[Device, RestoreLog],
) -> None:
    found = pace_of(measured[1].trials, DILATION)
    assert set(found) == {"compute", "load", "stock_timeout", "kvtier"}
    loads = found["load"]
    assert (loads["steps"], loads["checked_tokens"], loads["valid"]) == (1, 8, True)
    assert loads["busy_s"] == pytest.approx(0.02 / DILATION)


def test_a_trial_that_lost_its_pace_is_made_again_and_counts_for_nothing(tmp_path: Path) -> None:
    path, log = tmp_path / "pace.jsonl", RestoreLog()
    server = Device(path, slow=2)  # the prompt that is stored, and the first after it
    measure(server, path, log)
    assert len([trial for trial in log.trials if trial.kind == DISCARDED]) == 1
    assert all(figures["valid"] for figures in pace_of(log.trials, DILATION).values())


def test_what_was_wrong_in_a_trial_that_counts_for_nothing_makes_the_run_invalid(
    tmp_path: Path,
) -> None:
    path, log = tmp_path / "pace.jsonl", RestoreLog()
    server = Device(path)
    server.wrong_at = 1  # while the prompt was stored
    measure(server, path, log)
    found = pace_of(log.trials, DILATION)["compute"]
    assert (found["mismatches"], found["valid"]) == (1, False)
    (note,) = pace.verdict("compute", found)
    assert note.startswith("INVALID: compute lost 0% of its steps' time")
    assert note.endswith("1 mismatches.")


def test_a_log_keeps_steps_and_a_result_does_not(tmp_path: Path) -> None:
    row = {"step": "prefill", "at": 1.0, "seconds": 1.0, "late_s": 0.5, "gap_s": 0.0}
    file = tmp_path / "log.jsonl"
    RestoreLog.open(file, {}).keep(Trial("m", 512, WARM, "kvtier", 1, 1.0, steps=(row,)))
    again = RestoreLog.open(file, {})
    assert again.trials[0].steps == (row,)
    assert "steps" not in results_of(again)["trials"][0]


def test_paced_and_computed_trials_share_no_log(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    RestoreLog.open(file, restore.about(options_of()))
    with pytest.raises(BenchError, match="were made with device"):
        RestoreLog.open(file, restore.about(options_of("--device", "cpu")))
    with pytest.raises(BenchError, match="were made with paced"):
        RestoreLog.open(file, restore.about(options_of("--dilation", "2")))


def test_a_server_gets_the_devices_own_model_disk_and_deadlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    args = options_of("--dilation", "2")
    shape = restore.shape_of(args, "h100-llama8b")
    options = restore.options_of(args, "h100-llama8b", shape.page, shape.chunk)
    setup = setup_for(args, shape, options, "key")
    assert (setup.served_name, setup.page_size, setup.chunk_tokens) == ("paced-mha-1", 64, 8192)
    assert setup.context_tokens == setup.device_tokens
    policy = setup.sections["policy"]
    assert (policy["restore"], policy["load_deadline_s"]) == ("both", 4.0)
    assert setup.sections["lab"]["throttle"]["write_gbps"] == pytest.approx(4.0 * 8 / 512 / 2)


@pytest.fixture(scope="module")
def done(kvtier: Command, tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, str]:
    folder = tmp_path_factory.mktemp("command")
    page = folder / "page.html"
    words = ("--lengths", "512", "--load-over-compute", "1", "--rounds", "1", "--foreign", "99")
    found = kvtier(folder, "compare", "restore", *PACED, *words, "--html", str(page))
    return found, page.read_text()


def test_every_title_says_that_nothing_was_computed(done: tuple[Done, str]) -> None:
    result, page = done
    assert result.result["device"]["paced"]["profile"] == "h100-llama8b"
    mark = "(paced h100-llama8b, not computed)"
    titles = [table.title for table in kinds.GRID.tables(result.result)]
    assert len(titles) == 4
    assert all(title.endswith(mark) for title in titles)
    assert f"<title>Restoring a stored prompt {mark}" in page


def test_a_device_that_wrote_no_step_makes_the_run_invalid(done: tuple[Done, str]) -> None:
    result, _ = done
    assert result.status == 1
    assert "INVALID: kvtier: the paced device wrote no step." in result.out
