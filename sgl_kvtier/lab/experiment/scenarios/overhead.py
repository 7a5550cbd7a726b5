"""`kvtier bench restore-overhead`: what restoration, and looking ahead, cost while there is nothing
to restore.

Every round sends the same new prompts to each server, several at a time; every second round goes
backwards. The time per output token of a round is the median of its requests'.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import RUN, SERVER, add_options, setup_of, shape_of, words
from sgl_kvtier.lab.experiment.arms import ARMS, NOT_RESTORED, OURS, Setup, Variant, check_arms
from sgl_kvtier.lab.experiment.comparison import Cell, Comparison, failed
from sgl_kvtier.lab.experiment.frame import check, work_folder
from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.experiment.options import Options
from sgl_kvtier.lab.experiment.rounds import Plan, backwards
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.outside.lab_model import write_named
from sgl_kvtier.lab.outside.model_shapes import BYTES
from sgl_kvtier.lab.outside.replay import Sample, milliseconds
from sgl_kvtier.lab.pages.compare.tables import overhead_tables
from sgl_kvtier.lab.pages.stats import pair_ratios, percentile

SCHEMA = "kvtier.restore-overhead/1"

STOCK = "hicache-file"
OVERHEAD_ARMS = (STOCK, NOT_RESTORED, OURS)
AHEAD = "looking-ahead"
OVERHEAD_VARIANTS = {
    AHEAD: Variant(
        OURS,
        "kvtier, and the server looks ahead",
        {"prefetch": "on", "eviction": "next-use", "sessions": True},
    )
}
"""Arms there are beside those measured by default."""


@dataclass(frozen=True)
class OverheadOptions(Options):
    """The command's options: how much is asked, the same of every arm."""

    arms: Sequence[str] = OVERHEAD_ARMS
    rounds: int = 7
    threads: int = 1
    requests: int = 4
    prompt_tokens: int = 256
    output_tokens: int = 64


_MEASURED = ("arms", "rounds", "requests", "prompt_tokens", "output_tokens", "seed")
"""Options that are in the result."""


@dataclass
class Decoding:
    """The work of a round: new prompts, all at a time."""

    options: OverheadOptions
    unit: str = "requests"

    def __post_init__(self) -> None:
        self.steps = self.options.requests

    async def warm_up(self, client: Client, arm: str) -> list[str]:
        """A round that is not counted."""
        await self.measure(client, Round(arm, 0), lambda: None)
        return []

    async def prepare(self, client: Client) -> bool:
        """Nothing."""
        del client
        return False

    async def measure(self, client: Client, one: Round, advance: Callable[[], None]) -> None:
        """Raises BenchError when a request fails."""

        async def ask(number: int, ids: Sequence[int]) -> Sample:
            done = await client.generate(ids, self.options.output_tokens)
            advance()
            return Sample(str(number), 1, done)

        asked = enumerate(new_prompts(self.options, one.number))
        found = await asyncio.gather(*(ask(number, ids) for number, ids in asked))
        one.samples += found
        errors = [sample.completion.error for sample in found if sample.completion.error]
        if errors:
            raise BenchError(f"{one.arm}: a request failed: {errors[0]}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    there = ", ".join((*ARMS, *OVERHEAD_VARIANTS))
    default = OverheadOptions()
    rounds = "rounds, every second one backwards (default %(default)s)"
    add_options(parser, RUN, "rounds json seed", rounds={"default": default.rounds, "help": rounds})
    add_options(parser, SERVER, "lab-model device folder")
    parser.add_argument(
        "--arms",
        type=words,
        default=list(default.arms),
        metavar="A,B",
        help=f"servers, of {there} (default {','.join(default.arms)})",
    )


def run(given: argparse.Namespace) -> int:
    """Measures and reports. The exit status: 0, 1 when an arm failed, 130 after Ctrl-C. Raises
    KVTierError; where the bench could not go on, after what had been measured is reported.
    """
    options = OverheadOptions.of(given)
    check(options)
    check_arms(options.arms, OVERHEAD_VARIANTS)
    cells: list[Cell] = []
    with work_folder(options.folder, lambda: failed(cells)) as folder:
        setup = make_setup(options)
        plan = Plan(options.arms, setup, folder, options.rounds, together=True, order=backwards)
        cells.append(Cell({}, "", plan, Decoding(options)))
        return (
            Comparison(cells)
            .experiment(
                options,
                SCHEMA,
                results=lambda: results(options, setup, cells[0].outcome.rounds),
                tables=overhead_tables,
            )
            .run()
        )


def results(options: OverheadOptions, setup: Setup, rounds: Sequence[Round]) -> dict[str, Any]:
    """The result of the rounds, schema kvtier.restore-overhead/1."""
    rows = [round_row(one) for one in rounds if one.complete]
    settings = {**{name: getattr(options, name) for name in _MEASURED}, **asdict(setup)}
    return {"settings": settings, **overhead_figures(rows, options.arms), "rounds": rows}


def make_setup(options: OverheadOptions) -> Setup:
    """Room for all requests at once, so that nothing is evicted or waits."""
    shape = shape_of(options)
    each = options.prompt_tokens + options.output_tokens + 4 * shape.page
    tokens = each * (options.requests + 1) // shape.page * shape.page
    return setup_of(
        options,
        shape,
        write_named(options.lab_model or "lab-mha"),
        device_tokens=tokens,
        context_tokens=tokens,
        max_running=max(options.requests, 8),
        variants=OVERHEAD_VARIANTS,
    )


def new_prompts(options: OverheadOptions, number: int) -> list[list[int]]:
    """The prompts of a round: the same for every arm, and no two rounds share a page."""
    rng = random.Random(f"{options.seed}:{number}")
    return [rng.choices(range(BYTES), k=options.prompt_tokens) for _ in range(options.requests)]


def round_row(one: Round) -> dict[str, Any]:
    """A round's figures."""
    done = [sample.completion for sample in one.samples]
    return {
        "arm": one.arm,
        "round": one.number,
        "tpot_ms": milliseconds(percentile((each.tpot_s for each in done), 50)),
        "ttft_ms": milliseconds(percentile((each.ttft_s for each in done), 50)),
        "cached_tokens": sum(each.cached.total for each in done if each.cached is not None),
        "errors": sum(each.error is not None for each in done),
        "foreign_cores": None if one.cpu is None else one.cpu.foreign_cores,
    }


def overhead_figures(rounds: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    """The median time per output token of each arm, and ours over the others' round by round. Ours
    are `kvtier`, and the arm that looks ahead.
    """
    by_arm = {arm: {row["round"]: row for row in rounds if row["arm"] == arm} for arm in arms}
    whole = sorted(set.intersection(*(set(found) for found in by_arm.values()))) if by_arm else []
    times = {
        name: {arm: [by_arm[arm][number][name] for number in whole] for arm in arms}
        for name in ("tpot_ms", "ttft_ms")
    }
    pairs = [
        (ours, other)
        for ours in (OURS, AHEAD)
        if ours in arms
        for other in arms
        if other not in (ours, AHEAD)
    ]
    return {
        "arms": {
            arm: {name: percentile(times[name][arm], 50) for name in times}
            | {"cached_tokens": sum(by_arm[arm][number]["cached_tokens"] for number in whole)}
            for arm in arms
        },
        "ratios": {
            f"{ours}/{other}": {
                name: pair_ratios(times[name][ours], times[name][other]) for name in times
            }
            for ours, other in pairs
        },
    }
