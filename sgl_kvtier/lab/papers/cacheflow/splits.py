"""Splitting one prefix by layers or by tokens (CacheFlow 3.1), on the true cost of steps."""

from __future__ import annotations

from functools import lru_cache

from sgl_kvtier.lab.sim.costs import Batch, StepCost
from sgl_kvtier.types import Span


def layer_split(cost: StepCost, tokens: int, load_s: float, layers: int) -> tuple[int, float]:
    """Layer-wise restoration: layers below the cut are computed, the rest loaded from the top down.

    Returns the cut and its seconds. CacheFlow section 3.1 takes one pass over all tokens. So a
    prefix pays a step's fixed part and the reading of weights once, and only in proportion to the
    layers it computes.
    """
    compute_s = cost.seconds(Batch((Span(0, tokens),)))
    times = [
        max(cut / layers * compute_s, (layers - cut) / layers * load_s) for cut in range(layers + 1)
    ]
    cut = min(range(layers + 1), key=lambda place: (times[place], place))
    return cut, times[cut]


def token_split(
    cost: StepCost, tokens: int, load_s: float, chunk: int, unit: int
) -> tuple[int, float]:
    """Token-wise restoration in units of `unit` tokens: the number of tokens to compute, and the
    seconds it takes.
    """

    def seconds(computed: int) -> float:
        return max(chunks_seconds(cost, computed, chunk), load_s * (tokens - computed) / tokens)

    # Computing takes longer with every token, loading less long: the two cross once.
    low, high = 0, -(-tokens // unit)
    while low < high:
        middle = (low + high) // 2
        computed = min(middle * unit, tokens)
        if chunks_seconds(cost, computed, chunk) < load_s * (tokens - computed) / tokens:
            low = middle + 1
        else:
            high = middle
    places = [min(place * unit, tokens) for place in (max(0, low - 1), low)]
    best = min(places, key=lambda computed: (seconds(computed), computed))
    return best, seconds(best)


@lru_cache(maxsize=1 << 16)
def chunks_seconds(cost: StepCost, tokens: int, chunk: int) -> float:
    """Seconds of computing the first `tokens`, chunk by chunk."""
    if tokens <= 0:
        return 0.0
    start = (tokens - 1) // chunk * chunk
    return chunks_seconds(cost, start, chunk) + cost.seconds(Batch((Span(start, tokens),)))


def crossover_tokens(
    cost: StepCost, seconds_per_token: float, layers: int, chunk: int, unit: int, longest: int
) -> int | None:
    """CacheFlow's L_delta: the shortest prefix from which splitting by tokens is no slower than by
    layers.

    It is searched in steps of `unit` tokens; None when there is none up to `longest`. Lengths at
    which both would load everything are passed over.
    """
    for tokens in range(unit, longest + 1, unit):
        load_s = tokens * seconds_per_token
        cut, by_layer_s = layer_split(cost, tokens, load_s, layers)
        if cut and token_split(cost, tokens, load_s, chunk, unit)[1] <= by_layer_s:
            return tokens
    return None
