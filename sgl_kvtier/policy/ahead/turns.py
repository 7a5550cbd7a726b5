"""Runs to come: their owner, the iterations before them, and the time that leaves for moving
pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Turn(NamedTuple):
    """A run to come of an owner in the map. `steps` iterations run before it (0: it runs in this
    step) and take `window_s` seconds in all. `rid` is the request it is for, None for a session
    that is only expected. `before` counts HBM pages claimed by runs between the previous turn and
    this one, which were left out because they lack nothing. `chance` is the probability that it
    comes at all.
    """

    owner: str
    rid: str | None
    steps: int
    window_s: float
    before: int = 0
    chance: float = 1.0


def turns_of(
    queue: Iterable[tuple[str, str, int]],
    step_tokens: int,
    iteration_s: float,
    ahead_tokens: int = 0,
    rest_s: float = 0.0,
) -> list[Turn]:
    """When each (owner, rid, tokens to compute) of a queue in run order will run: in the iteration
    that reaches its tokens if each takes `step_tokens`. `ahead_tokens` run before them all, and
    `rest_s` seconds are left of the present iteration.
    """
    turns = []
    step_tokens = max(1, step_tokens)
    for owner, rid, tokens in queue:
        steps = ahead_tokens // step_tokens
        turns.append(Turn(owner, rid, steps, rest_s + steps * iteration_s))
        ahead_tokens += tokens
    return turns
