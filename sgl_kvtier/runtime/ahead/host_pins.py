"""Host pages evicted by SGLang's own order, some paths held back: its tree core picks victims
itself, and never a locked one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

MOST_PINS = 256
"""So many paths at most are held back: about 6 microseconds each."""


def evict_others(
    tree: Any, tokens: int, nodes: Iterable[int], evict: Callable[[int], int], *, least: bool
) -> int:
    """Evicts `tokens` with the paths to `nodes` locked meanwhile; returns how many were freed.
    Where that is too little, and at least `tokens` have to be freed, it evicts again without locks.
    Scheduler's thread.
    """
    pins = []
    for node in islice(nodes, MOST_PINS):
        try:
            pins.append((node, tree.inc_host_lock_ref(node).to_dec_params()))
        except KeyError:
            continue  # gone meanwhile
    try:
        freed = int(evict(tokens))
    finally:
        for node, params in pins:
            tree.dec_host_lock_ref(node, params)
    return freed if freed >= tokens or not least or not pins else freed + int(evict(tokens - freed))
