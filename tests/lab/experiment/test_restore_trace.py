"""Bandwidth traces and other requests, made from a seed and replayed beside a request."""

from __future__ import annotations

import asyncio

import pytest
from fake_restore import RestoringServer

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.restore.arms import ArmSwitch, check_restore_arms, restore_choice
from sgl_kvtier.lab.experiment.restore.trace import (
    BandwidthDriver,
    BandwidthTrace,
    OtherRequests,
    OtherRequestsDriver,
)
from sgl_kvtier.lab.outside.client import Client


def test_equal_seeds_give_equal_traces_and_others_do_not() -> None:
    one = BandwidthTrace.seeded(1, 0.5, 0.2, 10.0)
    assert one == BandwidthTrace.seeded(1, 0.5, 0.2, 10.0)
    assert one != BandwidthTrace.seeded(2, 0.5, 0.2, 10.0)
    assert one.starts_s[0] == 0.0
    assert all(0.5 / 4 <= rate <= 0.5 * 4 for rate in one.gbps)


def test_bytes_take_what_the_pieces_of_a_trace_allow() -> None:
    trace = BandwidthTrace(
        (0.0, 1.0, 2.0), (8e-9 * 100, 8e-9 * 10, 8e-9 * 50)
    )  # 100, 10 and 50 bytes a second
    assert trace.seconds(50) == pytest.approx(0.5)
    assert trace.seconds(105) == pytest.approx(1.5)
    assert trace.seconds(160) == pytest.approx(3.0)


def test_a_trace_is_replayed_until_the_request_is_over() -> None:
    server = RestoringServer()
    trace = BandwidthTrace((0.0, 0.01, 0.02, 1000.0), (1.0, 2.0, 3.0, 4.0))

    async def go() -> BandwidthTrace:
        async with server.up(), Client(server.url, admin_key="secret") as client:
            driver, over = BandwidthDriver(ArmSwitch(client), trace), asyncio.Event()
            running = asyncio.create_task(driver(over))
            while len(server.changes) < 2:
                await asyncio.sleep(0.01)
            over.set()
            await running
            return driver.applied

    applied = asyncio.run(go())
    assert server.changes == [2.0, 3.0]
    assert applied.gbps == (1.0, 2.0, 3.0)
    assert applied.starts_s[1] >= 0.01


def test_other_requests_are_new_in_every_replay_and_end_before_the_driver_does() -> None:
    server = RestoringServer()
    others = OtherRequests(((0.0, 32), (0.001, 48), (1000.0, 64)), seed=3)

    async def go() -> None:
        async with server.up(), Client(server.url, admin_key="secret") as client:
            for _ in range(2):
                over = asyncio.Event()
                running = asyncio.create_task(OtherRequestsDriver(client, others)(over))
                before = len(server.requests)
                while len(server.requests) < before + 2:
                    await asyncio.sleep(0.01)
                over.set()
                await running

    asyncio.run(go())
    sizes = [len(body["input_ids"]) for body in server.requests]
    assert sorted(sizes) == [32, 32, 48, 48]
    assert len({tuple(body["input_ids"]) for body in server.requests}) == 4


def test_arrivals_come_from_the_seed() -> None:
    one = OtherRequests.seeded(1, 0.1, 5.0)
    assert one == OtherRequests.seeded(1, 0.1, 5.0)
    assert all(64 <= tokens <= 256 for _, tokens in one.arrivals)


def test_only_what_changes_is_sent() -> None:
    server = RestoringServer()

    async def go() -> None:
        async with server.up(), Client(server.url, admin_key="secret") as client:
            switch = ArmSwitch(client)
            for arm in ("kvtier", "kvtier", "load"):
                await switch.use(arm, 2.0)

    asyncio.run(go())
    assert server.changes == [2.0]
    assert (server.restore, server.prefetch) == ("off", "wait_complete")


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (["compute", "load", "magic"], "no arm named magic"),
        (["kvtier"], "must be among them"),
        (["load", "load"], "each arm once"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(arms: list[str], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        check_restore_arms(arms)


def test_a_choice_is_sent_as_its_place_in_the_settings() -> None:
    assert [restore_choice(name) for name in ("auto", "both", "load", "compute", "off")] == [
        0,
        1,
        2,
        3,
        4,
    ]
