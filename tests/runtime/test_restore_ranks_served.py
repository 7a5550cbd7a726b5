"""Two tensor-parallel ranks restore in step although one of them reads later than the other, and
loses pages of its own.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from restore_lab import CHUNK, GBPS, LONG, counts, settled, since, two_ranks
from serving import config_file, flags, prompts, serving

pytestmark = pytest.mark.server


def test_a_rank_that_reads_late_and_loses_pages_changes_no_answer(servers):
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


# A prompt's stored pages behind a missing one are used, by a real server: by two ranks too, one
# of which has lost other pages than the other.


POLICY = {"restore": "both", "min_restore_tokens": 64}


def test_without_its_first_page_a_prefix_is_restored_and_the_page_is_stored_again(tmp_path):
    sections = {"throttle": {"read_gbps": GBPS}, "policy": POLICY, "faults": {"lose_first": 1}}
    asked = prompts(3, tokens=LONG, seed=5)
    arguments = flags(chunked_prefill_size=CHUNK, page_size=16)
    with serving(tmp_path, arguments, config_file(tmp_path, **sections)) as server:
        first = [server.ask(ids) for ids in asked]
        server.flush()
        pages = server.metric("kvtier:store_pages")
        server.restore("off")
        stock = [server.ask(ids) for ids in asked]
        assert [one.storage for one in stock] == [0] * 3, "its hit ends at the first missing page"
        server.restore("both")
        for _ in range(2):
            server.flush()
            assert server.metric("kvtier:store_pages") == pages, "the hole was filled"
            again = [server.ask(ids) for ids in asked]
            assert [one.tokens for one in again] == [one.tokens for one in first]
            assert all(0 < one.storage < LONG - 16 for one in again)
        time.sleep(1.2)  # counters are published twice a second
        found = counts(server)
    assert found["ended_total met"] == found["started_total both configured"] == 6
    assert found["loaded_tokens_total storage"] > 0
    assert found["planner_failures_total"] == 0
    assert not any(found.get(f"lost_pages_total {why}") for why in ("miss", "failed"))


def test_two_ranks_with_different_holes_load_what_both_have(servers):
    asked = prompts(4, tokens=LONG, seed=6)
    server = two_ranks(servers)
    before = settled(server)
    first = [server.ask(ids) for ids in asked]
    server.flush()
    with ThreadPoolExecutor(len(asked)) as pool:
        again = list(pool.map(server.ask, asked))
    assert [one.tokens for one in again] == [one.tokens for one in first]
    assert 0 < sum(one.storage for one in again) < len(asked) * (LONG - 32)
    grown = since(before, settled(server))
    assert grown["ended_total met"] == grown["started_total both configured"] == len(asked)
    assert grown["planner_failures_total"] == 0
