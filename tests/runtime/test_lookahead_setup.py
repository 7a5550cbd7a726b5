"""Which servers look ahead: those that are asked to, but for several pipeline stages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.runtime.scheduler import setup as restore_setup
from sgl_kvtier.runtime.scheduler.refusals import STAGES as MORE_THAN_ONE_STAGE
from sgl_kvtier.runtime.settings import from_extra_config, looks_ahead

ONE = SimpleNamespace(tp_size=1, pp_size=1, device="cpu")
TWO = SimpleNamespace(tp_size=2, pp_size=1, device="cpu")
STAGES = SimpleNamespace(tp_size=1, pp_size=2, device="cpu")


def server(**policy: object) -> PolicyConfig:
    return from_extra_config({"store": {"path": "/nowhere"}, "policy": policy}).policy


def test_without_a_device_of_its_own_a_server_looks_ahead_only_where_its_file_says_so():
    assert not looks_ahead(restore_setup.in_force(ONE, server()))
    assert not looks_ahead(restore_setup.in_force(TWO, server()))
    assert not looks_ahead(server())
    assert looks_ahead(server(prefetch="on"))
    assert looks_ahead(server(eviction="next-use"))
    assert looks_ahead(server(eviction="sgl_kvtier.lab.rules:LFU"))
    assert restore_setup.in_force(ONE, server(prefetch="on")).eviction == "lru"


def test_a_servers_defaults_are_those_of_the_settings():
    assert from_extra_config({"store": {"path": "/nowhere"}}).policy == PolicyConfig()


def test_with_pipeline_stages_it_is_sglangs_own_way_and_restoring_goes_on():
    asked = server(prefetch="on", eviction="next-use", restore="both")
    followed = restore_setup.in_force(STAGES, asked)
    assert not looks_ahead(followed) and followed.restore == "both"
    assert restore_setup.nothing_to_do(STAGES, asked) is None
    assert restore_setup.nothing_to_do(STAGES, server(prefetch="on", restore="off")) == str(
        MORE_THAN_ONE_STAGE
    )
    assert str(MORE_THAN_ONE_STAGE) in str(
        restore_setup.nothing_to_do(STAGES, server(prefetch="on", restore="auto"))
    )


@pytest.mark.parametrize(
    ("restore", "in_force"), [("auto", "off"), ("both", "both"), ("off", "off")]
)
def test_on_two_ranks_it_looks_ahead_and_restores_only_when_asked_by_name(restore, in_force):
    followed = restore_setup.in_force(TWO, server(prefetch="on", restore=restore))
    assert looks_ahead(followed) and followed.restore == in_force
    assert restore_setup.nothing_to_do(TWO, server(prefetch="on", restore=restore)) is None


def test_a_plain_server_is_left_as_it_is():
    followed = restore_setup.in_force(ONE, server(restore="auto"))
    assert followed == server(restore="auto", prefetch="off", eviction="lru")
    assert restore_setup.nothing_to_do(ONE, server(restore="auto")) is None
    assert restore_setup.nothing_to_do(ONE, server(eviction="sgl_kvtier.lab.rules:LFU")) is None
