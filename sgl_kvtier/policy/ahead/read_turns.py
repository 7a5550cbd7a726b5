"""The requests whose stored pages are read ahead of their turn: in the order they run, as many as
memory holds.

SGLang reads a waiting request's pages from storage into host memory once, when it arrives, however
many wait before it. Pages that do not fit evict those read for other requests, are read in vain,
and are then computed. TierKV (Algorithm 1) looks as far ahead as there is room for; so do we.
"""

from __future__ import annotations

from sgl_kvtier.policy.messages import ReadsDue


def due(question: ReadsDue) -> tuple[str, ...]:
    """Requests whose stored pages are read now, in the queue's order. `room` are host pages that
    may hold prefixes of waiting requests. The first in the queue is never kept waiting; one behind
    it is due while it and all before it fit.
    """
    found: list[str] = []
    room = question.room
    for place, request in enumerate(question.queue):
        room -= request.pages
        if room < 0 and place:
            break
        if request.unread:
            found.append(request.rid)
    return tuple(found)
