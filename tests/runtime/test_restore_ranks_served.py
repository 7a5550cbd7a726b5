"""Two tensor-parallel ranks restore in step although one of them reads later than the other, and
loses pages of its own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from restore_lab import LONG, settled, since, two_ranks
from serving import prompts
from shared import Shared

pytestmark = pytest.mark.server


def test_a_rank_that_reads_late_and_loses_pages_changes_no_answer(servers: Shared) -> None:
    asked = prompts(4, tokens=LONG, seed=3)
    server = two_ranks(servers)
    before = settled(server)
    first = [server.ask(ids) for ids in asked]
    for _ in range(2):
        server.flush()
        with ThreadPoolExecutor(len(asked)) as pool:
            again = list(pool.map(server.ask, asked))
        assert [a.tokens for a in again] == [a.tokens for a in first]
        assert sum(a.storage for a in again) > 0
    grown = since(before, settled(server))  # of the rank that is read last: all count alike
    log = server.server.log_path.read_text(errors="replace")
    assert grown["ended_total met"] == grown["started_total both configured"] == 2 * len(asked)
    assert grown["loaded_tokens_total storage"] > 0
    assert grown["planner_failures_total"] == 0
    assert grown["reductions_total"] > 0
    assert sum(grown.get(f"lost_pages_total {why}", 0) for why in ("failed", "corrupt")) > 0
    compared = {how: grown.get(f"proof_attaches_total {how}", 0) for how in ("equal", "skipped")}
    assert compared["equal"] > 0 and sum(compared.values()) <= 2 * len(asked)
    assert "proof_attaches_total differs" not in grown and grown["proof"] == 0  # as before: proving
    assert log.count("faults are injected on purpose") == 1
