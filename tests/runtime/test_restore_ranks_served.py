"""Two tensor-parallel ranks restore in step although one of them reads later than the other, and
loses pages of its own.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from restore_lab import CHUNK, GBPS, LONG, counts
from serving import config_file, flags, prompts, serving

pytestmark = pytest.mark.server

CHECKED = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
"""SGLang compares what its ranks decide, and ends the server when they differ."""


def test_a_rank_that_reads_late_and_loses_pages_changes_no_answer(tmp_path: Path) -> None:
    sections = {
        "throttle": {"read_gbps": GBPS},
        "policy": {"restore": "both", "min_restore_tokens": 64},
        "faults": {
            "read_error_rate": 0.02,
            "corrupt_rate": 0.02,
            "stall_ms": 150,
            "seed": 4,
            "rank": 1,
        },
    }
    arguments = flags(
        "tiny-llama", chunked_prefill_size=CHUNK, page_size=16, max_total_tokens=8192, tp_size=2
    )
    asked = prompts(4, tokens=LONG, seed=3)
    with serving(tmp_path, arguments, config_file(tmp_path, **sections), **CHECKED) as server:
        first = [server.ask(ids) for ids in asked]
        for _ in range(2):
            server.flush()
            with ThreadPoolExecutor(len(asked)) as pool:
                again = list(pool.map(server.ask, asked))
            assert [a.tokens for a in again] == [a.tokens for a in first]
            assert sum(a.storage for a in again) > 0
        time.sleep(1.2)  # counters are published twice a second
        found = counts(server)  # of the rank that is read last: all count alike
        log = (tmp_path / "server.log").read_text(errors="replace")
    assert found["ended_total met"] == found["started_total both configured"] == 2 * len(asked)
    assert found["loaded_tokens_total storage"] > 0
    assert found["planner_failures_total"] == 0
    assert found["reductions_total"] > 0
    assert sum(found.get(f"lost_pages_total {why}", 0) for why in ("failed", "corrupt")) > 0
    assert log.count("faults are injected on purpose") == 1
