"""A server that looks ahead, and sessions that go on from what they were answered."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from golden import Answers, Golden
from restore_lab import change
from serving import ADMIN, Served, config_file, flags, prompts, serving
from shared import Shared

SESSIONS, TURNS, GROWS = 8, 6, 20
AHEAD = {"prefetch": "on", "eviction": "next-use", "min_restore_tokens": 64}
POOLS = {"max_total_tokens": 2048, "page_size": 16, "hicache_ratio": 1.25}
"""The device holds less than half of the sessions here, and host memory does not hold them all."""


@contextmanager
def looking_ahead(
    folder: Path,
    policy: dict[str, object],
    sections: dict[str, dict[str, object]] | None = None,
    env: dict[str, str] | None = None,
    **more: object,
) -> Iterator[Served]:
    """A server with `POOLS`, unless `more` flags say otherwise."""
    with serving(
        folder,
        flags(**{**POOLS, **more}),
        config_file(folder, policy=policy, **(sections or {})),
        **(env or {}),
    ) as served:
        yield served


def shared_server(servers: Shared) -> Served:
    """One that restores, looks ahead and takes hints, also after it brought up pages in vain."""
    told = {"sessions": True, "hint_limit_s": 60.0, "decision_log": "{folder}/decisions.jsonl"}
    policy = {**AHEAD, "restore": "both", "prefetch_waste": 1.0, **told}
    return servers.get(flags(**POOLS), {"policy": policy})


def counts(served: Served) -> dict[str, float]:
    """The metrics of looking ahead: name without prefix, then the labels that are not a rank's."""
    return served.counts("kvtier:lookahead_")


def check_map(served: Served) -> dict[str, float]:
    """Has the server compare its map with the truth, once nothing runs; the counters after that."""
    served.settle()
    for _ in range(50):
        if change(served, lookahead__check=1):
            break
        time.sleep(0.2)
    time.sleep(1.2)
    return counts(served)


def one_at_a_time(servers: Shared) -> Served:
    """One that looks ahead and runs one request; device and host hold two and four prompts of 1,000
    tokens, and copies of what is on the device are among those on the host. It knows no sessions:
    pages of one that should come back are read ahead, and may be read for nothing.
    """
    told = {"restore": "both", "sessions": False, "decision_log": "{folder}/decisions.jsonl"}
    pools = {**POOLS, "hicache_ratio": 2, "max_running_requests": 1}
    return servers.get(flags(**pools), {"policy": {**AHEAD, **told}})


class Agents:
    """Sessions that go on from what they were answered, several at a time. What they are told next
    depends on nothing else. `alone`: each prompt is a tenant's of its own, so that all of it is
    computed.
    """

    def __init__(self, seed: int, *, alone: bool = False) -> None:
        self.seed = seed
        self.alone = alone
        self.said = prompts(SESSIONS, 400, seed=seed)
        self.answers: dict[tuple[int, int], list[int]] = {}

    def turn(self, served: Served, session: int, turn: int) -> None:
        rid = f"{self.seed}-{session}-{turn}-{time.monotonic()}"
        own = {"extra_key": rid} if self.alone else {"session_id": f"agent {self.seed} {session}"}
        answer = served.ask(self.said[session], tokens=8, rid=rid, **own)
        assert not (self.alone and answer.cached)
        self.answers[session, turn] = answer.tokens
        rng = random.Random(self.seed * 1000 + session * 100 + turn)
        self.said[session] = (
            self.said[session] + answer.tokens + [rng.randrange(4, 500) for _ in range(GROWS)]
        )

    def run(
        self, served: Served, together: int, pause_s: float = 0.5, turns: int = TURNS
    ) -> dict[tuple[int, int], list[int]]:
        """So many turns of all, with a pause behind each."""
        with ThreadPoolExecutor(together) as pool:
            for turn in range(turns):
                list(pool.map(partial(self.turn, served, turn=turn), range(SESSIONS)))
                time.sleep(pause_s)
        return self.answers


def aborts_and_flushes(served: Served, seconds: float) -> tuple[int, int]:
    """How many requests were sent, every third of them aborted, and how many had no answer."""
    rng, stop = random.Random(5), time.monotonic() + seconds
    others = prompts(12, 500, seed=9)

    def ask(number: int) -> int:
        rid = f"fuzz-{number}"
        with ThreadPoolExecutor(1) as one:
            asked = one.submit(
                served.ask, others[number % 12], 6, rid=rid, session_id=f"fuzz {number % 12}"
            )
            if number % 3 == 0:
                time.sleep(rng.random() * 0.1)
                served.call(
                    "POST", "/abort_request", {"rid": rid, "abort_all": False}, ADMIN, raw=True
                )
            try:
                asked.result()
            except Exception:
                return 1
        return 0

    number = lost = 0
    with ThreadPoolExecutor(5) as pool:
        while time.monotonic() < stop:
            lost += sum(pool.map(ask, range(number, number + 10)))
            number += 10
            if number % 40 == 0:
                served.flush()
    return number, lost


def computed_answers(
    golden: Golden, arguments: Sequence[str], server: Callable[[], Served], seed: int
) -> Answers:
    """What the sessions are answered where all is computed, from a server unless it is kept."""
    key = [*arguments, f"seed={seed}"]
    return golden.answers(key, Agents, lambda: Agents(seed, alone=True).run(server(), 4))
