"""What restoring takes from requests that run: sessions whose prefixes are in storage alone return
to a server that also answers chats, in virtual time.

A session's prompt was served once, and other sessions have pushed its pages out of memory. Chats
have short prompts that nothing stores. While a prefix is computed every chat stands still, while it
is loaded none does. So time to first token is not enough: whole requests are timed as well.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, quantiles
from typing import Any

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.console import Column, Table
from sgl_kvtier.lab.rules import Eager, NeverRestores
from sgl_kvtier.lab.sim.experiment import Machine, run_policy
from sgl_kvtier.lab.sim.policies import named
from sgl_kvtier.lab.sim.requests import RequestResult, SimRequest
from sgl_kvtier.types import PageKey

MACHINE = Machine(device_bytes=40 << 30, host_bytes=60 << 30, storage_gbps=51.2, mixed=True)
"""Device memory of an H100 beside Llama 3.1 8B, an SSD of 6.4 GB/s, and `--enable-mixed-chunk`."""
_APART = replace(MACHINE, mixed=False)
PER_SECOND = (0.0, 2.0, 6.0)
"""Chats that begin in a second: with 400 tokens each about eight and 24 of them run at a time."""
_OURS = PolicyConfig(prefetch="off", eviction="lru", restore="auto")
_LOADS, _EAGER = (replace(_OURS, rules=named(rules)) for rules in (NeverRestores, Eager))
POLICIES = {
    "loads alone, not mixed": (_LOADS, _APART),
    "loads alone": (_LOADS, MACHINE),
    "kvtier, not mixed": (_OURS, _APART),
    "kvtier": (_OURS, MACHINE),
    "TTFT alone": (_EAGER, MACHINE),
}
"""By the names of rows: settings, and the machine. *Not mixed*: chunks and decoding have steps of
their own.
"""

_SESSIONS, _RETURNS_PER_S = 60, 0.36
_PROMPT_TOKENS, _SUFFIX_TOKENS = (30_000, 51_000), 300
_OUTPUT_TOKENS, _CHAT_TOKENS, _CHAT_PROMPT_TOKENS = 220, 400, 600
_SERVED_EVERY_S, _RETURN_FROM_S = 1.6, 200.0
_SEEDS = range(1, 4)


def requests(chats_per_s: float, seed: int, sessions: int = _SESSIONS) -> list[SimRequest]:
    """First each session's prompt, one after the other; then they return at random times, in the
    same order, beside chats.
    """
    chance = random.Random(seed)
    page = MACHINE.page_tokens
    found = []
    returns_s = _RETURN_FROM_S
    for number in range(sessions):
        returns_s += chance.expovariate(_RETURNS_PER_S)
        prompt = chance.randint(*_PROMPT_TOKENS)
        keys = tuple(_key(seed, number, place) for place in range(prompt // page))
        stored = (prompt - _SUFFIX_TOKENS) // page
        output = 1 + int(chance.expovariate(1 / _OUTPUT_TOKENS))
        name = f"session {number}"
        found += [
            SimRequest(
                f"first {number}",
                number * _SERVED_EVERY_S,
                stored * page,
                keys=keys[:stored],
                session=name,
            ),
            SimRequest(f"return {number}", returns_s, prompt, output, keys, session=name),
        ]
    at_s = _RETURN_FROM_S
    while chats_per_s and (at_s := at_s + chance.expovariate(chats_per_s)) < returns_s:
        output = 1 + int(chance.expovariate(1 / _CHAT_TOKENS))
        found.append(SimRequest(f"chat {len(found)}", at_s, _CHAT_PROMPT_TOKENS, output))
    return sorted(found, key=lambda one: one.arrival_s)


def _key(*what: int) -> PageKey:
    return PageKey(hashlib.blake2b(repr(what).encode(), digest_size=32).digest())


def measure(
    chats_per_s: float,
    config: PolicyConfig,
    machine: Machine = MACHINE,
    seeds: Sequence[int] = _SEEDS,
    sessions: int = _SESSIONS,
) -> dict[str, Any]:
    """One row over these draws: seconds, how much of the returning prompts is computed, and the
    99th percentile of gaps between output tokens, in milliseconds.
    """
    done: list[RequestResult] = []
    gaps_s: list[float] = []
    for seed in seeds:
        run = run_policy("kvtier", machine, requests(chats_per_s, seed, sessions), config)
        done += run.requests
        gaps_s += run.gaps_s
    returned = [one for one in done if one.rid.startswith("return")]
    chats = [one for one in done if one.rid.startswith("chat")]
    return {
        "ttft_s": fmean(one.ttft_s for one in returned),
        "whole_s": fmean(map(_whole_s, returned)),
        "chats_s": fmean(map(_whole_s, chats)) if chats else None,
        "gap_ms": 1000 * quantiles(gaps_s, n=100)[-1],
        "computed": 100
        * sum(one.computed_tokens for one in returned)
        / sum(one.prompt_tokens for one in returned),
    }


def _whole_s(done: RequestResult) -> float:
    assert done.finished_s is not None, done.rid
    return done.finished_s - done.arrived_s


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of `measure` with their `chats_per_s` and `policy`, one a line."""
    columns = [
        Column("chats_per_s", "chats a second", decimals=0),
        Column("policy", "policy"),
        Column("ttft_s", "TTFT, returning", "s", 2),
        Column("whole_s", "whole request, returning", "s", 2),
        Column("chats_s", "whole request, chats", "s", 2),
        Column("gap_ms", "gap p99", "ms", 0),
        Column("computed", "computed", "% of tokens", 0),
    ]
    return Table("", columns, rows)
