"""Restorations of models whose linear layers keep states: the state comes with the last page, the
request takes it over at the jump, and it is given back on every other path. SGLang's own slots and
its own taking over; loads and storage are fakes, no server.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent
from test_restore_ends import Mover, Pool

from sgl_kvtier.policy import messages
from sgl_kvtier.policy.messages import Mode
from sgl_kvtier.runtime.backend import host_pages
from sgl_kvtier.runtime.restore import offers
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.scheduler import hooks, refusals
from sgl_kvtier.runtime.sglang import slot_pools, states
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.polls import LANDED, LOST
from sgl_kvtier.runtime.step.restoration import Restoration, Stored
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Link, PageKey, Span, Tier

PAGE, PAGES, STATES = 16, 8, 24
CORRUPT = LOST[ReadOutcome.CORRUPT]


def host_states(slots: int = 6) -> MambaPoolHost:
    """SGLang's host memory for states of two layers: one recurrent tensor, two of convolutions."""
    recurrent = torch.zeros(2, slots, 3, 4)
    convolutions = [torch.zeros(2, slots, width, dtype=torch.bfloat16) for width in (5, 2)]
    info = MambaStateBufferInfo(conv=convolutions, temporal=recurrent)
    return MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout="page_first")


class Lab:
    """An engine around SGLang's slots of a model with states, which restores one request."""

    def __init__(self, ends: tuple[int, ...] = ()) -> None:
        self.slots = MambaSlotAllocator(STATES, "cpu")
        self.evictable: list[torch.Tensor] = []
        self.device, self.host, self.host_states = Pool(), Pool(), host_states()
        self.host.size_per_token = 8
        self.host.entry_map = {"mamba": SimpleNamespace(name="mamba", host_pool=self.host_states)}
        self.device.size = self.device.available_size()
        pool = HybridReqToTokenPool.__new__(HybridReqToTokenPool)
        pool.mamba_allocator, pool.mamba_ckpt_pool = self.slots, None
        pool.mamba_pool = SimpleNamespace(size=STATES, replayssm_write_pos=None)
        component = MambaComponent.__new__(MambaComponent)
        component._mamba_pool_host = self.host_states
        self.tree: Any = SimpleNamespace(
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
        component.cache = self.tree
        self.engine = RestoreEngine(StepContext(self.tree), Mover(), 0, lambda offer: None)
        self.offered: list[Stored] = []
        self.engine.offers.instead = lambda r, stored: self.offered.append(stored)
        self.free = self.available()
        self.req = SimpleNamespace(kv=ReqKvInfo(), mamba_branching_seqlen=None)
        keys = tuple(PageKey(page.to_bytes(32, "big")) for page in range(PAGES))
        sources = ((Span(0, PAGES), Tier.STORAGE),)
        self.r = Restoration(
            "r", self.req, (PAGES + 1) * PAGE, 0, PAGES, sources, keys, torch.empty(0),
            anchor=Span(PAGES - 1, PAGES), stored=Stored(0, keys, sources, ends),
        )  # fmt: skip
        self.r.mode = Mode.BOTH
        self.engine.begin(self.r)

    def evict(self, params: EvictParams) -> None:
        for _ in range(params.mamba_num):
            self.slots.free(self.evictable.pop())

    def available(self) -> tuple[int, ...]:
        """Free slots: states and KV on the device, the same in host memory."""
        pools = (self.slots, self.device, self.host_states, self.host)
        return tuple(pool.available_size() for pool in pools)

    def load(self, first: int, stop: int) -> Any:
        span = Span(first, stop)
        self.engine.load(messages.Load("r", span, Tier.STORAGE, Link.STORAGE_TO_DEVICE, 1.0))
        return self.engine.loads[-1] if self.engine.loads else None

    def end(self, load: Any, *outcomes: int) -> None:
        every = outcomes * len(load.span) if len(outcomes) == 1 else outcomes
        for page, state in enumerate(every):
            load.poll.mark(page, state, 1.0)
        engine = self.engine
        engine.context.now = 1.0
        engine.settle([bytes(one.poll.local) for one in engine.loads], [1.0] * len(engine.loads))
        engine.context.slots.free()

    def runs(self, pages: int) -> int:
        """The front is in a state of its own behind its first pages; the slot of that."""
        own = self.slots.alloc(1)
        assert own is not None
        self.req.kv.mamba_pool_idx = own[0]
        self.r.admitted, self.r.front = True, pages
        return int(own)


def test_a_state_is_claimed_with_the_last_page_alone():
    lab = Lab()
    load = lab.load(4, PAGES)
    assert len(load.anchor.device) == len(load.anchor.host) == 1
    assert lab.engine.context.slots.anchor_slots == 1
    assert lab.load(0, 4).anchor is None
    assert load.anchor_of(0, 3) is None
    assert torch.equal(load.anchor_of(2, 4).device, load.anchor.device)


def test_the_jump_replaces_the_state_of_the_front_whose_slot_is_free_again():
    lab = Lab()
    own = lab.runs(2)
    load = lab.load(2, PAGES)
    lab.end(load, LANDED)
    there = int(load.anchor.device)
    lab.req.kv.mamba_cow_src_index, lab.req.kv.mamba_needs_clear = torch.tensor([own]), True
    lab.req.mamba_branching_seqlen = PAGES * PAGE
    assert lab.engine.trusted(lab.r, Span(2, PAGES))
    assert len(lab.engine.splice(lab.r, Span(2, PAGES))) == (PAGES - 2) * PAGE
    kv = lab.req.kv
    assert (int(kv.mamba_pool_idx), kv.mamba_cow_src_index, kv.mamba_needs_clear) == (
        there, None, False,
    )  # fmt: skip
    assert own in lab.slots.free_slots.tolist() and there not in lab.slots.free_slots.tolist()
    assert lab.req.mamba_branching_seqlen is None
    assert lab.engine.context.slots.anchor_slots == 0


def test_a_prefix_that_is_loaded_whole_gives_its_state_before_the_request_has_a_slot():
    lab = Lab()
    load = lab.load(0, PAGES)
    lab.end(load, LANDED)
    lab.req.mamba_branching_seqlen = (PAGES + 4) * PAGE
    lab.engine.splice(lab.r, Span(0, PAGES))
    assert int(lab.req.kv.mamba_pool_idx) == int(load.anchor.device)
    assert lab.req.mamba_branching_seqlen == (PAGES + 4) * PAGE, "of a branch behind it"


def test_pages_without_the_state_behind_them_are_never_attached():
    lab = Lab()
    lab.runs(1)
    lab.end(lab.load(1, 5), LANDED)
    assert not lab.engine.trusted(lab.r, Span(1, 5))
    assert lab.r.closed


@pytest.mark.parametrize("state", ["open", "landed", "lost"])
def test_an_abort_gives_everything_back(state):
    lab = Lab()
    load = lab.load(4, PAGES)
    if state != "open":
        lab.end(load, LANDED if state == "landed" else CORRUPT)
    if not lab.r.closed:
        lab.engine.abandon(lab.r, "aborted")
    lab.engine.context.slots.free()
    if state == "open":
        assert lab.engine.context.slots.anchor_slots == 1, "a copy may still write there"
        lab.end(load, LANDED)
    assert lab.engine.context.slots.anchor_slots == 0
    assert lab.available() == lab.free


def test_a_lost_state_moves_the_end_to_the_next_lower_one():
    lab = Lab(ends=(2, 5))
    lab.end(lab.load(4, PAGES), LANDED, LANDED, LANDED, CORRUPT)
    assert lab.r.closed
    (stored,) = lab.offered
    assert (len(stored.keys), stored.ends) == (5, (2,))


def test_a_request_that_is_passed_over_gives_back_what_it_took_at_the_match():
    lab = Lab()
    own = lab.runs(2)
    lab.req.kv.mamba_cow_src_index, lab.req.session = torch.tensor([9]), None
    lab.engine.context.anchors.not_admitted(lab.req)
    assert not lab.req.kv.holds_mamba and lab.req.kv.mamba_cow_src_index is None
    assert own in lab.slots.free_slots.tolist()


@pytest.mark.parametrize("by_us", [True, False])
def test_a_request_that_waits_for_its_pages_keeps_no_state_from_its_match(by_us):
    """It is matched anew at its turn. Without a state there, SGLang would go by the old plan and
    copy what has become another request's.
    """
    lab = Lab()
    own = lab.runs(2)
    lab.req.kv.mamba_cow_src_index, lab.req.session = torch.tensor([9]), None
    turns = SimpleNamespace(at_turn=lambda scheduler, req: by_us)
    parts = SimpleNamespace(turns=turns, context=lab.engine.context)
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(kvtier=parts))
    assert hooks.read_first(lambda scheduler, req: not by_us, scheduler, lab.req)
    assert not lab.req.kv.holds_mamba and lab.req.kv.mamba_cow_src_index is None
    assert own in lab.slots.free_slots.tolist()


def test_a_request_whose_pages_are_there_keeps_the_state_of_its_match():
    lab = Lab()
    lab.runs(2)
    turns = SimpleNamespace(at_turn=lambda scheduler, req: False)
    parts = SimpleNamespace(turns=turns, context=lab.engine.context)
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(kvtier=parts))
    assert not hooks.read_first(lambda scheduler, req: False, scheduler, lab.req)
    assert lab.req.kv.holds_mamba


@pytest.mark.parametrize(("in_host", "planned"), [(1, None), (0, 9)])
def test_a_state_that_comes_from_host_memory_is_not_overwritten_by_an_older_plan(in_host, planned):
    lab = Lab()
    lab.req.kv.mamba_cow_src_index, lab.req.mamba_host_hit_length = torch.tensor(9), in_host
    lab.engine.context.anchors.drop_old_copy(lab.req)
    source = lab.req.kv.mamba_cow_src_index
    assert (None if source is None else int(source)) == planned


def test_slots_are_left_for_the_requests_that_run_and_one_more():
    lab = Lab()
    held = lab.slots.alloc(STATES - 6)
    assert lab.load(4, PAGES) is None, "18 slots are in use: 9 requests may want another one each"
    lab.engine.context.slots.free()
    assert lab.available()[1:] == lab.free[1:], "nothing of it was claimed"
    assert lab.engine.context.anchors.is_short()
    lab.evictable = list(held[:10].split(1))
    assert not lab.engine.context.anchors.is_short()
    before = lab.slots.available_size()
    assert lab.load(4, PAGES) is not None
    assert lab.slots.available_size() == before - 1, "a free one goes before one of the tree"


def test_an_offer_says_how_many_bytes_the_state_has():
    lab = Lab()
    offer = offers._offer_of(lab.engine.context, lab.r)
    layers, recurrent, convolutions = 2, 3 * 4 * 4, (5 + 2) * 2
    assert (offer.anchor_pages, offer.anchor_bytes) == (1, layers * (recurrent + convolutions))


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


def test_states_are_copied_to_slots_of_their_own():
    asked: list[Any] = []
    kv = SimpleNamespace(name="kv", host_pool=SimpleNamespace(size_per_token=8))
    mamba = SimpleNamespace(name="mamba", host_pool=SimpleNamespace(size_per_token=400))
    group = SimpleNamespace(entries=[kv, mamba], anchor_entry=kv)
    controller = SimpleNamespace(
        mem_pool_host=group,
        _l2_load_transfers=lambda host, device, sides=None: asked.append(sides) or [],
    )
    assert slot_pools.beside(controller) == [] and slot_pools.page_bytes(group, 1) == 8
    host, device = torch.tensor([3]), torch.tensor([7])
    slot_pools.transfers(controller, torch.arange(4), torch.arange(4), (host, device))
    ((state,),) = asked
    assert str(state.name) == states.POOL
    assert (state.host_indices is host, state.device_indices is device) == (True, True)


def test_states_of_another_kind_are_left_to_sglang():
    lab = Lab()
    assert states.unknown(lab.tree) is None and refusals.lacking(lab.tree) is None
    pool = lab.tree.req_to_token_pool
    pool.mamba_pool.replayssm_write_pos = torch.zeros(1)
    assert "ReplaySSM" in str(states.unknown(lab.tree))
    pool.mamba_pool.replayssm_write_pos, pool.mamba_ckpt_pool = None, object()
    assert "HybridReqToTokenPool" in str(refusals.lacking(lab.tree))
    pool.mamba_ckpt_pool = None
    lab.host.entry_map = {}
    assert states.unknown(lab.tree) == "states without host memory"
