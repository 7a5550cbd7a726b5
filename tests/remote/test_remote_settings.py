"""What is refused at start."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
from remote_pages import IDENTITY

from sgl_kvtier.errors import ConfigError, StoreError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.remote.child.mooncake import what_to_install
from sgl_kvtier.remote.child.settings import RemoteSettings, own_hostname
from sgl_kvtier.remote.store import open_remote


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"engine": "redis"}, "remote.engine"),
        ({"engine": "mooncake", "master": "10.0.0.1"}, "remote.master"),
        ({"engine": "mooncake", "master": "10.0.0.1:0"}, "remote.master"),
        ({"engine": "mooncake", "master": "10.0.0.1:99999"}, "remote.master"),
        ({"protocol": "udp"}, "remote.protocol"),
        ({"ring_bytes": 4096}, "remote.ring_bytes"),
        ({"deadline_s": 6.0}, "remote.deadline_s"),
        ({"deadline_s": float("nan")}, "remote.deadline_s"),
    ],
)
def test_a_setting_that_cannot_work_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RemoteSettings(**given)


def test_a_name_that_only_this_host_knows_is_refused_beside_a_master_elsewhere() -> None:
    settings = RemoteSettings("mooncake", "192.0.2.1:50051", hostname="127.0.0.1")
    with pytest.raises(ConfigError, match="other hosts cannot reach it"):
        own_hostname(settings)


def test_a_cluster_on_one_host_may_use_its_loopback_name() -> None:
    settings = RemoteSettings("mooncake", "127.0.0.1:50051", hostname="127.0.0.1")
    assert own_hostname(settings) == "127.0.0.1"
    assert own_hostname(RemoteSettings("mooncake", "127.0.0.1:50051")) == "127.0.0.1"


def test_a_store_that_is_off_does_not_open() -> None:
    with pytest.raises(StoreError, match=r"set remote\.engine"):
        open_remote(RemoteSettings(), IDENTITY, "tp0")


def test_without_mooncake_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match=re.escape(how_to_install("remote"))):
        open_remote(RemoteSettings("mooncake", "127.0.0.1:1"), IDENTITY, "tp0")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1"),
        ("libcudart.so.12: cannot open", "mooncake-transfer-engine-non-cuda"),
        ("No module named 'mooncake'", how_to_install("remote")),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_to_install(error: str, advice: str) -> None:
    assert advice in what_to_install(ImportError(error))
