"""Runs to come: their owner, the iterations before them, the time that leaves for moving pages, and
whose stored pages are read before their turn.

SGLang reads a waiting request's pages from storage into host memory once, when it arrives, however
many wait before it. Pages that do not fit evict those read for other requests, are read in vain,
and are then computed. TierKV (Algorithm 1) looks as far ahead as there is room for; so do we.
"""

from __future__ import annotations

from typing import NamedTuple

from sgl_kvtier.policy.messages import ReadsDue


class Turn(NamedTuple):
    """A run to come of an owner in the map. `steps` iterations run before it (0: it runs in this
    step) and take `window_s` seconds in all. `rid` is the request it is for, None for a session
    that is only expected. `before` counts device pages claimed by runs between the previous turn
    and this one, which were left out because they lack nothing. `chance` is the probability that it
    comes at all.
    """

    owner: str
    rid: str | None
    steps: int
    window_s: float
    before: int = 0
    chance: float = 1.0


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
