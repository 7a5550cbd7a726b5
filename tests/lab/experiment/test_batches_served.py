"""`kvtier compare restore --at-once` with a real server of a tiny model: the papers' rules in turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.launch import detect_device, missing_packages

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        bool(missing_packages()), reason="sglang is not installed: pip install '.[sglang]'"
    ),
    pytest.mark.skipif(detect_device() != "cpu", reason="checks the CPU reference platform"),
]

ARMS = ("stock", "compute", "load", "cake", "cacheflow", "kvtier", "both")


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three prefixes at once beside requests that decode, every arm once."""
    folder = tmp_path_factory.mktemp("batches")
    out = folder / "out.json"
    words = ("--at-once", "3", "--lengths", "512,1024", "--rounds", "1")
    where = ("--device", "cpu", "--models", "tiny-qwen3", "--folder", str(folder / "work"))
    arms = ("--arms", ",".join(ARMS), "--foreign", "99", "--json", str(out))
    assert main(["compare", "restore", *words, *where, *arms]) == 0
    (found,) = json.loads(out.read_text())["cells"]
    return found


def test_every_answer_is_that_of_the_prompt_computed_alone(cell: dict[str, Any]) -> None:
    assert tuple(cell["arms"]) == ARMS
    for arm in cell["arms"].values():
        assert arm["equal_tokens_fraction"] == arm["equal_logprobs_fraction"] == 1.0
        assert (arm["errors"], arm["ttft_ms"]["n"]) == (0, 3)


def test_each_rule_answers_in_its_own_way(cell: dict[str, Any]) -> None:
    answers = {name: arm["answers"] for name, arm in cell["arms"].items()}
    assert answers["stock"] == answers["load"] == {"declined: switched off": 3}
    assert answers["compute"] == {"compute: configured": 3}
    assert answers["cake"] == answers["cacheflow"] == {"both: rule": 3}
    assert answers["both"] == {"both: configured": 3}
    assert sum(answers["kvtier"].values()) == 3


def test_what_is_computed_and_what_is_loaded_follow_from_the_arm(cell: dict[str, Any]) -> None:
    arms, page = cell["arms"], 16
    assert arms["compute"]["computed_tokens"] == arms["compute"]["prompt_tokens"]
    assert arms["compute"]["link_busy_fraction"] == 0
    assert arms["load"]["computed_tokens"] == 3 * page
    for name in ("load", "cake", "cacheflow", "both"):
        assert arms[name]["link_busy_fraction"] > 0


def test_requests_beside_go_on_decoding(cell: dict[str, Any]) -> None:
    for arm in cell["arms"].values():
        assert arm["token_gap_ms"]["n"] >= 2
        assert arm["token_gap_ms"]["max"] > 0
