"""Writes the tables of docs/results/papers.md and docs/results/simulator.md: how printed numbers of
the three papers agree with ours, their rules beside ours, and planners on recorded traces.

`python -m sgl_kvtier.lab.papers.pages docs/results [papers|traces]` replaces the text between a
page's markers. The text around them is written by hand. A trace that is missing is an error.
`kvtier sim paper NAME` prints every cell.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.console import Column, Table, progress, to_markdown, write_text
from sgl_kvtier.console.table import Row
from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.papers import batches, beside, cacheflow, cake, tierkv
from sgl_kvtier.lab.rules import (
    KeptWhileExpected,
    LeastBudget,
    QuickDemotion,
    SmallestHeld,
    Unbounded,
)
from sgl_kvtier.lab.sim.arrivals import Pace
from sgl_kvtier.lab.sim.cells import agreement
from sgl_kvtier.lab.sim.experiment import (
    Load,
    Machine,
    draws_table,
    outcome,
    over_draws,
    run_policy,
)
from sgl_kvtier.lab.sim.policies import AHEAD, named

# --- the papers -----------------------------------------------------------------------------------

PAPERS = {
    "Cake (ICML 2025), Tables 3 to 7": cake,
    "CacheFlow (arXiv 2604.25080), Figures 4 to 9": cacheflow,
    "TierKV, Tables 4 to 7 and Figure 6": tierkv,
}
_AT_ONCE = 4

_COLUMNS = (
    Column("paper", "Paper"),
    Column("cells", "Predicted cells"),
    Column("share", "Within 15 %", "% of cells", 1),
    Column("median", "Median deviation", "%", 1),
    Column("null_cells", "Null model's cells"),
    Column("null_share", "Null model within 15 %", "% of cells", 1),
    Column("null_median", "Its median deviation", "%", 1),
)


def _row(name: str, paper: ModuleType) -> Row:
    """TierKV's machine is the one whose bytes obey the link."""
    ours = agreement([cell for table in paper.RESULTS for cell in paper.TABLES[table]()])
    null = paper.NULL_MODEL["all"]
    return {
        "paper": name,
        "cells": ours.predicted,
        "share": _percent(ours.within_15_percent),
        "median": _percent(ours.median_abs_deviation),
        "null_cells": null.predicted,
        "null_share": _percent(null.within_15_percent),
        "null_median": _percent(null.median_abs_deviation),
    }


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def write_papers(folder: Path) -> None:
    """Rewrites papers.md in this folder: about five minutes."""
    page, rows = folder / "papers.md", []
    with progress("papers", len(PAPERS) + 1, "tables") as bar:
        for name, paper in PAPERS.items():
            rows.append(_row(name, paper))
            bar.advance()
        several = batches.table(list(batches.batches(_AT_ONCE)), _AT_ONCE)
        bar.advance()
    text = put(page.read_text("utf-8"), "agreement", to_markdown(Table("", _COLUMNS, rows)))
    write_text(put(text, "batches", to_markdown(several)), str(page))


# --- recorded traces ------------------------------------------------------------------------------

_SEEDS = range(1, 7)
_MACHINE = Machine(device_bytes=8 << 30, host_bytes=8 << 30, storage_gbps=28)
"""Its memory is too small for these loads."""
_STAYS = replace(AHEAD, prefetch="off")
_AHEAD_OR_NOT = {
    "kvtier": ("kvtier", AHEAD),
    "kvtier, no lookahead": ("kvtier", replace(_STAYS, eviction="lru")),
}
_POLICIES = {
    **{name: (name, AHEAD) for name in ("recompute", "stock", "cake")},
    **_AHEAD_OR_NOT,
    "unbounded": ("unbounded", AHEAD),
}
_BY_ARRIVAL = {"kvtier by arrival": ("kvtier", replace(AHEAD, queue="arrival"))}

_RIVALS = {
    "no prefetching": ("kvtier", _STAYS),
    "order: Bidaw": ("kvtier", replace(_STAYS, rules=named(SmallestHeld))),
    "order: Cascade": ("kvtier", replace(_STAYS, rules=named(LeastBudget))),
    "order: unbounded": ("kvtier", replace(_STAYS, rules=named(Unbounded))),
    "eviction: LRU": ("kvtier", replace(_STAYS, eviction="lru")),
    "eviction: quick demotion": ("kvtier", replace(_STAYS, eviction=named(QuickDemotion))),
    "eviction: kept": ("kvtier", replace(_STAYS, eviction=named(KeptWhileExpected))),
}
"""Rules of others in the place of one of kvtier's, without prefetching."""

Rows: TypeAlias = Mapping[str, tuple[str, PolicyConfig]]
"""Policies with their settings, by the rows' names."""

_SWE = Load("swe_openhands_claude35", 16, pace=Pace(mean_start_s=12.0), most_prompt_tokens=60_000)
_CLAUDE_CODE = Load(
    "claude_code_blocks64",
    5,
    pace=Pace(mean_start_s=30.0, most_gap_s=60.0, most_output_tokens=256),
    most_prompt_tokens=50_000,
)

SCENES: Mapping[str, tuple[Load, Rows]] = {
    "swe": (_SWE, _POLICIES | _BY_ARRIVAL),
    "claude-code": (_CLAUDE_CODE, _POLICIES),
    "swe-rivals": (_SWE, _RIVALS),
    "swe-5s": (replace(_SWE, pace=replace(_SWE.pace, gap_s=5.0)), _AHEAD_OR_NOT),
    "swe-20s": (replace(_SWE, pace=replace(_SWE.pace, gap_s=20.0)), _AHEAD_OR_NOT),
}


def scene_markdown(name: str) -> str:
    """The table of a scene over all draws of its session starts. The page explains its columns."""
    load, rows = SCENES[name]
    draws = [replace(load, seed=seed).requests(_MACHINE.page_tokens) for seed in _SEEDS]
    outcomes: list[dict[str, Any]] = []
    with progress(name, sum(len(drawn) for _, drawn in draws) * len(rows), "requests") as bar:
        for _, requests in draws:
            for row, (policy, config) in rows.items():
                result = run_policy(
                    policy, _MACHINE, requests, config, on_finish=lambda _: bar.advance()
                )
                outcomes.append(outcome(row, result))
    return to_markdown(replace(draws_table(over_draws(outcomes), ""), notes=()))


def beside_markdown() -> str:
    """The table of what restoring takes from requests that run."""
    rows = []
    with progress("beside", len(beside.PER_SECOND) * len(beside.POLICIES), "rows") as bar:
        for chats_per_s in beside.PER_SECOND:
            for name, of_row in beside.POLICIES.items():
                row = beside.measure(chats_per_s, *of_row)
                rows.append({"chats_per_s": chats_per_s, "policy": name, **row})
                bar.advance()
    return to_markdown(beside.table(rows))


def write_traces(folder: Path) -> None:
    """Rewrites simulator.md in this folder."""
    page = folder / "simulator.md"
    write_text(put(page.read_text("utf-8"), "beside", beside_markdown()), str(page))
    for name in SCENES:
        table = scene_markdown(name)
        write_text(put(page.read_text("utf-8"), name, table), str(page))


# --- pages ----------------------------------------------------------------------------------------


def put(page: str, name: str, text: str) -> str:
    """The page with what stands between the markers of `name` replaced. Raises TraceError when it
    has none.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in page or end not in page:
        raise TraceError(f"the page has no place for {name}: it needs the lines {begin} and {end}")
    head, rest = page.split(begin, 1)
    return f"{head}{begin}\n\n{text.strip()}\n\n{end}{rest.split(end, 1)[1]}"


def main(folder: str, part: str = "all") -> None:
    """Rewrites the pages of this folder. Raises TraceError where a trace or a marker is missing."""
    if part != "traces":
        write_papers(Path(folder))
    if part != "papers":
        write_traces(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
