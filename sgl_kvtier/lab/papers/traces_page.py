"""The tables of docs/results/simulator.md that come from traces.

`python -m sgl_kvtier.lab.papers.traces_page docs/results [SCENE ...]` runs each scene under all
policies. It replaces the text between the scene's markers on the page, and writes a plot of the
distributions. The text around them is written by hand. Where the recorded traces are missing,
sessions generated from their published statistics take their place, and the table says so.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier.console import Table, progress, to_markdown, write_text
from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.pages.plots import cdf
from sgl_kvtier.lab.sim.arrivals import Pace
from sgl_kvtier.lab.sim.experiment import Load, Machine, outcome, run_policy
from sgl_kvtier.lab.sim.pictures import policies_table
from sgl_kvtier.lab.sim.policies import AHEAD
from sgl_kvtier.lab.sim.requests import SimRequest
from sgl_kvtier.lab.workload.catalogue import trace_files

_GIB = 1 << 30
_NOT_ON_THE_PAGE = ("ttft_s.p90", "finished_s")
"""Columns of the simulator's table that are left out: the page has eight at most. The plot shows
every percentile.
"""


@dataclass(frozen=True)
class Scene:
    """A workload and a machine with too little memory for it. `instead` is generated where the
    trace is missing.
    """

    trace: str
    instead: str
    sessions: int
    pace: Pace
    machine: Machine
    most_prompt_tokens: int
    policies: tuple[str, ...]

    def load(self) -> Load:
        """The arrivals, from the trace or generated."""
        trace = self.trace if self.trace in trace_files() else self.instead
        return Load(
            trace, self.sessions, seed=1, pace=self.pace, most_prompt_tokens=self.most_prompt_tokens
        )


SCENES: Mapping[str, Scene] = {
    "swe": Scene(
        "swe_openhands_claude35",
        "generated:swe-openhands",
        16,
        Pace(mean_start_s=12.0),
        Machine(device_bytes=8 * _GIB, host_bytes=8 * _GIB, storage_gbps=28),
        60_000,
        (
            "recompute",
            "stock",
            "stock-wait",
            "cake",
            "cacheflow",
            "kvtier",
            "restore",
            "oracle",
            "unbounded",
        ),
    ),
    "claude-code": Scene(
        "claude_code_blocks64",
        "generated:claude-code",
        5,
        Pace(mean_start_s=30.0, most_gap_s=60.0, most_output_tokens=256),
        Machine(device_bytes=8 * _GIB, host_bytes=8 * _GIB, storage_gbps=28),
        50_000,
        ("recompute", "stock", "cake", "cacheflow", "kvtier", "restore", "oracle", "unbounded"),
    ),
}


def scene_markdown(name: str, on_finish: Callable[[SimRequest], None]) -> tuple[str, str]:
    """The table of a scene, and its plot as SVG."""
    scene = SCENES[name]
    description, requests = scene.load().requests(scene.machine.page_tokens)
    outcomes, ttfts = [], {}
    for policy in scene.policies:
        result = run_policy(policy, scene.machine, requests, AHEAD, on_finish=on_finish)
        outcomes.append(outcome(policy, result))
        ttfts[policy] = [1e3 * value for value in result.ttfts()]
    title = f"{description.split('.: ')[0]}: {len(requests)} requests"
    shown = ("recompute", "stock", "cake", "kvtier", "restore", "unbounded")
    plot = cdf(
        {policy: ttfts[policy] for policy in shown if policy in ttfts},
        f"Time to first token: {name}",
        "milliseconds",
    )
    return to_markdown(table_of(outcomes, title)), plot


def table_of(outcomes: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row per policy, with the columns that the page has."""
    table = policies_table(outcomes, title)
    shown = [column for column in table.columns if column.name not in _NOT_ON_THE_PAGE]
    return dataclasses.replace(table, columns=shown)


def put(page: str, name: str, text: str) -> str:
    """The page with what stands between the markers of `name` replaced. Raises TraceError when it
    has none.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in page or end not in page:
        raise TraceError(f"the page has no place for {name}: it needs the lines {begin} and {end}")
    head, rest = page.split(begin, 1)
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end, 1)[1]}"


def main(arguments: Sequence[str]) -> int:
    """Runs the scenes named (all when none is) and writes their tables and plots."""
    folder, names = Path(arguments[0]), list(arguments[1:]) or list(SCENES)
    target = folder / "simulator.md"
    for name in names:
        scene = SCENES[name]
        total = len(scene.load().requests(scene.machine.page_tokens)[1]) * len(scene.policies)
        with progress(name, total, "requests") as bar:
            table, plot = scene_markdown(name, lambda _: bar.advance())
        write_text(plot, str(folder / f"simulator-{name}.svg"))
        write_text(put(target.read_text("utf-8"), name, table), str(target))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
