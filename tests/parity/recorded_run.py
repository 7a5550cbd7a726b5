"""A simulated run with memory pressure, losses and several sessions, written down as a decision
log. Also a script.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

from sgl_kvtier.lab.sim.arrivals import Pace
from sgl_kvtier.lab.sim.experiment import Load, Machine, run_policy
from sgl_kvtier.lab.sim.policies import AHEAD

MACHINE = Machine(
    device_bytes=1 << 30, host_bytes=1 << 29, storage_bytes=3 << 29, step_tokens=512, storage_gbps=8
)
LOAD = Load(
    "generated:swe-mini",
    5,
    seed=1,
    pace=Pace(mean_start_s=1.0, most_gap_s=2.0, most_output_tokens=32),
    most_prompt_tokens=5000,
)

RULES = {
    "kvtier": "",
    "cake": "sgl_kvtier.lab.rules:Cake",
    "cacheflow": "sgl_kvtier.lab.rules:CacheFlow",
}
"""policy.rules, by the names of tests."""


PLANS = Path(__file__).with_name("plans.json")
"""Digests of the runs' logs: of every fact, view, plan and answer. tests/golden/record.py writes it."""


def digest(lines: list[str]) -> dict[str, object]:
    """Of a log."""
    text = "\n".join(lines)
    return {"lines": len(lines), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def digests() -> dict[str, dict[str, object]]:
    """Of the runs under all rules."""
    return {rule: digest(record(rule)) for rule in RULES}


def record(rule: str) -> list[str]:
    """The log of a run under this rule, line by line."""
    lines: list[str] = []
    _, requests = LOAD.requests(MACHINE.page_tokens)
    config = replace(AHEAD, rules=RULES[rule], min_restore_tokens=64)
    run_policy("kvtier", MACHINE, requests, config, log=lines.append)
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(record(sys.argv[1])) + "\n")
