"""When the CPU platform offers itself, and how it shares cores."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from sglang.srt.mem_cache.pool_host import base

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.runtime.cpu import hicache, platform
from sgl_kvtier.runtime.sglang import features, seams
from sgl_kvtier.runtime.sglang.seams import Seam, SeamStatus

OURS = "sgl_kvtier.runtime.cpu.platform_class.CpuPlatform"


@pytest.mark.parametrize(
    ("accelerators", "variables", "offered"),
    [
        (["/dev/nvidia0"], {}, None),
        ([], {}, OURS),
        (["/dev/nvidia0"], {"SGLANG_PLATFORM": "kvtier_cpu"}, OURS),
        ([], {"SGLANG_USE_CPU_ENGINE": "1"}, None),
    ],
    ids=["an accelerator", "none", "chosen beside one", "SGLang's own engine is asked for"],
)
def test_it_offers_itself_where_there_is_no_accelerator_or_it_is_chosen(
    monkeypatch, accelerators, variables, offered
):
    for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "accelerators", lambda: accelerators)
    assert platform.activate() == offered


def test_it_stays_away_from_an_sglang_that_lacks_what_it_is_made_of(monkeypatch, caplog):
    gone = Seam("cpu", "server", "sglang.srt.platforms.interface.PlatformCapabilities", "declared")
    monkeypatch.setattr(features, "moved", lambda name: (SeamStatus(gone, "missing"),))
    monkeypatch.setenv("SGLANG_PLATFORM", "kvtier_cpu")
    with caplog.at_level(logging.WARNING):
        assert platform.activate() is None
    (record,) = caplog.records
    assert "interface.PlatformCapabilities: missing" in record.getMessage()


REGISTRY = """
from enum import Enum
class HookType(Enum):
    AFTER = "after"
    AROUND = "around"
class HookRegistry:
    registered = []
    @classmethod
    def register(cls, target, hook, kind):
        cls.registered.append(target)
"""
LOADED_BY_ANOTHER_SGLANG = """
import sglang.srt
from importlib.metadata import EntryPoint
import sgl_kvtier.runtime.sglang.seams as seams
assert seams.__file__.startswith(CHECKOUT)
for value in ("sgl_kvtier.runtime.cpu.platform:activate", "sgl_kvtier.runtime.plugin:register"):
    assert EntryPoint("kvtier", value, "any").load()() is None, value
from sglang.srt.plugins.hook_registry import HookRegistry
print(HookRegistry.registered)
"""


def test_the_entry_points_are_loaded_by_an_sglang_that_has_none_of_our_symbols(tmp_path):
    """SGLang loads them whatever its release is, and one that raises is one that nobody can use."""
    for package in ("sglang", "sglang/srt", "sglang/srt/platforms", "sglang/srt/plugins"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "sglang/srt/platforms/interface.py").write_text("class SRTPlatform: pass\n")
    (tmp_path / "sglang/srt/plugins/hook_registry.py").write_text(REGISTRY)
    checkout = str(Path(platform.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", LOADED_BY_ANOTHER_SGLANG.replace("CHECKOUT", repr(checkout))],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{checkout}", "SGLANG_PLATFORM": "kvtier_cpu"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert "cpu is off" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "cores", "groups"),
    [
        (1, [0, 1], "0-1"),
        (2, [0, 1], "0|1"),
        (2, [4, 5, 6, 7], "4-5|6-7"),
        (4, [0, 1], "0|1|0|1"),
        (2, [0, 2, 4, 6], "0,2|4,6"),
    ],
)
def test_every_rank_gets_its_share_of_the_cores(ranks, cores, groups):
    assert platform.threads_per_rank(ranks, cores) == groups


@pytest.mark.parametrize(
    ("device", "stand_in", "at_once"),
    [("cpu", "", True), ("cpu:0", "", True), ("cuda:0", "", False), ("cpu", "a:b", False)],
)
def test_work_is_over_when_it_returns_on_a_cpu_that_nothing_stands_in_for(
    monkeypatch, device, stand_in, at_once
):
    monkeypatch.delenv(platform.STAND_IN, raising=False)
    if stand_in:
        monkeypatch.setenv(platform.STAND_IN, stand_in)
    assert platform.works_at_once(device) is at_once


def test_what_stands_in_for_the_cpu_is_called_by_its_name(monkeypatch):
    called = []
    module = ModuleType("a_device_of_a_test")
    module.install = lambda: called.append(True)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv(platform.STAND_IN, "a_device_of_a_test:install")
    platform.stand_in()
    assert called == [True]


def test_nothing_is_called_where_nothing_stands_in(monkeypatch):
    monkeypatch.delenv(platform.STAND_IN, raising=False)
    platform.stand_in()


@pytest.mark.parametrize("named", ["no_such_module:install", "json:no_such_function", "json", ":"])
def test_a_stand_in_that_is_not_there_is_refused_and_named(monkeypatch, named):
    monkeypatch.setenv(platform.STAND_IN, named)
    with pytest.raises(ConfigError, match=platform.STAND_IN):
        platform.stand_in()


def test_every_hook_on_host_pools_is_a_seam():
    assert set(hicache.UNPINNED) <= {seam.symbol for seam in seams.load_manifest()}


def test_host_pools_leave_little_memory_free(monkeypatch):
    hicache.install()
    free = 3 << 30
    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: free)
    monkeypatch.setattr(base, "ranks_per_host", lambda: 1)
    assert base.host_memory_budget_bytes(1) == free - platform.RESERVE_BYTES
