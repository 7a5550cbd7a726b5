"""The tables of docs/results/simulator.md that come from traces.

`python -m sgl_kvtier.lab.papers.traces_page docs/results [SCENE ...]` runs each scene under all
policies, in `_SEEDS` draws of session starts. It replaces the text between the scene's markers on
the page. The text around them is written by hand. A scene whose trace is missing fails.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.console import progress, to_markdown, write_text
from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.sim.arrivals import Pace
from sgl_kvtier.lab.sim.experiment import Load, Machine, outcome, over_draws, run_policy
from sgl_kvtier.lab.sim.pictures import draws_table
from sgl_kvtier.lab.sim.policies import AHEAD
from sgl_kvtier.lab.sim.requests import SimRequest

_GIB = 1 << 30
_SEEDS = range(1, 7)


@dataclass(frozen=True)
class Scene:
    """A workload and a machine with too little memory for it. `instead` is generated where the
    trace is missing.
    """

    trace: str
    sessions: int
    pace: Pace
    machine: Machine
    most_prompt_tokens: int
    policies: tuple[str, ...]

    variants: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    """More rows: a policy with other settings."""

    def load(self, seed: int) -> Load:
        """The arrivals of one draw."""
        return Load(
            self.trace,
            self.sessions,
            seed=seed,
            pace=self.pace,
            most_prompt_tokens=self.most_prompt_tokens,
        )

    def arms(self) -> dict[str, tuple[str, PolicyConfig]]:
        """Policies and settings by their rows' names."""
        plain = {name: (name, AHEAD) for name in self.policies}
        return plain | {
            name: (policy, dataclasses.replace(AHEAD, **changes))
            for name, (policy, changes) in self.variants.items()
        }

    def total(self) -> int:
        """Requests of all runs."""
        requests = self.load(1).requests(self.machine.page_tokens)[1]
        return len(requests) * len(self.arms()) * len(_SEEDS)


SCENES: Mapping[str, Scene] = {
    "swe": Scene(
        "swe_openhands_claude35",
        16,
        Pace(mean_start_s=12.0),
        Machine(device_bytes=8 * _GIB, host_bytes=8 * _GIB, storage_gbps=28),
        60_000,
        ("recompute", "stock", "cake", "kvtier", "restore", "unbounded"),
        {"kvtier by arrival": ("kvtier", {"queue": "arrival"})},
    ),
    "claude-code": Scene(
        "claude_code_blocks64",
        5,
        Pace(mean_start_s=30.0, most_gap_s=60.0, most_output_tokens=256),
        Machine(device_bytes=8 * _GIB, host_bytes=8 * _GIB, storage_gbps=28),
        50_000,
        ("recompute", "stock", "cake", "kvtier", "restore", "unbounded"),
    ),
}


def scene_markdown(name: str, on_finish: Callable[[SimRequest], None]) -> str:
    """The table of a scene over all draws."""
    scene, description, calls = SCENES[name], "", 0
    outcomes: list[dict[str, Any]] = []
    for seed in _SEEDS:
        description, requests = scene.load(seed).requests(scene.machine.page_tokens)
        calls = len(requests)
        for row, (policy, config) in scene.arms().items():
            result = run_policy(policy, scene.machine, requests, config, on_finish=on_finish)
            outcomes.append(outcome(row, result))
    title = f"{description.split('.: ')[0]}: {calls} requests, {len(_SEEDS)} draws"
    return to_markdown(draws_table(over_draws(outcomes), title))


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
    """Runs the scenes named (all when none is) and writes their tables."""
    folder, names = Path(arguments[0]), list(arguments[1:]) or list(SCENES)
    target = folder / "simulator.md"
    for name in names:
        with progress(name, SCENES[name].total(), "requests") as bar:
            table = scene_markdown(name, lambda _: bar.advance())
        write_text(put(target.read_text("utf-8"), name, table), str(target))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
