"""Real servers that restore prefixes by layers: the same answers as from computing, whatever comes
of the reads. SGLang's strict memory checks are on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from restore_lab import CHUNK, LONG, change, counts
from serving import Answer, Served, config_file, flags, prompts, serving

pytestmark = [pytest.mark.server, pytest.mark.slow]

POLICY = {"restore": "auto", "min_restore_tokens": 64, "rules": "sgl_kvtier.lab.rules:ByLayers"}
SLOW, BALANCED, FAST = 0.0005, 0.05, 100.0
LOADED = "loaded_bytes_total storage-device"


@contextmanager
def by_layers(folder: Path, model: str, **sections: Any) -> Iterator[Served]:
    sections = {"throttle": {"read_gbps": BALANCED}, "policy": POLICY, **sections}
    config = config_file(folder, lab={"layer_parts": 2}, **sections)
    with serving(folder, flags(model, chunked_prefill_size=CHUNK, page_size=16), config) as served:
        yield served


def together(served: Served, asked: list[list[int]]) -> list[Answer]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(served.ask, asked))


def settled(served: Served) -> dict[str, float]:
    time.sleep(1.2)  # counters are published twice a second
    return counts(served)


def assert_equal(found: list[Answer], wanted: list[Answer]) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_answers_equal_computing_at_every_bandwidth_and_after_an_abort(
    model: str, tmp_path: Path
) -> None:
    asked = prompts(3, tokens=LONG, seed=5)
    loaded = {}
    with by_layers(tmp_path, model) as served:
        first = [served.ask(ids) for ids in asked]
        for gbps in (SLOW, BALANCED, FAST):
            assert change(served, throttle__read_gbps=gbps)
            before = settled(served)
            served.flush()
            assert_equal([served.ask(ids) for ids in asked], first)
            served.flush()
            assert_equal(together(served, asked), first)
            after = settled(served)
            loaded[gbps] = after.get(LOADED, 0.0) - before.get(LOADED, 0.0)
        assert change(served, throttle__read_gbps=BALANCED)
        served.flush()
        for ids in asked:
            with pytest.raises(TimeoutError):
                served.call("POST", "/generate", {"input_ids": ids}, timeout_s=0.05)
        served.flush()
        assert_equal(together(served, asked), first)
        found = settled(served)
    assert loaded[SLOW] < loaded[FAST]
    assert found["ended_total by layers"] >= 18
    assert found["planner_failures_total"] == 0


def test_a_prefix_that_lacks_a_page_is_computed(tmp_path: Path) -> None:
    asked = prompts(3, tokens=LONG, seed=6)
    with by_layers(tmp_path, "tiny-qwen3", faults={"read_error_rate": 0.01, "seed": 2}) as served:
        first = [served.ask(ids) for ids in asked]
        assert change(served, throttle__read_gbps=FAST)
        served.flush()
        assert_equal([served.ask(ids) for ids in asked], first)
        served.flush()
        assert_equal(together(served, asked), first)
        found = settled(served)
    assert found["ended_total by layers"] == 6
    assert found["planner_failures_total"] == 0
