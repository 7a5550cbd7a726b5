"""What restoration, and looking ahead, cost while there is nothing to restore: decoding of prompts
nobody has seen, stock and ours in turn.

One server per arm, all up at once and asleep while they wait. Every round sends the same new
prompts to each of them, several at a time; every second round goes backwards. The time per output
token of a round is the median of its requests'.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import NOT_RESTORED, OURS, Setup, Variant, prepare
from sgl_kvtier.lab.experiment.machine import CpuWatch
from sgl_kvtier.lab.experiment.restore.trial import ServerCpu
from sgl_kvtier.lab.outside.client import Client, Completion
from sgl_kvtier.lab.outside.replay import milliseconds
from sgl_kvtier.lab.outside.server import Server, stop_servers
from sgl_kvtier.lab.pages.stats import pair_ratios, percentile

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
_BYTES = 256


@dataclass(frozen=True)
class OverheadOptions:
    """How much is asked. `warm_up` rounds are not counted."""

    arms: Sequence[str] = OVERHEAD_ARMS
    rounds: int = 7
    requests: int = 4
    prompt_tokens: int = 256
    output_tokens: int = 64
    warm_up: int = 1
    seed: int = 0


@dataclass
class OverheadRound:
    """One arm's requests of one round."""

    arm: str
    number: int
    done: list[Completion] = field(default_factory=list)
    foreign_cores: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The round's figures."""
        return {
            "arm": self.arm,
            "round": self.number,
            "tpot_ms": milliseconds(percentile((one.tpot_s for one in self.done), 50)),
            "ttft_ms": milliseconds(percentile((one.ttft_s for one in self.done), 50)),
            "cached_tokens": sum(one.cached.total for one in self.done if one.cached is not None),
            "errors": sum(one.error is not None for one in self.done),
            "foreign_cores": self.foreign_cores,
        }


class Overhead:
    """One run. Rounds go to the list given, so that an interruption loses none."""

    def __init__(
        self,
        options: OverheadOptions,
        setup: Setup,
        folder: Path,
        rounds: list[OverheadRound],
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._setup = setup
        self._folder = folder
        self._rounds = rounds
        self._advance = advance

    def run(self) -> None:
        """Starts the servers, measures, stops them. Raises BenchError when one does not start or
        fails a request.
        """
        with self._servers() as servers:
            cpus = {arm: ServerCpu(server.pid) for arm, server in servers.items()}
            for number in range(1 - self._options.warm_up, self._options.rounds + 1):
                arms = list(servers) if number % 2 else list(servers)[::-1]
                for arm in arms:
                    one = asyncio.run(self._round(servers[arm], cpus[arm], arm, number))
                    if number > 0:
                        self._rounds.append(one)
                        self._advance()

    @contextlib.contextmanager
    def _servers(self) -> Iterator[dict[str, Server]]:
        servers: dict[str, Server] = {}
        try:
            for arm in self._options.arms:
                folder = self._folder / arm
                servers[arm] = Server(arm, prepare(arm, self._setup, folder), folder)
                servers[arm].start()
            for server in servers.values():
                server.wait_until_healthy(400.0)
            yield servers
        finally:
            stop_servers(list(servers.values()))

    async def _round(self, server: Server, cpu: ServerCpu, arm: str, number: int) -> OverheadRound:
        options = self._options
        one = OverheadRound(arm, number)
        async with Client(server.url, timeout_s=300) as client:
            await client.flush()
            watch = CpuWatch(cpu.seconds)
            asked = (
                client.generate(ids, options.output_tokens) for ids in new_prompts(options, number)
            )
            one.done = list(await asyncio.gather(*asked))
            one.foreign_cores = watch.stop().foreign_cores
        failed = next((done.error for done in one.done if done.error is not None), None)
        if failed is not None:
            raise BenchError(f"{arm}: a request failed: {failed}. {server.last_lines(5)}")
        return one


def new_prompts(options: OverheadOptions, number: int) -> list[list[int]]:
    """The prompts of a round: the same for every arm, and no two rounds share a page."""
    rng = random.Random(f"{options.seed}:{number}")
    return [rng.choices(range(_BYTES), k=options.prompt_tokens) for _ in range(options.requests)]


def overhead_figures(rounds: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    """Per arm the median time per output token, and ours over the others' round by round: `kvtier`,
    and with it what looks ahead.
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
