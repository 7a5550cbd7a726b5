"""A recorded run decided again: the same plans, in this process and in others whatever their hash
seed.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_kvtier.lab.sim.replay import replay
from sgl_kvtier.policy.decision_log import NUMBERED, Reader, Writer, decode_header, encode_header

sys.path.insert(0, str(Path(__file__).parent))

from recorded_run import PLANS, digest, record

from sgl_kvtier.policy.decision_log import decode, encode
from sgl_kvtier.policy.messages import StepPlan

ANEW = (
    "decisions or settings are others. Where that is on purpose run tests/golden/record.py, and say why in "
    "the commit"
)
RULES = ("kvtier", "cake", "cacheflow")


@pytest.fixture(scope="module")
def logs() -> dict[str, list[str]]:
    return {rule: record(rule) for rule in RULES}


@pytest.mark.parametrize("rule", RULES)
def test_a_replay_decides_every_step_as_the_run_did(rule: str, logs: dict[str, list[str]]) -> None:
    replayed = replay(logs[rule])
    assert replayed.difference is None
    assert replayed.steps > 500
    assert replayed.commands > 200


@pytest.mark.parametrize("rule", RULES)
def test_every_plan_is_the_one_that_was_kept(rule: str, logs: dict[str, list[str]]) -> None:
    assert digest(logs[rule]) == json.loads(PLANS.read_text())[rule], ANEW


def test_the_run_that_is_replayed_has_loads_computes_and_moves_to_decide(
    logs: dict[str, list[str]],
) -> None:
    plans = [record for record in map(decode, logs["kvtier"][1:]) if isinstance(record, StepPlan)]
    for what in ("starts", "loads", "computes"):
        assert any(getattr(plan, what) for plan in plans), what


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.slow
def test_the_log_is_the_same_under_any_hash_seed(rule: str, logs: dict[str, list[str]]) -> None:
    script = Path(__file__).with_name("recorded_run.py")
    for seed in ("1", "4242"):
        out = subprocess.run(
            [sys.executable, str(script), rule],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert out.splitlines() == logs[rule]


def test_a_replay_stops_at_the_first_step_decided_otherwise(logs: dict[str, list[str]]) -> None:
    lines = list(logs["kvtier"])
    places = [i for i, line in enumerate(lines) if '"loads":[' in line]
    place = places[len(places) // 2]
    plan = decode(lines[place])
    assert isinstance(plan, StepPlan)
    lines[place] = encode(StepPlan(starts=plan.starts, computes=plan.computes))
    replayed = replay(lines)
    assert replayed.difference is not None
    assert replayed.difference.line == place + 1


def test_a_log_that_breaks_off_is_compared_up_to_there(logs: dict[str, list[str]]) -> None:
    lines = logs["cake"]
    views = [i for i, line in enumerate(lines) if '"type":"StepView"' in line]
    replayed = replay(lines[: views[100] + 1])
    assert replayed.difference is None
    assert replayed.steps == 100


# Recorded decision logs decided again: the same plan and answer in every step, and every line
# written as it was. `tests/golden/record.py` says what they are.


LOGS = sorted(Path(__file__).parents[1].glob("golden/decisions/*.jsonl.gz"))


def named(log: Path) -> str:
    return log.name.removesuffix(".jsonl.gz")


@pytest.mark.parametrize("log", LOGS, ids=named)
def test_a_recorded_run_is_decided_and_written_as_it_was(log: Path) -> None:
    lines = gzip.decompress(log.read_bytes()).decode().splitlines()
    replayed = replay(lines)
    assert replayed.difference is None, ANEW
    assert replayed.steps > 100
    reader, writer = Reader(), Writer()
    same_header = encode_header(decode_header(lines[0]), NUMBERED) == lines[0]
    assert same_header, ANEW
    assert [writer.encode(reader.decode(line)) for line in lines[1:]] == lines[1:], ANEW


def test_there_are_logs() -> None:
    assert len(LOGS) > 15
