"""With write-back a page leaves the device when host memory has its copy, and host memory is full of
pages that are being stored: requests wait for these, and SGLang does not end with "Prefill out of
memory".
"""

from __future__ import annotations

import pytest
from serving import config_file, flags, prompts, serving

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

POOLS = {"max_total_tokens": 2048, "context_length": 2048, "hicache_ratio": 1.5}


@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_requests_wait_while_what_leaves_the_device_is_being_stored(tmp_path, policy):
    asked = prompts(4, 1800, seed=31)
    slow = config_file(tmp_path, throttle={"latency_ms": 700})
    arguments = flags(hicache_write_policy=policy, **POOLS)
    with serving(tmp_path, arguments, slow) as served:
        first = [served.ask(prompt).tokens for prompt in asked]
        assert [served.ask(prompt).tokens for prompt in asked] == first
    log = (tmp_path / "server.log").read_text(errors="replace")
    assert "Prefill out of memory" not in log and "Retract requests" not in log
