"""GET /kvtier/requests: what this package knows of each request that waits or runs, for developers.

One request is known to at most four objects: its `Tracked` record in the runtime, and in the
planner its place in the queue, its restoration, and the pages that lookahead wants for it. Each is
shown in words. A question travels like a hint, as SGLang's own query of the internal state.
"""

from __future__ import annotations

from typing import Any

MARK = "kvtier.requests:"
"""The scheduler recognizes the question among SGLang's control messages by this prefix; the id of
one request may follow it.
"""
ANSWER = "kvtier.requests"
"""The key of a scheduler's answer in the state it sends back."""
MOST = 200
"""At most so many requests are shown, those that were noted first."""


def known(scheduler: Any, rid: str) -> dict[str, Any]:
    """What is known of this request, or of all with an empty `rid`: `requests`, a list of objects
    with `rid`, `runtime` (the record of the runtime) and `planner` (the planner's parts, by name),
    and `omitted`, the number of others. Scheduler's thread.
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
    """The answers of all data-parallel replicas as one; None: a scheduler without the plugin."""
    found = [answer for answer in answers if answer is not None]
    return {
        "requests": [one for answer in found for one in answer["requests"]],
        "omitted": sum(answer["omitted"] for answer in found),
    }
