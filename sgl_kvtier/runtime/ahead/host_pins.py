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
    """Evicts `tokens` while the paths to `nodes` are locked; returns how many were freed. With
    `least`, if that is too little, it evicts the rest without locks. Scheduler's thread.
    """
    pins = []
    for node in islice(nodes, MOST_PINS):
        try:
            pins.append(host.pin(node))
        except KeyError:
            continue  # it was evicted meanwhile
    try:
        freed = int(evict(tokens))
    finally:
        for pin in pins:
            host.unpin(pin)
    return freed if freed >= tokens or not least or not pins else freed + int(evict(tokens - freed))
