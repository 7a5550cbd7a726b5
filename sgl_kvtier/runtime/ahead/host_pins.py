"""Evicts host pages in SGLang's own order with some paths protected: SGLang's tree picks the
victims itself, but never a locked node, so the paths are locked meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from sgl_kvtier.runtime.sglang.host_tier import HostTier

MOST_PINS = 256
"""Most paths that are locked, at about 6 microseconds each."""


def evict_others(
    host: HostTier, tokens: int, nodes: Iterable[int], evict: Callable[[int], int], *, least: bool
) -> int:
    """Evicts `tokens` while the paths to `nodes` are locked, the one needed soonest first; returns
    how many were freed. With `least`, if that is too little, it unlocks paths from the last one on,
    an eighth of them at a time. Scheduler's thread.
    """
    pins = []
    for node in islice(nodes, MOST_PINS):
        try:
            pins.append(host.pin(node))
        except KeyError:
            continue  # it was evicted meanwhile
    try:
        freed = int(evict(tokens))
        while least and pins and freed < tokens:
            for _ in range(max(1, len(pins) // 8)):
                host.unpin(pins.pop())
            freed += int(evict(tokens - freed))
    finally:
        for pin in pins:
            host.unpin(pin)
    return freed
