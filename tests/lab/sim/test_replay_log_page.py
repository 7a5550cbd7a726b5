"""`kvtier sim replay-log --html`: the restorations of a log, listed and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.pages.figure import plots_available
from sgl_kvtier.lab.sim.replay import Recording
from sgl_kvtier.policy.decision_log import Header
from sgl_kvtier.policy.messages import (
    ChunkDone,
    ChunkStarted,
    RestoreOffered,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

CONFIG, ENGINE = (
    PolicyConfig(restore="both"),
    EngineShape(page_tokens=16, page_bytes=4096, chunk_tokens=256),
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """One restoration of 60 pages: the last 8 loaded, the first 16 computed."""
    lines: list[str] = []
    planner = Recording(make_planner(CONFIG, ENGINE), Header(CONFIG, ENGINE), lines.append)
    planner.observe(RestoreOffered("prompt-7", 1.0, 1024, 0, 60, ((Span(0, 60), Tier.STORAGE),)))
    plan = planner.step(StepView(1.0, ("prompt-7",), free_pages={Tier.DEVICE: 500, Tier.HOST: 500}))
    assert plan.loads[0].span == Span(52, 60)
    planner.observe(ChunkStarted("prompt-7", Span(0, 256), 1.01))
    planner.observe(
        TransferDone("prompt-7", Link.STORAGE_TO_DEVICE, Span(52, 60), 8 * 4096, 0.05, 1.06)
    )
    planner.observe(ChunkDone("prompt-7", Span(0, 256), 0.1, 1.11))
    planner.step(StepView(1.11, (), slot="prompt-7", free_pages={Tier.DEVICE: 500, Tier.HOST: 500}))
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_page_lists_and_draws_what_was_computed_and_loaded(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = log.with_name("page.html")
    assert main(["sim", "replay-log", str(log), "--html", str(page), "--rid", "prompt-7"]) == 0
    assert "2 plans with" in capsys.readouterr().out
    text = page.read_text()
    assert "prompt-7" in text
    assert "both (configured)" in text
    if plots_available():
        assert "<svg" in text
        assert "960 tokens: 256 computed, 128 loaded" in text


def test_a_request_that_is_not_in_the_log_is_named(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "replay-log", str(log), "--html", str(log) + ".html", "--rid", "x"]) == 1
    assert "no restoration of request 'x'. The first there are: prompt-7" in capsys.readouterr().err


def test_a_request_without_a_page_is_refused(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "replay-log", str(log), "--rid", "prompt-7"]) == 1
    assert "--html" in capsys.readouterr().err


def test_a_last_line_that_was_being_written_is_passed_over(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text(log.read_text() + '{"type":"StepV')
    assert main(["sim", "replay-log", str(log)]) == 0
    assert "2 plans with" in capsys.readouterr().out
