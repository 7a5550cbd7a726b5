"""Two ranks look ahead in step, although one stalls, fails to read and damages pages."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ahead_lab import AHEAD, Agents, aborts_and_flushes, check_map, computed_answers, looking_ahead
from golden import Answers, Golden
from restore_lab import CHECKED, two_ranks, two_ranks_flags
from serving import ADMIN, Served, prompts, series
from shared import Shared

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

TENSOR = {"model": "tiny-llama", "tp_size": 2}
ONE_STALLS = {"stall_ms": 40, "seed": 4, "rank": 1}
ONE_LOSES = {"read_error_rate": 0.05, "corrupt_rate": 0.03, **ONE_STALLS}
OWN = (
    "checks",
    "map",
    "sessions",
    "moved_bytes",
    "failed_moves",
    "victims",
    "host_victims",
    "failures",
)
"""Counters that are the same on both ranks, since both do the same."""


def by_rank(served: Served, prefix: str = "lookahead_") -> dict[str, dict[str, float]]:
    """The metrics of each rank: name without prefix, then the labels that are not a rank's."""
    found: dict[str, dict[str, float]] = {}
    for name, labels, value in served.samples(f"kvtier:{prefix}"):
        if "pp_rank" in labels:
            rank = str(max(int(labels["tp_rank"]), int(labels["pp_rank"])))
            found.setdefault(rank, {})[series(name, labels)] = value
    return found


def same(served: Served, log: Path) -> dict[str, float]:
    """The second rank's counters, after both have done the same and found their whole maps true."""
    check_map(served)
    found = by_rank(served)
    print(found)
    assert sorted(found) == ["0", "1"]
    first, second = (
        {name: rank[name] for name in rank if name.startswith(OWN)} for rank in found.values()
    )
    assert first == second
    assert all(rank["failures_total"] == 0 and rank["checks_total"] == 1 for rank in found.values())
    said = log.read_text(errors="replace")
    wrong = ("Traceback", "maps of pages differ", "planner failed")
    assert [words for words in wrong if words in said] == []
    compared = [
        ast.literal_eval(text) for text in re.findall(r"compared with the truth: (\{.*?\})", said)
    ]
    assert len(compared) == 2 and not any(sum(kinds.values()) for kinds in compared), compared
    return found["1"]


def until(served: Served, true: Callable[[dict[str, float]], bool]) -> None:
    """Waits until something is true on both ranks: an idle one looks once a second."""
    for _ in range(60):
        ranks = by_rank(served)
        if len(ranks) == 2 and all(map(true, ranks.values())):
            return
        time.sleep(0.5)
    raise AssertionError(ranks)


@pytest.fixture(scope="module")
def expected(servers: Shared, golden: Golden) -> Answers:
    """What the sessions are answered by two ranks that do not look ahead, from nothing."""
    return computed_answers(golden, two_ranks_flags(), lambda: two_ranks(servers), 1)


def test_answers_are_equal_and_the_maps_true_on_both_ranks(
    tmp_path: Path, expected: Answers
) -> None:
    policy = {**AHEAD, "restore": "off"}  # the tests below restore as well
    with looking_ahead(tmp_path, policy, {"faults": ONE_STALLS}, CHECKED, **TENSOR) as served:
        assert Agents(1).run(served, 4) == expected
        found = same(served, tmp_path / "server.log")
        assert found["drift_total"] == 0
        assert found["victims_total"] > 0
        assert found["map_pages"] >= found["map_storage_pages"] >= found["map_device_pages"] > 0
        assert (
            sum(found[f"moved_bytes_total {link}"] for link in ("host-device", "storage-host")) > 0
        )
        assert sum(rank["reductions_total"] for rank in by_rank(served, "restore_").values()) == 0


@pytest.mark.slow
def test_pages_that_one_rank_loses_are_lost_for_both(tmp_path: Path, expected: Answers) -> None:
    with looking_ahead(
        tmp_path, {**AHEAD, "restore": "both"}, {"faults": ONE_LOSES}, CHECKED, **TENSOR
    ) as served:
        assert Agents(1).run(served, 4) == expected
        assert same(served, tmp_path / "server.log")["victims_total"] > 0


@pytest.mark.slow
def test_aborts_and_flushes_while_pages_move_on_two_ranks(
    tmp_path: Path, expected: Answers
) -> None:
    with looking_ahead(
        tmp_path, {**AHEAD, "restore": "both"}, {"faults": ONE_LOSES}, CHECKED, **TENSOR
    ) as served:
        number, lost = aborts_and_flushes(served, 20)
        assert number > lost
        assert Agents(1).run(served, 4) == expected
        same(served, tmp_path / "server.log")


@pytest.mark.slow
def test_a_hint_brings_pages_up_on_both_ranks_although_one_fails_to_read_some_and_a_flush_ends_it(
    tmp_path: Path,
) -> None:
    sections = {"throttle": {"read_gbps": 0.004}, "faults": {"read_error_rate": 0.05, **ONE_STALLS}}
    asked = dict(zip(("one", "other"), prompts(2, 600, seed=8), strict=True))
    pools = {"max_total_tokens": 4096, "hicache_ratio": 2}
    policy = {**AHEAD, "restore": "off"}
    with looking_ahead(tmp_path, policy, sections, CHECKED, **TENSOR, **pools) as served:
        first = [served.ask(ids, session_id=name).tokens for name, ids in asked.items()]
        served.flush()
        until(served, lambda rank: rank["map_host_pages"] == 0)

        def hint(session: str, delay_s: float) -> None:
            answer = served.hint(session=session, expected_delay_s=delay_s)
            assert (answer["result"], answer["sessions"]) == ("accepted", 1)

        hint("one", 0.5)
        time.sleep(0.2)
        served.call("POST", "/flush_cache", {}, ADMIN)  # its pages are being read
        hint("other", 5.0)
        until(served, lambda rank: rank["map_host_pages"] >= 37)
        hint("one", 5.0)
        until(served, lambda rank: rank["map_host_pages"] >= 2 * 37)
        again = [served.ask(ids, session_id=name) for name, ids in asked.items()]
        assert [answer.tokens for answer in again] == first
        assert all(answer.device + answer.host > 500 and answer.storage == 0 for answer in again), (
            again
        )
        found = same(served, tmp_path / "server.log")
        assert found["drift_total"] == 0
        assert found["moved_bytes_total storage-host"] > 0
        assert found["failed_moves_total not read"] > 0
        assert served.metric("kvtier:lookahead_hints_total") == 3
