"""Host pages evicted by SGLang's own order, some paths held back: its tree core picks victims
itself, and never a locked one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from sgl_kvtier.runtime.sglang.host_tier import HostTier

MOST_PINS = 256
"""Most paths that are held back: about 6 microseconds each."""


def evict_others(
    host: HostTier, tokens: int, nodes: Iterable[int], evict: Callable[[int], int], *, least: bool
) -> int:
    """Evicts `tokens` with the paths to `nodes` locked meanwhile; returns how many were freed.
    Where that is too little, and at least `tokens` have to be freed, it evicts again without locks.
    Scheduler's thread.
    """
    pins = []
    for node in islice(nodes, MOST_PINS):
        try:
            pins.append(host.pin(node))
        except KeyError:
            continue  # gone meanwhile
    try:
        freed = int(evict(tokens))
    finally:
        for pin in pins:
            host.unpin(pin)
    return freed if freed >= tokens or not least or not pins else freed + int(evict(tokens - freed))
