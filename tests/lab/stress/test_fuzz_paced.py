"""A fuzz run on a paced device, with fakes for servers: what it finds wrong in place, what the
server is set to, and what is refused.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Command

from sgl_kvtier.lab.experiment.arms import OURS, Setup
from sgl_kvtier.lab.paced.launching import LOG
from sgl_kvtier.lab.paced.pace import PaceLog
from sgl_kvtier.lab.stress.server import command
from sgl_kvtier.lab.stress.server.chaos import Chaos
from sgl_kvtier.lab.stress.server.log import FuzzLog, counts
from sgl_kvtier.lab.stress.server.server import FuzzServer, sections

PACED = ("--device", "paced:h100-llama8b")
SMALL = ("--trace", "generated:swe-mini", "--sessions", "2", "--turns", "2", "--divisor", "16")
SETUP = Setup(
    model_path="/m",
    served_name="m",
    device="paced:h100-llama8b",
    page_size=64,
    chunk_tokens=2048,
    device_tokens=8192,
    dilation=2.0,
)


def step(log: PaceLog, checked: int) -> None:
    log.step(
        kind="prefill", rids=["r"], waiting=set(), called=0.0, begin=0.0, end=1.0, returned=0.1,
        checked=checked,
    )  # fmt: skip


def test_wrong_keys_and_values_are_findings_over_all_lives_of_a_server(tmp_path: Path) -> None:
    log = FuzzLog()
    (tmp_path / LOG).write_text('{"mismatch": "of an earlier run", "at": 0.0}\n')
    server = FuzzServer(OURS, SETUP, tmp_path, log, {})
    first = PaceLog(tmp_path / LOG)
    step(first, 100)
    server.look()
    assert (counts(log)["mismatches"], counts(log)["checked_tokens"]) == (0, 100)
    first.mismatch(1.0, "1 of 8 tokens checked of request r are wrong", "r", "storage")
    second = PaceLog(tmp_path / LOG)  # the next server's
    step(second, 10)
    server.look()
    server.look()
    assert log.findings == ["mismatch: 1 of 8 tokens checked of request r are wrong"]
    assert (counts(log)["mismatches"], counts(log)["checked_tokens"]) == (1, 110)


def test_a_log_keeps_what_was_compared(tmp_path: Path) -> None:
    FuzzLog.open(tmp_path / "log.jsonl", {}).add("checked", 7)
    assert FuzzLog.open(tmp_path / "log.jsonl", {}).checked_tokens == 7


def test_a_server_gets_the_modelled_disk_and_trouble_at_its_own_pace() -> None:
    args = argparse.Namespace(fault_rank=None, lookahead=False, floor=False, scene=None)
    found = sections(SETUP, Chaos(), args)
    assert found["policy"]["load_deadline_s"] == 0.2
    assert found["policy"]["min_restore_tokens"] == found["policy"]["load_tokens"] == 128
    assert found["lab"]["throttle"]["read_gbps"] == pytest.approx(6.4 * 8 / 512 / 2)
    assert found["lab"]["faults"]["stall_ms"] == 800.0
    assert "proof" not in found["policy"]


def test_every_restored_page_is_compared_on_a_cpu() -> None:
    args = argparse.Namespace(fault_rank=None, lookahead=False, floor=False, scene=None)
    assert sections(replace(SETUP, device="cpu"), Chaos(), args)["policy"]["proof"] == "all"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--scene", "storm"), "--scene: paced:h100-llama8b has none"),
        (("--model", "tiny-llama"), "--model: paced:h100-llama8b brings a model"),
        (("--tp", "2"), "--tp 2: paced:h100-llama8b has 1"),
    ],
)
def test_what_a_paced_device_has_otherwise_is_refused(
    kvtier: Command, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = kvtier(tmp_path, "bench", "restore-fuzz", *PACED, *words)
    assert done.status == 1
    assert said in done.err
    assert not (tmp_path / "work").exists()


def test_a_run_in_which_nothing_was_compared_in_place_is_no_success(
    kvtier: Command, tmp_path: Path
) -> None:
    words = (*SMALL, "--requests", "20", "--chaos", "switch", "--concurrency", "2")
    done = kvtier(tmp_path, "bench", "restore-fuzz", *PACED, *words)
    result = done.result
    assert done.status == 1
    assert "Keys and values compared in place: 0 tokens." in done.out
    assert [result["counts"][name] for name in result["must_be_zero"]] == [0] * 9
    assert result["device"]["paced"]["profile"] == "h100-llama8b"
    titles = [table.title for table in command.tables(result)]
    assert all(title.endswith("(paced h100-llama8b, not computed)") for title in titles)
