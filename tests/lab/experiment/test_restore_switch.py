"""How a running server is switched from one arm to another."""

from __future__ import annotations

import asyncio

import pytest
from fake_restore import RestoringServer

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.restore.arms import ArmSwitch, check_restore_arms, restore_choice
from sgl_kvtier.lab.outside.client import Client


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
