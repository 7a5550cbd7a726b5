"""Which servers restore prefixes: what is refused, and what has to be asked for by naming a mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.runtime import restore_setup

SERVER = {
    "chunked_prefill_size": 512, "page_size": 16, "hicache_mem_layout": "page_first_direct", "hicache_host_memory_mode": "cache", "speculative_algorithm": None,
    "enable_mixed_chunk": False, "enable_dp_attention": False, "disaggregation_mode": "null", "pp_size": 1, "tp_size": 1, "nnodes": 1,
    "attn_cp_size": 1, "dcp_size": 1, "device": "cpu", "disable_overlap_schedule": False,
}  # fmt: skip
CACHE = {"disable_radix_cache": False, "is_hybrid_swa": False, "is_hybrid_ssm": False, "is_dsa": False}


def unsupported(**changes: Any) -> str | None:
    args = SimpleNamespace(**{**SERVER, **{k: v for k, v in changes.items() if k in SERVER}})
    return restore_setup.unsupported(args, SimpleNamespace(**{**CACHE, **{k: v for k, v in changes.items() if k in CACHE}}))


def test_a_plain_server_is_supported_and_proven():
    assert unsupported() is None
    assert restore_setup.unproven(SimpleNamespace(**SERVER), PolicyConfig(restore="auto")) is None


@pytest.mark.parametrize(
    "change",
    [
        {"disable_radix_cache": True}, {"is_hybrid_swa": True}, {"is_hybrid_ssm": True}, {"is_dsa": True},
        {"chunked_prefill_size": -1}, {"chunked_prefill_size": None}, {"page_size": 1},
        {"hicache_host_memory_mode": "buffer_only"}, {"hicache_mem_layout": "layer_first"}, {"speculative_algorithm": "EAGLE"}, {"enable_mixed_chunk": True},
        {"enable_dp_attention": True}, {"disaggregation_mode": "prefill"}, {"pp_size": 2, "nnodes": 2}, {"attn_cp_size": 2},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_restoration_cannot_serve_goes_sglangs_own_way(change):
    assert unsupported(**change) is not None


def test_a_model_with_pages_of_another_kind_goes_sglangs_own_way():
    assert restore_setup.lacking(SimpleNamespace(sidecar_pool_specs=[])) is None
    assert "another kind" in (restore_setup.lacking(SimpleNamespace(sidecar_pool_specs=["indexer"])) or "")


@pytest.mark.parametrize("change", [{"tp_size": 2}, {"pp_size": 2}, {"device": "cuda"}], ids=lambda c: next(iter(c)))
def test_what_was_not_shown_under_stress_has_to_be_asked_for_by_name(change):
    args = SimpleNamespace(**{**SERVER, **change})
    assert "policy.restore = both" in str(restore_setup.unproven(args, PolicyConfig(restore="auto")))
    assert restore_setup.unproven(args, PolicyConfig(restore="both")) is None
