"""More stored prompts wait than host memory holds: each finds all of its pages when it runs, and
none is read for nothing.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ahead_lab import AHEAD, check_map, counts, looking_ahead, one_at_a_time
from restore_lab import counts as restore_counts
from serving import ADMIN, Served, prompts

from sgl_kvtier.lab.sim.replay import replay

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

LENGTH, PAGE = 1000, 16
WHOLE = (LENGTH - 1) // PAGE * PAGE


def ask_all(served: Served, asked: list[list[int]]) -> list[tuple[list[int], int]]:
    """All at once: output tokens, and how much of each prompt was cached."""
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda prompt: served.ask(prompt, 6), asked))
    return [(answer.tokens, answer.cached) for answer in answers]


def pages_read(served: Served, expected: float) -> float:
    """Pages read from storage so far, once as many as expected are published, and a second later."""
    for _ in range(60):
        if served.metric("kvtier:pages_read_total") >= expected:
            break
        time.sleep(0.5)
    time.sleep(1.2)
    return served.metric("kvtier:pages_read_total")


def test_all_that_wait_find_what_is_stored_of_them(servers):
    asked = prompts(8, LENGTH, seed=11)
    served = one_at_a_time(servers)
    served.restore("off")
    kept_back = restore_counts(served).get("turn_reads_total kept back", 0.0)
    again = restore_counts(served).get("turn_reads_total read again", 0.0)
    first = [served.ask(prompt, 6).tokens for prompt in asked]
    served.flush()
    read = pages_read(served, 0)
    for _ in range(2):
        served.flush()
        assert ask_all(served, asked) == [(tokens, WHOLE) for tokens in first]
        read += len(asked) * WHOLE // PAGE
        # Where the order of the queue changes after pages were read, the last ones' make room.
        published = pages_read(served, read)
        lost = restore_counts(served).get("turn_reads_total read again", 0.0) - again
        again, read = again + lost, read + lost * (WHOLE // PAGE)
        assert published == read and lost <= 2, "each page once, and again what was lost"
    found = check_map(served)
    assert found["drift_total"] == 0 and found["failures_total"] == 0
    assert restore_counts(served)["turn_reads_total kept back"] > kept_back
    replayed = replay((served.server.folder / "decisions.jsonl").read_text().splitlines())
    assert replayed.difference is None
    assert replayed.questions > 2 * len(asked), "whose pages are read is decided again from the log"


@pytest.mark.slow
def test_aborted_ones_keep_nobody_waiting(tmp_path):
    asked = prompts(8, LENGTH, seed=12)
    pools = {"hicache_ratio": 2, "max_running_requests": 1}
    with looking_ahead(tmp_path, {**AHEAD, "restore": "off"}, **pools) as served:
        first = [served.ask(prompt, 6).tokens for prompt in asked]
        for again in range(3):
            served.flush()
            with ThreadPoolExecutor(len(asked)) as pool:
                sent = [
                    pool.submit(served.ask, prompt, 6, rid=f"{again}-{place}")
                    for place, prompt in enumerate(asked)
                ]
                for place in (1, 2, 5):
                    served.call(
                        "POST",
                        "/abort_request",
                        {"rid": f"{again}-{place}", "abort_all": False},
                        ADMIN,
                        raw=True,
                    )
                for place in (0, 3, 4, 6, 7):
                    assert sent[place].result().tokens == first[place]
                for place in (1, 2, 5):
                    sent[place].exception()
        found = check_map(served)
        assert found["drift_total"] == 0 and found["failures_total"] == 0
        assert counts(served)["map_storage_pages"] > 0
