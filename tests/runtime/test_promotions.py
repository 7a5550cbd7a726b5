"""Moves of a plan where they cannot be carried out, and reads that hang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kvtier.policy.messages import Move
from sgl_kvtier.runtime.ahead import promotions
from sgl_kvtier.runtime.ahead.counters import LookaheadCounters
from sgl_kvtier.runtime.ahead.engine import LookaheadEngine
from sgl_kvtier.runtime.ahead.promotions import Promotions, _Copying, _Fetch
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.scheduler import hooks as restore_hooks
from sgl_kvtier.runtime.scheduler.parts import Parts
from sgl_kvtier.runtime.sglang.host_tier import Pin
from sgl_kvtier.runtime.sglang.tree_nodes import Found
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.polls import LANDED, Poll
from sgl_kvtier.runtime.step.tracked import Path
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Link, PageKey, Tier

PAGE = 4
KEYS = tuple(PageKey(bytes([n]) * 32) for n in range(2))


def made() -> tuple[Promotions, list[torch.Tensor], list[Any]]:
    """Promotions of a small tree, the host slots that were given back, and the pages that were said
    not to come.
    """
    given_back: list[torch.Tensor] = []
    failed: list[Any] = []
    host = SimpleNamespace(size=64 * PAGE, size_per_token=4)
    tree = SimpleNamespace(
        page_size=PAGE,
        cache_controller=SimpleNamespace(
            mem_pool_host=host, storage_backend=None, write_policy="write_through"
        ),
        token_to_kv_pool_allocator=SimpleNamespace(size=32 * PAGE),
        dec_host_lock_ref=lambda anchor, pin: None,
        tree_core=SimpleNamespace(is_eagle=False),
    )
    slots = SimpleNamespace(
        put_back_host=given_back.append,
        put_back_host_anchors=given_back.append,
        give_host=lambda tokens: None,
        tokens=0,
    )
    context = StepContext(tree)
    context.now, context.slots = 10.0, slots
    facts: Any = SimpleNamespace(failed=lambda keys, target: failed.append((keys, target)))
    return Promotions(context, facts, lambda fact: None, LookaheadCounters()), given_back, failed


def fetch(deadline_at: float, ended: bool, source: Tier = Tier.STORAGE) -> _Fetch:
    job = SimpleNamespace(cancel=lambda: None, wait=lambda timeout_s: ended, done=ended)
    host = torch.arange(2 * PAGE)
    return _Fetch(
        Path([], KEYS, None, None),
        KEYS,
        0,
        host,
        Pin(1, None),
        job,
        Poll(1, 2),
        0.0,
        deadline_at,
        source,
        False,
    )


def test_host_pages_of_a_read_that_hangs_are_not_given_to_others(monkeypatch):
    monkeypatch.setattr(promotions, "_RESET_S", 0.0)
    moves, given_back, failed = made()
    hung = fetch(9.0, ended=False)
    moves._fetches = [hung, fetch(11.0, ended=True)]
    assert moves.hangs, "the first one's time was over a second ago"
    moves.reset()
    assert len(given_back) == 1 and moves._context.hung_reads == [hung.job], (
        "its host pages are still read into"
    )
    assert failed == [(KEYS, Tier.HOST)] * 2


def test_pages_that_other_servers_have_no_more_are_taken_off_the_map():
    moves, _, _ = made()
    dropped: list[Any] = []
    moves._facts.dropped = lambda keys, tier: dropped.append((keys, tier))
    moves._facts.brought = lambda keys: None
    moves._land(fetch(11.0, ended=True, source=Tier.STORAGE), 0)
    assert dropped == []
    moves._land(fetch(11.0, ended=True, source=Tier.REMOTE), 0)
    assert dropped == [(KEYS, Tier.REMOTE)]


def test_a_read_in_its_time_does_not_keep_a_server_from_being_idle():
    moves, _, _ = made()
    moves._fetches = [fetch(11.0, ended=False)]
    assert not moves.hangs


def tree_with(moves: Promotions, ahead: Any, agreement: Any) -> SimpleNamespace:
    """A tree with parts that know of the same reads and restore nothing."""
    parts = object.__new__(Parts)
    parts.engine = object.__new__(RestoreEngine)
    parts.context = parts.engine.context = moves._context
    parts.engine.loads, parts.agreement = [], agreement
    parts.tick = SimpleNamespace(ahead=ahead)
    return SimpleNamespace(kvtier=parts)


@pytest.mark.parametrize("paused", [True, False])
def test_a_server_is_not_idle_before_a_read_that_hangs_has_ended(paused, monkeypatch):
    monkeypatch.setattr(promotions, "_RESET_S", 0.0)
    moves, given_back, _ = made()
    hung = fetch(9.0, ended=False)
    moves._fetches = [hung]
    tree = tree_with(moves, SimpleNamespace(promotions=moves), SimpleNamespace(alone=True))
    scheduler = SimpleNamespace(tree_cache=tree, _engine_paused=paused)
    for _ in range(2):
        assert not restore_hooks.is_fully_idle(lambda scheduler: True, scheduler)
    hung.job.done = True
    assert (
        restore_hooks.is_fully_idle(lambda scheduler: True, scheduler) is paused
    )  # one that runs notes it in its next step
    assert not given_back


def test_nor_after_a_failure_has_ended_all_looking_ahead(monkeypatch):
    monkeypatch.setattr(promotions, "_RESET_S", 0.0)
    moves, _, _ = made()
    hung = fetch(9.0, ended=False)
    moves._fetches = [hung]
    moves.reset()
    alone = SimpleNamespace(alone=True)
    tree = tree_with(moves, None, alone)
    scheduler = SimpleNamespace(tree_cache=tree, _engine_paused=False)
    assert not restore_hooks.is_fully_idle(lambda scheduler: True, scheduler)
    alone.alone = False
    assert restore_hooks.is_fully_idle(lambda scheduler: True, scheduler), (
        "ranks may not differ in this"
    )
    alone.alone, hung.job.done = True, True
    assert restore_hooks.is_fully_idle(lambda scheduler: True, scheduler)


def test_copies_to_the_device_have_ended_when_nobody_heeds_their_counter_any_more():
    """The tree has their pages since they began, and a batch may be launched on them."""
    moves, _, _ = made()
    waited: list[int] = []
    event = SimpleNamespace(query=lambda: bool(waited), synchronize=lambda: waited.append(1))
    moves._copying = _Copying(3, SimpleNamespace(finish_event=event), 9.0, 0.0, Poll(1, 1))
    assert moves.consumer == 3
    moves.reset()
    assert waited == [1] and moves.consumer == -1


def test_a_server_with_nothing_to_do_is_idle_for_a_flush_although_it_prefetches() -> None:
    """SGLang ends a server that is to give back its memory and is not idle."""
    moves, _, _ = made()
    tree = tree_with(moves, SimpleNamespace(promotions=moves), SimpleNamespace(alone=True))
    queue: list[Any] = ["copies"]
    moves._context.tree.cache_controller.ack_load_queue = queue

    def loading_check(finish_count: int) -> None:
        del queue[:finish_count]

    moves._context.tree.loading_check = loading_check  # type: ignore[method-assign]
    event = SimpleNamespace(query=lambda: not queue)
    moves._copying = _Copying(3, SimpleNamespace(finish_event=event), 9.0, 0.0, Poll(1, 1))
    scheduler = SimpleNamespace(tree_cache=tree, _engine_paused=False)

    def asked(scheduler: Any, **how: Any) -> bool:
        return not queue

    assert not restore_hooks.is_fully_idle(asked, scheduler) and queue
    assert restore_hooks.is_fully_idle(asked, scheduler, ignore_waiting=False) and not queue
    busy = restore_hooks.is_fully_idle(lambda *_, **how: False, scheduler, ignore_waiting=False)
    assert not busy, "requests run"


@pytest.mark.parametrize("released", [True, False])
def test_nothing_is_moved_into_memory_that_was_released(released):
    moves, _, _ = made()
    begun: list[Any] = []
    moves.carry_out = lambda *how: begun.append(how)
    hands = object.__new__(LookaheadEngine)
    updater = SimpleNamespace(offload_tags={"kv_cache"} if released else set())
    hands.context = SimpleNamespace(scheduler=SimpleNamespace(weight_updater=updater))
    hands.promotions, hands._config = moves, SimpleNamespace(load_deadline_s=1.0)
    hands.carry_out((Move(KEYS, Tier.HOST, Tier.DEVICE, "r"),), 0)
    assert len(begun) == (0 if released else 1)
    assert moves._counters.failed_moves == ({"released": 2} if released else {})


@pytest.mark.parametrize(("owed", "moved"), [(6, 0), (5, 2), (0, 2)])
def test_what_a_move_locks_is_not_what_running_prompts_will_claim(owed, moved):
    """Of 12 claimable pages a move takes two, and five that the device has already are locked until
    its copies have come.
    """
    moves, _, _ = made()
    locked, queued = [], list[int]()

    def lock(node):
        locked.append(node)
        return node

    tree = moves._context.tree
    tree.token_to_kv_pool_allocator.available_size = lambda: 4 * PAGE
    tree.evictable_size = lambda: (3 if locked else 8) * PAGE
    tree.lock, tree.unlock = lock, locked.remove
    tree.load_back = lambda node: queued.append(node) or True
    moves._facts.placed = lambda keys, tier: None
    there = SimpleNamespace(node_id=7, full_value_len=5 * PAGE, path_start=0, path_end=5 * PAGE)
    absent = SimpleNamespace(node_id=8, full_value_len=None, path_start=5 * PAGE, path_end=7 * PAGE)
    moves._nodes = lambda path: [there, absent]
    keys = tuple(PageKey(bytes([n]) * 32) for n in range(7))
    assert moves._load_back(Path([], keys, None, None), keys[5:], owed * PAGE) == moved
    assert queued == [8] * bool(moved) and not locked
    assert moves._counters.failed_moves == ({} if moved else {"no room": 2})


class HostTier:
    """A host tier whose tree takes everything behind the first `known` pages of a graft."""

    def __init__(self, known: int = 0) -> None:
        self.known, self.pinned, self.grafted = known, list[Any](), list[Any]()

    def pin(self, node: int) -> Pin:
        self.pinned.append(Pin(node, None))
        return self.pinned[-1]

    def unpin(self, pin: Pin) -> None:
        self.pinned.remove(pin)

    def takes_behind(self, node: int) -> bool:
        return True

    def graft(
        self, node: int, tokens: Any, slots: torch.Tensor, names: list[str], beside: Any = None
    ) -> Any:
        self.grafted.append((tokens, slots.tolist(), names))
        if beside is not None:
            beside("inserted")
        return SimpleNamespace(node=5, known_tokens=self.known * PAGE)


class Reads:
    """A storage that begins reads and notes them."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def begin_read(
        self, keys: Any, slots: torch.Tensor, late_s: float, on_page: Any, urgency: Any, anchor: Any
    ) -> Any:
        self.begun.append((keys, slots.tolist()))
        self.on_page, self.anchor = on_page, anchor
        return SimpleNamespace(cancel=lambda: None)


def fetching(
    monkeypatch: pytest.MonkeyPatch, room: torch.Tensor | None
) -> tuple[Promotions, HostTier, Reads]:
    """Promotions whose host pool gives out `room`, for pages that the tree lacks as a whole."""
    moves, _, _ = made()
    host, storage = HostTier(), Reads()
    moves._host, moves._slots.claim_host = host, lambda tokens: room
    moves._facts.unused = 0
    moves._find = lambda path: Found(0, 1, 1)
    monkeypatch.setattr(promotions, "store_of", lambda controller: storage)
    return moves, host, storage


def test_pages_for_which_the_host_has_no_room_leave_nothing_pinned(monkeypatch):
    moves, host, storage = fetching(monkeypatch, None)
    moves._fetch(Move(KEYS, Tier.STORAGE, Tier.HOST), Path([], KEYS, None, None), 1.0)
    assert (host.pinned, storage.begun, moves._fetches) == ([], [], [])
    assert moves._counters.failed_moves == {"no room": 2}


def test_the_node_behind_which_pages_come_is_pinned_until_they_are_there(monkeypatch):
    moves, host, storage = fetching(monkeypatch, torch.arange(2 * PAGE))
    moves._fetch(Move(KEYS, Tier.STORAGE, Tier.HOST), Path([], KEYS, None, None), 1.0)
    assert storage.begun == [(KEYS, list(range(2 * PAGE)))]
    assert [pin.node for pin in host.pinned] == [1]
    moves._facts.brought = lambda keys: None
    moves._land(moves._fetches[0], 0)
    assert host.pinned == []


class Anchors:
    """Anchors of two pages, with two slots a page."""

    name, pages, page_slots, page_bytes = "swa", 2, 2, 1000


LONG = tuple(PageKey(bytes([n]) * 32) for n in range(4))


def fetching_with_anchors(
    monkeypatch: pytest.MonkeyPatch, there: int = 0
) -> tuple[Promotions, Path, Reads]:
    """Promotions of a tree with anchors that has the first `there` pages of a path of four."""
    moves, _, storage = fetching(monkeypatch, torch.arange((4 - there) * PAGE))
    moves._anchors = Anchors()
    moves._slots.claim_host_anchors = lambda pages: torch.arange(100, 100 + pages * 2)
    moves._find = lambda path: Found(there * PAGE, 1, 1)
    moves._facts.brought = lambda keys: None
    moves._facts.stored = len
    return moves, Path(list(range(4 * PAGE)), LONG, None, None), storage


def test_with_anchors_a_path_comes_whole_its_end_first_with_the_anchor(monkeypatch):
    moves, path, storage = fetching_with_anchors(monkeypatch)
    given = list[Any]()
    monkeypatch.setattr(promotions.anchors, "given", lambda *what: given.append(what[1:]))
    metrics = SimpleNamespace(log_prefetched_tokens=lambda tokens: None)
    moves._context.tree.storage_metrics_collector = metrics
    moves._fetch(Move(LONG[:1], Tier.STORAGE, Tier.HOST), path, 1.0)
    reverse = [slot for page in (3, 2, 1, 0) for slot in range(page * PAGE, page * PAGE + PAGE)]
    assert storage.begun == [(LONG[::-1], reverse)]
    assert storage.anchor.tolist() == [102, 103, 100, 101], "the last page's first"
    storage.on_page(0, ReadOutcome.MISS)
    assert moves._fetches[0].poll.local[3] != 0, "the first that is read is the last page"
    moves._land(moves._fetches[0], 4)
    assert [(pool, behind, slots.tolist(), record) for pool, behind, slots, record in given] == [
        ("swa", 1, [100, 101, 102, 103], "inserted")
    ]
    assert moves._counters.moved_bytes == {Link.STORAGE_TO_HOST: 4 * PAGE * 4 + 2 * 1000}


def test_bytes_of_anchors_that_sglang_copies_are_counted(monkeypatch):
    moves, _, _ = fetching_with_anchors(monkeypatch)
    for by_pool, own in (({"kv": 3 * PAGE, "swa": 4}, 2 * 1000), ({"kv": 3 * PAGE}, 0), (None, 0)):
        moves._counters.moved_bytes.clear()
        poll: Any = Poll(1, 1)
        poll.mark(0, LANDED, 2.0)
        poll.seen[:] = poll.local
        ack = SimpleNamespace(num_tokens=3 * PAGE, num_tokens_by_pool=by_pool)
        moves._copying = _Copying(0, ack, 1.0, 1.0, poll)
        moves._note_copied()
        assert moves._counters.moved_bytes == {Link.HOST_TO_DEVICE: 3 * PAGE * 4 + own}


def test_with_anchors_a_path_comes_as_far_as_it_is_stored(monkeypatch):
    moves, path, storage = fetching_with_anchors(monkeypatch)
    moves._slots.claim_host = torch.arange
    moves._facts.stored = lambda keys: 3
    moves._fetch(Move(LONG, Tier.STORAGE, Tier.HOST), path, 1.0)
    assert [keys for keys, _ in storage.begun] == [LONG[2::-1]]


def test_with_anchors_a_path_that_does_not_come_whole_is_given_back(monkeypatch):
    moves, path, _ = fetching_with_anchors(monkeypatch)
    back, dropped = list[Any](), list[Any]()
    moves._slots.put_back_host = moves._slots.put_back_host_anchors = back.append
    moves._facts.dropped = lambda keys, tier: dropped.append((keys, tier))
    moves._fetch(Move(LONG[:1], Tier.STORAGE, Tier.HOST), path, 1.0)
    moves._land(moves._fetches[0], 3)
    assert sorted(slot for slots in back for slot in slots.tolist()) == [
        *range(4 * PAGE),
        *range(100, 104),
    ]
    assert dropped == [(LONG, Tier.STORAGE)], "it is not read in vain again"
    assert moves._host.grafted == [] == moves._host.pinned


@pytest.mark.parametrize(
    ("there", "room", "reason"),
    [pytest.param(3, 64, "no room", id="anchor begins earlier"), (0, 3, "no room")],
)
def test_with_anchors_what_cannot_come_whole_is_not_read(monkeypatch, there, room, reason):
    moves, path, storage = fetching_with_anchors(monkeypatch, there)
    moves._most_unused = room
    moves._fetch(Move(LONG[there:], Tier.STORAGE, Tier.HOST), path, 1.0)
    assert storage.begun == [] == moves._host.pinned
    assert moves._counters.failed_moves == {reason: 4 - there}


def test_pages_that_the_tree_has_already_are_given_back_and_the_others_are_its_own():
    moves, given_back, _ = made()
    given = list[int]()
    moves._host = HostTier(known=1)
    moves._slots.give_host = given.append
    brought = list[Any]()
    moves._facts.brought = brought.append
    one = fetch(11.0, ended=True)
    one.path.tokens = list(range(2 * PAGE))
    moves._host.pinned.append(one.pin)
    counted = list[int]()
    metrics = SimpleNamespace(log_prefetched_tokens=counted.append)
    moves._context.tree.storage_metrics_collector = metrics
    moves._land(one, 2)
    assert counted == [2 * PAGE], "SGLang's count of tokens read from storage"
    assert [slots.tolist() for slots in given_back] == [list(range(PAGE)), []]
    assert (given, brought) == ([PAGE], [KEYS[1:]])


def test_a_read_is_cancelled_once_its_time_is_over_and_not_before():
    moves, _, _ = made()
    cancelled = list[str]()
    late, early = fetch(9.0, ended=False), fetch(11.0, ended=False)
    late.job.cancel = lambda: cancelled.append("late")
    early.job.cancel = lambda: cancelled.append("early")
    moves._fetches = [late, early]
    moves.look()
    assert (cancelled, moves._fetches) == (["late"], [late, early])


def test_only_pages_of_nodes_that_were_queued_count_as_come():
    moves, _, _ = made()
    came = list[Any]()
    moves._facts.placed = lambda keys, tier: came.append((keys, tier))
    moves._device = SimpleNamespace(
        claimable=lambda: 64 * PAGE, locked_by_copies=lambda node: 0, queue_copies=lambda node: True
    )
    nodes = [
        SimpleNamespace(node_id=8, full_value_len=None, path_start=0, path_end=2 * PAGE),
        SimpleNamespace(node_id=9, full_value_len=None, path_start=2 * PAGE, path_end=4 * PAGE),
    ]
    moves._nodes = lambda path: nodes
    keys = tuple(PageKey(bytes([n]) * 32) for n in range(4))
    assert moves._load_back(Path([], keys, None, None), keys[:3], 0) == 2
    assert came == [(keys[:2], Tier.DEVICE)]
    assert moves._counters.failed_moves == {"partly": 1}
