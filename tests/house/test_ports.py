"""Who touches SGLang's device slots, host tier, tree, requests and steps: their ports, and a list of
others that may only become shorter.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

RUNTIME = Path(__file__).parents[2] / "sgl_kvtier" / "runtime"
INSIDE = ("sglang", "backend", "cpu")
"""The ports; classes that SGLang calls with its host slots; HiCache on a CPU."""
BEHIND_PORTS = {
    # device slots
    "ack_load_queue", "evictable_size", "free_segment", "has_free_load_back_slot", "load_back",
    "start_loading", "token_to_kv_pool_allocator", "_l2_load_transfers",
    # host pages
    "anchor_entry", "build_load_back_spec", "commit_backup", "dec_host_lock_ref", "evict_host",
    "host_hit_length", "host_indices", "host_insert_dropped", "host_pool", "host_value",
    "inc_host_lock_ref", "insert_host", "inserted_host_node", "is_backuped", "last_host_node",
    "mem_pool_host", "write_policy", "write_storage", "_drain_host_frees",
    # tree
    "all_values_flatten", "collect_path_info", "commit_load_back", "evict_device_end",
    "evict_device_next_node", "evict_device_start", "get_hash_values", "get_last_hash_value",
    "match_prefix", "tree_core", "_evict_device_leaf",
    # request
    "beam_group", "full_untruncated_fill_ids", "init_next_round_input", "input_embeds",
    "is_prefill_only", "multimodal_inputs", "origin_input_ids", "output_ids",
    "positional_embed_overrides", "return_hidden_states", "return_logprob", "sampling_params",
    "token_indices_to_pool",
    # step
    "batch_is_full", "chunked_req", "last_batch", "running_batch", "waiting_queue",
    # ranks
    "pp_group", "tp_group", "tp_world_size", "_all_reduce", "_all_reduce_attn_groups", "_pp_sync",
    # offer
    "ongoing_prefetch", "prefetch_rate_limited", "prefetch_threshold", "_prefetch_kvcache",
}  # fmt: skip
OUTSIDE = {
    "cuda/page_shape.py": 2,
    "proof/pages.py": 1,
    "restore/copy_device.py": 2,
    "scheduler/prefill_adder.py": 2,  # another one
    "scheduler/radix_cache.py": 13,  # a class of SGLang's, extended
}


def touches(source: str) -> list[str]:
    """Names behind ports that a module's code reads, writes or calls."""
    attributes = (
        node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    )
    return [name for name in attributes if name in BEHIND_PORTS]


def test_names_behind_ports_are_found_where_code_uses_them() -> None:
    source = 'class A:\n    def f(self):\n        """pool.evict_host"""\n        self.pool.evict_host(1)\n'
    assert touches(source) == ["evict_host"]


def test_what_is_behind_ports_is_touched_by_no_one_new() -> None:
    found = Counter[str]()
    for path in sorted(RUNTIME.rglob("*.py")):
        place = path.relative_to(RUNTIME)
        if place.parts[0] not in INSIDE:
            found[str(place)] += len(touches(path.read_text()))
    assert dict(+found) == OUTSIDE, (
        "use the ports in runtime/sglang for what is new; take off the list what has gone"
    )
