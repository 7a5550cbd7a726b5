"""Offers that an arm's planner declined, and whether that was right, from its decision log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgl_kvtier.lab.experiment.arms import Setup
from sgl_kvtier.lab.pages.timeline import whole_lines
from sgl_kvtier.lab.sim.declined import by_reason, declined


def declined_of(log: Path, setup: Setup) -> dict[str, Any]:
    """Under `declined`: `by_reason` of a server's log, without dilation. Nothing where no log was
    asked for or written. Raises TraceError on a damaged one.
    """
    if not setup.decisions or not log.exists():
        return {}
    with log.open(encoding="utf-8") as lines:
        return {"declined": by_reason(declined(whole_lines(lines)), setup.dilation)}
