"""GET /kvtier/requests: what this package knows of each waiting or running request, for developers.

A request is known to at most four objects: its `Tracked` record in the runtime, and in the planner
its place in the queue, its restoration, and the pages that lookahead prefetches for it. Each is
shown as text. The query travels like a hint, as SGLang's own query of the internal state.
"""

from __future__ import annotations

from typing import Any

MARK = "kvtier.requests:"
"""The prefix by which the scheduler recognizes the query among SGLang's control messages; the id of
one request may follow.
"""
ANSWER = "kvtier.requests"
"""The key of a scheduler's answer in the state it returns."""
MOST = 200
"""Most requests that are shown, those noted first."""


def known(scheduler: Any, rid: str) -> dict[str, Any]:
    """What is known of this request, or of all with an empty `rid`: `requests`, a list of objects
    with `rid`, `runtime` (the runtime's record) and `planner` (the planner's parts, by name), and
    `omitted`, the number of requests not shown. Scheduler's thread.
    """
    parts: Any = getattr(scheduler.tree_cache, "kvtier", None)
    if parts is None:
        return {"requests": [], "omitted": 0}
    records = [one for one in parts.context.requests if rid in ("", one.rid)]
    shown = [
        {"rid": one.rid, "runtime": str(one), "planner": dict(parts.planned(one.rid))}
        for one in records[:MOST]
    ]
    return {"requests": shown, "omitted": len(records) - len(shown)}


def together(answers: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Merges the answers of all data-parallel replicas; None: a scheduler without the plugin."""
    found = [answer for answer in answers if answer is not None]
    return {
        "requests": [one for answer in found for one in answer["requests"]],
        "omitted": sum(answer["omitted"] for answer in found),
    }
