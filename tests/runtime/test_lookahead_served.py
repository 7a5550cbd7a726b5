"""Looking ahead in the real server: the map of pages is true, tokens stay equal, and no request waits for room in vain."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from serving import ADMIN, Served, config_file, flags, prompts, serving

from sgl_kvtier.sim.replay import replay

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

SESSIONS, TURNS, GROWS = 8, 6, 20
AHEAD = {"prefetch": "kvtier", "eviction": "next-use", "min_restore_tokens": 64}


@contextmanager
def looking_ahead(folder: Path, policy: dict[str, object], **more: object) -> Iterator[Served]:
    """A server whose device holds less than half of the sessions here, and whose host memory does not hold them all."""
    given = {"max_total_tokens": 2048, "page_size": 16, "hicache_ratio": 1.25, **more}
    with serving(folder, flags(**given), config_file(folder, policy=policy)) as served:
        yield served


def counts(served: Served) -> dict[str, float]:
    """The metrics of looking ahead: name without prefix, then the labels that are not a rank's."""
    found: dict[str, float] = {}
    for line in served.call("GET", "/metrics", None, raw=True).splitlines():
        match = re.match(r"kvtier:lookahead_(\w+)\{(.*)\} (.*)", line)
        if match:
            name, labels, value = match.groups()
            kept = [text for key, text in re.findall(r'(\w+)="([^"]*)"', labels) if key not in ("tp_rank", "pp_rank", "dp_rank", "pid")]
            found[" ".join([name, *kept])] = float(value)
    return found


def check_map(served: Served) -> dict[str, float]:
    """Has the server compare its map with the truth, once nothing runs; the counters after that."""
    served.settle()
    for _ in range(50):
        answer = served.call("POST", "/set_internal_state", {"server_args": {"kvtier.lookahead.check": 1}}, ADMIN, raw=True)
        if "true" in str(answer).lower():
            break
        time.sleep(0.2)
    time.sleep(1.2)
    return counts(served)


class Agents:
    """Sessions that go on from what they were answered, several at a time. What they are told next depends on nothing else."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.said = prompts(SESSIONS, 400, seed=seed)
        self.answers: dict[tuple[int, int], list[int]] = {}

    def turn(self, served: Served, session: int, turn: int) -> None:
        answer = served.ask(self.said[session], tokens=8, session_id=f"agent {session}", rid=f"{session}-{turn}-{time.monotonic()}")
        self.answers[session, turn] = answer.tokens
        rng = random.Random(self.seed * 1000 + session * 100 + turn)
        self.said[session] = self.said[session] + answer.tokens + [rng.randrange(4, 500) for _ in range(GROWS)]

    def run(self, served: Served, together: int) -> dict[tuple[int, int], list[int]]:
        with ThreadPoolExecutor(together) as pool:
            for turn in range(TURNS):
                list(pool.map(lambda session, turn=turn: self.turn(served, session, turn), range(SESSIONS)))  # type: ignore[misc]
                time.sleep(0.5)
        return self.answers


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], list[int]]:
    """What the sessions are answered by a server with room for all of them, and no cache below the device."""
    folder = tmp_path_factory.mktemp("expected")
    with serving(folder, flags(backend=None, max_total_tokens=16384, page_size=16)) as served:
        return Agents(1).run(served, 4)


@pytest.mark.parametrize("restore", ["off", "both"])
def test_tokens_are_equal_and_the_map_is_true_after_many_sessions(tmp_path, restore, expected):
    log = tmp_path / "decisions.jsonl"
    with looking_ahead(tmp_path, {**AHEAD, "restore": restore, "decision_log": str(log)}) as served:
        assert Agents(1).run(served, 4) == expected
        found = check_map(served)
        print(found)
        assert found["checks_total"] == 1
        assert found["drift_total"] == 0
        assert found["failures_total"] == 0
        assert found["victims_total"] > 0
        assert found["map_pages"] >= found["map_ssd_pages"] >= found["map_hbm_pages"] > 0
        assert sum(found[f"moved_bytes_total {link}"] for link in ("dram-hbm", "ssd-dram")) > 0
        tokens = sum(value for name, value in found.items() if name.startswith("hit_tokens_total"))
        asked = SESSIONS * sum(400 + turn * (8 + GROWS) for turn in range(TURNS))
        assert tokens >= asked  # SGLang's own warm-up request is counted as well
        said = (tmp_path / "server.log").read_text(errors="replace")
        assert "Traceback" not in said and "planner failed" not in said
    replayed = replay(log.read_text().splitlines())
    assert replayed.difference is None and replayed.commands > 0


def test_aborts_and_flushes_while_pages_move(tmp_path, expected):
    with looking_ahead(tmp_path, {**AHEAD, "restore": "both"}) as served:
        rng, stop = random.Random(5), time.monotonic() + 25
        lost = 0
        others = prompts(12, 500, seed=9)

        def ask(number: int) -> int:
            rid = f"fuzz-{number}"
            with ThreadPoolExecutor(1) as one:
                asked = one.submit(served.ask, others[number % 12], 6, rid=rid, session_id=f"fuzz {number % 12}")
                if number % 3 == 0:
                    time.sleep(rng.random() * 0.1)
                    served.call("POST", "/abort_request", {"rid": rid, "abort_all": False}, ADMIN, raw=True)
                try:
                    asked.result()
                except Exception:
                    return 1
            return 0

        with ThreadPoolExecutor(5) as pool:
            number = 0
            while time.monotonic() < stop:
                lost += sum(pool.map(ask, range(number, number + 10)))
                number += 10
                if number % 40 == 0:
                    served.flush()
        assert number > lost
        assert Agents(1).run(served, 4) == expected
        found = check_map(served)
        print(found, number, lost)
        assert found["drift_total"] == 0 and found["failures_total"] == 0
        assert "Traceback" not in (tmp_path / "server.log").read_text(errors="replace")


def test_waiting_requests_find_their_pages_on_the_device_and_a_tiny_pool_starves_nobody(tmp_path):
    asked = prompts(6, 300, seed=4)
    with looking_ahead(
        tmp_path, {**AHEAD, "restore": "off", "sessions": False}, max_total_tokens=1024, hicache_ratio=4, max_running_requests=1
    ) as served:
        first = [served.ask(prompt, 6).tokens for prompt in asked]
        served.settle()
        for _ in range(4):
            with ThreadPoolExecutor(6) as pool:
                assert [answer.tokens for answer in pool.map(lambda prompt: served.ask(prompt, 6), asked)] == first
        found = check_map(served)
        print(found)
        assert found["moved_bytes_total dram-hbm"] > 0
        assert found["victims_total"] > 0
        assert found["drift_total"] == 0 and found["failures_total"] == 0


def test_a_server_looks_ahead_only_where_it_is_asked_to_and_not_on_two_ranks(tmp_path):
    with serving(tmp_path / "plain", flags(page_size=16), config_file(tmp_path / "plain")) as served:
        served.ask(prompts(1)[0])
        assert counts(served) == {}
    two = {"tp_size": 2, "max_total_tokens": 2048, "page_size": 16}
    config = config_file(tmp_path / "two", policy={**AHEAD, "restore": "off"})
    with serving(tmp_path / "two", flags(**two), config, SGLANG_CPU_OMP_THREADS_BIND="0|1") as served:
        served.ask(prompts(1)[0])
        assert counts(served) == {}
    assert "not looking ahead: more than one rank" in (tmp_path / "two" / "server.log").read_text(errors="replace")
