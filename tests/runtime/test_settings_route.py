"""GET and POST /kvtier/settings: what may be changed by name, and that all replicas change or none."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from test_restore_control import lab

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.runtime.hints.route import change
from sgl_kvtier.runtime.hints.scheduler import get_internal_state
from sgl_kvtier.runtime.hints.settings import answer, pack, read
from sgl_kvtier.runtime.settings import FIXED


def body(**policy: Any) -> bytes:
    return json.dumps({"policy": policy}).encode()


def manager(*schedulers: Any) -> Any:
    """The HTTP server's side of data-parallel replicas: each message goes to all of them."""

    async def communicate(message: Any) -> list[Any]:
        return [
            get_internal_state(
                lambda *_: SimpleNamespace(internal_state={}),
                SimpleNamespace(scheduler=scheduler),
                message,
            )
            for scheduler in schedulers
        ]

    return SimpleNamespace(
        auto_create_handle_loop=lambda: None, get_internal_state_communicator=communicate
    )


def post(schedulers: list[Any], **policy: Any) -> tuple[int, dict[str, Any]]:
    return asyncio.run(change(manager(*schedulers), body(**policy)))


def test_settings_are_named_as_in_the_settings_file_and_are_in_force_on_all_replicas():
    schedulers = [lab(PolicyConfig()), lab(PolicyConfig())]
    status, told = post(schedulers, restore="load", min_restore_tokens=512)
    assert (status, told["result"], told["reason"]) == (200, "accepted", "")
    assert told["settings"]["policy"]["restore"] == "load"
    for scheduler in schedulers:
        assert scheduler.notes.config == PolicyConfig(restore="load", min_restore_tokens=512)
        assert scheduler.engine.offers.min_tokens == 512


def test_what_is_in_force_can_be_sent_back_as_it_came():
    scheduler = lab(PolicyConfig(restore="both"))
    found = answer(scheduler, pack({}, change=False))
    assert found["reason"] == ""
    assert sorted([*found["settings"]["policy"], *found["fixed"]["policy"]]) == sorted(
        vars(PolicyConfig())
    )
    assert set(found["fixed"]["policy"]) == set(FIXED)
    assert post([scheduler], **found["settings"]["policy"])[0] == 200
    assert scheduler.notes.config == PolicyConfig(restore="both")


def test_one_wrong_value_changes_nothing_and_is_named():
    scheduler = lab(PolicyConfig())
    status, told = post([scheduler], min_restore_tokens=512, restore="sometimes")
    assert (status, told["result"]) == (400, "refused")
    assert told["reason"].startswith('policy.restore = "sometimes": must be one of')
    assert scheduler.notes.config == PolicyConfig()


def test_a_replica_that_refuses_keeps_all_others_as_they_are():
    schedulers = [lab(PolicyConfig()), lab(PolicyConfig())]
    schedulers[1].engine.proof.refute()
    status, told = post(schedulers, min_restore_tokens=512, restore="both")
    assert (status, told["result"]) == (409, "refused")
    assert "stays off" in told["reason"]
    assert [one.notes.config for one in schedulers] == [PolicyConfig()] * 2
    assert post(schedulers, restore="off")[0] == 200


@pytest.mark.parametrize("name", FIXED)
def test_what_is_fixed_at_the_start_says_to_restart(name):
    with pytest.raises(
        ConfigError, match=f"policy.{name}: fixed when the server starts. .*restart"
    ):
        read(body(**{name: getattr(PolicyConfig(), name)}))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"[]",
        b"{}",
        b'{"policy": {}}',
        b'{"policy": 3}',
        b'{"store": {"path": "/x"}}',
        b'{"policy": {"restore": "off"}, "store": {}}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_another_body_is_refused_with_an_example(sent):
    with pytest.raises(ConfigError, match=r'Send \{"policy": \{"restore": "off"'):
        read(sent)


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match=r"policy\.restores"):
        read(body(restores="off"))


def test_a_server_that_falls_back_can_be_told_off_and_says_why_not_on():
    plain = SimpleNamespace(tree_cache=SimpleNamespace())
    assert post([plain], restore="off") == (
        200, {"result": "accepted", "reason": "", "settings": {}},
    )  # fmt: skip
    status, told = post([plain], restore="auto")
    assert status == 409 and "SGLang's own way since it started" in told["reason"]


def test_a_server_whose_copies_were_not_checked_says_to_restart():
    scheduler = lab(PolicyConfig(restore="off", prefetch="on"))
    scheduler.notes.is_unproven = True
    status, told = post([scheduler], restore="fastest")
    assert status == 409 and "restart the server" in told["reason"]
    assert not scheduler.engine.offers.is_on and scheduler.notes.config.restore == "off"
    assert post([scheduler], restore="off", load_tokens=64)[0] == 200


def test_a_defect_is_a_refusal_and_not_the_end_of_the_server(caplog):
    scheduler = lab(PolicyConfig())
    scheduler.notes.configure = None
    status, told = post([scheduler], restore="off")
    assert status == 409 and "log has the error" in told["reason"]
    assert "TypeError" in caplog.text


def test_schedulers_without_the_plugin_are_named():
    async def communicate(message):
        return [SimpleNamespace(internal_state={})]

    stock = manager()
    stock.get_internal_state_communicator = communicate
    status, told = asyncio.run(change(stock, body(restore="off")))
    assert status == 409 and "kvtier doctor" in told["reason"]
