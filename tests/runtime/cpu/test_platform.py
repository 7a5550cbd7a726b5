"""When the CPU platform offers itself, and how it shares cores."""

from __future__ import annotations

import pytest

from sgl_kvtier.runtime.cpu import platform


def test_it_stays_away_from_a_host_with_an_accelerator(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.setattr(platform, "accelerators", lambda: ["/dev/nvidia0"])
    assert platform.activate() is None


def test_it_offers_itself_where_there_is_none(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(platform, "accelerators", lambda: [])
    assert platform.activate() == "sgl_kvtier.runtime.cpu.platform_class.CpuPlatform"


def test_it_can_be_chosen_beside_an_accelerator(monkeypatch):
    monkeypatch.setenv("SGLANG_PLATFORM", "kvtier_cpu")
    monkeypatch.setattr(platform, "accelerators", lambda: ["/dev/nvidia0"])
    assert platform.activate() == "sgl_kvtier.runtime.cpu.platform_class.CpuPlatform"


def test_it_leaves_the_cpu_to_sglangs_own_engine_when_that_is_asked_for(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr(platform, "accelerators", lambda: [])
    assert platform.activate() is None


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
