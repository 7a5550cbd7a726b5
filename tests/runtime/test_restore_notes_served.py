"""One real server that restores: its counters, its decision log decided again, what it learned, and
settings at run time.
"""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path

import pytest
from restore_lab import LONG, change, counts, restoring, settled, since
from serving import Served, prompts
from shared import Shared

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.sim.replay import replay
from sgl_kvtier.policy.decision_log import Reader, decode_header
from sgl_kvtier.policy.messages import Mode, PolicyChanged, StepPlan
from sgl_kvtier.runtime.records import cost_profile

pytestmark = pytest.mark.server

RESTORE = next(f for f in dataclasses.fields(PolicyConfig) if f.name == "restore").metadata[
    "choices"
]


@pytest.fixture(scope="module")
def served(servers: Shared) -> Served:
    return restoring(servers)


@pytest.fixture(scope="module")
def folder(served: Served) -> Path:
    return served.server.folder


def restored(served: Served, seed: int) -> tuple[list[int], list[int], int]:
    """One prompt asked, flushed and asked again: both answers, and the tokens that came from
    storage.
    """
    ids = prompts(1, LONG, seed=seed)[0]
    first = served.ask(ids)
    served.flush()
    again = served.ask(ids)
    return first.tokens, again.tokens, again.storage


def lines_of(folder: Path) -> list[str]:
    time.sleep(0.6)
    return (folder / "decisions.jsonl").read_text().splitlines()


def total(served: Served, name: str) -> float:
    """A metric, all its labels together."""
    lines = served.call("GET", "/metrics", None, raw=True).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)


def sglangs(served: Served) -> dict[str, float]:
    """SGLang's own counters that its dashboards make hit rates of, as they are now."""
    settled(served)
    text = served.call("GET", "/metrics", None, raw=True)
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        source = re.search(r'(?:cache_source|mode)="(\w+)"', rest)
        key = name.removeprefix("sglang:") + (f" {source[1]}" if source else "")
        if name.startswith("sglang:") and not line.startswith("#"):
            found[key] = found.get(key, 0.0) + float(line.rpartition(" ")[2])
    return found


def test_restored_tokens_are_in_sglangs_own_hit_figures(served):
    (ids,) = prompts(1, LONG, seed=71)
    served.ask(ids)
    served.flush()
    before = sglangs(served)
    again = served.ask(ids)
    grown = since(before, sglangs(served))
    assert again.storage > 0
    assert grown["prompt_tokens_total"] == LONG
    assert grown["cached_tokens_total storage"] == again.storage == again.cached
    assert grown["prefill_effective_tokens_total storage_hit"] == again.storage
    assert grown["storage_prefetch_hit_tokens_total"] >= again.storage
    assert grown["prefetched_tokens_total"] == again.storage
    assert not grown.get("storage_prefetch_unfulfilled_tokens_total")


def test_bytes_restored_from_host_memory_are_in_sglangs_load_back_figures(served):
    (ids,) = prompts(1, LONG, seed=72)
    served.ask(ids)
    served.flush()
    served.ask(ids[: LONG // 2])
    for other in prompts(3, LONG - 200, seed=73):  # the whole device pool; the host's is larger
        served.ask(other, 1)
    ours, theirs = settled(served), sglangs(served)
    served.ask(ids)
    loaded = since(ours, settled(served))["loaded_bytes_total host-device"]
    grown = since(theirs, sglangs(served))
    assert loaded > 0
    assert grown["load_back_bytes_total"] == loaded
    assert grown["load_back_duration_seconds_sum"] > 0


def test_pages_that_were_restored_are_not_copied_back_where_they_came_from(served):
    ids = prompts(1, LONG, seed=41)[0]
    served.ask(ids)
    served.flush()
    time.sleep(1.2)
    names = ("sglang:hicache_backup_tokens_total", "kvtier:written_bytes_total")
    before = [total(served, name) for name in names]
    again = served.ask(ids)
    time.sleep(1.2)
    backed_up, written = (total(served, n) - b for n, b in zip(names, before, strict=True))
    assert again.storage > 0
    # What is copied to host memory was computed: of a restored token no byte.
    assert 0 < backed_up <= LONG + len(again.tokens) - again.storage
    assert written == 0, "all of the prompt's pages were in storage"
    settled(served)


def test_what_restorations_did_is_in_the_metrics(served):
    before = settled(served)
    loaded = 0
    for seed in (11, 12, 13):
        first, again, storage = restored(served, seed)
        assert first == again
        loaded += storage
    after = settled(served)
    grown = since(before, after)
    assert loaded > 0
    assert grown["started_total both configured"] == 3
    assert grown["ended_total met"] == 3
    assert grown["loaded_tokens_total storage"] == loaded
    assert grown["computed_tokens_total"] + loaded == 3 * (LONG // 16 * 16)
    assert grown["loaded_bytes_total storage-device"] > 0
    assert grown["jumps_total"] >= 3
    assert grown["meeting_position_count"] == 3
    assert grown["restoring_seconds_total"] > 0
    assert grown["reductions_total"] == 0
    assert grown["planner_failures_total"] == 0
    assert after["under_way"] == 0


def test_a_setting_is_changed_between_two_requests(served):
    assert change(served, policy__restore=RESTORE.index("load"))
    before = settled(served)
    first, again, storage = restored(served, 21)
    after = settled(served)
    assert change(served, policy__restore=RESTORE.index("both"))
    assert first == again
    assert (
        after["started_total configured load"] - before.get("started_total configured load", 0) == 1
    )
    assert storage == LONG // 16 * 16
    # SGLang's, of the last prefill: the whole prefix was attached to it.
    assert total(served, "sglang:cache_hit_rate") == pytest.approx(storage / LONG)


def test_switched_off_everything_is_sglangs_own_until_it_is_switched_on(served):
    assert change(served, policy__restore=RESTORE.index("off"))
    before = settled(served)
    first, again, storage = restored(served, 31)
    after = settled(served)
    assert change(served, policy__restore=RESTORE.index("both"))
    assert first == again
    assert storage == (LONG - 1) // 16 * 16, "wait_complete loads all of it"
    assert after["ended_total met"] == before["ended_total met"]
    assert after["declined_total switched off"] > before.get("declined_total switched off", 0)
    assert restored(served, 32)[2] > 0
    assert settled(served)["ended_total met"] == before["ended_total met"] + 1


def test_the_log_of_a_running_server_is_decided_again_to_the_bit(served, folder):
    restored(served, 41)
    lines = lines_of(folder)
    records = [*map(Reader().decode, lines[1:])]
    modes = [
        start.mode for record in records if isinstance(record, StepPlan) for start in record.starts
    ]
    assert Mode.BOTH in modes
    assert Mode.LOAD in modes
    assert any(isinstance(record, PolicyChanged) for record in records)
    replayed = replay(lines)
    assert replayed.difference is None, str(replayed.difference)
    assert replayed.steps > 20
    assert replayed.commands > 20
    assert decode_header(lines[0]).config.decision_log == ""
    assert counts(served)["log_lines_dropped_total"] == 0


def test_what_was_learned_lies_beside_the_store(served, folder):
    found = [cost_profile.read(path) for path in (folder / "store").glob(f"*/{cost_profile.NAME}")]
    assert len(found) == 1
    profile = found[0]
    assert profile is not None
    assert profile.chunks >= cost_profile.LEAST_CHUNKS
    assert profile.transfers["storage-device"] > 0
    assert profile.prefill["per_token_s"] > 0 or profile.prefill["fixed_s"] > 0
    assert 0 < profile.links["storage-device"] < 2e9 / 8 * 10
    assert profile.conditions["throttle"]["read_gbps"] > 0
