"""The least time that a paced device's steps and links allow for a round of requests.

What is taken to be so, and makes it a lower bound:

- A page that no earlier request had is computed once. All else may be reused by any request behind
  it, by whole pages, as by SGLang's radix cache; the last token of a prompt is always computed.
- Waiting in the queue costs nothing, steps are full, and tokens computed again cost what the
  cheapest token of the profile does.
- For what no device pool of this size can have kept (`missing`), the requests come in the order in
  which they were sent. The pool is filled with hindsight (Belady), and counted empty of what a
  request needs only while it runs.
- Loading overlaps with all computing, from both ends, at the full speed of one link.

Pure functions. Times are seconds without dilation.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvtier.lab.profile import Profile

_NEVER = 1 << 62


@dataclass(frozen=True)
class Asked:
    """One request. `pages` are names of its whole pages, each for all tokens up to its end.
    `wait_s` passes in its session before it is sent.
    """

    session: str
    turn: int
    tokens: int
    pages: tuple[int, ...]
    output_tokens: int
    wait_s: float = 0.0


@dataclass(frozen=True)
class Machine:
    """What the requests run on. The disk's bytes are those of the modelled machine; `at_a_time` are
    sessions, `memory_tokens` the device's and the host's pool together.
    """

    profile: Profile
    page: int
    chunk: int
    device_tokens: int
    memory_tokens: int
    disk_gbytes_per_s: float
    at_a_time: int

    @property
    def token_s(self) -> float:
        """The cheapest prefill of a token that there is."""
        table = self.profile.prefill
        sizes = [size for size in table.rows if 0 < size <= self.chunk] + [self.chunk]
        return min(table.at(size, 0) / size for size in sizes)

    @property
    def to_device_s(self) -> float:
        """Seconds of a token on the link to the device."""
        return self.profile.kv_bytes_per_token / self.profile.to_device_gbytes_per_s / 1e9

    @property
    def disk_s(self) -> float:
        """Seconds of a token on the disk."""
        return self.profile.kv_bytes_per_token / self.disk_gbytes_per_s / 1e9


def reused(order: Sequence[Asked], page: int) -> list[int]:
    """Of each request, the leading pages that a request before it had."""
    seen: set[int] = set()
    found = []
    for one in order:
        usable = one.pages[: (one.tokens - 1) // page]
        count = next((k for k, name in enumerate(usable) if name not in seen), len(usable))
        seen.update(one.pages)
        found.append(count)
    return found


def missing(order: Sequence[Asked], kept: Sequence[int], capacity: int) -> list[int]:
    """Of each request's reused pages (`kept`), the least that a pool of `capacity` pages lacks.

    Evicted is what is used again latest, so that all together are as few as can be.
    """
    later: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for place in range(len(order) - 1, -1, -1):
        next_uses.append([later.get(name, _NEVER) for name in order[place].pages])
        for name in order[place].pages[: kept[place]]:
            later[name] = place
    pool: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    found = []
    for one, reuse, uses in zip(order, kept, reversed(next_uses), strict=True):
        found.append(sum(name not in pool for name in one.pages[:reuse]))
        for name, use in zip(one.pages, uses, strict=True):
            if use == _NEVER:
                pool.pop(name, None)
            else:
                pool[name] = use
                heapq.heappush(latest, (-use, name))
        while len(pool) > capacity:
            use, name = heapq.heappop(latest)
            if pool.get(name) == -use:
                del pool[name]
    return found


def both_ends(compute_s: float, tokens: float, token_s: float, link_s: float) -> float:
    """The least seconds for `compute_s` of computing and for `tokens` tokens more, each of which is
    computed or loaded.
    """
    split_s = (tokens + compute_s / token_s) / (1 / token_s + 1 / link_s)
    return max(compute_s, split_s)


def bound(order: Sequence[Asked], machine: Machine) -> dict[str, Any]:
    """The bound of requests in the order they were sent (`bound` of kvtier.compare/1)."""
    kept = reused(order, machine.page)
    gone = [missing(order, kept, size // machine.page) for size in _sizes(machine)]
    alone = [_prefill_s(machine, one, have) for one, have in zip(order, kept, strict=True)]
    later = [place for place, one in enumerate(order) if one.turn > 1]
    fresh_s = sum(alone[place] for place in later)
    absent = [machine.page * sum(each[place] for place in later) for each in gone]
    compute_s = sum(map(_shared_s, [machine] * len(order), order, kept))
    total = [machine.page * sum(each) for each in gone]
    session_s = _sessions_s(machine, order, alone)
    return {
        "ttft_later_ms": 1e3 * fresh_s / len(later) if later else None,
        "ttft_later_on_demand_ms": 1e3 * _least(machine, fresh_s, absent) / len(later)
        if later
        else None,
        "makespan_s": max(_least(machine, compute_s, total), session_s),
        "compute_s": compute_s,
        "session_s": session_s,
        "computed_tokens": sum(
            one.tokens - have * machine.page for one, have in zip(order, kept, strict=True)
        ),
        "missing_on_device_tokens": total[0],
        "missing_in_memory_tokens": total[1],
    }


def _sizes(machine: Machine) -> tuple[int, int]:
    return machine.device_tokens, machine.memory_tokens


def _least(machine: Machine, compute_s: float, absent: Sequence[int]) -> float:
    """With what is not on the device over its link, and with what is in no memory from the disk."""
    links = zip(absent, (machine.to_device_s, machine.disk_s), strict=True)
    return max(both_ends(compute_s, tokens, machine.token_s, link_s) for tokens, link_s in links)


def _spans(machine: Machine, one: Asked, kept: int) -> list[tuple[int, int]]:
    """The chunks of what it does not reuse: tokens, and those before them."""
    start = kept * machine.page
    places = range(start, one.tokens, machine.chunk)
    return [(min(machine.chunk, one.tokens - place), place) for place in places]


def _prefill_s(machine: Machine, one: Asked, kept: int) -> float:
    """Its own prefill with nothing beside it."""
    return sum(machine.profile.prefill_seconds([span]) for span in _spans(machine, one, kept))


def _shared_s(machine: Machine, one: Asked, kept: int) -> float:
    """What it adds to the device's work: prefill in full batches, and its share of decode steps."""
    prefill, decode = machine.profile.prefill, machine.profile.decode
    chunk = machine.chunk
    attending_s = sum(
        prefill.at(tokens, before) - prefill.at(tokens, chunk)
        for tokens, before in _spans(machine, one, kept)
    )
    tokens = one.tokens - kept * machine.page
    each_s = min(decode.at(n, one.tokens) / n for n in range(1, machine.at_a_time + 1))
    return max(tokens * machine.token_s + attending_s, 0.0) + (one.output_tokens - 1) * each_s


def _sessions_s(machine: Machine, order: Sequence[Asked], alone: Sequence[float]) -> float:
    """How long the sessions take where each is served as if it were alone: the longest, and all
    of them as many at a time as there are.
    """
    took: dict[str, float] = {}
    for one, prefill_s in zip(order, alone, strict=True):
        step_s = machine.profile.decode.at(1, one.tokens)
        own_s = one.wait_s + prefill_s + (one.output_tokens - 1) * step_s
        took[one.session] = took.get(one.session, 0.0) + own_s
    return max(*took.values(), sum(took.values()) / machine.at_a_time) if took else 0.0
