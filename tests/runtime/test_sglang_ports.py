"""The ports to SGLang's device slots, host tier and tree: what they pass on, and what they make of
it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sgl_kvtier.runtime.sglang.device_slots import DeviceSlots
from sgl_kvtier.runtime.sglang.host_tier import Grafted, HostTier, Pin
from sgl_kvtier.runtime.sglang.tree_nodes import TreeNodes

PAGE = 4


class Core:
    """A tree core that takes host pages behind node 1 alone, and has their first page already."""

    def __init__(self) -> None:
        self.backed_up: list[int] = []

    def commit_backup(self, node_id: int, host_indices: Any, comp_xfers: Any) -> None:
        self.backed_up.append(node_id)

    def get_hash_values(self, node_id: int) -> list[str]:
        return [f"{node_id}a", f"{node_id}b"] if node_id in self.backed_up else []

    def insert_host(self, node_id: int, key: Any, host_value: Any, hash_value: Any) -> Any:
        if node_id > 1:
            raise KeyError(node_id)
        return SimpleNamespace(
            host_insert_dropped=node_id == 0,
            prefix_len=PAGE,
            inserted_host_node=9,
            cache_actions=["freed"],
        )

    def commit_load_back(self, node_id: int, device: Any, kv_xfer: Any, comp_xfers: Any) -> str:
        return "actions"


def tree_of(core: Core, **controller: Any) -> Any:
    done: list[Any] = []
    return SimpleNamespace(
        page_size=PAGE,
        tree_core=core,
        token_to_kv_pool_allocator=None,
        cache_controller=SimpleNamespace(**controller),
        applied=done,
        _apply_cache_actions=done.extend,
    )


def test_who_watches_host_memory_is_told_names_and_slots_of_what_came_until_it_ends() -> None:
    core, came = Core(), []
    backup, insert = core.commit_backup, core.insert_host
    end = HostTier(tree_of(core)).watch(lambda names, slots: came.append((names, slots.tolist())))
    core.commit_backup(7, torch.arange(2 * PAGE), None)
    core.insert_host(1, None, torch.arange(100, 100 + 3 * PAGE), ["x", "y", "z"])
    core.insert_host(0, None, torch.arange(PAGE), ["dropped"])
    assert came == [
        (["7a", "7b"], list(range(2 * PAGE))),
        (["y", "z"], list(range(100 + PAGE, 100 + 3 * PAGE))),
    ], "a node is named once it has its copy, and a page that was there before is not new"
    end()
    core.commit_backup(8, torch.arange(PAGE), None)
    assert len(came) == 2 and core.backed_up == [7, 8]
    assert (core.commit_backup, core.insert_host) == (backup, insert)


def test_what_the_tree_does_not_take_is_nothing_and_its_actions_are_done_all_the_same() -> None:
    tree = tree_of(Core())
    host = HostTier(tree)
    assert host.graft(1, None, torch.arange(PAGE), ["x"]) == Grafted(PAGE, 9)
    assert host.graft(0, None, torch.arange(PAGE), ["x"]) is None
    assert host.graft(5, None, torch.arange(PAGE), ["x"]) is None, "its anchor is gone"
    assert tree.applied == ["freed", "freed"]


def test_a_pin_is_taken_back_with_what_the_tree_gave_for_it() -> None:
    tree, let_go = tree_of(Core()), []
    tree.inc_host_lock_ref = lambda node: SimpleNamespace(to_dec_params=lambda: f"of {node}")
    tree.dec_host_lock_ref = lambda node, params: let_go.append((node, params))
    host = HostTier(tree)
    pin = host.pin(3)
    assert pin == Pin(3, "of 3")
    host.unpin(pin)
    assert let_go == [(3, "of 3")]


def test_a_write_policy_that_is_changed_while_the_server_runs_counts_at_once() -> None:
    tree = tree_of(Core(), write_policy="write_through")
    host = HostTier(tree)
    assert not host.write_back
    tree.cache_controller.write_policy = "write_back"
    assert host.write_back


def test_nodes_that_are_loaded_back_are_told_and_the_core_has_its_answer() -> None:
    core, loaded = Core(), []
    end = TreeNodes(tree_of(core)).watch(loaded.append)
    assert core.commit_load_back(1, None, SimpleNamespace(nodes_to_load=[4, 5]), None) == "actions"
    core.commit_load_back(1, None, SimpleNamespace(nodes_to_load=None), None)
    end()
    core.commit_load_back(1, None, SimpleNamespace(nodes_to_load=[6]), None)
    assert loaded == [[4, 5], ()]


def test_copies_that_sglang_begins_are_named_by_their_record_and_none_where_none_are_queued() -> (
    None
):
    tree = tree_of(Core(), ack_load_queue=[], start_loading=lambda: -1)
    tree.has_free_load_back_slot = lambda: True
    slots = DeviceSlots(tree)
    assert slots.begin_copies() is None and not slots.copies_are_begun
    tree.cache_controller.ack_load_queue.append("record")
    tree.cache_controller.start_loading = lambda: 3
    assert slots.begin_copies() == (3, "record") and slots.copies_are_begun
