"""What is asked for together: how long the prefixes are, in which order and when they are asked for.
All of it follows from the seed.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvtier.lab.experiment.batches.arms import DEFAULT_BATCH_ARMS
from sgl_kvtier.lab.experiment.rounds import backwards

LENGTHS = (1024, 2048, 3072, 4096)
PACED_LENGTHS = (4096, 8192, 16384, 32768)
DECODERS = 4
MOST_DECODED = 4096
"""Tokens that a request beside generates at most."""

_BYTES = 256
_DECODER_PAGES = 2


@dataclass(frozen=True)
class BatchOptions:
    """Options of a run. `at_once` are the sizes of batches, `ratios` loading over computing of the
    mix, `lengths` the prefixes that a batch is mixed of, in tokens. `poisson` is the load of a
    stream whose requests arrive at random; None: all arrive together. `decoders` is how many
    requests decode beside. `page` is the server's.
    """

    model: str
    page: int
    at_once: Sequence[int]
    lengths: Sequence[int] = LENGTHS
    ratios: Sequence[float] = (1.0,)
    arms: Sequence[str] = DEFAULT_BATCH_ARMS
    rounds: int = 5
    seed: int = 0
    decoders: int = DECODERS
    poisson: float | None = None


def lengths_of(options: BatchOptions, at_once: int, number: int) -> list[int]:
    """The prefixes of a round's batch, in tokens, in the order they are asked for. Every length is
    in it as often as any other, or once more.
    """
    draw = _random(options, "lengths", at_once, number)
    found: list[int] = []
    while len(found) < at_once:
        found += draw.sample(list(options.lengths), len(options.lengths))
    chosen = found[:at_once]
    draw.shuffle(chosen)
    return chosen


def prompts_of(options: BatchOptions, at_once: int, number: int) -> list[list[int]]:
    """The prompts of a round's batch: each a prefix that can be restored, and a page more whose
    last token has to be computed. No two have a page in common.
    """
    return [
        _random(options, "prompt", at_once, number, place).choices(
            range(_BYTES), k=length + options.page
        )
        for place, length in enumerate(lengths_of(options, at_once, number))
    ]


def scale_prompt(options: BatchOptions, length: int) -> list[int]:
    """A prompt to time computing with."""
    return _random(options, "scale", length).choices(range(_BYTES), k=length + options.page)


def decoders_of(options: BatchOptions) -> list[list[int]]:
    """The prompts of the requests beside, the same in every batch. They are too short to be stored
    for."""
    return [
        _random(options, "beside", place).choices(range(_BYTES), k=_DECODER_PAGES * options.page)
        for place in range(options.decoders)
    ]


def arrivals_of(
    options: BatchOptions, at_once: int, number: int, service_s: float
) -> tuple[float, ...]:
    """When each request of a round's batch is asked for, in seconds from the first.

    `service_s` is what one takes on average with both resources for itself. A stream of load 1 has
    one request in that time on average.
    """
    if options.poisson is None:
        return (0.0,) * at_once
    draw = _random(options, "arrivals", at_once, number)
    gaps = [draw.expovariate(options.poisson / service_s) for _ in range(at_once - 1)]
    return (0.0, *itertools.accumulate(gaps))


def order(options: BatchOptions, number: int) -> list[tuple[float, int, str]]:
    """Ratios, sizes and arms of a round: every second one backwards."""
    cells = itertools.product(options.ratios, options.at_once, options.arms)
    return backwards(list(cells), number)


def all_lengths(options: BatchOptions) -> list[int]:
    """The prefixes of a whole run, in tokens: what storage has to hold."""
    return [
        *options.lengths,
        *(
            length
            for number in range(1, options.rounds + 1)
            for at_once in options.at_once
            for length in lengths_of(options, at_once, number)
        ),
    ]


def _random(options: BatchOptions, *what: object) -> random.Random:
    named = ":".join(map(str, (options.seed, options.model, *what)))
    return random.Random(zlib.crc32(named.encode()))
