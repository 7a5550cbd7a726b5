"""How loads end in the restore engine: late, hung, after a reset. Pools and the mover are fakes; no
server.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from engine_fakes import PAGE, PAGES, end, engine_with, load, load_of, restoration, settle

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy import messages
from sgl_kvtier.policy.messages import (
    NO_ROOM_YET,
    ChunkDone,
    ChunkStarted,
    PagesLost,
    RequestFinished,
    RestoreOffered,
    StepPlan,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.restore.kept_pages import KeptPages
from sgl_kvtier.runtime.scheduler import tick as ticks
from sgl_kvtier.runtime.scheduler.hooks import is_fully_idle
from sgl_kvtier.runtime.scheduler.parts import Parts
from sgl_kvtier.runtime.scheduler.queue import Queue
from sgl_kvtier.runtime.scheduler.tick import RestoreTick
from sgl_kvtier.runtime.scheduler.view import Views
from sgl_kvtier.runtime.step.chunk_clock import Chunk
from sgl_kvtier.runtime.step.polls import LANDED, LOST, REASON
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Link, PageKey, Span, Tier


class Handle(NamedTuple):
    """SGLang's name of a request in the cache: equal for two requests with one id."""

    rid: str


def free_tokens(engine: RestoreEngine) -> int:
    """Of the device's pool."""
    return engine.context.tree.token_to_kv_pool_allocator.available_size()


@pytest.mark.parametrize(("admitted", "patience_s"), [(False, 2.0), (True, 0.2)])
def test_pages_without_room_may_be_loaded_later_but_not_for_ever(admitted, patience_s):
    engine, r, _ = engine_with()
    engine.context.slots.claim_device = lambda tokens: None
    r.admitted = admitted
    for now, reason in (
        (0.0, NO_ROOM_YET),
        (patience_s - 0.1, NO_ROOM_YET),
        (patience_s + 0.1, "no room"),
    ):
        engine.context.now = now
        engine.load(load_of(Span(4, 8)))
        assert engine.context.facts.pop() == PagesLost("r", Span(4, 8), reason, 0.0)
    assert engine.counters.lost_pages == {"no room": 4}


def test_a_read_that_hangs_is_the_fronts_and_its_slots_stay_the_loads_until_it_ends():
    engine, r, _ = engine_with()
    hung = load(engine, Span(4, 8))
    hung.poll.mark(3, LANDED, 0.5)
    settle(engine, 0.5)
    assert r.barrier(0) == 4
    assert settle(engine, 1.9) == []
    lost = settle(engine, 2.1)
    assert lost == [PagesLost("r", Span(4, 7), "hung", 0.0)]
    assert r.barrier(0) == 7 and r.is_landed(7)
    assert engine.context.slots.tokens == 4 * PAGE and engine.loads == [hung]
    assert list(r.owner) == [7], "the other slots are no room for chunks that compute their pages"
    assert settle(engine, 2.2) == []
    end(hung, LANDED, at=9.0)
    assert settle(engine, 9.0) == []
    engine.context.slots.free()
    slots = engine.context.slots
    assert (engine.loads, slots.tokens, slots.host_tokens) == ([], PAGE, 0)


def test_a_reset_reports_the_same_on_ranks_whose_reads_had_come_differently_far():
    told = []
    for landed in (0, 3):
        engine, _, _ = engine_with()
        one = load(engine, Span(0, 8))
        one.poll.mark(7, LANDED, 0.5)
        settle(engine, 0.5)
        end(one, *[LANDED] * landed, at=0.6)
        engine.reset()
        assert not engine.holds_memory and free_tokens(engine) == PAGES * PAGE
        told.append(engine.context.facts)
    assert told[0] == told[1]
    assert not any(isinstance(fact, TransferDone) for fact in told[0])
    assert [fact for fact in told[0] if isinstance(fact, RequestFinished)]


def test_a_read_that_hangs_on_one_rank_leaves_the_loads_of_all(monkeypatch):
    monkeypatch.setattr("sgl_kvtier.runtime.restore.engine._RESET_S", 0.0)
    left = []
    for hangs in (True, False):
        engine, _, _ = engine_with()
        first, second = load(engine, Span(4, 8)), load(engine, Span(0, 4))
        end(first, LANDED)
        if not hangs:
            end(second, LANDED)
        asked = []
        engine.reset(lambda is_so, asked=asked: bool(asked.append(is_so)))
        assert asked == [not hangs] and engine.holds_memory
        if hangs:
            engine.reset(lambda _: True)
            assert engine.holds_memory, "a later stage knows only that the first one's have ended"
        left.append([one.span for one in engine.loads])
        # With the next reduction they end on both.
        end(second, LANDED)
        settle(engine, 1.0)
        engine.reset(lambda is_so: is_so)
        assert not engine.holds_memory and free_tokens(engine) == PAGES * PAGE
    assert left[0] == left[1] == [Span(4, 8), Span(0, 4)]


def test_a_stage_with_fewer_layers_tells_its_planner_the_first_stages_bytes():
    engine, _, mover = engine_with()
    engine.context.agreed_page_bytes = 10 * engine.context.page_bytes
    load(engine, Span(6, 8))
    mover.wait_news(0.0)
    (done,) = [fact for fact in settle(engine, 2.0) if isinstance(fact, messages.TransferDone)]
    assert done.nbytes == 2 * 10 * engine.context.page_bytes
    assert engine.counters.bytes_loaded[Link.STORAGE_TO_DEVICE] == 2 * engine.context.page_bytes


def test_hits_of_another_backend_are_left_to_it():
    engine, _, _ = engine_with()
    engine.restorations.clear()
    handle = object()
    engine.context.scheduler = SimpleNamespace(
        waiting_queue=[SimpleNamespace(cache_request_handle=handle, rid="r")]
    )
    engine.context.tree.cache_controller.storage_backend = SimpleNamespace()
    operation = SimpleNamespace(handle=handle, hash_value=["00" * 32] * 8, storage_start=0)
    assert not engine.offers.hit(operation, 8 * PAGE)
    assert engine.counters.declined == {"another backend": 1}


def test_another_request_of_the_same_id_gets_none_of_the_pages():
    engine, r, mover = engine_with()
    load(engine, Span(0, 8))
    mover.wait_news(0.0)
    settle(engine, 1.0)
    other, r.req = (SimpleNamespace(rid="r", cache_request_handle=Handle("r")) for _ in range(2))
    queue = [other, r.req]
    engine.context.scheduler = SimpleNamespace(waiting_queue=queue)  # type: ignore[assignment]
    assert engine.context.waiting(r.req.cache_request_handle) is r.req
    assert engine.restoration_of(other) is None and engine.restoration_of(r.req) is r
    engine.admitted(r, engine.splice(r, Span(0, 8)), 8 * PAGE)
    assert engine.take_prefix(other) is None
    prefix = engine.take_prefix(r.req)
    assert prefix is not None and len(prefix) == 8 * PAGE
    assert engine.take_prefix(r.req) is None


def test_room_for_a_waiting_request_is_given_only_by_those_behind_it():
    engine, r, mover = engine_with()
    load(engine, Span(0, 4))
    mover.wait_news(0.0)
    settle(engine, 1.0)
    queue = [SimpleNamespace(rid=rid) for rid in ("first", "r", "last")]
    engine.context.scheduler = SimpleNamespace(waiting_queue=queue)
    assert not engine.give_room(PAGE, to="last") and not r.closed
    assert not engine.give_room(PAGE, to="r") and not r.closed
    assert engine.give_room(PAGE, to="first") and r.closed


def test_transfers_are_timed_by_the_agreed_clock_alone():
    engine, _, _ = engine_with()
    engine.context.now = 10.0
    one = load(engine, Span(0, 2))
    end(one, LANDED, at=123.0)
    engine.settle([bytes(one.poll.local)], [10.5])
    assert [fact.seconds for fact in engine.context.facts if isinstance(fact, TransferDone)] == [
        0.5
    ]


class TwoRanks:
    """A tree whose reductions give back what they are given: both ranks hold the same."""

    def __init__(self, tree: Any) -> None:
        self.tree, self.reductions = tree, 0

    def _all_reduce(self, data: torch.Tensor, op: Any) -> None:
        self.reductions += 1

    def _all_reduce_attn_groups(self, data: torch.Tensor, op: Any) -> None:
        pass


def tick_of_two_ranks() -> tuple[RestoreTick, Restoration, list[Any], TwoRanks]:
    """One of two ranks, with one restoration of eight pages that computes its front; and what its
    planner was told.
    """
    engine, r, _ = engine_with()
    pool = SimpleNamespace(anchor_entry=SimpleNamespace(host_pool=SimpleNamespace(size=1024)))
    engine.context.tree.cache_controller.mem_pool_host.anchor_entry = pool.anchor_entry
    told: list[Any] = []
    planner = SimpleNamespace(observe=told.append, step=lambda view: StepPlan())
    ranks = TwoRanks(engine.context.tree)
    agreement, views = Agreement(ranks, 2, first=True), Views(engine, 256, 1024)
    turns = SimpleNamespace(look=lambda scheduler: None)
    return RestoreTick(engine, planner, agreement, turns, views), r, told, ranks


def plans(tick: RestoreTick, told: list[Any], plan: StepPlan) -> None:
    """From now on the planner plans this in every step."""
    tick.planner = SimpleNamespace(observe=told.append, step=lambda view: plan)
    tick.views = SimpleNamespace(of=lambda scheduler, now: None)


def fails_at(tick: RestoreTick, span: Span) -> None:
    """From now on the device fails at a load of these pages."""
    load = tick.engine.load

    def fails(command: messages.Load) -> None:
        if command.span == span:
            raise RuntimeError("the device is gone")
        load(command)

    tick.engine.load = fails


def loads_of(*spans: tuple[int, int]) -> tuple[messages.Load, ...]:
    return tuple(load_of(Span(*span)) for span in spans)


def lost(told: list[Any]) -> list[tuple[Span, str]]:
    return [(fact.span, fact.reason) for fact in told if isinstance(fact, PagesLost)]


def finished(told: list[Any]) -> list[str]:
    """The requests whose end was told."""
    return [fact.rid for fact in told if isinstance(fact, RequestFinished)]


def test_the_chunk_by_which_the_last_restoration_ends_is_told_on_several_ranks_too():
    tick, r, told, ranks = tick_of_two_ranks()
    engine = tick.engine
    engine.admitted(r, None, 8 * PAGE)
    assert not engine.busy
    started = tick.note_chunk(Chunk("r", Span(0, 8 * PAGE), 0, 1.0))
    tick.note_chunk(Chunk("r", Span(0, 8 * PAGE), 0, 1.1, 0.1), started)
    tick.run(SimpleNamespace())
    assert [type(fact) for fact in told] == [ChunkStarted, ChunkDone]
    assert not tick.note_chunk(Chunk("another", Span(0, 64), 0, 2.0))
    tick.run(SimpleNamespace())
    assert len(told) == 2 and ranks.reductions == 1


def test_several_ranks_that_restore_nothing_still_bound_how_long_a_request_is_overtaken(
    monkeypatch: pytest.MonkeyPatch,
):
    tick, r, _, ranks = tick_of_two_ranks()
    tick.engine.abandon(r, "aborted")
    context, clock = tick.context, [100.0]
    context.alone, context.tree.pp_size = False, 1  # type: ignore[misc]
    monkeypatch.setattr(ticks, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    planner = make_planner(PolicyConfig(), EngineShape(PAGE, 1 << 10, 8 * PAGE))
    queue, waiting = Queue(planner, context.requests), [waits("long", 4000)]
    passes, scheduler = 0, SimpleNamespace(waiting_queue=waiting)
    while passes < 1000:
        passes += 1
        clock[0] += 0.1
        waiting.append(waits(f"short {passes}", 100))
        tick.run(scheduler)  # type: ignore[arg-type]
        queue.sort(waiting, context.moment())
        if waiting.pop(0).rid == "long":
            break
    work_s = 4000 / 4000 + 4000 / (8 * PAGE) * 0.01  # by the cost that is guessed at first
    assert work_s < 0.1 * passes < 2 * work_s + 16 * 0.1 + 0.2
    assert 1 < ranks.reductions <= 2 + passes / 16
    reductions = ranks.reductions
    for _ in range(100):
        del waiting[1:]
        tick.run(scheduler)  # type: ignore[arg-type]
    assert ranks.reductions == reductions  # one waits for none


def waits(rid: str, prompt: int) -> Any:
    return SimpleNamespace(
        rid=rid, origin_input_ids=range(prompt), full_untruncated_fill_ids=(), prefix_len=0,
        host_hit_length=0,
    )  # fmt: skip


def test_the_end_of_the_last_restoration_is_told_on_several_ranks_too():
    tick, r, told, _ = tick_of_two_ranks()
    tick.engine.abandon(r, "aborted")
    assert not tick.engine.busy
    tick.run(SimpleNamespace())
    assert [(type(fact), fact.rid) for fact in told] == [(RequestFinished, "r")]


def test_loads_that_were_not_begun_because_something_failed_are_told_as_lost():
    """A planner that waits for them for ever would hand out no more."""
    tick, _, told, _ = tick_of_two_ranks()
    plans(tick, told, StepPlan(loads=loads_of((6, 8), (4, 6), (2, 4))))
    fails_at(tick, Span(4, 6))
    tick.run(SimpleNamespace())
    tick.run(SimpleNamespace())
    assert lost(told) == [(Span(4, 6), "failed"), (Span(2, 4), "failed")]
    assert finished(told) == ["r"]
    assert tick.engine.counters.planner_failures == 1 and not tick.engine.restorations


def test_a_read_that_was_taken_back_is_told_to_the_planner_as_such():
    assert REASON[LOST[ReadOutcome.CANCELLED]] == messages.CANCELLED


def test_pages_a_restoration_holds_already_are_not_kept_free_for_it_once_more():
    tick, r, _, _ = tick_of_two_ranks()
    engine = tick.engine
    engine.context.tree.evictable_size = lambda: 0
    load(engine, Span(4, 8))
    sampling = SimpleNamespace(max_new_tokens=0)
    # Of its nine pages one is being computed, eight are left: four to be claimed yet, four in the
    # load's slots.
    req = SimpleNamespace(
        rid="r",
        full_untruncated_fill_ids=range(9 * PAGE),
        extend_end=PAGE,
        prefix_len=0,
        sampling_params=sampling,
        output_ids=(),
    )
    r.front = 1
    room = PAGES - 4 - 1  # and a page for what it generates
    free = tick.views.free_pages([], req)[Tier.DEVICE]
    assert free == room - 1, "the last page is no part of the prefix"
    engine.begin(restoration("other", 4))
    assert tick.views.free_pages([], req)[Tier.DEVICE] == room - 4


def failing_pool(tick: RestoreTick) -> None:
    """From now on the device's pool fails where it should hand out pages, as SGLang's pool of
    window pages does.
    """

    def fails(tokens: int) -> None:
        raise AssertionError("page_size == 1")

    tick.engine.context.tree.token_to_kv_pool_allocator.alloc = fails


def test_a_pool_that_fails_to_hand_out_pages_ends_that_restoration_alone():
    tick, _, told, _ = tick_of_two_ranks()
    engine = tick.engine
    ahead = SimpleNamespace(
        look=lambda scheduler: None,
        polls=list,
        facts_reported=lambda: None,
        hinted=[],
        carry_out=lambda moves, owed: None,
    )
    tick.ahead = ahead
    tick.shared.results = lambda loads, own: ([1.0] * (1 + loads + own), b"")
    engine.begin(restoration("other"))
    computes = (messages.Compute("other", None, 64),)
    plans(tick, told, StepPlan(loads=loads_of((6, 8), (4, 6)), computes=computes))
    failing_pool(tick)
    tick.run(SimpleNamespace(running_batch=SimpleNamespace(reqs=[1])))
    assert tick.ahead is ahead, "looking ahead goes on"
    assert list(engine.restorations) == ["other"] and engine.counters.ended == {"failed": 1}
    assert engine.counters.planner_failures == 0 and not engine.holds_memory
    tick.report_facts()
    failed = [(Span(6, 8), "failed"), (Span(4, 6), "failed")]
    assert lost(told) == failed, "the planner waits for neither"
    assert finished(told) == ["r"]


def test_host_memory_that_fails_gives_the_device_pages_back():
    engine, r, _ = engine_with()

    def fails(tokens, **how):
        raise RuntimeError("no host memory")

    engine.context.tree.cache_controller.mem_pool_host.alloc = fails
    engine.load(load_of(Span(4, 8)))
    engine.context.slots.free()
    assert r.closed and not engine.holds_memory and free_tokens(engine) == PAGES * PAGE


def test_a_chunk_without_a_time_is_counted():
    tick, *_ = tick_of_two_ranks()
    for seconds in (None, 0.0, 0.25):
        tick.note_chunk(Chunk("r", Span(0, 64), 0, 1.0, seconds))
    assert tick.engine.counters.untimed_chunks == 1
    said = {name: value for name, _, value in tick.engine.counters.counts(PAGE)}
    assert said["untimed_chunks"] == 1


def kept_by(engine: RestoreEngine) -> KeptPages:
    """The pages kept by an engine whose server writes new pages through."""
    engine.context.tree.cache_controller.write_policy = "write_through"
    engine.kept = KeptPages(engine.context.tree.cache_controller.mem_pool_host, PAGE)
    return engine.kept


def engine_of_keys(pages: int) -> tuple[RestoreEngine, Restoration, Any]:
    engine, r, _ = engine_with(pages)
    r.keys = tuple(PageKey(bytes([page + 1]) * 32) for page in range(pages))
    return engine, r, engine.context.tree.cache_controller.mem_pool_host


def test_pages_that_landed_are_kept_for_the_tree_and_those_that_were_lost_are_freed():
    engine, r, host = engine_of_keys(8)
    kept, one = kept_by(engine), load(engine, Span(4, 8))
    end(one, LANDED, LOST[ReadOutcome.MISS], LANDED, LANDED)
    settle(engine, 0.5)
    assert kept.tokens == 3 * PAGE and engine.context.slots.host_tokens == 0
    assert host.available_size() == (PAGES - 3) * PAGE
    taken = kept.take([r.keys[4], r.keys[5], r.keys[7]])
    assert {place: page.tolist() for place, (_, page) in taken.items()} == {
        0: one.host_slots[:PAGE].tolist(),
        2: one.host_slots[3 * PAGE :].tolist(),
    }
    engine.forget("r")
    assert kept.tokens == 0 and host.available_size() == (PAGES - 2) * PAGE


def test_pages_of_a_restoration_that_is_given_up_are_kept_as_far_as_they_were_used():
    engine, r, host = engine_of_keys(4)
    kept, one = kept_by(engine), load(engine, Span(0, 4))
    end(one, LANDED)
    settle(engine, 0.5)
    engine.splice(r, Span(0, 2))
    engine.abandon(r, "gave room")
    assert kept.tokens == 2 * PAGE
    assert kept.give_room(1) == PAGE and kept.tokens == PAGE
    engine.reset()
    assert kept.tokens == 0 and host.available_size() == PAGES * PAGE


def test_a_page_that_two_requests_have_read_is_kept_once():
    engine, r, host = engine_of_keys(2)
    kept = kept_by(engine)
    for _ in range(2):
        slots = host.alloc(PAGE)
        kept.keep("r", r.keys[:1], slots)
    assert kept.tokens == PAGE and host.available_size() == (PAGES - 1) * PAGE


def test_an_end_that_raises_is_not_repeated(monkeypatch):
    engine, _, _ = engine_of_keys(8)
    kept = kept_by(engine)
    loads = [load(engine, Span(0, 4)), load(engine, Span(4, 8))]
    for one in loads:
        end(one, LANDED)
    ended: list[Span] = []
    leave = engine._leave_host

    def fails_once(one):
        ended.append(one.span)
        if len(ended) == 2:
            raise AssertionError("the pool finds a page freed twice")
        leave(one)

    monkeypatch.setattr(engine, "_leave_host", fails_once)
    with pytest.raises(AssertionError):
        settle(engine, 0.5)
    settle(engine, 0.6)
    assert ended == [Span(0, 4), Span(4, 8)] and engine.loads == []
    assert kept.tokens == 4 * PAGE


def test_a_request_that_ends_leaves_pages_that_another_one_brought():
    engine, r, host = engine_of_keys(2)
    kept = kept_by(engine)
    kept.keep("another", r.keys[:2], host.alloc(2 * PAGE))
    kept.drop_keys("r", r.keys)
    assert kept.tokens == 2 * PAGE


def test_reads_beside_a_restorations_loads_say_nothing_of_the_disk(monkeypatch):
    """They wait for the loads. One that began after the last of them ended does."""
    tick, _, _, _ = tick_of_two_ranks()
    reads: deque[Any] = deque()
    monkeypatch.setattr(
        "sgl_kvtier.runtime.scheduler.tick.store_of",
        lambda controller: SimpleNamespace(own_reads=reads),
    )
    tick.agreement, context = SimpleNamespace(alone=True), tick.context
    context.alone = False  # so that the test sets the clock
    context.now = 1.0
    one = load(tick.engine, Span(4, 8))
    tick._note_reads()
    tick.engine.loads.remove(one)
    context.now = 3.0
    reads += [(Tier.STORAGE, 100, 2.5), (Tier.STORAGE, 200, 1.5)]
    tick._note_reads()
    assert [fact.nbytes for fact in context.facts if isinstance(fact, TransferDone)] == [200]


def test_spliced_pages_are_the_requests_own_whatever_becomes_of_the_restoration():
    engine, r, _ = engine_with()
    one = load(engine, Span(0, 6))
    end(one, LANDED)
    settle(engine, 1.0)
    slots = engine.splice(r, Span(0, 4))
    engine.abandon(r, "aborted")
    engine.context.slots.free()
    free = engine.context.tree.token_to_kv_pool_allocator.free_pages
    assert len(free) == len(set(free)) == PAGES - 4
    assert not set(free) & {int(slot) // PAGE for slot in slots}
    assert engine.context.slots.tokens == 0


def test_loads_that_lie_in_part_outside_of_what_is_taken_back_go_on():
    engine, _, _ = engine_with()
    loads = [load(engine, span) for span in (Span(0, 3), Span(3, 5), Span(5, 8))]
    engine.cancel(messages.Cancel("r", Span(2, 6)))
    assert [one.cancelled for one in loads] == [False, True, False]
    engine.cancel(messages.Cancel("r", Span(5, 8)))
    assert [one.cancelled for one in loads] == [False, True, True]


def test_room_is_given_by_requests_that_wait_and_never_by_one_that_runs():
    engine, r, _ = engine_with()
    load(engine, Span(0, 4))
    r.admitted = True
    assert not engine.give_room(PAGE)
    r.admitted = False
    assert engine.give_room(PAGE)
    assert engine.restorations == {}


def test_the_trees_host_pages_stay_pinned_while_a_load_reads_them():
    engine, r, _ = engine_with()
    unpinned = list[Any]()
    engine.context.host.unpin = unpinned.append
    r.sources, r.host_slots = ((Span(0, 8), Tier.HOST),), torch.arange(8 * PAGE)
    r.host_pin = pin = object()
    engine.load(load_of(Span(0, 2), Tier.HOST, Link.HOST_TO_DEVICE))
    one = engine.loads[0]
    engine.abandon(r, "aborted")
    assert unpinned == []
    end(one, LANDED, at=1.0)
    settle(engine, 2.0)
    assert unpinned == [pin]


@pytest.mark.parametrize(
    ("paused", "how", "ends"),
    [(False, {}, False), (False, {"ignore_waiting": False}, True), (True, {}, True)],
)
def test_a_load_of_an_aborted_request_is_ended_before_the_pools_are_emptied(paused, how, ends):
    engine, r, _ = engine_with()
    load(engine, Span(4, 8))
    engine.abandon(r, "aborted")
    parts = object.__new__(Parts)
    parts.engine, parts.context, parts.agreement = (
        engine,
        engine.context,
        Agreement(engine.context.tree, 1, first=True),
    )  # type: ignore[assignment]
    parts.tick = SimpleNamespace(ahead=None)  # type: ignore[assignment]
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(kvtier=parts), _engine_paused=paused)
    assert is_fully_idle(lambda scheduler, **how: True, scheduler, **how) is ends
    assert bool(engine.loads) is not ends and bool(engine.context.slots.tokens) is not ends


def test_the_tree_pages_of_an_admitted_request_are_not_protected_any_more():
    engine, r, _ = engine_with()
    unlocked = list[Any]()
    engine.context.tree.unlock = unlocked.append
    r.node_lock = lock = object()
    engine.admitted(r, None, 2 * PAGE)
    assert (unlocked, r.node_lock, r.front) == ([lock], None, 2)


def test_a_page_in_which_a_chunk_ends_is_computed_for_the_engine_as_for_the_planner():
    """Where memory is short SGLang ends a chunk anywhere. If the engine still waited for the last
    page while the planner was done with the request, nobody would compute the rest.
    """
    engine, r, _ = engine_with()
    planner = make_planner(PolicyConfig(restore="both"), EngineShape(PAGE, 1 << 10, 8 * PAGE))
    planner.observe(RestoreOffered("r", 0.0, 9 * PAGE, 0, 8, ((Span(0, 8), Tier.STORAGE),)))
    planner.step(StepView(0.0, ("r",), free_pages={Tier.DEVICE: 0}))  # no room: nothing is loaded
    assert planner.restoring == ("r",)
    engine.admitted(r, None, 4 * PAGE + 1)
    planner.observe(ChunkStarted("r", Span(0, 4 * PAGE + 1), 0.0))
    assert r.front == 5 and planner.restoring == ("r",)
    engine.advance(r, 8 * PAGE - 1)
    planner.observe(ChunkStarted("r", Span(4 * PAGE + 1, 8 * PAGE - 1), 0.0))
    assert r.closed and planner.restoring == ()


def test_the_patience_without_room_begins_anew_with_every_load_that_finds_some():
    engine, _, _ = engine_with()
    engine.context.now = 1.9
    load(engine, Span(4, 8))
    engine.context.slots.claim_device = lambda tokens: None
    engine.context.now = 2.5
    engine.load(load_of(Span(0, 4)))
    assert engine.context.facts.pop() == PagesLost("r", Span(0, 4), NO_ROOM_YET, 0.0)


def test_pages_lost_before_something_failed_in_the_same_step_are_told_as_well():
    tick, _, told, _ = tick_of_two_ranks()
    plans(tick, told, StepPlan(loads=loads_of((6, 8), (4, 6))))
    tick.engine.context.slots.claim_device = lambda tokens: None
    fails_at(tick, Span(4, 6))
    tick.run(SimpleNamespace())
    tick.run(SimpleNamespace())
    assert [span for span, _ in lost(told)] == [Span(6, 8), Span(4, 6)]


def test_a_link_is_busy_from_the_latest_end_on_in_whatever_order_ends_are_told():
    engine, _, _ = engine_with()
    one = load(engine, Span(0, 2))
    assert [engine._busy_seconds(one, ended) for ended in (5.0, 3.0, 6.0)] == [5.0, 0.0, 1.0]
