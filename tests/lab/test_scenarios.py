"""Every scenario from a recorded run: its log gives the same figures, and its result the same tables
and page.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recorded_runs
from commands import Command


@pytest.mark.parametrize(
    "name", [name for name in recorded_runs.SCENARIOS if name not in recorded_runs.REPORTED]
)
def test_a_result_is_drawn_as_it_was(name: str) -> None:
    """The others by `kvtier report`, in `pages/test_report.py`."""
    pytest.importorskip("matplotlib", reason="the plots need the extra [bench]")
    kept = recorded_runs.read(name)
    drawn = recorded_runs.drawn(recorded_runs.filled(name, kept["result"]))
    assert drawn["tables"] == kept["drawn"]["tables"]
    assert drawn["page"] == kept["drawn"]["page"]


@pytest.mark.parametrize("name", recorded_runs.LOGGED)
def test_a_log_gives_the_figures_that_it_gave(name: str, kvtier: Command, tmp_path: Path) -> None:
    kept, log = recorded_runs.read(name), tmp_path / "log.jsonl"
    log.write_text("".join(f"{json.dumps(line)}\n" for line in kept["log"]))
    with recorded_runs.unchecked():
        done = kvtier(tmp_path, *recorded_runs.SCENARIOS[name], "--log", str(log))
    assert recorded_runs.measured(done.result) == recorded_runs.measured(kept["result"]), done.err
    assert len(log.read_text().splitlines()) == len(kept["log"]), "nothing was measured again"
