"""T_opt: the fastest possible restoration by compute and load together, from curves measured in the
same run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sgl_kvtier.lab.pages.stats import percentile


@dataclass(frozen=True)
class ComputeCurve:
    """Seconds until the first n tokens of a prompt are computed, linear between the measured
    points.

    `first_token_s`: time to first token of prompts that were computed whole, by their tokens.
    `request_s`: what of it is no computing (network, tokeniser, scheduler, sampling).
    """

    first_token_s: Mapping[int, float]
    request_s: float

    def seconds(self, tokens: float) -> float:
        """Computing the first `tokens` tokens; beyond the last point the last slope goes on."""
        points = [
            (0, 0.0),
            *((n, max(s - self.request_s, 0.0)) for n, s in sorted(self.first_token_s.items())),
        ]
        for (left, low), (right, high) in itertools.pairwise(points):
            if tokens <= right or right == points[-1][0]:
                return low + (high - low) * (tokens - left) / (right - left)
        return 0.0


@dataclass(frozen=True)
class Best:
    """A split and the time to first token it would reach. `computed_tokens` come from the front."""

    computed_tokens: int
    seconds: float


def best_split(
    prefix: int,
    page: int,
    compute: Callable[[float], float],
    load: Callable[[int], float],
    rest_s: float,
) -> Best:
    """The best of all splits of `prefix` tokens: compute [0, n), load the others meanwhile, then
    the rest.

    `compute(n)` and `load(n)` are seconds for n tokens. `rest_s` are the seconds after the prefix
    is there, in any split.
    """
    splits = [*range(0, prefix, page), prefix]
    return min(
        (Best(n, max(compute(n), load(prefix - n)) + rest_s) for n in splits),
        key=lambda best: (best.seconds, best.computed_tokens),
    )


def optimal(
    prefix: int, page: int, curve: ComputeCurve, load_only_s: float, resident_s: float
) -> Best:
    """T_opt: both resources at full speed and not disturbing each other, met to the page.

    `load_only_s` is the time to first token when all of the prefix is loaded. `resident_s` is that
    time when all of it is in device memory. Their difference is the loading, taken as linear;
    `resident_s` is what remains after it. That loading includes SGLang's other work, such as copies
    in host memory and polling them.
    """
    loading_s = max(load_only_s - resident_s, 0.0)
    return best_split(
        prefix, page, curve.seconds, lambda tokens: loading_s * tokens / prefix, resident_s
    )


def request_seconds(one_page_s: Sequence[float], per_output_s: Sequence[float]) -> float:
    """The seconds a request costs beside computing, at least 0.

    That is a prompt of one page less one decoding step, which is as small a forward pass as there
    is.
    """
    page, step = percentile(one_page_s, 50), percentile(per_output_s, 50)
    return max((page or 0.0) - (step or 0.0), 0.0)


def curve_points(prefix: int, chunk: int, most: int = 8) -> list[int]:
    """Where the compute curve is measured: multiples of the chunk up to the prefix, at most `most`
    of them.
    """
    chunks = max(prefix // chunk, 1)
    step = -(-chunks // most)
    points = [n * chunk for n in range(step, chunks + 1, step) if n * chunk <= prefix]
    return [*points, prefix] if not points or points[-1] != prefix else points
