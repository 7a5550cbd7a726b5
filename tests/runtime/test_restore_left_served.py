"""A real server under `auto`: what loading alone would bring is left to SGLang, what lies in two
tiers is restored.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from restore_lab import GBPS, LONG, change, restoring, settled
from serving import Served, prompts
from shared import Shared

pytestmark = pytest.mark.server

WHOLE = (LONG - 1) // 16 * 16
AUTO, BOTH, LOAD = 0, 1, 2
LONGER, PAGE_BYTES = 3000, 16384
PAUSES_S = (0.3, 0.1, 0.03, 0.01, 0.003)
"""A long prompt is computed for at least one of these times."""


@pytest.fixture(scope="module")
def served(servers: Shared) -> Served:
    """After one restoration: what computing and storage cost is known."""
    server = restoring(servers)
    ids = prompts(1, LONG, seed=1)[0]
    server.ask(ids)
    server.flush()
    server.ask(ids)
    assert change(server, policy__restore=AUTO)
    return server


def crowd_out(served: Served, seed: int) -> None:
    """Prompts that take the whole device pool; the host pool holds twice as much."""
    for ids in prompts(3, LONG - 200, seed=seed):
        served.ask(ids, 1)


def test_a_prefix_in_host_memory_is_copied_by_sglang(served):
    served.flush()
    ids = prompts(1, LONG, seed=2)[0]
    first = served.ask(ids)
    crowd_out(served, 20)
    before = settled(served)
    again = served.ask(ids)
    after = settled(served)
    assert (again.tokens, again.host) == (first.tokens, WHOLE)
    assert after["declined_total host memory"] - before.get("declined_total host memory", 0) == 1
    assert sum(v for name, v in after.items() if name.startswith("started")) == sum(
        v for name, v in before.items() if name.startswith("started")
    )


def test_storage_so_fast_that_all_would_be_loaded_is_read_ahead_by_sglang(served):
    assert change(served, throttle__read_gbps=100)
    assert change(served, policy__restore=LOAD)
    for ids in prompts(6, LONG, seed=3):  # until the link is known to be fast
        served.ask(ids, 1)
        served.flush()
        served.ask(ids, 1)
    assert change(served, policy__restore=AUTO)
    ids = prompts(1, LONG, seed=4)[0]
    first = served.ask(ids)
    served.flush()
    before = settled(served)
    again = served.ask(ids)
    after = settled(served)
    assert change(served, throttle__read_gbps=GBPS)
    assert (again.tokens, again.storage) == (first.tokens, WHOLE)
    assert (
        after["declined_total loading is faster"]
        - before.get("declined_total loading is faster", 0)
        == 1
    )
    assert after["ended_total met"] == before["ended_total met"]


def test_a_prefix_that_loads_about_as_fast_as_it_is_computed_is_restored(served):
    assert change(served, policy__restore=AUTO)
    for seed in range(60, 68):  # the link of the test before was fast: until that is forgotten
        ids = prompts(1, LONGER, seed=seed)[0]
        begun = time.monotonic()
        first = served.ask(ids)
        seconds = time.monotonic() - begun
        read_gbps = LONGER // 16 * PAGE_BYTES * 8 / seconds / 1e9
        assert change(served, throttle__read_gbps=read_gbps)
        served.flush()
        before = settled(served)
        again = served.ask(ids)
        after = settled(served)
        assert again.tokens == first.tokens
        if after["ended_total met"] > before["ended_total met"]:
            break
    else:
        raise AssertionError("all of it was left to SGLang")
    assert change(served, throttle__read_gbps=GBPS)


def test_a_prefix_in_host_memory_and_storage_is_restored(served):
    assert change(served, policy__restore=BOTH)
    ids = prompts(1, LONG, seed=5)[0]
    first = served.ask(ids)
    served.flush()
    served.ask(ids[: LONG // 2])
    crowd_out(served, 50)
    before = settled(served)
    again = served.ask(ids)
    after = settled(served)
    assert again.tokens == first.tokens
    assert again.host + again.storage > 0
    assert again.storage > 0
    assert after["ended_total met"] - before["ended_total met"] == 1
    assert after["loaded_bytes_total host-device"] > before.get("loaded_bytes_total host-device", 0)


def test_a_read_begun_for_want_of_device_room_is_taken_back_when_there_is_room(served):
    (stored,), (running,) = prompts(1, LONGER, seed=30), prompts(1, LONG, seed=31)
    assert change(served, policy__restore=AUTO)
    served.flush()
    begun = time.monotonic()
    first = served.ask(stored)
    seconds = time.monotonic() - begun
    assert change(served, throttle__read_gbps=LONGER // 16 * PAGE_BYTES * 8 / seconds / 1e9)
    for pause_s in PAUSES_S:
        served.flush()
        before = settled(served)
        with ThreadPoolExecutor(2) as pool:
            beside = pool.submit(served.ask, running, 16)
            time.sleep(pause_s)
            again = pool.submit(served.ask, stored).result()
            beside.result()
        after = settled(served)
        assert again.tokens == first.tokens
        taken = "turn_reads_total taken back"
        if after.get(taken, 0) > before.get(taken, 0):
            break
    else:
        raise AssertionError("all of it was read by SGLang")
    assert after["ended_total met"] > before["ended_total met"]
    assert change(served, throttle__read_gbps=GBPS)


def test_a_short_one_runs_beside_the_chunks_of_a_long_one(served):
    (long,), (short,) = prompts(1, 3570, seed=20), prompts(1, 40, seed=21)
    found = []
    for pause_s in PAUSES_S:
        served.flush()
        beside, answers = computed(served, long, short, pause_s)
        assert change(served, policy__queue=1)
        served.flush()
        behind, again = computed(served, long, short, pause_s)
        assert change(served, policy__queue=0)
        assert again == answers
        found.append((beside, behind))
        if found[-1] == ([40, 3570], [3570, 40]):
            return  # sent while the long one was computed, both times
    raise AssertionError(f"the order of the queue made no difference: {found}")


def computed(
    served: Served, long: list[int], short: list[int], pause_s: float
) -> tuple[list[int], dict[int, list[int]]]:
    """Lengths in the order in which prompts are computed, and the answers. The short one is sent
    while the long one is computed in chunks. Nothing is stored for this tenant.
    """
    order: list[int] = []
    tenant = f"at {time.monotonic()}"

    def ask(prompt: list[int]) -> list[int]:
        found = served.ask(prompt, 1, extra_key=tenant).tokens
        order.append(len(prompt))
        return found

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, long)
        time.sleep(pause_s)
        second = pool.submit(ask, short)
        answers = {len(long): first.result(), len(short): second.result()}
    return order, answers
