"""Several restorations at once by the papers' rules and ours: both chunk sizes, the same queue order."""

from __future__ import annotations

import pytest

from sgl_kvtier.lab.papers import batches
from sgl_kvtier.lab.papers.batches import BY_LENGTH, CHUNKS, DRAWN, OURS, RULES, Bench
from sgl_kvtier.lab.profile import read
from sgl_kvtier.policy.rules import Rules


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_link_loads_the_mix_in_the_time_of_computing_it(chunk: int) -> None:
    profile, lengths = read("h100-llama8b"), range(4096, 32769, 4096)
    computing_s = sum(
        profile.prefill_seconds([(min(chunk, length + 64 - start), start)])
        for length in lengths
        for start in range(0, length + 64, chunk)
    )
    loading_s = sum(lengths) * profile.kv_bytes_per_token / Bench(chunk).link_bytes_per_s
    assert loading_s == pytest.approx(computing_s)


def test_ours_alone_bounds_the_gaps_of_requests_that_decode() -> None:
    bench, prefixes = Bench(8192), [4096, 8192, 16384, 32768]
    gaps = {rule: bench.batch(rule, prefixes)["gap_s"] for rule in RULES}
    assert gaps[OURS] < 0.5 * min(gap for rule, gap in gaps.items() if rule != OURS)


def test_the_table_has_both_chunk_sizes_and_every_rule_in_the_same_queue_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The papers compute in chunks of 512, and take requests in the order of the queue."""
    monkeypatch.setattr(batches, "SEEDS", (1,))
    found = list(batches.batches(2))
    assert [(one["chunk_tokens"], one["order"], one["rule"]) for one in found] == [
        (chunk, order, rule)
        for chunk in (512, 8192)
        for order in (DRAWN, BY_LENGTH)
        for rule in RULES
    ]
    assert len(batches.table(found, 2).rows) == 2 * 2 * len(RULES)


def test_a_queue_by_length_is_what_kvtiers_own_order_makes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`by length` gives the papers' rules the order that kvtier chooses by itself."""
    bench, prefixes = Bench(8192), [32768, 4096, 16384, 8192]
    ordered = bench.batch(OURS, sorted(prefixes))
    monkeypatch.setitem(RULES, OURS, (Rules, RULES[OURS][1]))
    own = bench.batch(OURS, prefixes)
    assert own["ttft_s"] == pytest.approx(ordered["ttft_s"], rel=0.02)
