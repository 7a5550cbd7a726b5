"""Reads of SGLang's that are taken back when the device has room: the engine's offers over fakes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_request import PLAIN

from sgl_kvtier.policy.messages import RestoreOffered
from sgl_kvtier.runtime.restore import offers as offers_module
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.restore.offers import _MOST_STOPPING_S, _MOST_STOPPING_TICKS, Offers
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.types import Span, Tier

PAGE, HIT = 16, 8


@dataclass(frozen=True)
class Handle:
    """As far as SGLang's is used here."""

    rid: str


@dataclass(eq=False)
class Read:
    """SGLang's read of one request's stored pages."""

    handle: Handle
    completed_tokens: int = 0
    storage_hit_count: int = HIT * PAGE
    storage_start: int = 0
    stopped: bool = False
    host_indices: Any = ()
    hash_value: list[str] = field(default_factory=lambda: [f"{n:064x}" for n in range(HIT)])

    def is_terminated(self) -> bool:
        return self.stopped


class Lab:
    """Offers over a device of the test's. `why`: what the planner answers to `asked`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, alone: bool = True) -> None:
        self.why: str | None = "no room"
        self.asked: list[RestoreOffered] = []
        self.given_up: list[list[str]] = []
        self.claimable = 0
        self.now = 0.0
        self.queue: list[Any] = []
        backend = SimpleNamespace(begin_read=None, stop_reading=self.given_up.append)
        controller = SimpleNamespace(
            mem_pool_host=SimpleNamespace(size=1024, size_per_token=4),
            storage_backend=backend,
            write_policy="write_through",
            terminate_prefetch=lambda read: setattr(read, "stopped", True),
        )
        pool = SimpleNamespace(size=1024, available_size=lambda: self.claimable)
        self.tree = SimpleNamespace(
            page_size=PAGE,
            cache_controller=controller,
            ongoing_prefetch={},
            token_to_kv_pool_allocator=pool,
            evictable_size=lambda: 0,
            discard_storage_prefetch_accounting=lambda handle: None,
            lock=lambda node: None,
        )
        context = StepContext(self.tree, alone=alone)
        context.scheduler = SimpleNamespace(waiting_queue=self.queue)
        monkeypatch.setattr(context, "moment", lambda: self.now)
        monkeypatch.setattr(offers_module, "find", self.find)
        self.restorations: dict[str, Restoration] = {}
        self.requests = context.requests
        self.offers = Offers(context, self.begin, [], RestoreCounters(), PAGE, self.why_declined)

    def begin(self, r: Restoration) -> None:
        self.restorations[r.rid] = r
        self.requests.record(r.rid).restoration = r

    def why_declined(self, offer: RestoreOffered) -> str | None:
        self.asked.append(offer)
        return self.why

    def find(self, context: StepContext, req: Any, stored: Any) -> Restoration:
        return Restoration(
            req.rid, req, HIT * PAGE + 1, 0, HIT, stored.sources, stored.keys, torch.empty(0)
        )

    def reads(self, rid: str) -> Read:
        """A request that was left to SGLang, which reads its pages now."""
        read = Read(Handle(rid))
        req = SimpleNamespace(rid=rid, cache_request_handle=read.handle, last_node=0, **PLAIN)
        self.queue.append(req)
        assert not self.offers.hit(read, HIT * PAGE)
        self.tree.ongoing_prefetch[read.handle] = SimpleNamespace(operation=read)
        self.asked.clear()
        return read

    def taken_back(self) -> Read:
        """A read that is stopped, since the planner wants its request after all."""
        read = self.reads("a")
        self.why = None
        assert self.room(64) and read.stopped
        return read

    def ends(self, read: Read) -> None:
        """SGLang is done with a read."""
        del self.tree.ongoing_prefetch[read.handle]

    def room(self, tokens: int) -> bool:
        """A tick with so much claimable; whether a read was taken back."""
        self.claimable = tokens
        return self.offers.look_again()


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(monkeypatch)


def test_a_read_is_stopped_and_its_request_offered_when_it_has_ended(lab):
    read = lab.taken_back()
    assert lab.given_up == [read.hash_value]
    assert lab.offers.is_delayed(read.handle) and lab.offers.delayed == ["a"]
    assert lab.offers.offer_stopped() == [] and not lab.restorations, "the read has not ended"
    lab.ends(read)
    assert lab.offers.offer_stopped() == []
    assert not lab.offers.is_delayed(read.handle) and list(lab.restorations) == ["a"]


def test_a_stopped_read_whose_request_is_left_once_more_is_made_again(lab):
    read = lab.taken_back()
    lab.ends(read)
    lab.why = "no room"
    assert lab.offers.offer_stopped() == ["a"] and not lab.restorations
    assert not lab.offers.is_delayed(read.handle)


def test_a_stopped_read_whose_request_is_gone_is_forgotten(lab):
    read = lab.taken_back()
    lab.ends(read)
    lab.queue.clear()
    assert lab.offers.offer_stopped() == [] and not lab.restorations
    assert not lab.offers.delayed


@pytest.mark.parametrize("why", ["host copies do not stay", "nothing is restored"])
def test_nothing_is_taken_back_where_it_could_not_be_restored(lab, why):
    read = lab.reads("a")
    lab.why = None
    if why == "nothing is restored":
        lab.offers.is_on = False
    else:
        lab.tree.cache_controller.write_policy = "write_back"
    assert not lab.room(64) and not lab.asked and not read.stopped


def test_what_was_read_so_far_is_offered_as_host_memory(lab):
    read = lab.reads("a")
    read.completed_tokens = 3 * PAGE
    lab.room(64)
    (offer,) = lab.asked
    assert offer.sources == ((Span(0, 3), Tier.HOST), (Span(3, HIT), Tier.STORAGE))
    assert not read.stopped, "the planner leaves it"


def test_nothing_is_asked_while_the_device_gets_no_more_room(lab):
    lab.reads("a")
    for tokens in (64, 64, 32, 64, 64):
        lab.room(tokens)
    assert len(lab.asked) == 2


def test_the_room_of_one_request_is_no_news_to_the_next(lab):
    first = lab.reads("a")
    lab.claimable = 64
    lab.reads("b")
    assert not lab.room(64) and [offer.rid for offer in lab.asked] == ["a"]
    lab.ends(first)
    assert not lab.room(64) and len(lab.asked) == 1, "b was asked for with as much"
    lab.room(32)
    assert not lab.room(64) and [offer.rid for offer in lab.asked] == ["a", "b"]


def test_a_rest_that_is_too_short_is_left(lab):
    read = lab.reads("a")
    lab.why, read.completed_tokens = None, HIT * PAGE
    assert not lab.room(64) and not lab.asked


def test_reads_are_taken_back_in_the_order_they_are_made(lab):
    first, second = lab.reads("a"), lab.reads("b")
    lab.why = None
    assert lab.room(64) and first.stopped and not second.stopped
    assert lab.room(128) and second.stopped


def test_who_is_gone_or_was_read_is_not_asked_about(lab):
    read, gone = lab.reads("a"), lab.reads("b")
    lab.why = None
    lab.ends(read)
    lab.requests.forget("b")
    assert not lab.room(64) and not lab.asked and not gone.stopped


def test_a_request_does_not_wait_for_ever_for_a_read_that_hangs(lab):
    read = lab.taken_back()
    lab.now = _MOST_STOPPING_S + 0.1
    assert lab.offers.offer_stopped() == []
    assert not lab.offers.is_delayed(read.handle) and not lab.restorations


def test_on_several_ranks_ticks_count_where_their_time_stands_still(monkeypatch):
    lab = Lab(monkeypatch, alone=False)
    read = lab.taken_back()
    lab.now = 1e3  # agreed on for the first time after a pause
    for _ in range(_MOST_STOPPING_TICKS):
        lab.offers.offer_stopped()
    assert lab.offers.is_delayed(read.handle)
    lab.offers.offer_stopped()
    assert not lab.offers.is_delayed(read.handle)


def test_a_hit_of_a_request_that_is_gone_is_nobodys(lab):
    assert not lab.offers.hit(Read(Handle("gone")), HIT * PAGE)
    lab.why = None
    assert not lab.room(64) and not lab.asked
