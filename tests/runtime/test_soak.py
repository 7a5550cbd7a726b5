"""A thousand requests through one server: memory and open files come to rest."""

from __future__ import annotations

import random

import pytest
from serving import config_file, flags, prompts, serving

pytestmark = [pytest.mark.server, pytest.mark.slow]
REQUESTS, EVERY = 1000, 100
_GROWTH = 48 << 20


@pytest.mark.timeout(1500)
def test_memory_and_open_files_are_flat_over_a_thousand_requests(tmp_path):
    # 40 prompts of 320 tokens are more than the device pool, the host pool and the store hold, and
    # they come in random order (in turn, least-recently-used would always have dropped the next
    # one): requests evict, read and write
    asked, order = prompts(40, 320, seed=31), random.Random(31)
    config = config_file(tmp_path, store={"capacity_bytes": "10MiB", "segment_bytes": "1MiB"})
    samples, storage = [], 0
    with serving(tmp_path, flags(max_total_tokens=2048, hicache_ratio=1.5), config) as server:
        first = {}
        for i in range(REQUESTS):
            which = order.randrange(len(asked))
            answer = server.ask(asked[which], tokens=2)
            storage += answer.storage
            assert first.setdefault(which, answer.tokens) == answer.tokens
            if (i + 1) % EVERY == 0:
                usage = server.server.usage()
                samples.append((i + 1, usage.rss_bytes, usage.open_files, usage.threads))
        print("\nrequests  RSS MiB  open files  threads")
        for count, rss, files, threads in samples:
            print(f"{count:8}  {rss / 2**20:7.1f}  {files:10}  {threads:7}")
        print(
            f"tokens from storage: {storage}, pages evicted: {server.metric('kvtier:pages_evicted_total'):.0f}"
        )
        assert storage > 0
        assert server.metric("kvtier:pages_evicted_total") > 0
    settled = samples[2:]
    assert max(files for _, _, files, _ in settled) <= min(files for _, _, files, _ in settled) + 4
    assert settled[-1][1] - settled[0][1] < _GROWTH
