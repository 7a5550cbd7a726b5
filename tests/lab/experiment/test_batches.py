"""Batches of restorations against a fake server: what is asked for, when, and what is kept."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from aiohttp import web
from fake_restore import PAGE, PAGE_BYTES, RestoringServer
from fake_restore import measure as measure_with

from sgl_kvtier.lab.experiment.restore.arms import BATCH_ARMS, DEFAULT_BATCH_ARMS
from sgl_kvtier.lab.experiment.restore.cells import batch_results
from sgl_kvtier.lab.experiment.restore.plan import (
    RestorePlan,
    decoders_of,
    lengths_of,
    order,
    prompts_of,
)
from sgl_kvtier.lab.experiment.restore.run import Together
from sgl_kvtier.lab.experiment.restore.trial import GRID, PRIME, Batch, RestoreLog, gaps_within
from sgl_kvtier.lab.outside.client import Completion
from sgl_kvtier.lab.rules import IN_TURN

SMALL = RestorePlan(
    *("fake", PAGE, 256, (256, 512)), arms=DEFAULT_BATCH_ARMS, rounds=2, at_once=(2, 3), decoders=1
)
ONE = dataclasses.replace(SMALL, at_once=(3,), rounds=1)


class Slow(RestoringServer):
    """Takes a moment for each prompt, so that those that are asked for together are there
    together. `turns` is whose rules decided when each came.
    """

    def __init__(self) -> None:
        super().__init__(incremental=True)
        self.turns: list[float] = []

    async def cached(self, input_ids: list[int]) -> dict[str, int]:
        self.turns.append(self.turn)
        await asyncio.sleep(0.02)
        return await super().cached(input_ids)


def measure(server: RestoringServer, options: RestorePlan, log: RestoreLog) -> None:
    measure_with(server, options, log, Together, arms=BATCH_ARMS)


@pytest.fixture(scope="module")
def measured() -> tuple[Slow, RestoreLog]:
    server, log = Slow(), RestoreLog()
    measure(server, SMALL, log)
    return server, log


def of(log: RestoreLog, kind: str) -> list[Batch]:
    return [one for one in log.batches if one.kind == kind]


def test_every_arm_is_asked_for_the_same_batches_and_every_second_round_goes_backwards(
    measured: tuple[Slow, RestoreLog],
) -> None:
    made = [(b.round, b.load_over_compute, b.at_once, b.arm) for b in of(measured[1], GRID)]
    assert made == [(n, *cell) for n in (1, 2) for cell in order(SMALL, n)]
    assert made[0][2:] == (2, "stock")
    assert made[-1][2:] == (2, "stock")
    for one in of(measured[1], GRID):
        tokens = [r.prompt_tokens for r in one.requests]
        assert tokens == [n + PAGE for n in lengths_of(SMALL, one.at_once, one.round)]


def test_all_of_a_batch_are_there_at_the_same_time_beside_those_that_decode(
    measured: tuple[Slow, RestoreLog],
) -> None:
    assert measured[0].most_running == 3 + 1


def test_what_decodes_begins_before_the_batch_and_ends_after_it(
    measured: tuple[Slow, RestoreLog],
) -> None:
    server, log = measured
    assert len(server.aborted) == len(of(log, GRID)) + len(of(log, "warm"))
    for one in of(log, GRID):
        assert one.error is None
        assert len(one.decoded) == 1
        assert one.gaps_s
        assert sum(one.gaps_s) >= (one.makespan_s or 0.0)


def test_the_rules_are_the_arms_own(measured: tuple[Slow, RestoreLog]) -> None:
    server = measured[0]
    last = order(SMALL, 2)[-len(DEFAULT_BATCH_ARMS) :]
    assert [arm for _, _, arm in last] == list(reversed(DEFAULT_BATCH_ARMS))
    each = server.turns[-3 * len(last) :: 3]
    settings = [state[0] for state in server.states[-3 * len(last) :: 3]]
    found = dict(zip((arm for _, _, arm in last), zip(each, settings, strict=True), strict=True))
    assert found["kvtier"] == (list(IN_TURN).index("kvtier"), "auto")
    assert found["cacheflow"] == (list(IN_TURN).index("cacheflow"), "auto")
    assert found["cake"] == (list(IN_TURN).index("cake"), "auto")
    assert found["stock"] == (list(IN_TURN).index("by-arrival"), "off")


def test_the_bandwidth_loads_the_mix_as_fast_as_it_is_computed(
    measured: tuple[Slow, RestoreLog],
) -> None:
    log = measured[1]
    scales = [log.scale("fake", length) for length in SMALL.lengths]
    assert [one.prefix_bytes for one in scales if one] == [
        n // PAGE * PAGE_BYTES for n in SMALL.lengths
    ]
    nbytes = sum(one.prefix_bytes for one in scales if one)
    load_s = nbytes * 8e-9 / of(log, GRID)[0].gbps
    assert load_s == pytest.approx(sum(one.compute_s for one in scales if one))


def test_an_arm_that_is_shortest_first_sends_the_same_batch_in_the_order_of_length() -> None:
    server, log = Slow(), RestoreLog()
    arms = ("kvtier", "kvtier-shortest-first")
    measure(server, dataclasses.replace(ONE, arms=arms, decoders=0), log)
    sent = [len(body["input_ids"]) for body in server.requests[-6:]]
    drawn = [n + PAGE for n in lengths_of(ONE, 3, 1)]
    assert (sent[:3], sent[3:]) == (drawn, sorted(drawn))
    kvtier, shortest = of(log, GRID)
    assert [r.output_ids for r in kvtier.requests] == [r.output_ids for r in shortest.requests]


def test_answers_are_compared_with_those_of_each_prompt_alone() -> None:
    server, log = Slow(), RestoreLog()
    server.wrong_when_loaded = True
    measure(server, dataclasses.replace(ONE, arms=("compute", "kvtier"), decoders=0), log)
    assert len(of(log, PRIME)[0].requests) == 3
    found = batch_results(log)
    (cell,) = found["cells"]
    assert cell["arms"]["compute"]["equal_tokens_fraction"] == 1.0
    assert cell["arms"]["kvtier"]["equal_tokens_fraction"] == 0.0
    assert found["summary"]["equal_tokens"] is False


def test_a_request_that_fails_fails_its_batch_and_the_next_run_makes_it_again() -> None:
    server, log = Slow(), RestoreLog()
    options = dataclasses.replace(ONE, arms=("compute", "kvtier"))
    long = max(len(ids) for ids in prompts_of(options, 3, 1))
    server.fail_when = lambda ids: (
        "refuse" if len(ids) == long and server.most_running >= 3 + 1 else None
    )
    measure(server, options, log)
    (cell,) = batch_results(log)["cells"]
    assert all(arm["errors"] == 1 for arm in cell["arms"].values())
    assert batch_results(log)["summary"]["equal_tokens"] is False
    measure(Slow(), options, log)
    (cell,) = batch_results(log)["cells"]
    assert all((arm["errors"], arm["rounds"]) == (0, 1) for arm in cell["arms"].values())
    assert batch_results(log)["summary"]["equal_tokens"] is True


def test_every_length_of_a_mix_is_in_a_batch_as_often_as_any_other() -> None:
    options = RestorePlan("m", 64, 8192, (4096, 8192, 16384, 32768), at_once=(2, 4, 8))
    for number in range(1, 9):
        assert sorted(lengths_of(options, 8, number)) == sorted([*options.lengths] * 2)
        assert sorted(lengths_of(options, 4, number)) == sorted(options.lengths)
        assert len(set(lengths_of(options, 2, number))) == 2
    orders = {tuple(lengths_of(options, 4, number)) for number in range(1, 9)}
    assert len(orders) > 4


def test_gaps_are_those_that_reach_into_the_batch_on_the_clock_of_the_device() -> None:
    # sent at 10 s; dilation 2: tokens at 12, 14, 20, 22 and 30 s of this machine's clock
    one = Completion(sent_s=10.0, e2e_s=10.0, token_times_s=(1.0, 2.0, 5.0, 6.0, 10.0))
    assert gaps_within(one, 15.0, 21.0, 2.0) == [3.0, 1.0]
    assert gaps_within(one, 0.0, 11.0, 2.0) == []
    assert gaps_within(one, 13.0, 13.5, 2.0) == [1.0]


def test_a_long_prompt_is_there_before_a_short_one_that_is_sent_after_it() -> None:
    class SlowReader(Slow):
        """Reads prompts the slower the longer they are, as a server that is busy otherwise."""

        async def generate(self, request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(len((await request.json())["input_ids"]) / 20_000)
            return await super().generate(request)

    server, log = SlowReader(), RestoreLog()
    options = dataclasses.replace(ONE, arms=("compute",), decoders=0, rounds=3)
    measure(server, options, log)
    sent = [len(body["input_ids"]) for body in server.requests[-9:]]
    assert sent == [n + PAGE for number in (1, 2, 3) for n in lengths_of(options, 3, number)]


def test_prompts_follow_from_the_seed_alone_and_share_no_page() -> None:
    options = RestorePlan("m", PAGE, 256, (256, 512), seed=3, at_once=(2, 4), decoders=4)
    every = [ids for n in (1, 2) for size in (2, 4) for ids in prompts_of(options, size, n)]
    every += decoders_of(options)
    assert len({tuple(ids[:PAGE]) for ids in every}) == len(every)
    others = dataclasses.replace(options, arms=("kvtier", "cake"), decoders=1)
    assert prompts_of(options, 4, 2) == prompts_of(others, 4, 2)
    assert prompts_of(options, 4, 2) != prompts_of(dataclasses.replace(options, seed=4), 4, 2)
