"""What several ranks that look ahead agree on, in one process: a reduction is a minimum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from ticks import bare_tree, idle_tick

from sgl_kvtier.policy.messages import ChunkDone, ChunkStarted, LookaheadEnded, StepDone
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.runtime.ahead.store_votes import StoreVotes
from sgl_kvtier.runtime.proof.record import Proof
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.scheduler.radix_cache import KVTierRadixCache
from sgl_kvtier.runtime.step.chunk_clock import Chunk
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.polls import LANDED, LOST, Poll
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Lookup, PageKey, Span, Tier

FAILED = LOST[ReadOutcome.FAILED]


class Ahead:
    """The hands' side that agreement needs: polls, a fingerprint, and whether they were given up."""

    def __init__(self) -> None:
        self.waiting: list[Poll] = []
        self.print = 7
        self.given_up = False
        self.hinted: list[Any] = []

    def polls(self) -> list[Poll]:
        return self.waiting

    def fingerprint(self) -> int:
        return self.print

    def look(self, scheduler: Any) -> None:
        del scheduler

    def due(self, scheduler: Any) -> bool:
        del scheduler
        return True

    def note_chunk(self, chunk: Chunk) -> None:
        del chunk

    def facts_reported(self) -> None:
        """Nothing to note."""

    def carry_out(self, moves: Any, owed_tokens: int) -> None:
        """No moves here."""

    def give_up(self) -> None:
        self.given_up = True


class Rank:
    """One rank's tick without restorations. Its own collectives are refused."""

    def __init__(self, number: int = 0) -> None:
        def refused(*args: Any) -> None:
            raise AssertionError("a collective of our own")

        tree = bare_tree(_all_reduce=refused, _all_reduce_attn_groups=lambda data, op: None)
        self.context = StepContext(tree, alone=False)
        offers = SimpleNamespace(make=lambda: None, look_again=lambda: False, offer_stopped=list)
        engine = SimpleNamespace(
            layers=None, context=self.context, loads=[], restorations={}, computes={}, busy=False,
            ending=False, offers=offers, settle=lambda states, ends: None, polls=list,
            settle_proof=lambda states: None, proof=Proof(), abandon_all=lambda how: None,
            counters=RestoreCounters(),
        )  # fmt: skip
        self.told: list[Any] = []
        self.ahead = Ahead()
        self.tick = idle_tick(engine, first=number == 0, told=self.told, ahead=self.ahead)
        self.tick._unblock = lambda scheduler, tried: None
        self.agreement = self.tick.agreement

    @property
    def has_ended(self) -> bool:
        """Whether it does not look ahead any more."""
        return self.ahead.given_up and self.tick.ahead is None and not self.tick.shares_reduction


def reduce(*ranks: Rank) -> None:
    """SGLang's reduction of one tick, with ours behind it."""
    asked = [rank.tick.reduction_input() for rank in ranks]
    assert len({len(values) for values in asked}) == 1
    agreed = [min(values) for values in zip(*asked, strict=True)]
    for rank in ranks:
        rank.tick.take_result(agreed)


def run(*ranks: Rank) -> None:
    """One tick of all."""
    reduce(*ranks)
    for rank in ranks:
        rank.tick.run(SimpleNamespace())


def test_the_first_ranks_clock_and_the_smallest_state_count_and_nothing_is_reduced_besides():
    ranks = Rank(0), Rank(1)
    for place, rank in enumerate(ranks):
        rank.ahead.waiting = [Poll(1, 3), Poll(2, 1)]
        for page in range(3):
            rank.ahead.waiting[0].mark(page, LANDED if page or not place else FAILED, 5.0 + place)
    ranks[0].ahead.waiting[1].mark(0, LANDED, 6.0)
    for place, rank in enumerate(ranks):
        started = rank.tick.note_chunk(Chunk("r", Span(0, 64), 0, 1.0 + place))
        assert started and rank.tick.note_chunk(
            Chunk("r", Span(0, 64), 0, 1.5 + place, 0.25 + place), started
        )
        rank.context.facts.append(StepDone(0.25 + place, 64, 0, 0.0))
    run(*ranks)
    first, second = ranks
    assert first.context.now == second.context.now > 0
    for rank in ranks:
        fetch, copy = rank.ahead.waiting
        assert fetch.over and fetch.well == 0 and list(fetch.seen) == [FAILED, LANDED, LANDED]
        assert not copy.over
        assert (fetch.seen_at, rank.agreement.reductions) == (5.0, 0)
        assert [type(fact) for fact in rank.told] == [ChunkStarted, ChunkDone, StepDone]
        assert (rank.told[0].now, rank.told[1].seconds, rank.told[2].seconds) == (1.0, 0.25, 0.25)
    assert first.told == second.told


@pytest.mark.parametrize(
    "fingerprints",
    [(7, 8), (7, 8, 9), (7, -1), (-1, -1)],
    ids=["two that differ", "three that differ", "one that cannot keep it", "none can"],
)
def test_ranks_whose_maps_are_not_alike_stop_looking_ahead_in_the_same_step(fingerprints):
    ranks = [Rank(number) for number in range(len(fingerprints))]
    run(*ranks)
    assert not any(rank.ahead.given_up for rank in ranks)
    for rank, fingerprint in zip(ranks, fingerprints, strict=True):
        rank.ahead.print = fingerprint
    run(*ranks)
    assert all(rank.has_ended for rank in ranks)
    ended = [LookaheadEnded(ranks[0].context.now)]
    assert [rank.told for rank in ranks] == [ended] * len(ranks), "planners know it as well"


def test_whoever_looks_ahead_and_raises_costs_no_server():
    rank = Rank(0)

    def raises(scheduler: Any) -> None:
        raise OverflowError("a token id of an image")

    rank.ahead.look = raises
    reduce(rank, Rank(1))
    rank.tick.run(SimpleNamespace())
    assert rank.ahead.given_up and rank.tick.ahead is None
    rank.tick.run(SimpleNamespace())


def test_a_tick_without_its_answer_gives_up_rather_than_guess():
    rank = Rank(0)
    reduce(rank)
    rank.context.facts.append(StepDone(1.0, 64, 0, 0.0))  # noted after the question
    rank.tick.run(SimpleNamespace())
    assert rank.ahead.given_up and [type(fact) for fact in rank.told] == [LookaheadEnded]


def test_what_is_agreed_on_travels_with_sglangs_own_reduction_and_comes_out_again(monkeypatch):
    seen: list[list[int]] = []

    def all_reduce(self: Any, data: torch.Tensor, op: Any) -> None:
        seen.append(data.tolist())
        data.copy_(torch.minimum(data, torch.arange(len(data)) + 3))

    monkeypatch.setattr(UnifiedRadixCache, "_all_reduce", all_reduce)
    tree = KVTierRadixCache.__new__(KVTierRadixCache)
    tree.tree_core = SimpleNamespace(write_back_duplicate_reclaim_digest=0)
    tree.pp_rank, tree.pp_size, tree.host_memory_mode, tree.enable_storage = 0, 1, "cache", False
    done = SimpleNamespace(finish_event=SimpleNamespace(query=lambda: True))
    tree.cache_controller = SimpleNamespace(ack_write_queue=[done] * 5, ack_load_queue=[done])
    answers: list[list[int]] = []
    tick = SimpleNamespace(
        shares_reduction=True, reduction_input=lambda: [9, 8, 9], take_result=answers.append
    )
    tree.kvtier = SimpleNamespace(tick=tick)
    assert tree._sync_hicache_ready_counts()[:2] == (3, 1)
    assert seen == [[5, 1, 0, 0, 9, 8, 9]] and answers == [[7, 8, 9]]
    tick.shares_reduction = False
    assert tree._sync_hicache_ready_counts()[:2] == (3, 1)
    tree._all_reduce(torch.tensor([1]), None)
    assert seen[1:] == [[5, 1, 0, 0], [1]] and len(answers) == 1


class Voter:
    """One rank's votes, with a store of its own, on a map that is told at once."""

    def __init__(self, stored: set[PageKey]) -> None:
        self.stored, self.lost = stored, 0
        self.tree = SimpleNamespace(
            ongoing_backup={},
            cache_controller=SimpleNamespace(write_storage=self.write, storage_backend=None),
        )
        self.tree.cache_controller.storage_backend = SimpleNamespace(local_store=self)
        self.map = TierMap(1000)
        self.operations = self.numbers = 0
        self.votes = StoreVotes(self.tree, self.map, self, self.number)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def write(self, host: Any, tokens: Any, hashes: list[str], *rest: Any) -> int:
        self.operations += 1
        return self.operations

    def lookup(self, keys: tuple[PageKey, ...]) -> list[Lookup]:
        return [Lookup.HIT if key in self.stored else Lookup.MISS for key in keys]

    def stats(self) -> Any:
        return SimpleNamespace(pages_evicted=self.lost, pages_corrupt=0, pages=len(self.stored))

    @property
    def stored_pages(self) -> list[PageKey]:
        """As the map has them."""
        return sorted(self.map.resident(Tier.STORAGE))

    def placed(self, keys: tuple[PageKey, ...], tier: Tier) -> None:
        self.map.placed(keys, tier, 0.0)

    def dropped(self, keys: tuple[PageKey, ...], tier: Tier) -> None:
        self.map.dropped(keys, tier)


def look(now: float, *voters: Voter) -> list[int]:
    """One tick of all: what each has marked is reduced, then looked at."""
    polls = [voter.votes.polls() for voter in voters]
    assert len({tuple((poll.number, len(poll.local)) for poll in mine) for mine in polls}) == 1
    for same in zip(*polls, strict=True):
        agreed = bytes(min(states) for states in zip(*(poll.local for poll in same), strict=True))
        for poll in same:
            poll.agreed(agreed, now)
    return [voter.votes.look(now) for voter in voters]


def test_a_page_is_stored_when_every_rank_has_it_and_gone_when_one_has_lost_it():
    keys = [PageKey(bytes([i]) * 32) for i in range(6)]
    one, other = Voter(set(keys)), Voter(set(keys) - {keys[2]})
    for voter in (one, other):
        write = voter.tree.cache_controller.write_storage
        operation = write(None, None, [key.hex() for key in keys[:4]])
        voter.tree.ongoing_backup[operation] = None
    look(0.0, one, other)
    look(0.1, one, other)
    assert one.map.count(Tier.STORAGE) == 0, "not before all ranks have written it"
    for voter in (one, other):
        voter.tree.ongoing_backup.clear()
        voter.votes.found([keys[4].hex(), keys[5].hex()], [Tier.STORAGE, Tier.REMOTE])
    for step in range(3):
        assert look(0.2 + step / 10, one, other) == [0, 0]
    assert [list(voter.map.resident(Tier.REMOTE)) for voter in (one, other)] == [[keys[5]]] * 2
    there = [keys[0], keys[1], keys[3], keys[4]]
    assert [voter.stored_pages for voter in (one, other)] == [there] * 2
    other.stored.discard(keys[1])
    other.lost = 1
    gone = [look(2.0 + step / 10, one, other) for step in range(5)]
    assert [sum(rank) for rank in zip(*gone, strict=True)] == [1, 1]
    there.remove(keys[1])
    assert [voter.stored_pages for voter in (one, other)] == [there] * 2
    one.votes.stop()
    one.tree.cache_controller.write_storage(None, None, [keys[5].hex()])
    one.votes.forget()
    assert not one.votes.polls()


def test_a_store_that_was_emptied_without_an_eviction_has_lost_its_pages_too():
    keys = [PageKey(bytes([i]) * 32) for i in range(3)]
    one, other = Voter(set(keys)), Voter(set(keys))
    for voter in (one, other):
        voter.votes.found([key.hex() for key in keys], [Tier.STORAGE] * 3)
    for step in range(3):
        look(step / 10, one, other)
    other.stored.clear()
    for step in range(6):
        look(2.0 + step / 10, one, other)
    assert one.map.count(Tier.STORAGE) == other.map.count(Tier.STORAGE) == 0


def test_a_rank_alone_asks_nobody(monkeypatch):
    rank = Rank(0)
    monkeypatch.setattr(rank.agreement, "_ranks", 1)
    assert not rank.tick.shares_reduction
    rank.ahead.waiting = [Poll(1, 1)]
    rank.ahead.waiting[0].mark(0, LANDED, 3.0)
    rank.tick.run(SimpleNamespace())
    assert rank.ahead.waiting[0].over and rank.ahead.waiting[0].seen_at == 3.0


@pytest.mark.parametrize(("other", "alike"), [(7, True), (6, False), (8, False)])
def test_ranks_whose_pools_differ_in_size_are_told_apart(other, alike):
    def least(data: torch.Tensor, op: Any) -> None:
        data.copy_(torch.minimum(data, torch.tensor([other if data.item() > 0 else -other])))

    assert Agreement(SimpleNamespace(_all_reduce_attn_groups=least), 2, first=True).same(7) is alike
    assert Agreement(None, 1, first=True).same(7)
