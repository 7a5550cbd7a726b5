"""What is measured: the options of a run, the prompts that are asked for and in which order.
All of it follows from the options and the seed. One restoration at a time is a batch of one, and
has the same prompts in all rounds.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sgl_kvtier.lab.experiment.argtypes import Options
from sgl_kvtier.lab.experiment.restore.arms import COMPUTE, DEFAULT_RESTORE_ARMS
from sgl_kvtier.lab.experiment.restore.bound import curve_points
from sgl_kvtier.lab.experiment.restore.trial import CURVE, GRID, Trial
from sgl_kvtier.lab.experiment.rounds import backwards

DECODERS = 4
"""Requests that decode next to a batch."""
CURVE_ROUNDS = 3

_BYTES = 256
_DECODER_PAGES = 2


@dataclass(frozen=True)
class RestoreOptions(Options):
    """The options of `compare restore`."""

    device: str = ""
    dilation: float = 1.0
    threads: int = 1
    lengths: Sequence[int] | None = None
    load_over_compute: Sequence[float] | None = None
    slow_rounds: int | None = None
    arms: Sequence[str] | None = None
    hole: str | None = None
    at_once: Sequence[int] | None = None
    foreign: float | None = None
    models: Sequence[str] | None = None


@dataclass(frozen=True)
class RestorePlan:
    """What is measured on one server. `lengths` are the prefixes, in tokens; `ratios` are loading over computing, of
    a batch those of the mix. `page` and `chunk` are the server's.
    """

    model: str
    page: int
    chunk: int
    lengths: Sequence[int]
    ratios: Sequence[float] = (1.0,)
    arms: Sequence[str] = DEFAULT_RESTORE_ARMS
    rounds: int = 5
    seed: int = 0
    slow_rounds: int | None = None
    """First rounds that measure slow arms; None: all."""
    hole: bool = False
    """The first page of every prefix is gone when storage is asked for it: SGLang's load reads
    nothing.
    """
    curve_step: int | None = None
    """Tokens between two points of the compute curve; None: a chunk."""
    at_once: Sequence[int] = ()
    """Sizes of batches, mixed of `lengths`; none: one prefix at a time."""
    decoders: int = 0
    """Requests that decode beside a batch."""

    def curve_points(self, length: int) -> list[int]:
        """Where the compute curve of a length is measured."""
        return curve_points(length, self.curve_step or self.chunk)


def order(options: RestorePlan, number: int) -> list[tuple[float, int, str]]:
    """Ratios, sizes and arms of a round: every second one backwards."""
    cells = itertools.product(options.ratios, options.at_once or (1,), options.arms)
    return backwards(list(cells), number)


def curve_rounds(rounds: int) -> list[int]:
    """Before which rounds the compute curve is measured."""
    return sorted({1, (rounds + 1) // 2, rounds})[:CURVE_ROUNDS]


def planned(options: RestorePlan, length: int) -> Iterator[Trial]:
    """Every trial of a length that is counted as progress, in its order. The bandwidths are not
    known in advance.
    """
    for number in range(1, options.rounds + 1):
        if number in curve_rounds(options.rounds):
            for tokens in options.curve_points(length):
                place = (options.model, length, CURVE, COMPUTE, number, 0.0)
                yield Trial(*place, prompt_tokens=tokens)
        for ratio, _, arm in order(options, number):
            cell = (options.model, length, GRID, arm, number, 0.0, ratio)
            yield Trial(*cell, prompt_tokens=length + options.page)


def prompt(options: RestorePlan, length: int) -> list[int]:
    """The prompt of a length that is restored alone: a prefix, and one page more. The page's last
    token has to be computed.
    """
    return _random(options, length).choices(range(_BYTES), k=length + options.page)


def lengths_of(options: RestorePlan, at_once: int, number: int) -> list[int]:
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


def prompts_of(options: RestorePlan, at_once: int, number: int) -> list[list[int]]:
    """The prompts of a round's batch: each a prefix that can be restored, and a page more whose
    last token has to be computed. No two have a page in common.
    """
    return [
        _random(options, "prompt", at_once, number, place).choices(
            range(_BYTES), k=length + options.page
        )
        for place, length in enumerate(lengths_of(options, at_once, number))
    ]


def scale_prompt(options: RestorePlan, length: int) -> list[int]:
    """A prompt to time computing with."""
    return _random(options, "scale", length).choices(range(_BYTES), k=length + options.page)


def decoders_of(options: RestorePlan) -> list[list[int]]:
    """The prompts of the requests beside, the same in every batch. They are too short to be stored
    for."""
    return [
        _random(options, "beside", place).choices(range(_BYTES), k=_DECODER_PAGES * options.page)
        for place in range(options.decoders)
    ]


def all_lengths(options: RestorePlan) -> list[int]:
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


def _random(options: RestorePlan, *what: object) -> random.Random:
    named = ":".join(map(str, (options.seed, options.model, *what)))
    return random.Random(zlib.crc32(named.encode()))
