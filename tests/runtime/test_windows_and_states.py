"""Restorations of models that need more than KV pages at the end of a prefix: window rows or a
state come with the last pages, go over to the request at the jump, and are given back on every
other path. SGLang's own pools and its own taking over; loads and storage are fakes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_fakes import PAGE, AnchorLab, Pool
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent
from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent
from side_pools import with_compressed

from sgl_kvtier.policy.messages import PagesLost, RequestFinished, RestoreOffered
from sgl_kvtier.runtime.backend import host_pages
from sgl_kvtier.runtime.cpu import hicache
from sgl_kvtier.runtime.restore import offers
from sgl_kvtier.runtime.scheduler import hooks, refusals
from sgl_kvtier.runtime.sglang import slot_pools, states, windows
from sgl_kvtier.runtime.step.polls import DIFFERS, LANDED, LOST
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Span, Tier

PAGES = 12
"""Of the prefix."""
WINDOW = 2
"""Pages of a window."""
SLOTS, WINDOW_SLOTS, STATES = 40 * PAGE, 20 * PAGE, 24
CORRUPT = LOST[ReadOutcome.CORRUPT]


class Windows(AnchorLab):
    """Sliding windows, of the last two pages."""

    pages, slots, page_bytes = WINDOW, WINDOW * PAGE, PAGE * 4

    def __init__(self, ends: tuple[int, ...] = ()) -> None:
        pool = SWAKVPool(
            size=SLOTS, size_swa=WINDOW_SLOTS, page_size=PAGE, dtype=torch.float32, head_num=1,
            head_dim=1, swa_attention_layer_ids=[0], full_attention_layer_ids=[1], device="cpu",
        )  # fmt: skip
        self.pools = SWATokenToKVPoolAllocator(
            SLOTS, WINDOW_SLOTS, PAGE, torch.float32, "cpu", pool, need_sort=False
        )
        self.host, self.host_windows = Pool(), Pool()
        self.host.size_per_token, self.host_windows.size_per_token = 8, 4
        self.host.entry_map = {"swa": SimpleNamespace(name="swa", host_pool=self.host_windows)}
        component = SWAComponent.__new__(SWAComponent)
        component.sliding_window_size, component.full_window_pages = WINDOW * PAGE, WINDOW
        component._swa_kv_pool_host = self.host_windows
        tree = SimpleNamespace(
            page_size=PAGE,
            tree_components=(ComponentType.FULL, ComponentType.SWA),
            components={ComponentType.SWA: component},
            token_to_kv_pool_allocator=self.pools,
            cache_controller=SimpleNamespace(mem_pool_host=self.host, storage_backend=None),
            req_to_token_pool=SimpleNamespace(
                req_to_token=torch.zeros(1, 2 * PAGES * PAGE, dtype=torch.int64)
            ),
            sidecar_pool_specs=[],
            evict_for_alloc=lambda params: None,
            evict_host=lambda tokens, kind=None: 0,
            full_evictable_size=lambda: 0,
            unlock=lambda lock: None,
        )
        super().__init__(tree, component, PAGES, WINDOW, ends)

    def available(self) -> tuple[int, ...]:
        device = self.pools.full_available_size(), self.pools.swa_available_size()
        return (*device, self.host.available_size(), self.host_windows.available_size())

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


def host_states(slots: int = 6) -> MambaPoolHost:
    """SGLang's host memory for states of two layers: one recurrent tensor, two of convolutions."""
    hicache.install()  # else SGLang leaves 10 GiB of the host's memory alone
    recurrent = torch.zeros(2, slots, 3, 4)
    convolutions = [torch.zeros(2, slots, width, dtype=torch.bfloat16) for width in (5, 2)]
    info = MambaStateBufferInfo(conv=convolutions, temporal=recurrent)
    return MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout="page_first")


class States(AnchorLab):
    """States of linear layers, one with the last page."""

    pages, slots = 1, 1
    page_bytes = 2 * (3 * 4 * 4 + (5 + 2) * 2)
    """Of two layers: the recurrence and the convolutions."""

    def __init__(self, ends: tuple[int, ...] = ()) -> None:
        self.on_device = MambaSlotAllocator(STATES, "cpu")
        self.evictable: list[torch.Tensor] = []
        self.device, self.host, self.host_states = Pool(), Pool(), host_states()
        self.host.size_per_token = 8
        self.host.entry_map = {"mamba": SimpleNamespace(name="mamba", host_pool=self.host_states)}
        pool = HybridReqToTokenPool.__new__(HybridReqToTokenPool)
        pool.mamba_allocator, pool.mamba_ckpt_pool = self.on_device, None
        pool.mamba_pool = SimpleNamespace(size=STATES, replayssm_write_pos=None)
        component = MambaComponent.__new__(MambaComponent)
        component._mamba_pool_host = self.host_states
        tree = SimpleNamespace(
            page_size=PAGE,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            components={ComponentType.MAMBA: component},
            token_to_kv_pool_allocator=self.device,
            cache_controller=SimpleNamespace(mem_pool_host=self.host, storage_backend=None),
            req_to_token_pool=pool,
            sidecar_pool_specs=[],
            evictable_size=lambda: 0,
            mamba_evictable_size=lambda: len(self.evictable),
            evict_for_alloc=self.evict,
            evict_host=lambda slots, kind=None: 0,
            unlock=lambda lock: None,
        )
        super().__init__(tree, component, PAGES, 1, ends)

    def evict(self, params: EvictParams) -> None:
        for _ in range(params.mamba_num):
            self.on_device.free(self.evictable.pop())

    def available(self) -> tuple[int, ...]:
        pools = (self.on_device, self.device, self.host_states, self.host)
        return tuple(pool.available_size() for pool in pools)

    def compute(self, pages: int) -> int:
        """The front is in a state of its own behind its first pages; the slot of that."""
        own = self.on_device.alloc(1)
        self.req.kv.mamba_pool_idx = own[0]
        self.r.admitted, self.r.front = True, pages
        return int(own)


EACH = pytest.mark.parametrize("made", [Windows, States], ids=["windows", "states"])


# --- windows and states alike ---------------------------------------------------------------------


@EACH
def test_an_anchor_is_claimed_with_the_last_pages_alone(made):
    lab = made()
    load = lab.load(8, 12)
    assert lab.held == (4 * PAGE, made.slots)
    assert len(load.anchor.device) == len(load.anchor.host) == made.slots
    assert lab.load(4, 8).anchor is None
    assert load.anchor_of(0, 4 - made.pages) is None
    assert torch.equal(load.anchor_of(1, 4).device, load.anchor.device)


@EACH
def test_an_offer_says_how_many_bytes_the_anchor_has(made):
    lab = made()
    offer = offers._offer_of(lab.engine.context, lab.r)
    assert isinstance(offer, RestoreOffered)
    assert (offer.anchor_pages, offer.anchor_bytes) == (made.pages, made.pages * made.page_bytes)


@EACH
def test_pages_that_end_before_the_anchor_are_never_attached(made):
    lab = made()
    lab.compute(4)
    lab.end(lab.load(4, 8), LANDED)
    assert not lab.engine.trusted(lab.r, Span(4, 8))
    assert lab.r.closed


@EACH
@pytest.mark.parametrize("state", ["open", "landed", "some lost", "differs"])
def test_an_abort_gives_everything_back(made, state):
    lab = made()
    load = lab.load(8, 12)
    if state != "open":
        some = {"landed": LANDED, "some lost": CORRUPT, "differs": DIFFERS}[state]
        lab.end(load, LANDED, LANDED, some, LANDED)
    if not lab.r.closed:
        lab.engine.abandon(lab.r, "aborted")
    lab.settle()
    if state == "open":
        assert lab.held == (4 * PAGE, made.slots), "a copy may still write there"
        lab.end(load, LANDED)
    assert lab.held == (0, 0) and lab.available() == lab.free


@EACH
def test_a_lost_anchor_of_a_waiting_request_moves_its_end_to_the_next_lower_one(made):
    lab = made(ends=(3, 7))
    facts = lab.end(lab.load(8, 12), LANDED, LANDED, LANDED, CORRUPT)
    assert lab.r.closed and any(isinstance(fact, RequestFinished) for fact in facts)
    (stored,) = lab.offered
    assert len(stored.keys) == 7 and stored.ends == (3,)
    assert stored.sources == ((Span(0, 7), Tier.STORAGE),)
    assert lab.available() == lab.free


@pytest.mark.parametrize("pool", [windows.POOL, states.POOL])
def test_anchors_are_copied_to_slots_of_their_own_and_counted_apart_from_pages(pool):
    asked: list[Any] = []
    kv = SimpleNamespace(name="kv", host_pool=SimpleNamespace(size_per_token=8))
    side = SimpleNamespace(name=pool, host_pool=SimpleNamespace(size_per_token=4))
    group = SimpleNamespace(entries=[kv, side], anchor_entry=kv)
    controller = SimpleNamespace(
        mem_pool_host=group,
        _l2_load_transfers=lambda host, device, sides=None: asked.append(sides) or [],
    )
    assert slot_pools.beside(controller) == [] and slot_pools.others(controller) == [pool]
    assert slot_pools.page_bytes(group, PAGE) == PAGE * 8
    host, device = torch.arange(2), torch.arange(5, 7)
    slot_pools.transfers(controller, torch.arange(4), torch.arange(4))
    slot_pools.transfers(controller, torch.arange(4), torch.arange(4), (host, device))
    assert asked[0] is None
    (anchor,) = asked[1]
    assert str(anchor.name) == pool
    assert anchor.host_indices is host and anchor.device_indices is device


# --- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", ["device's windows", "host's windows", "host's pages"])
def test_a_load_that_does_not_find_all_its_room_claims_nothing(full):
    lab = Windows()
    if full == "device's windows":
        lab.pools.swa_attn_allocator.alloc(WINDOW_SLOTS - PAGE)
    else:
        (lab.host if full == "host's pages" else lab.host_windows).free_pages = []
    before = lab.available()
    assert lab.load(8, 12) is None
    assert lab.available() == before and lab.held == (0, 0)


def test_a_part_of_a_window_has_its_own_pages():
    load = Windows().load(8, 12)
    assert torch.equal(load.anchor_of(1, 3).device, load.anchor.device[:PAGE])


def test_a_jump_from_before_the_window_takes_it_over_and_frees_what_the_front_had():
    lab = Windows()
    own = lab.compute(4, inserted=False)
    load = lab.load(4, 12)
    lab.end(load, LANDED)
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
    lab = Windows()
    own = lab.compute(4)
    lab.end(lab.load(4, 12), LANDED)
    lab.engine.splice(lab.r, Span(4, 12))
    assert lab.pools.full_to_swa_index_mapping[own].all()


def test_a_jump_from_within_the_window_keeps_what_the_front_has_of_it():
    lab = Windows()
    own = lab.compute(PAGES - 1, inserted=False)
    lab.end(lab.load(PAGES - 1, PAGES), LANDED)
    slots = lab.engine.splice(lab.r, Span(PAGES - 1, PAGES))
    mapping = lab.pools.full_to_swa_index_mapping
    assert mapping[slots].all() and mapping[own[-PAGE:]].all()
    assert not mapping[own[:-PAGE]].any()
    assert lab.req.kv.get_evicted_seqlen(ComponentType.SWA) == (PAGES - WINDOW) * PAGE


def test_a_whole_prefix_is_taken_over_before_the_request_has_a_row():
    lab = Windows()
    lab.end(lab.load(6, 12), LANDED)
    lab.end(lab.load(0, 6), LANDED)
    lab.req.swa_branching_seqlen = 3 * PAGE
    slots = lab.engine.splice(lab.r, Span(0, 12))
    assert len(slots) == PAGES * PAGE and lab.req.swa_branching_seqlen is None
    assert lab.req.kv.get_evicted_seqlen(ComponentType.SWA) == (PAGES - WINDOW) * PAGE


def test_without_a_lower_end_pages_up_to_the_lost_one_are_computed():
    lab = Windows()
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
    lab = Windows(ends=(3,))
    lab.compute(1)
    lab.end(lab.load(8, 12), LANDED, LANDED, LANDED, CORRUPT)
    assert lab.offered == [] and not lab.r.closed
    assert lab.held == (0, 0)


def test_a_landed_page_at_the_front_that_waits_for_others_is_blocked():
    lab = Windows()
    lab.compute(4)
    lab.end(lab.load(4, 8), LANDED)
    assert lab.r.is_blocked
    lab.end(lab.load(8, 12), LANDED)
    assert not lab.r.is_blocked


def test_states_with_the_windows_slots_are_counted_with_their_pages():
    """DeepSeek V4's."""
    lab = Windows()
    compressor = with_compressed().host("deepseek_v4_c4_state")
    lab.host.entry_map["deepseek_v4_c4_state"] = SimpleNamespace(host_pool=compressor)
    own = compressor.layer_num * compressor.state_page_bytes
    assert windows.Windows(lab.tree).page_bytes == PAGE * 4 + own > PAGE * 4


def test_windows_in_memory_of_another_kind_are_left_to_sglang():
    lab = Windows()
    assert windows.unknown(lab.tree) is None
    assert refusals.lacking(lab.tree) is None
    lab.host.entry_map = {}
    assert windows.unknown(lab.tree) == "windows without host memory"
    lab.tree.token_to_kv_pool_allocator = Pool()
    assert windows.unknown(lab.tree) == "windows in a Pool"


# --- states ---------------------------------------------------------------------------------------


def test_the_jump_replaces_the_state_of_the_front_whose_slot_is_free_again():
    lab = States()
    own, kv = lab.compute(2), lab.req.kv
    load = lab.load(2, PAGES)
    lab.end(load, LANDED)
    there = int(load.anchor.device)
    kv.mamba_cow_src_index, kv.mamba_needs_clear = torch.tensor([own]), True
    lab.req.mamba_branching_seqlen = PAGES * PAGE
    assert lab.engine.trusted(lab.r, Span(2, PAGES))
    assert len(lab.engine.splice(lab.r, Span(2, PAGES))) == (PAGES - 2) * PAGE
    assert int(kv.mamba_pool_idx) == there
    assert kv.mamba_cow_src_index is None and kv.mamba_needs_clear is False
    free = lab.on_device.free_slots.tolist()
    assert own in free and there not in free
    assert lab.req.mamba_branching_seqlen is None
    assert lab.held == (0, 0)


def test_a_prefix_that_is_loaded_whole_gives_its_state_before_the_request_has_a_slot():
    lab = States()
    load = lab.load(0, PAGES)
    lab.end(load, LANDED)
    lab.req.mamba_branching_seqlen = (PAGES + 4) * PAGE
    lab.engine.splice(lab.r, Span(0, PAGES))
    assert int(lab.req.kv.mamba_pool_idx) == int(load.anchor.device)
    assert lab.req.mamba_branching_seqlen == (PAGES + 4) * PAGE, "of a branch behind it"


def matched() -> tuple[States, int]:
    """A request in a state of its own into which another one will be copied, and its slot."""
    lab = States()
    own = lab.compute(2)
    lab.req.kv.mamba_cow_src_index, lab.req.session = torch.tensor([9]), None
    return lab, own


def gave_back(lab: States, own: int) -> bool:
    """Whether the request has neither a state nor a plan any more."""
    is_free = own in lab.on_device.free_slots.tolist()
    return is_free and not lab.req.kv.holds_mamba and lab.req.kv.mamba_cow_src_index is None


def test_a_request_that_is_passed_over_gives_back_what_it_took_at_the_match():
    lab, own = matched()
    lab.engine.context.anchors.not_admitted(lab.req)
    assert gave_back(lab, own)


@pytest.mark.parametrize(
    ("by_us", "by_sglang"), [(True, False), (False, True), (False, False)],
    ids=["we read", "sglang reads", "its pages are there"],
)  # fmt: skip
def test_a_request_that_waits_for_its_pages_keeps_no_state_from_its_match(by_us, by_sglang):
    """It is matched anew at its turn. Without a state there, SGLang would go by the old plan and
    copy what has become another request's.
    """
    lab, own = matched()
    turns = SimpleNamespace(at_turn=lambda scheduler, req: by_us)
    parts = SimpleNamespace(turns=turns, context=lab.engine.context)
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(kvtier=parts))
    waits = hooks.read_first(lambda scheduler, req: by_sglang, scheduler, lab.req)
    assert waits is (by_us or by_sglang)
    assert gave_back(lab, own) is waits and lab.req.kv.holds_mamba is not waits


@pytest.mark.parametrize(("in_host", "planned"), [(1, None), (0, 9)])
def test_a_state_that_comes_from_host_memory_is_not_overwritten_by_an_older_plan(in_host, planned):
    lab = States()
    lab.req.kv.mamba_cow_src_index, lab.req.mamba_host_hit_length = torch.tensor(9), in_host
    lab.engine.context.anchors.drop_old_copy(lab.req)
    source = lab.req.kv.mamba_cow_src_index
    assert (None if source is None else int(source)) == planned


def test_slots_are_left_for_the_requests_that_run_and_one_more():
    lab = States()
    held = lab.on_device.alloc(STATES - 6)
    assert lab.load(8, PAGES) is None, "18 slots are in use: 9 requests may want another one each"
    assert lab.available()[1:] == lab.free[1:], "nothing of it was claimed"
    assert lab.engine.context.anchors.is_short()
    lab.evictable = list(held[:10].split(1))
    assert not lab.engine.context.anchors.is_short()
    before = lab.on_device.available_size()
    assert lab.load(8, PAGES) is not None
    assert lab.on_device.available_size() == before - 1, "a free one goes before one of the tree"


@pytest.mark.parametrize(("in_use", "fits"), [(13, True), (14, False)])
def test_the_last_slot_that_may_be_taken_is(in_use, fits):
    lab = States()
    lab.on_device.alloc(in_use)  # one for every two in use, and four, are left
    assert (lab.load(8, PAGES) is not None) is fits


def test_a_state_is_read_and_written_in_place_as_a_page_of_its_tensors():
    pool = host_states()
    assert host_pages.is_page_contiguous(pool)
    for number, buffer in enumerate(pool.kv_buffer):
        buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) % 97 + number)
    (first, second) = host_pages.parts_of(pool, 2, torch.tensor([4, 1]))
    for slot, parts in ((4, first), (1, second)):
        assert b"".join(parts) == pool.get_data_page(slot).numpy().tobytes()
    first[0][:4] = b"\0\0\x80\x3f"  # 1.0
    assert pool.temporal_buffer[4].flatten()[0] == 1.0, "a view of the pool's own memory"


def test_states_of_another_kind_are_left_to_sglang():
    lab = States()
    assert states.unknown(lab.tree) is None and refusals.lacking(lab.tree) is None
    pool = lab.tree.req_to_token_pool
    pool.mamba_pool.replayssm_write_pos = torch.zeros(1)
    assert "ReplaySSM" in str(states.unknown(lab.tree))
    pool.mamba_pool.replayssm_write_pos, pool.mamba_ckpt_pool = None, object()
    assert "HybridReqToTokenPool" in str(refusals.lacking(lab.tree))
    pool.mamba_ckpt_pool = None
    lab.host.entry_map = {}
    assert states.unknown(lab.tree) == "states without host memory"
