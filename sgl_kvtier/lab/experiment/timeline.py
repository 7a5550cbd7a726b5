"""A round over time: how full each tier is, and what storage and the link between host and device
moved, read from a server's /metrics while sessions are replayed; and when each request waited, was
loaded, computed and decoded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from sgl_kvtier.lab.experiment.arms import BASELINE, ORACLE
from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.outside.client import Client, Completion, Metrics

Spans: TypeAlias = list[list[float]]
PERIOD_S = 1.0
"""Seconds between two readings. One costs some ten milliseconds of the HTTP process, the same in
every arm.
"""
_RESTORED = "kvtier:restore_loaded_bytes_total"
_LINK: Mapping[str, Sequence[tuple[str, Mapping[str, str]]]] = {
    "to_device_bytes": (
        ("sglang:load_back_bytes_total", {}),
        (_RESTORED, {"link": "storage-device"}),
        (_RESTORED, {"link": "remote-device"}),
    ),
    "to_host_bytes": (("sglang:hicache_backup_bytes_total", {}),),
}
"""Counters of the link between host and device, of all ranks, with their labels. Pages that are
prefetched, or restored from host memory, are among SGLang's own.
"""
_DIRECTIONS = ("to_device", "to_host")
_TOUCHING_S = 0.002
"""Two spans of computing with less time between them are one."""


def occupancy(metrics: Metrics, before: Metrics, page_tokens: int) -> dict[str, float]:
    """Tokens in each tier: cached or in use on the device, in host memory, and in storage. A tier
    that is not there, or whose server counts nothing, is left out. SGLang's file backend counts
    what it has written, which it keeps.
    """
    found: dict[str, float | None] = {}
    used, evictable = (metrics.total(f"sglang:kv_{kind}_tokens") for kind in ("used", "evictable"))
    found["device"] = None if used is None else used + (evictable or 0.0)
    found["host"] = metrics.total("sglang:hicache_host_used_tokens")
    pages = metrics.total("kvtier:store_pages", tp_rank="0")
    if pages is not None:
        found["storage"] = pages * page_tokens
    else:
        found["storage"] = _grown(metrics, before, "sglang:backuped_tokens_total")
    return {tier: tokens for tier, tokens in found.items() if tokens is not None}


def moved(metrics: Metrics, before: Metrics) -> dict[str, float]:
    """Bytes since `before`. Those that storage read and wrote: by the store's own count, else SGLang's
    tokens times its bytes per token. Those copied to the device and to host memory: by SGLang's
    counts, and those of restorations from storage. What is not counted is left out.
    """
    tokens, nbytes = (
        metrics.total(f"sglang:hicache_backup_{what}_total") for what in ("tokens", "bytes")
    )
    per_token = nbytes / tokens if tokens and nbytes else None
    found: dict[str, float | None] = {}
    for name, ours, stock in (
        ("read_bytes", "kvtier:read_bytes_total", "sglang:prefetched_tokens_total"),
        ("written_bytes", "kvtier:written_bytes_total", "sglang:backuped_tokens_total"),
    ):
        found[name] = _grown(metrics, before, ours)
        count = _grown(metrics, before, stock)
        if found[name] is None and count is not None:
            found[name] = count * per_token if per_token else None if count else 0.0
    if metrics.total("sglang:hicache_host_used_tokens") is not None:
        # A counter that is not there yet is at 0.
        for name, counters in _LINK.items():
            found[name] = sum(
                _grown(metrics, before, counter, **labels) or 0.0 for counter, labels in counters
            )
    return {name: value for name, value in found.items() if value is not None}


async def watch(client: Client, one: Round, page_tokens: int, period_s: float = PERIOD_S) -> None:
    """Puts a reading into `one.occupancy` every period, until it is cancelled. Seconds are those
    of a server that is not dilated, since `one.began_s`.
    """
    while True:
        metrics = await client.metrics()
        reading = occupancy(metrics, one.before, page_tokens) | moved(metrics, one.before)
        at = (time.monotonic() - one.began_s) / one.dilation
        one.occupancy.append({"t_s": round(at, 3), **reading})
        await asyncio.sleep(period_s * one.dilation)


async def watch_first(client: Client, one: Round, page_tokens: int) -> None:
    """The same in the first round alone, which `timelines` is made of: reading takes processor time
    from the server.
    """
    if one.number == 1:
        await watch(client, one, page_tokens)


def timelines(rounds: Iterable[Round]) -> list[dict[str, Any]]:
    """The first complete round of each arm over time, `timeline` of kvtier.compare/1."""
    first: dict[str, Round] = {}
    for one in rounds:
        if one.complete and one.samples:
            first.setdefault(one.arm, one)
    return [
        {"arm": one.arm, "round": one.number, "requests": _requests(one), "tiers": _readings(one)}
        for one in first.values()
    ]


def _readings(one: Round) -> list[dict[str, float]]:
    """Its readings; a paced device's clock knows what its link had copied by then."""
    copies = [row for row in one.steps if "copy" in row]
    if not copies:
        return one.occupancy
    found = []
    for reading in one.occupancy:
        at = one.began_s + reading["t_s"] * one.dilation
        found.append({**reading, **{f"{to}_bytes": _copied(copies, to, at) for to in _DIRECTIONS}})
    return found


def _copied(copies: Sequence[Mapping[str, Any]], to: str, at: float) -> float:
    """Bytes that were copied in a direction by then, of a copy under way its share."""
    mine = [row for row in copies if row["copy"] == to and row["at"] < at]
    return sum(
        row["bytes"] * min(1.0, (at - row["at"]) / max(row["end"] - row["at"], 1e-9))
        for row in mine
    )


def _requests(one: Round) -> list[dict[str, Any]]:
    began = one.began_s
    steps, loads = _steps_by_request(one.steps), _loads_by_request(one.steps)
    rows = []
    for sample in sorted(one.samples, key=lambda sample: sample.completion.sent_s):
        done = sample.completion
        begin = (done.sent_s - began) / one.dilation
        spans, loaded = steps.get(done.rid or ""), loads.get(done.rid or "", [])
        computing = _taken(done, begin) if spans is None else _since(began, spans, one.dilation)
        loading = _untold(one, done) if spans is None else _since(began, loaded, one.dilation)
        rows.append(
            {
                "session": sample.session,
                "turn": sample.turn,
                "begin_s": round(begin, 3),
                "first_s": None if done.ttft_s is None else round(begin + done.ttft_s, 3),
                "end_s": round(begin + done.e2e_s, 3),
                "computing_s": computing,
                "loading_s": loading,
            }
        )
    return rows


def _since(began: float, spans: Spans, dilation: float) -> Spans:
    """Spans of the monotonic clock as seconds of a round that is not dilated."""
    return [[round((at - began) / dilation, 3) for at in span] for span in spans]


def _untold(one: Round, done: Completion) -> Spans | None:
    """When a request was loaded, of a server that does not say when: never, where nothing was. Else
    None.
    """
    if one.arm in (BASELINE, ORACLE):
        return []
    restores = one.after.total("kvtier:restore_computed_tokens_total") is not None
    cached = done.cached
    if restores or cached is None or cached.host or cached.storage or done.storage_wait_s != 0:
        return None
    return []


def _taken(done: Completion, begin: float) -> Spans:
    """The span from when the scheduler took a request to its first token, where steps are not
    known.
    """
    if done.ttft_s is None or done.server_queue_s is None:
        return []
    taken = begin + min(done.server_queue_s, done.ttft_s)
    return [[round(taken, 3), round(begin + done.ttft_s, 3)]]


def _loads_by_request(steps: Sequence[Mapping[str, Any]]) -> dict[str, Spans]:
    """When each request's pages were read or copied, as a paced device wrote it: loads of its own,
    and steps of its prompt that waited for pages. Ascending spans that do not overlap.
    """
    found: dict[str, Spans] = {}
    for row in steps:
        if "load" in row:
            found.setdefault(row["rid"], []).append([row["at"], row["end"]])
        elif wait_s := row.get("load_wait_s"):
            for rid in row.get("rids", ()):
                found.setdefault(rid, []).append([row["begin"], row["begin"] + wait_s])
    return {rid: _joined(spans) for rid, spans in found.items()}


def _joined(spans: Spans) -> Spans:
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin - joined[-1][1] < _TOUCHING_S:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return joined


def _steps_by_request(steps: Sequence[Mapping[str, Any]]) -> dict[str, Spans]:
    """When each request's prompt was computed, as a paced device wrote it: spans of the monotonic
    clock. A step that waits for pages computes when they have come.
    """
    found: dict[str, Spans] = {}
    for step in steps:
        for rid in step.get("rids", ()):
            begin = step["begin"] + step.get("load_wait_s", 0.0)
            spans = found.setdefault(rid, [])
            if spans and begin - spans[-1][1] < _TOUCHING_S:
                spans[-1][1] = begin + step["seconds"]
            else:
                spans.append([begin, begin + step["seconds"]])
    return found


def _grown(metrics: Metrics, before: Metrics, name: str, **labels: str) -> float | None:
    now = metrics.total(name, **labels)
    return None if now is None else max(0.0, now - (before.total(name, **labels) or 0.0))
