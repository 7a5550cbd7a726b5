"""What a page says of results in cells, by the example of a comparison at rising load. That columns
are what they were is tested with recorded runs (test_scenarios.py).
"""

from __future__ import annotations

import pytest

from sgl_kvtier.lab.pages.kinds import GRID, SWEEP
from sgl_kvtier.lab.pages.stats import summary

pytest.importorskip("matplotlib", reason="the plots need the extra [bench]")

TIMES = {"hicache-file": {1: 200.0, 4: 900.0}, "kvtier": {1: 250.0, 4: 300.0}}

NOTHING = {"requests": 0, "throughput_tokens_per_s": None}


def figures(arm: str, load: int) -> dict:
    first_ms = TIMES[arm][load]
    return {
        "ttft_ms": summary([first_ms, 2 * first_ms]),
        "ttft_later_ms": summary([first_ms]),
        "throughput_tokens_per_s": 40.0 * load if arm == "kvtier" else 30.0 * load,
        "goodput_requests_per_s": 0.5 * load,
        "requests": 2,
        "errors": 0,
        "rounds": [{"complete": True}],
    }


@pytest.fixture
def result() -> dict:
    """Two arms at two loads: ours is slower at the first and faster at the second."""
    return {
        "settings": {"ttft_bound_ms": 2000.0},
        "rounds": 1,
        "arms": {arm: {"errors": 0, "requests": 4} for arm in TIMES},
        "cells": [
            {"concurrency": load, "arms": {arm: figures(arm, load) for arm in TIMES}, "ratios": {}}
            for load in (1, 4)
        ],
        "samples": [{"arm": arm, "ttft_ms": 10.0, "error": None} for arm in TIMES],
        "notes": ["a note"],
    }


def test_the_page_says_at_which_load_and_in_what_ours_is_worse(result: dict) -> None:
    found = [text for text, _ in SWEEP.losing(result)]
    assert found == [
        "concurrency 1, TTFT p50: kvtier 375.0 ms, hicache-file 300.0 ms.",
        "concurrency 1, TTFT p99: kvtier 497.5 ms, hicache-file 398.0 ms.",
    ]
    page = SWEEP.page(result)
    assert all(text in page for text in found)
    assert page.count("<svg") == 3


@pytest.mark.parametrize(("share", "said"), [(1.0, "same tokens as"), (0.5, "equal those of")])
def test_equal_answers_name_the_arm_they_were_compared_with(
    result: dict, share: float, said: str
) -> None:
    result["arms"]["kvtier"]["equal_tokens_fraction"] = share
    (text,) = [text for text, _ in SWEEP.statements(result) if said in text]
    assert f"{said} hicache-file" in text
    result["arms"] = {"recompute": {"errors": 0, "requests": 4}, **result["arms"]}
    (text,) = [text for text, _ in SWEEP.statements(result) if said in text]
    assert f"{said} recompute" in text


def test_a_load_that_a_paced_device_could_not_keep_up_with_is_said_first(result: dict) -> None:
    result["device"] = {"paced": {"profile": "h100-llama8b"}}
    for cell in result["cells"]:
        for arm, one in cell["arms"].items():
            one["pace"] = {"valid": (arm, cell["concurrency"]) != ("kvtier", 4)}
    first = "The paced device did not keep pace: kvtier at concurrency 4."
    assert SWEEP.statements(result)[0] == (first, True)
    assert "paced h100-llama8b, not computed" in SWEEP.tables(result)[0].title


@pytest.mark.parametrize("left", [NOTHING, {"rounds": [{"complete": False}]}])
def test_a_load_that_was_not_measured_is_not_said_to_have_lost_pace(
    result: dict, left: dict
) -> None:
    result["device"] = {"paced": {"profile": "h100-llama8b"}}
    for cell in result["cells"]:
        for one in cell["arms"].values():
            one["pace"] = {"valid": True}
    last = result["cells"][1]["arms"]["kvtier"]
    del last["pace"]
    last |= left
    assert not [text for text, _ in SWEEP.statements(result) if "keep pace" in text]


@pytest.mark.parametrize(("failure", "text"), [("no memory\nat all", "kvtier failed: no memory")])
def test_what_failed_or_was_interrupted_is_said(result: dict, failure: str, text: str) -> None:
    result["arms"]["kvtier"] |= {"failure": failure, "errors": 3}
    result["interrupted"] = True
    said = [sentence for sentence, bad in SWEEP.statements(result) if bad]
    early = "Interrupted: figures are from what had been measured."
    assert said == [text, "Requests failed: 3 in kvtier.", early]


def test_a_result_without_a_cell_still_makes_a_page() -> None:
    summary = {"equal_tokens": None}
    result = {"cells": [], "arms": {}, "curves": [], "summary": summary, "settings": {}}
    assert GRID.tables(result) == GRID.statements(result) == []
    assert "no request ended without an error" in GRID.page(result)
