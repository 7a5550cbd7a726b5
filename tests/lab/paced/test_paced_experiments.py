"""The experiments on SGLang's real server on a paced device: the restore grid, and a fuzz run that
has to find a page damaged on its way.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.lab.experiment.argtypes import load_options
from sgl_kvtier.lab.experiment.arms import OURS
from sgl_kvtier.lab.experiment.load import LoadOptions, choose_encoder, load
from sgl_kvtier.lab.fuzz import command
from sgl_kvtier.lab.fuzz.chaos import Chaos
from sgl_kvtier.lab.fuzz.log import FuzzLog, counts
from sgl_kvtier.lab.fuzz.run import FuzzOptions, FuzzRun, calls_of
from sgl_kvtier.lab.fuzz.server import FuzzServer, sections
from sgl_kvtier.lab.outside.server import end_on_signals
from sgl_kvtier.lab.paced import pace
from sgl_kvtier.lab.paced.launching import LOG

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]
PACED = ("--device", "paced:h100-llama8b", "--dilation", "2")
FEW = ("--trace", "generated:swe-mini", "--sessions", "3", "--turns", "3", "--divisor", "4")


def test_every_arm_restores_a_stored_prompt_right(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    cells = ("--lengths", "8k", "--load-over-compute", "1/4,1", "--rounds", "1", "--foreign", "99")
    files = ("--folder", str(tmp_path / "work"), "--json", str(out))
    main(["compare", "restore", *PACED, *cells, *files])  # a busy machine may have lost its pace
    result = json.loads(out.read_text())
    assert [cell["load_over_compute"] for cell in result["cells"]] == [0.25, 1.0]
    assert result["summary"]["equal_tokens"]
    assert result["summary"]["errors"] == 0
    logs = (tmp_path / "work").glob(f"**/{LOG}")
    loads = {row["load"] for log in logs for row in pace.read(log) if "load" in row}
    assert loads >= {"storage-host", "storage-device"}  # stock's way, and restorations
    for cell in result["cells"]:
        assert cell["loaded_tokens"]["load"] == 8192
        assert cell["loaded_tokens"]["compute"] == 0
    for arm in ("compute", "load", "stock_timeout", "kvtier"):
        assert result["pace"][arm]["mismatches"] == 0
        assert result["pace"][arm]["steps"] > 0
    assert result["pace"]["load"]["checked_tokens"] >= 2 * 8192
    assert result["curves"][0]["prefix_bytes"] == 8192 * 131072
    # Two pages of 8 MiB to a load, as on a card; the log of stock has no such line.
    said = "kvtier: loads go through 0.25 MiB of staging, 128 tokens at once"
    logs = [file.read_text() for file in (tmp_path / "work").rglob("server.log")]
    assert sum(said in text for text in logs) == 1


def test_a_fuzz_run_finds_a_page_that_was_damaged_on_its_way_to_the_device(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args([*PACED, *FEW, "--concurrency", "2", "--chunk", "1024"])
    paced = command.parse(args.device, args.dilation)
    wanted = load_options(args, LoadOptions(most_output_tokens=8))
    chosen = load(wanted, choose_encoder(paced.model(), wanted.divisor))
    setup = command.make_setup(args, paced.model(), chosen)
    chaos, log = Chaos(kinds=("flush", "switch"), flush_every=5), FuzzLog()
    damaged = dataclasses.replace(paced, damage="device", damage_at=5)
    server = FuzzServer(
        OURS, setup, tmp_path, log, sections(setup, chaos, args), damaged.env(tmp_path / LOG)
    )
    options = FuzzOptions(
        run="r",
        chaos=chaos,
        concurrency=2,
        requests=30,
        page_tokens=64,
        dilation=2.0,
        gbps_scale=128 / paced.slower,
    )
    with end_on_signals():
        try:
            server.start()
            asyncio.run(FuzzRun(options, server, calls_of(chosen, 8), log).run())
        finally:
            server.stop()
    found = counts(log)
    assert found["completed"] == 30
    assert found["mismatches"] > 0
    assert any(text.startswith("mismatch: 1 of ") for text in log.findings)
    assert all(text.startswith("mismatch: ") for text in log.findings)
    assert found["checked_tokens"] > 0
