"""Splitting one prefix by layers or by tokens (CacheFlow, section 3.1)."""

from __future__ import annotations

from sgl_kvtier.policy.learned.cost import PrefillCost


def layer_split(cost: PrefillCost, tokens: int, load_s: float, layers: int) -> tuple[int, float]:
    """Layer-wise restoration of one chunk: layers below the cut are computed, the rest loaded from
    the top down.

    Returns the cut and its seconds. CacheFlow section 3.1 takes one pass over all tokens. So a
    short prefix pays the fixed part of a chunk only in proportion to the layers it computes.
    """
    compute_s = cost.chunk_seconds(0, tokens)
    times = [
        max(cut / layers * compute_s, (layers - cut) / layers * load_s) for cut in range(layers + 1)
    ]
    cut = min(range(layers + 1), key=lambda place: (times[place], place))
    return cut, times[cut]


def token_split(
    cost: PrefillCost, tokens: int, load_s: float, chunk: int, unit: int
) -> tuple[int, float]:
    """Token-wise restoration in units of `unit` tokens: the number of tokens to compute, and the
    seconds it takes.
    """

    def seconds(computed: int) -> float:
        return max(cost.range_seconds(0, computed, chunk), load_s * (tokens - computed) / tokens)

    places = [*range(0, tokens, unit), tokens]
    best = min(places, key=lambda computed: (seconds(computed), computed))
    return best, seconds(best)


def crossover_tokens(
    cost: PrefillCost, seconds_per_token: float, layers: int, chunk: int, unit: int, longest: int
) -> int | None:
    """CacheFlow's L_delta: the shortest prefix from which splitting by tokens is no slower than by
    layers.

    It is searched in steps of `unit` tokens; None when there is none up to `longest`.
    """
    for tokens in range(unit, longest + 1, unit):
        load_s = tokens * seconds_per_token
        if (
            token_split(cost, tokens, load_s, chunk, unit)[1]
            <= layer_split(cost, tokens, load_s, layers)[1]
        ):
            return tokens
    return None
