"""The experiments on SGLang's real server on a paced device: the restore grid, batches beside
requests that decode, and a fuzz run that has to find a page damaged on its way.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.experiment.argtypes import load_options
from sgl_kvtier.lab.experiment.arms import OURS
from sgl_kvtier.lab.experiment.load import LoadOptions, choose_encoder, load
from sgl_kvtier.lab.experiment.restore import server as restore_server
from sgl_kvtier.lab.experiment.restore.plan import RestorePlan
from sgl_kvtier.lab.outside.server import end_on_signals
from sgl_kvtier.lab.paced.launching import CHUNK_TOKENS, LOG, Paced
from sgl_kvtier.lab.sim.replay import replay
from sgl_kvtier.lab.stress.server import command
from sgl_kvtier.lab.stress.server.chaos import Chaos
from sgl_kvtier.lab.stress.server.log import FuzzLog, counts
from sgl_kvtier.lab.stress.server.run import FuzzOptions, FuzzRun, calls_of
from sgl_kvtier.lab.stress.server.server import FuzzServer, sections
from sgl_kvtier.policy.decision_log import Header
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import (
    ChunkStarted,
    Fact,
    PolicyChanged,
    Question,
    StepPlan,
    StepView,
)
from sgl_kvtier.policy.planner import make_planner

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


class Watched:
    """Decides again what a server's planner did, and notes the chunks of restorations that it began
    beside requests that decode: by the bound in force, tokens of each and its predicted seconds.
    """

    def __init__(self, header: Header) -> None:
        self._inner = make_planner(header.config, header.engine, header.profile)
        self.engine = header.engine
        self._bound_ms = header.config.max_stall_ms
        self._cost = PrefillCost(0.0, 0.0, 0.0)
        self._decoding = 0
        self.chunks = dict[float, list[tuple[int, float]]]()

    def observe(self, fact: Fact) -> None:
        if isinstance(fact, PolicyChanged):
            self._bound_ms = fact.config.max_stall_ms
        beside = isinstance(fact, ChunkStarted) and self._decoding
        if beside and fact.rid in self._inner.restoring:
            seconds = self._cost.chunk_seconds(fact.tokens.start, len(fact.tokens))
            self.chunks.setdefault(self._bound_ms, []).append((len(fact.tokens), seconds))
        self._inner.observe(fact)

    def step(self, view: StepView) -> StepPlan:
        self._decoding = view.decoding
        self._cost = PrefillCost(**self._inner.profile()["prefill"])
        return self._inner.step(view)

    def query(self, question: Question[Any]) -> Any:
        return self._inner.query(question)


@pytest.mark.slow
def test_chunks_beside_requests_that_decode_take_no_longer_than_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, log = tmp_path / "out.json", tmp_path / "decisions.jsonl"

    def written_down(options: RestorePlan, paced: Paced | None) -> dict[str, dict[str, Any]]:
        found = planned(options, paced)
        found["policy"]["decision_log"] = str(log)
        return found

    planned = restore_server._sections
    monkeypatch.setattr(restore_server, "_sections", written_down)
    cells = ("--at-once", "2", "--lengths", "16k", "--load-over-compute", "4")
    runs = ("--arms", "both,stall-any", "--rounds", "1", "--foreign", "99")
    files = ("--folder", str(tmp_path / "work"), "--json", str(out))
    main(["compare", "restore", *PACED, *cells, *runs, *files])  # it may have lost its pace
    (cell,) = json.loads(out.read_text())["cells"]
    assert all(arm["equal_tokens_fraction"] == 1.0 for arm in cell["arms"].values())
    made: list[Watched] = []

    def watched(header: Header) -> Watched:
        made.append(Watched(header))
        return made[-1]

    assert replay(log.read_text().splitlines(), watched).difference is None
    (found,) = made
    bound_s = PolicyConfig().max_stall_ms * 2 / 1000  # of the dilated device
    bounded, unbounded = found.chunks[bound_s * 1000], found.chunks[0.0]
    print(bounded, unbounded)
    assert found.engine.accelerator
    assert all(seconds <= bound_s for _, seconds in bounded)
    # Without a bound what is computed is cut into the fewest equal parts.
    assert max(tokens for tokens, _ in unbounded) > CHUNK_TOKENS // 2
    assert max(seconds for _, seconds in unbounded) > bound_s


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
    planned = sections(setup, chaos, args)
    planned["policy"]["proof"] = "off"  # it would find the page, and end restoring
    server = FuzzServer(OURS, setup, tmp_path, log, planned, damaged.env(tmp_path / LOG))
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
