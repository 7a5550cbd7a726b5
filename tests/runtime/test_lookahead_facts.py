"""Names of pages, facts about them and the choice of victims, on SGLang's real tree core."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.policy.messages import Fact, PagesDropped, PagesPlaced
from sgl_kvtier.policy.pages.eviction import NextUse
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.runtime.ahead.counters import LookaheadCounters
from sgl_kvtier.runtime.ahead.host_pins import evict_others
from sgl_kvtier.runtime.ahead.tier_check import TierCheck
from sgl_kvtier.runtime.ahead.tier_facts import TierFacts
from sgl_kvtier.runtime.ahead.victims import Victims
from sgl_kvtier.runtime.sglang.host_tier import HostTier
from sgl_kvtier.runtime.sglang.tree_nodes import TreeNodes
from sgl_kvtier.runtime.step.page_names import PageNames, SessionNames, compact
from sgl_kvtier.runtime.step.tracked import Path as TreePath
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.engine import open_store
from sgl_kvtier.types import PageKey, Tier

PAGE = 4
NAMES = PageNames(PAGE, pairs=False)


def request(rid: str = "r", **more: Any) -> Any:
    unnamed = dict.fromkeys(("session_id", "routing_key", "extra_key", "cache_salt"))
    return SimpleNamespace(rid=rid, **{**unnamed, **more})


def names_of(*tokens: int) -> tuple[PageKey, ...]:
    """The names of the pages of a prompt."""
    return NAMES.keys_of(array("q", tokens), request())


FOUR = tuple(PageKey(bytes([i]) * 32) for i in range(4))
"""Names of pages that are in no tree."""


class Lab:
    """A tree core, a map that is told at once, and evictions as SGLang's cache does them."""

    def __init__(self, *, pairs: bool = False) -> None:
        """`pairs`: of a server with EAGLE, whose pages are named by pairs of tokens."""
        self.full = ComponentType.FULL
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            page_size=PAGE,
            tree_components=(self.full,),
            is_eagle=pairs,
        )
        self.core = RustUnifiedTreeCore(params)
        self.core.set_hicache_enabled()
        self.core.enable_storage = True
        pool = SimpleNamespace(
            anchor_entry=SimpleNamespace(host_pool=SimpleNamespace(logical_size=4096))
        )
        self.tree = tree = SimpleNamespace(
            tree_core=self.core,
            page_size=PAGE,
            cache_controller=SimpleNamespace(mem_pool_host=pool, write_policy="write_through"),
            _evict_device_leaf=self.evict_leaf,
        )
        self.map = TierMap(1000, NextUse(), NextUse())
        self.facts = TierFacts(tree, self.note, self.map)
        self.counters = LookaheadCounters()
        self.victims = Victims(tree, self.map, self.facts, self.counters)
        self.evicted: list[int] = []
        self.next_slot = 0

    def note(self, fact: Fact) -> None:
        if isinstance(fact, PagesPlaced):
            self.map.placed(fact.keys, fact.tier, 0.0)
        elif isinstance(fact, PagesDropped):
            self.map.dropped(fact.keys, fact.tier)

    def insert(self, owner: str, tokens: list[int], next_use: float) -> int:
        """A path of the tree and who wants it when; its last node."""
        node = self.insert_key(RadixKey(array("q", tokens), None), len(tokens))
        keys = names_of(*tokens)
        self.facts.placed(keys, Tier.DEVICE)
        self.map.claim(owner, keys, next_use)
        return node

    def insert_key(self, key: RadixKey, tokens: int) -> int:
        values = torch.arange(self.next_slot, self.next_slot + tokens)
        self.next_slot += tokens
        step = self.core.begin_insert(InsertParams(key=key, value=values))
        while step.result is None:
            step = self.core.resume_insert()
        self.core.end_insert()
        return step.result.last_device_node

    def evict(self, tokens: int) -> int:
        """Has at least so many tokens leave the device; how many did."""
        tracker = {self.full: 0}
        self.victims.evict(tokens, tracker)
        return tracker[self.full]

    def evict_leaf(self, node: int, tracker: dict[Any, int]) -> None:
        keys = self.facts.node_keys(node)
        result = self.core.evict_device_leaf(node, self.core.is_write_back)
        tracker[self.full] += result.tracker[self.full]
        result.device_frees.clear()
        result.host_frees.clear()
        result.cache_actions.clear()
        self.evicted.append(node)
        self.facts.dropped(keys, Tier.DEVICE)


def test_pages_that_left_the_device_are_still_where_else_they_are():
    lab = Lab()
    for tier in (Tier.DEVICE, Tier.STORAGE):
        lab.facts.placed(FOUR[:1], tier)
    lab.facts.told()
    lab.facts.dropped(FOUR[:1], Tier.DEVICE)
    lab.facts.failed(FOUR[:1], Tier.STORAGE)
    page = lab.map.page(FOUR[0])
    assert page is not None and set(page.tiers) == {Tier.STORAGE}


def test_names_are_sglangs_and_can_be_continued():
    lab = Lab()
    tokens = array("q", range(5, 31))
    node = lab.insert("a", list(tokens[:24]), 1.0)
    keys = NAMES.keys_of(tokens, request())
    assert len(keys) == 6 and keys == lab.facts.node_keys(node)
    assert NAMES.keys_of(tokens, request(), keys[:2]) == keys
    assert NAMES.keys_of(tokens[:9], request(), keys) == keys[:2]
    assert not set(keys) & set(NAMES.keys_of(tokens, request(cache_salt="salt")))
    assert not set(keys) & set(NAMES.keys_of(tokens, request(extra_key="lora")))


def test_pages_named_by_pairs_have_sglangs_names_too():
    lab = Lab(pairs=True)
    names = PageNames(PAGE, pairs=TreeNodes(lab.tree).named_by_pairs)
    tokens = array("q", range(5, 30))
    keys = names.keys_of(tokens, request())
    assert len(keys) == 6 and len(names.keys_of(tokens[:24], request())) == 5
    assert names.keys_of(tokens, request(), keys[:2]) == keys
    assert names.keys_of(tokens[:12], request(), keys) == keys[:2], "the token after is needed"
    assert not set(keys) & set(NAMES.keys_of(tokens, request()))
    other = array("q", [*tokens[:12], 99])
    assert names.keys_of(other, request()) == (*keys[:2], names.keys_of(other, request())[2])
    assert names.keys_of(other, request())[2] != keys[2], "the next token is another one"

    path = TreePath(tokens[: names.tokens_naming(4)], keys[:4], None, None)
    node = lab.insert_key(names.radix_key(path, 0, 4), 4 * PAGE)
    assert lab.facts.node_keys(node) == keys[:4]
    part = names.radix_key(path, 1, 3)
    assert (len(part), part.is_bigram, part.token_ids.tolist()) == (8, True, list(range(9, 18)))


def test_a_session_is_what_its_client_names_or_what_its_prompt_goes_on_from():
    names = SessionNames()
    keys = names_of(*range(40))
    assert names.of(request("a", session_id="s"), keys) == "s"
    assert names.of(request("a", routing_key="k"), keys) == "k"
    first = names.of(request("a"), keys[:4])
    names.ended(first, keys[:6])
    assert names.of(request("b"), keys) == first
    assert names.of(request("c"), keys[:5]) != first
    names.ended(first, keys[:8])
    assert names.of(request("d"), keys) == first


def test_what_runs_latest_leaves_first_whatever_was_used_last():
    lab = Lab()
    soon = lab.insert("soon", list(range(100, 116)), 1.0)
    late = lab.insert("late", list(range(200, 216)), 9.0)
    middle = lab.insert("middle", list(range(300, 316)), 5.0)
    assert lab.evict(20) == 32 and lab.evicted == [late, middle]
    assert lab.counters.victims == 8
    lab.evict(64)
    assert lab.evicted == [late, middle, soon]
    assert lab.map.count(Tier.DEVICE) == 0


def test_a_server_that_was_switched_to_write_back_is_left_to_choose():
    lab = Lab()
    lab.insert("a", list(range(16)), 1.0)
    lab.tree.cache_controller.write_policy = "write_back"
    lab.evict(16)
    assert not lab.evicted


def test_a_shared_beginning_leaves_after_the_last_who_wants_it():
    lab = Lab()
    shared = list(range(8))
    lab.insert("late", [*shared, *range(200, 208)], 9.0)
    lab.insert("soon", [*shared, *range(100, 108)], 1.0)
    assert lab.evict(8) == 8
    wanted = names_of(*shared, *range(100, 108))
    assert all(Tier.DEVICE in lab.map.page(key).tiers for key in wanted)
    lab.evict(16)
    assert lab.map.count(Tier.DEVICE) == 0 and len(lab.evicted) == 3


def test_locked_paths_are_never_victims_and_what_is_missing_is_left_to_others():
    lab = Lab()
    used = lab.insert("used", list(range(100, 116)), 9.0)
    free = lab.insert("free", list(range(200, 216)), 1.0)
    lock = lab.core.inc_lock_ref(used)
    assert lab.evict(32) == 16 and lab.evicted == [free]
    lab.core.dec_lock_ref(used, lock.to_dec_params())
    lab.evict(32)
    assert lab.evicted == [free, used]


def test_host_copies_come_and_go_by_slot():
    lab = Lab()
    node = lab.insert("a", list(range(16)), 1.0)
    keys = lab.facts.node_keys(node)
    lab.core.commit_backup(node, torch.arange(64, 80), {})
    assert lab.map.count(Tier.HOST) == 4
    assert lab.facts.host_pages() == dict(zip(keys, range(16, 20), strict=True))
    lab.facts.host_freed([torch.arange(64, 72)])
    assert lab.map.count(Tier.HOST) == 2
    lab.facts.failed(keys, Tier.HOST)
    assert lab.map.count(Tier.HOST) == 2, "a move that failed does not hide pages that are there"
    assert set(lab.facts.cleared()) == set(keys[2:])


def test_host_pages_that_are_held_back_leave_last():
    lab = Lab()
    kept, other = (
        lab.insert(name, list(range(start, start + 16)), 1.0)
        for name, start in (("kept", 100), ("other", 200))
    )
    for place, node in enumerate((kept, other)):
        lab.core.commit_backup(node, torch.arange(64 * place, 64 * place + 16), {})
    lab.evict(32)
    assert lab.map.count(Tier.DEVICE) == 0 and lab.core.is_backuped(kept)

    def evict(tokens: int) -> int:
        result = lab.core.drive_host_eviction(lab.full, tokens)
        result.device_frees.clear()
        result.host_frees.clear()
        result.cache_actions.clear()
        return int(result.tracker.get(lab.full, 0))

    assert evict_others(HostTier(lab.core), 32, [kept, 999], evict, least=False) == 16
    assert lab.core.is_backuped(kept)
    with pytest.raises(KeyError):
        lab.facts.node_keys(other)
    assert evict_others(HostTier(lab.core), 16, [kept], evict, least=False) == 0
    assert evict_others(HostTier(lab.core), 16, [kept], evict, least=True) == 16
    with pytest.raises(KeyError):
        lab.facts.node_keys(kept)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_pages_brought_early_that_leave_unused_are_wasted(tier):
    lab = Lab()
    lab.facts.placed(FOUR, Tier.HOST)
    lab.facts.brought(FOUR)
    lab.facts.placed(FOUR[:1], tier)
    lab.facts.dropped(FOUR, Tier.HOST)
    assert lab.facts.wasted == (4 if tier is Tier.HOST else 3)


def test_what_was_said_to_have_left_the_store_is_not_found_missing_as_well(tmp_path):
    """The map learns it at the end of the tick in which it was said, and may be compared before."""
    lab = Lab()
    sizes = {"capacity_bytes": 8 << 20, "segment_bytes": 1 << 20, "min_free_bytes": 0}
    store = open_store(StoreConfig(path=str(tmp_path), **sizes), Identity({"model": "m"}), "tp0")
    controller = lab.tree.cache_controller
    controller.storage_backend = SimpleNamespace(local_store=store)
    check = TierCheck(lab.tree, lab.map, lab.facts)
    try:
        lab.facts.placed(FOUR[:2], Tier.STORAGE)
        assert check.roll(0.0) == 0, "a store that has lost nothing is not asked"
        controller.storage_backend = None
        check.forget()
        assert check.roll(5.0) == 0, "said in this tick"
        lab.facts.dropped(FOUR[:2], Tier.STORAGE)
        controller.storage_backend = SimpleNamespace(local_store=store)
        assert check.roll(7.0) == 0
        controller.storage_backend = None
        lab.facts.placed(FOUR[2:], Tier.STORAGE)
        assert check.roll(9.0) == 2, "found on the map, not in the store, and nobody said so"
        assert lab.map.count(Tier.STORAGE) == 0
    finally:
        store.close()


def test_a_host_page_that_was_freed_is_not_there_for_a_move_that_fails_later():
    lab = Lab()
    keys = lab.facts.node_keys(lab.insert("a", list(range(100, 108)), 1.0))
    lab.facts._hold([key.hex() for key in keys], torch.arange(2 * PAGE))
    lab.map.moving(keys, Tier.HOST)
    lab.facts.failed(keys, Tier.HOST)
    assert lab.map.count(Tier.HOST) == 2, "they came another way"
    lab.facts.host_freed([torch.arange(PAGE)])
    lab.map.moving(keys, Tier.HOST)
    lab.facts.failed(keys, Tier.HOST)
    there = [lab.map.page(key) for key in keys]
    assert [page.in_flight if page else None for page in there] == [(), (Tier.HOST,)]


@pytest.mark.parametrize("tokens", [1, 4, 10])
def test_the_paths_that_are_needed_last_are_the_first_to_go(tokens):
    """Each has one token, and the tree would evict the one first that is needed soonest."""
    held, evicted, nodes = list[int](), list[int](), list(range(10))
    host: Any = SimpleNamespace(pin=lambda node: held.append(node) or node, unpin=held.remove)

    def evict(wanted: int) -> int:
        free = [node for node in nodes if node not in held and node not in evicted][:wanted]
        evicted.extend(free)
        return len(free)

    assert evict_others(host, tokens, nodes, evict, least=True) == tokens
    assert held == [] and evicted == nodes[::-1][:tokens]


def test_paths_are_not_held_back_any_more_when_an_eviction_fails():
    pinned = list[Any]()
    host: Any = SimpleNamespace(pin=lambda node: pinned.append(node) or node, unpin=pinned.remove)

    def evict(tokens: int) -> int:
        assert pinned == [3, 4]
        raise RuntimeError("the tree's")

    with pytest.raises(RuntimeError):
        evict_others(host, 16, [3, 4], evict, least=True)
    assert pinned == []


def test_a_page_that_came_back_to_the_device_is_there_for_a_move_that_fails():
    lab = Lab()
    keys = lab.facts.node_keys(lab.insert("a", list(range(100, 108)), 1.0))
    lab.facts.dropped(keys[1:], Tier.DEVICE)
    lab.map.placed(keys[1:], Tier.DEVICE, 0.0)  # as if the map had not been told yet
    lab.facts.failed(keys, Tier.DEVICE)
    assert lab.map.count(Tier.DEVICE) == 1
    lab.facts.placed(keys[1:], Tier.DEVICE)
    lab.facts._came.clear()
    lab.facts.failed(keys, Tier.DEVICE)
    assert lab.map.count(Tier.DEVICE) == 2


# Token ids kept for idle sessions.


def test_ids_take_four_bytes_unless_images_are_among_them():
    plain, image = compact(array("q", [0, 151_935])), compact(array("q", [5, (1 << 62) | 7]))
    assert (plain.itemsize, plain.tolist()) == (4, [0, 151_935])
    assert (image.itemsize, image.tolist()) == (8, [5, (1 << 62) | 7])
