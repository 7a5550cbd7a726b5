"""Restorations of models with sliding windows: window rows come with the last pages, go over to the
request at the jump, and are given back on every other path. SGLang's own pools and its own taking
over; loads and storage are fakes, no server.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent
from side_pools import with_compressed
from test_restore_ends import Mover, Pool

from sgl_kvtier.policy import messages
from sgl_kvtier.policy.messages import Mode, PagesLost, RequestFinished, RestoreOffered
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.scheduler import refusals
from sgl_kvtier.runtime.sglang import slot_pools, windows
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.polls import DIFFERS, LANDED, LOST
from sgl_kvtier.runtime.step.restoration import Restoration, Stored
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Link, PageKey, Span, Tier

PAGE, PAGES, WINDOW = 16, 12, 2
"""Pages of the prefix, and of a window."""
SLOTS, WINDOW_SLOTS = 40 * PAGE, 20 * PAGE
CORRUPT = LOST[ReadOutcome.CORRUPT]


class Lab:
    """An engine around SGLang's pools of a model with windows, which restores one request."""

    def __init__(self, ends: tuple[int, ...] = ()) -> None:
        pool = SWAKVPool(
            size=SLOTS, size_swa=WINDOW_SLOTS, page_size=PAGE, dtype=torch.float32, head_num=1,
            head_dim=1, swa_attention_layer_ids=[0], full_attention_layer_ids=[1], device="cpu",
        )  # fmt: skip
        self.pools = SWATokenToKVPoolAllocator(
            SLOTS, WINDOW_SLOTS, PAGE, torch.float32, "cpu", pool, need_sort=False
        )
        self.host, self.host_windows = Pool(), Pool()
        self.host.size_per_token = 8
        self.host_windows.size_per_token = 4
        entry = SimpleNamespace(name="swa", host_pool=self.host_windows)
        self.host.entry_map = {"swa": entry}
        component = SWAComponent.__new__(SWAComponent)
        component.sliding_window_size, component.full_window_pages = WINDOW * PAGE, WINDOW
        component._swa_kv_pool_host = self.host_windows
        self.tree = SimpleNamespace(
            page_size=PAGE,
            tree_components=(ComponentType.FULL, ComponentType.SWA),
            components={ComponentType.SWA: component},
            token_to_kv_pool_allocator=self.pools,
            cache_controller=SimpleNamespace(mem_pool_host=self.host, storage_backend=None),
            req_to_token_pool=SimpleNamespace(
                req_to_token=torch.zeros(1, 2 * PAGES * PAGE, dtype=torch.int64)
            ),
            evict_for_alloc=lambda params: None,
            evict_host=lambda tokens, kind=None: 0,
            full_evictable_size=lambda: 0,
            unlock=lambda lock: None,
        )
        component.cache = self.tree
        self.mover = Mover()
        self.engine = RestoreEngine(StepContext(self.tree), self.mover, 0, lambda offer: None)
        self.offered: list[Stored] = []
        self.engine.offers.instead = lambda r, stored: self.offered.append(stored)
        self.free = self.available()
        self.req = SimpleNamespace(kv=ReqKvInfo(), swa_branching_seqlen=None)
        keys = tuple(PageKey(page.to_bytes(32, "big")) for page in range(PAGES))
        sources = ((Span(0, PAGES), Tier.STORAGE),)
        self.r = Restoration(
            "r", self.req, (PAGES + 1) * PAGE, 0, PAGES, sources, keys, torch.empty(0),
            anchor=Span(PAGES - WINDOW, PAGES), stored=Stored(0, keys, sources, ends),
        )  # fmt: skip
        self.r.mode = Mode.BOTH
        self.engine.begin(self.r)

    def available(self) -> tuple[int, ...]:
        """Free slots: KV and windows on the device, the same in host memory."""
        return (
            self.pools.full_available_size(),
            self.pools.swa_available_size(),
            self.host.available_size(),
            self.host_windows.available_size(),
        )

    def load(self, first: int, stop: int) -> Any:
        span = Span(first, stop)
        self.engine.load(messages.Load("r", span, Tier.STORAGE, Link.STORAGE_TO_DEVICE, 1.0))
        return self.engine.loads[-1]

    def end(self, load: Any, *states: int) -> list[Any]:
        """Pages of a load end, the lowest first, all alike where one state is given; the facts."""
        every = states * len(load.span) if len(states) == 1 else states
        for page, state in enumerate(every):
            load.poll.mark(page, state, 1.0)
        return self.settle()

    def settle(self, now: float = 1.0) -> list[Any]:
        engine = self.engine
        engine.context.now = now
        engine.settle([bytes(one.poll.local) for one in engine.loads], [now] * len(engine.loads))
        engine.context.slots.free()
        facts, engine.context.facts = engine.context.facts, []
        return facts

    def compute(self, pages: int, inserted: bool = True) -> torch.Tensor:
        """The front: the request's first pages are in its row, with windows of their own."""
        slots = self.pools.full_attn_allocator.alloc(pages * PAGE)
        own = self.pools.swa_attn_allocator.alloc(pages * PAGE)
        self.pools.set_full_to_swa_mapping(slots, own)
        self.tree.req_to_token_pool.req_to_token[0, : pages * PAGE] = slots
        kv = self.req.kv
        kv.req_pool_idx, kv.kv_allocated_len = 0, pages * PAGE
        kv.cache_protected_len = pages * PAGE if inserted else 0
        self.r.admitted, self.r.front = True, pages
        return slots

    @property
    def held(self) -> tuple[int, int]:
        """What SGLang's memory checks are told of."""
        slots = self.engine.context.slots
        return slots.tokens, slots.anchor_slots


def test_windows_are_claimed_with_the_last_pages_alone():
    lab = Lab()
    load = lab.load(8, 12)
    assert lab.held == (4 * PAGE, WINDOW * PAGE)
    assert len(load.anchor.device) == len(load.anchor.host) == WINDOW * PAGE
    assert lab.load(4, 8).anchor is None
    assert load.anchor_of(0, 2) is None
    assert torch.equal(load.anchor_of(1, 3).device, load.anchor.device[:PAGE])


def test_a_load_that_finds_no_room_for_windows_claims_nothing():
    lab = Lab()
    lab.pools.swa_attn_allocator.alloc(WINDOW_SLOTS - PAGE)
    before = lab.available()
    lab.engine.load(messages.Load("r", Span(8, 12), Tier.STORAGE, Link.STORAGE_TO_DEVICE, 1.0))
    lab.engine.context.slots.free()
    assert lab.engine.loads == [] and lab.available() == before and lab.held == (0, 0)


def test_a_load_that_finds_no_host_memory_for_windows_claims_nothing():
    lab = Lab()
    lab.host_windows.free_pages = []
    before = lab.available()
    lab.engine.load(messages.Load("r", Span(8, 12), Tier.STORAGE, Link.STORAGE_TO_DEVICE, 1.0))
    lab.engine.context.slots.free()
    assert lab.engine.loads == [] and lab.available() == before


def test_a_jump_from_before_the_window_takes_it_over_and_frees_what_the_front_had():
    lab = Lab()
    own = lab.compute(4, inserted=False)
    load = lab.end(lab.load(4, 12), LANDED) and lab.r.loads[0]
    windows_there = load.anchor.device.clone()
    swa = lab.pools.swa_available_size()
    slots = lab.engine.splice(lab.r, Span(4, 12))
    mapping = lab.pools.full_to_swa_index_mapping
    assert torch.equal(mapping[slots[-WINDOW * PAGE :]], windows_there)
    assert not mapping[slots[: -WINDOW * PAGE]].any() and not mapping[own].any()
    assert lab.req.kv.get_evicted_seqlen(ComponentType.SWA) == (PAGES - WINDOW) * PAGE
    assert lab.pools.swa_available_size() == swa + len(own), "its own windows are free"
    assert lab.held == (0, 0)


def test_windows_that_the_tree_has_stay_its_own():
    lab = Lab()
    own = lab.compute(4)
    lab.end(lab.load(4, 12), LANDED)
    lab.engine.splice(lab.r, Span(4, 12))
    assert lab.pools.full_to_swa_index_mapping[own].all()


def test_a_jump_from_within_the_window_keeps_what_the_front_has_of_it():
    lab = Lab()
    own = lab.compute(PAGES - 1, inserted=False)
    lab.end(lab.load(PAGES - 1, PAGES), LANDED)
    slots = lab.engine.splice(lab.r, Span(PAGES - 1, PAGES))
    mapping = lab.pools.full_to_swa_index_mapping
    assert mapping[slots].all() and mapping[own[-PAGE:]].all()
    assert not mapping[own[:-PAGE]].any()
    assert lab.req.kv.get_evicted_seqlen(ComponentType.SWA) == (PAGES - WINDOW) * PAGE


def test_a_whole_prefix_is_taken_over_before_the_request_has_a_row():
    lab = Lab()
    lab.end(lab.load(6, 12), LANDED)
    lab.end(lab.load(0, 6), LANDED)
    lab.req.swa_branching_seqlen = 3 * PAGE
    slots = lab.engine.splice(lab.r, Span(0, 12))
    assert len(slots) == PAGES * PAGE and lab.req.swa_branching_seqlen is None
    assert lab.req.kv.get_evicted_seqlen(ComponentType.SWA) == (PAGES - WINDOW) * PAGE


def test_pages_that_end_before_the_window_are_never_attached():
    lab = Lab()
    lab.compute(4)
    lab.end(lab.load(4, 8), LANDED)
    assert not lab.engine.trusted(lab.r, Span(4, 8))
    assert lab.r.closed


@pytest.mark.parametrize("state", ["open", "landed", "some lost", "differs"])
def test_an_abort_gives_everything_back(state):
    lab = Lab()
    load = lab.load(8, 12)
    if state != "open":
        some = {"landed": LANDED, "some lost": CORRUPT, "differs": DIFFERS}[state]
        lab.end(load, LANDED, LANDED, some, LANDED)
    if not lab.r.closed:
        lab.engine.abandon(lab.r, "aborted")
    lab.settle()
    if state == "open":
        assert lab.held == (4 * PAGE, WINDOW * PAGE), "a copy may still write there"
        lab.end(load, LANDED)
    assert lab.held == (0, 0) and lab.available() == lab.free


def test_a_lost_window_of_a_waiting_request_moves_its_end_to_the_next_lower_one():
    lab = Lab(ends=(3, 7))
    load = lab.load(8, 12)
    facts = lab.end(load, LANDED, LANDED, LANDED, CORRUPT)
    assert lab.r.closed and any(isinstance(fact, RequestFinished) for fact in facts)
    (stored,) = lab.offered
    assert len(stored.keys) == 7 and stored.ends == (3,)
    assert stored.sources == ((Span(0, 7), Tier.STORAGE),)
    assert lab.available() == lab.free


def test_without_a_lower_end_pages_up_to_the_lost_one_are_computed():
    lab = Lab()
    lab.compute(2)
    other = lab.load(4, 8)
    facts = lab.end(lab.load(8, 12), LANDED, LANDED, CORRUPT, LANDED)
    assert PagesLost("r", Span(10, 11), "corrupt", 0.0) in facts
    assert not lab.r.closed and other.cancelled
    assert lab.r.barrier(2) == 11, "compute may go up to the page behind it"
    assert lab.held == (5 * PAGE, PAGE), "of the open load, and of the last page"
    lab.end(other, LANDED)
    assert lab.held == (PAGE, PAGE)
    lab.r.front = 11
    assert lab.engine.trusted(lab.r, Span(11, 12))


def test_a_lost_page_of_a_request_that_runs_lowers_nothing():
    lab = Lab(ends=(3,))
    lab.compute(1)
    lab.end(lab.load(8, 12), LANDED, LANDED, LANDED, CORRUPT)
    assert lab.offered == [] and not lab.r.closed
    assert lab.held == (0, 0)


def test_an_offer_says_how_many_bytes_the_anchor_has():
    from sgl_kvtier.runtime.restore import offers

    lab = Lab()
    offer = offers._offer_of(lab.engine.context, lab.r)
    assert isinstance(offer, RestoreOffered)
    assert (offer.anchor_pages, offer.anchor_bytes) == (WINDOW, WINDOW * PAGE * 4)


def test_a_landed_page_at_the_front_that_waits_for_others_is_blocked():
    lab = Lab()
    lab.compute(4)
    lab.end(lab.load(4, 8), LANDED)
    assert lab.r.is_blocked
    lab.end(lab.load(8, 12), LANDED)
    assert not lab.r.is_blocked


def test_window_slots_are_copied_and_counted_apart_from_pages_at_kv_slots():
    asked: list[Any] = []
    kv = SimpleNamespace(name="kv", host_pool=SimpleNamespace(size_per_token=8))
    swa = SimpleNamespace(name="swa", host_pool=SimpleNamespace(size_per_token=4))
    group = SimpleNamespace(entries=[kv, swa], anchor_entry=kv)
    controller = SimpleNamespace(
        mem_pool_host=group,
        _l2_load_transfers=lambda host, device, sides=None: asked.append(sides) or [],
    )
    assert slot_pools.beside(controller) == [] and slot_pools.others(controller) == ["swa"]
    assert slot_pools.page_bytes(group, PAGE) == PAGE * 8
    host, device = torch.arange(2), torch.arange(5, 7)
    slot_pools.transfers(controller, torch.arange(4), torch.arange(4))
    slot_pools.transfers(controller, torch.arange(4), torch.arange(4), (host, device))
    assert asked[0] is None
    (window,) = asked[1]
    assert str(window.name) == windows.POOL
    assert (window.host_indices is host, window.device_indices is device) == (True, True)


def test_states_with_the_windows_slots_are_counted_with_their_pages():
    """DeepSeek V4's."""
    lab = Lab()
    (states,) = (
        one.host_pool
        for one in with_compressed().controller.mem_pool_host.entries
        if str(one.name) == "deepseek_v4_c4_state"
    )
    entries = lab.host.entry_map
    entries["deepseek_v4_c4_state"] = SimpleNamespace(host_pool=states)
    own = states.layer_num * states.state_page_bytes
    assert windows.Windows(lab.tree).page_bytes == PAGE * 4 + own > PAGE * 4


def test_windows_in_memory_of_another_kind_are_left_to_sglang():
    lab = Lab()
    assert windows.unknown(lab.tree) is None
    lab.tree.sidecar_pool_specs = []
    assert refusals.lacking(lab.tree) is None
    lab.host.entry_map = {}
    assert windows.unknown(lab.tree) == "windows without host memory"
    lab.tree.token_to_kv_pool_allocator = Pool()
    assert windows.unknown(lab.tree) == "windows in a Pool"
