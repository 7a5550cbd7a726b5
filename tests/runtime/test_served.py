"""The real SGLang server with our storage backend on this machine's CPU: pages leave, come back,
and survive a kill.
"""

from __future__ import annotations

import time
import urllib.error

import pytest
from serving import ADMIN, TOKENS, Served, config_file, flags, prompts, refused, serving

pytestmark = pytest.mark.server
PAGE = 16
WHOLE = (TOKENS - 1) // PAGE * PAGE
"""Tokens of a prompt that can come from a cache: whole pages, and at least one token is always
computed.
"""


@pytest.fixture(scope="module")
def served(servers):
    return servers.get(flags())


@pytest.mark.smoke
def test_flushed_prompts_come_back_from_the_store_with_equal_answers(served: Served):
    asked = prompts(3, seed=1)
    first = [served.ask(ids) for ids in asked]
    assert all(a.cached == 0 for a in first)
    served.flush()
    again = [served.ask(ids) for ids in asked]
    assert [a.storage for a in again] == [WHOLE] * 3
    assert [a.tokens for a in again] == [a.tokens for a in first]
    for a, b in zip(again, first, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.smoke
def test_the_split_by_tier_sums_to_the_cached_tokens(served: Served):
    ids = prompts(1, seed=2)[0]
    served.ask(ids)
    hot = served.ask(ids)
    assert (hot.device, hot.host, hot.storage) == (WHOLE, 0, 0)
    served.flush()
    longer = ids + prompts(1, 100, seed=3)[0]
    cold = served.ask(longer)
    assert cold.device + cold.host + cold.storage == cold.cached == TOKENS // PAGE * PAGE


@pytest.mark.smoke
def test_a_cache_salt_keeps_tenants_apart_in_the_store(served: Served):
    ids = prompts(1, seed=4)[0]
    served.ask(ids, extra_key="tenant-a")
    served.flush()
    assert served.ask(ids, extra_key="tenant-b").storage == 0
    served.flush()
    assert served.ask(ids, extra_key="tenant-a").storage == WHOLE


@pytest.mark.smoke
def test_metrics_tell_what_the_store_did(served: Served):
    served.settle()
    assert served.metric("kvtier:written_bytes_total") > 0
    assert served.metric("kvtier:read_bytes_total") > 0
    assert served.metric("kvtier:store_pages") > 0
    assert served.metric("kvtier:pages_corrupt_total") == 0


@pytest.mark.smoke
def test_sglangs_own_storage_metrics_are_filled_where_sglang_reads(served: Served):
    ids = prompts(1, seed=11)[0]
    served.restore("off")
    try:
        first = served.ask(ids)
        served.flush()
        again = served.ask(ids)
        served.settle()
    finally:
        served.restore("load")
    assert (again.storage, again.tokens) == (WHOLE, first.tokens)
    assert served.metric("sglang:storage_prefetch_hit_tokens_total") > 0
    assert served.metric("sglang:prefetch_bandwidth_count") > 0


@pytest.mark.smoke
def test_the_store_is_detached_attached_and_cleared_at_run_time(served: Served):
    ids = prompts(1, seed=5)[0]
    first = served.ask(ids)
    served.flush()
    served.call("DELETE", "/hicache/storage-backend", None, ADMIN)
    assert served.ask(ids).cached == 0
    served.call("POST", "/flush_cache", {}, ADMIN)
    with pytest.raises(urllib.error.HTTPError) as wrong:
        served.call(
            "PUT", "/hicache/storage-backend",
            {"hicache_storage_backend": "kvtier", "hicache_storage_backend_extra_config_json": '{"store": {"pth": "x"}}'},
            ADMIN,
        )  # fmt: skip
    assert "Did you mean store.path" in wrong.value.read().decode()
    config = served.server.folder / "kvtier.json"
    served.call(
        "PUT", "/hicache/storage-backend",
        {
            "hicache_storage_backend": "kvtier",
            "hicache_storage_backend_extra_config_json": config.read_text(),
            "hicache_storage_prefetch_policy": "wait_complete",
        },
        ADMIN,
    )  # fmt: skip
    again = served.ask(ids)
    assert (again.storage, again.tokens) == (WHOLE, first.tokens)
    served.flush()
    served.call("POST", "/hicache/storage-backend/clear", {}, ADMIN)
    served.settle()
    assert served.metric("kvtier:store_pages") == 0
    assert served.ask(ids).cached == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"dtype": "bfloat16"},
        {"page_size": 32},
        {"hicache_mem_layout": "layer_first"},
        {"tp_size": 2},
    ],
    ids=["weights", "dtype", "page-size", "layout", "tp-size"],
)
def test_pages_of_another_setup_are_not_found(served: Served, tmp_path, changes):
    ids = prompts(1, seed=7)[0]
    served.ask(ids)
    served.settle()
    config = config_file(tmp_path)
    # the same root as the running server's: only the identity keeps the two apart
    config.write_text((served.server.folder / "kvtier.json").read_text())
    with serving(tmp_path / "other", flags(**changes), config) as server:
        first = server.ask(ids)
        assert first.cached == 0
        server.flush()
        again = server.ask(ids)
        assert (again.storage > 0, again.tokens) == (True, first.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tp_size": 2}, {"pp_size": 2}], ids=["tp2", "pp2"])
def test_two_ranks_agree_on_what_the_store_gives(tmp_path, ranks):
    asked = prompts(2, seed=8)
    env = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    with serving(tmp_path, flags("tiny-llama", **ranks), config_file(tmp_path), **env) as server:
        first = [server.ask(ids) for ids in asked]
        server.flush()
        again = [server.ask(ids) for ids in asked]
        assert [a.storage for a in again] == [WHOLE] * 2
        assert [a.tokens for a in again] == [a.tokens for a in first]
        assert len({p.parent.name for p in (tmp_path / "store").glob("*/*/lock")}) == 2


@pytest.mark.slow
def test_a_disk_that_loses_reads_and_flips_bits_changes_no_answer(tmp_path):
    asked = prompts(6, seed=9)
    config = config_file(tmp_path, faults={"read_error_rate": 0.1, "corrupt_rate": 0.1, "seed": 3})
    with serving(tmp_path, flags(), config) as server:
        first = [server.ask(ids) for ids in asked]
        server.flush()
        again = [server.ask(ids) for ids in asked]
        assert [a.tokens for a in again] == [a.tokens for a in first]
        assert sum(a.storage for a in again) < WHOLE * len(asked)
        time.sleep(1.2)  # counters are published twice a second
        assert server.metric("kvtier:pages_corrupt_total") > 0


@pytest.mark.slow
def test_the_dynamic_form_serves_as_well(tmp_path):
    ids = prompts(1, seed=10)[0]
    config = config_file(
        tmp_path,
        backend_name="kvtier",
        module_path="sgl_kvtier.runtime.backend.storage",
        class_name="KVTierStorage",
        interface_v1=1,
    )
    with serving(tmp_path, flags(backend="dynamic"), config) as server:
        first = server.ask(ids)
        server.flush()
        again = server.ask(ids)
        assert (again.storage, again.tokens) == (WHOLE, first.tokens)


@pytest.mark.slow
def test_one_variable_turns_the_tier_on_and_one_line_says_what_it_set(tmp_path):
    pages = tmp_path / "pages"
    variables = {"KVTIER": "1", "KVTIER_STORE_PATH": str(pages)}
    with serving(tmp_path, flags(backend=None), **variables) as server:
        (ids,) = prompts(1, seed=61)
        first = server.ask(ids)
        server.flush()
        again = server.ask(ids)
        said = server.server.log_path.read_text(errors="replace")
    assert (first.storage, again.tokens) == (0, first.tokens)
    assert again.storage > 0
    assert (
        "kvtier: --enable-hierarchical-cache and --hicache-storage-backend kvtier are in force; "
        f"pages of {PAGE} tokens are stored in {pages}, at most 64.0 GiB"
    ) in said


def test_a_wrong_setting_stops_the_launch_before_a_model_is_loaded(tmp_path):
    log = refused(tmp_path, flags(), config_file(tmp_path, store={"io_threads": 0}))
    assert "store.io_threads = 0: must be a whole number from 1 to 256" in log
    assert "Load weight" not in log


@pytest.mark.slow
def test_the_event_loop_without_overlap_gives_the_same_answers(served: Served, tmp_path):
    ids = prompts(1, seed=12)[0]
    overlapped = served.ask(ids)
    with serving(tmp_path, flags(disable_overlap_schedule=True), config_file(tmp_path)) as server:
        first = server.ask(ids)
        server.flush()
        again = server.ask(ids)
    assert overlapped.tokens == first.tokens == again.tokens
    assert again.storage == WHOLE


@pytest.mark.slow
def test_stock_torch_native_attention_can_be_chosen_and_answers_the_same(served: Served, tmp_path):
    ids = prompts(1, 300, seed=11)[0]
    ours = served.ask(ids)
    with serving(tmp_path, flags(backend=None, attention_backend="torch_native")) as server:
        stock = server.ask(ids)
    assert stock.tokens == ours.tokens
    assert stock.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
