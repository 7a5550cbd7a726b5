"""Who touches SGLang's host tier: its port, and a list of others that may only become shorter."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

RUNTIME = Path(__file__).parents[2] / "sgl_kvtier" / "runtime"
INSIDE = ("sglang", "backend", "cpu")
"""The ports; classes that SGLang calls with its host slots; HiCache on a CPU."""
HOST_TIER = {
    "ack_load_queue", "anchor_entry", "build_load_back_spec", "commit_backup", "commit_load_back",
    "dec_host_lock_ref", "evict_host", "has_free_load_back_slot", "host_hit_length", "host_indices",
    "host_insert_dropped", "host_lock_ref", "host_pool", "host_value", "inc_host_lock_ref",
    "insert_host", "inserted_host_node", "is_backuped", "last_host_node", "load_back",
    "mem_pool_host", "start_loading", "write_policy", "write_storage", "_l2_load_transfers",
    "_drain_host_frees",
}  # fmt: skip
OUTSIDE = {
    "ahead/promotions.py": 2,
    "ahead/store_votes.py": 3,
    "ahead/tier_facts.py": 3,
    "ahead/turn_reads.py": 2,
    "restore/copy_device.py": 4,
    "restore/engine.py": 2,
    "restore/offers.py": 3,
    "scheduler/prefill_adder.py": 3,
    "scheduler/radix_cache.py": 3,
    "scheduler/view.py": 1,
}


def touches(source: str) -> list[str]:
    """Names of the host tier that a module's code reads, writes or calls."""
    attributes = (
        node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    )
    return [name for name in attributes if name in HOST_TIER]


def test_names_of_the_host_tier_are_found_where_code_uses_them() -> None:
    source = 'class A:\n    def f(self):\n        """pool.evict_host"""\n        self.pool.evict_host(1)\n'
    assert touches(source) == ["evict_host"]


def test_the_host_tier_is_touched_through_its_port_and_by_no_one_new() -> None:
    found = Counter[str]()
    for path in sorted(RUNTIME.rglob("*.py")):
        place = path.relative_to(RUNTIME)
        if place.parts[0] not in INSIDE:
            found[str(place)] += len(touches(path.read_text()))
    assert dict(+found) == OUTSIDE, (
        "use sglang/host_tier.py for what is new; take off the list what has gone"
    )
