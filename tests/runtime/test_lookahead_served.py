"""Looking ahead in the real server: maps are true, tokens equal, and nobody waits in vain."""

from __future__ import annotations

import pytest
from ahead_lab import (
    AHEAD,
    GROWS,
    SESSIONS,
    TURNS,
    Agents,
    aborts_and_flushes,
    check_map,
    computed_answers,
    counts,
    looking_ahead,
    shared_server,
)
from golden import Answers, Golden
from serving import Served, config_file, flags, prompts, serving
from shared import Shared

from sgl_kvtier.lab.sim.replay import replay

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

LOOKED_S = 2.5
"""Between two turns: an idle server looks once a second, and half of the sessions that are about to
return are not on the device then. Loads of restorations are not counted as moved ahead.
"""


@pytest.fixture(scope="module")
def served(servers: Shared) -> Served:
    return shared_server(servers)


def expected(servers: Shared, golden: Golden, seed: int) -> Answers:
    """What the sessions are answered by a server that does not look ahead, from nothing."""
    return computed_answers(golden, flags(), lambda: servers.get(flags()), seed)


@pytest.mark.parametrize(
    ("restore", "seed"), [pytest.param("off", 2, marks=pytest.mark.slow), ("both", 1)]
)
def test_tokens_are_equal_and_the_map_is_true_after_many_sessions(
    servers: Shared, served: Served, golden: Golden, restore: str, seed: int
) -> None:
    answers = expected(servers, golden, seed)
    served.restore(restore)
    before = counts(served)
    assert Agents(seed).run(served, 4, LOOKED_S) == answers
    found = check_map(served)
    grown = {name: value - before.get(name, 0.0) for name, value in found.items()}
    print(grown)
    assert grown["checks_total"] == 1
    assert grown["victims_total"] > 0
    assert found["drift_total"] == 0
    assert found["failures_total"] == 0
    assert found["map_pages"] >= found["map_storage_pages"] >= found["map_device_pages"] > 0
    assert sum(grown[f"moved_bytes_total {link}"] for link in ("host-device", "storage-host")) > 0
    tokens = sum(value for name, value in grown.items() if name.startswith("hit_tokens_total"))
    assert tokens >= SESSIONS * sum(400 + turn * (8 + GROWS) for turn in range(TURNS))
    said = served.server.log_path.read_text(errors="replace")
    assert "Traceback" not in said and "planner failed" not in said
    log = served.server.folder / "decisions.jsonl"
    replayed = replay(log.read_text().splitlines())
    assert replayed.difference is None and replayed.commands > 0


@pytest.mark.slow
def test_aborts_and_flushes_while_pages_move(tmp_path, servers, golden):
    answers = expected(servers, golden, 1)
    with looking_ahead(tmp_path, {**AHEAD, "restore": "both"}) as served:
        number, lost = aborts_and_flushes(served, 25)
        assert number > lost
        assert Agents(1).run(served, 4) == answers
        found = check_map(served)
        print(found, number, lost)
        assert found["drift_total"] == 0 and found["failures_total"] == 0
        assert "Traceback" not in (tmp_path / "server.log").read_text(errors="replace")


@pytest.mark.slow
def test_waiting_requests_find_their_pages_on_the_device_and_a_tiny_pool_starves_nobody(tmp_path):
    asked = prompts(6, 300, seed=4)
    policy = {**AHEAD, "restore": "off", "sessions": False}
    pools = {"max_total_tokens": 1024, "hicache_ratio": 4, "max_running_requests": 1}
    with looking_ahead(tmp_path, policy, **pools) as served:
        first = [served.ask(prompt, 6).tokens for prompt in asked]
        served.settle()
        for _ in range(4):
            assert [answer.tokens for answer in served.ask_all(asked, 6)] == first
        found = check_map(served)
        print(found)
        assert found["moved_bytes_total host-device"] > 0
        assert found["victims_total"] > 0
        assert found["drift_total"] == 0 and found["failures_total"] == 0


@pytest.mark.slow
def test_a_server_looks_ahead_only_where_it_is_asked_to_and_not_with_pipeline_stages(tmp_path):
    plain, two = tmp_path / "plain", tmp_path / "two"
    with serving(plain, flags(page_size=16), config_file(plain)) as served:
        served.ask(prompts(1)[0])
        assert counts(served) == {}
    stages = flags("tiny-llama", pp_size=2, max_total_tokens=2048, page_size=16)
    config = config_file(two, policy={**AHEAD, "restore": "off"})
    with serving(two, stages, config, SGLANG_CPU_OMP_THREADS_BIND="0|1") as served:
        served.ask(prompts(1)[0])
        assert counts(served) == {}
    log = (two / "server.log").read_text(errors="replace")
    assert "not looking ahead: more than one pipeline stage" in log
