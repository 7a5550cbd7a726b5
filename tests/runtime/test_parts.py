"""What the parts of one process ask the planner before a prefix is restored."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kvtier.policy.messages import LeftToEngine, RestoreOffered, StepView
from sgl_kvtier.runtime.proof.record import Proof, State
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.scheduler.parts import Parts, parts_of
from sgl_kvtier.runtime.step.tracked import Announced, Candidate, Look, Requests, TurnRead, Waits
from sgl_kvtier.types import Span, Tier

PAGE = 4
OFFER = RestoreOffered("r", 0.0, 50, 2, 10, ((Span(2, 4), Tier.HOST), (Span(4, 10), Tier.STORAGE)))


class Queue:
    """A view of the queue with `fresh` tokens, `ahead` of them before any request; what it is told
    of prefixes left to SGLang is in `left_tokens`.
    """

    def __init__(self, fresh: int, ahead: int) -> None:
        self.view = StepView(3.0, ("r",), fresh_tokens=fresh)
        self.ahead = ahead
        self.left_tokens: dict[str, int] = {}

    def of(self, scheduler: Any, now: float) -> StepView:
        return self.view

    def before(self, view: StepView, scheduler: Any, rid: str) -> StepView:
        return replace(view, fresh_tokens=self.ahead)

    def left(self, rid: str, tokens: int) -> None:
        self.left_tokens[rid] = tokens


def parts_with(query: Any, queue: Queue) -> Parts:
    """Parts with this view of the queue, and whose planner answers so."""
    parts = object.__new__(Parts)
    parts.context = SimpleNamespace(page=PAGE, scheduler=object(), moment=lambda: 3.0)
    parts.views = queue
    parts.planner = SimpleNamespace(query=query)
    parts.engine = SimpleNamespace(counters=RestoreCounters())
    return parts


def test_only_what_is_computed_before_a_request_is_fresh_in_the_view_it_is_asked_with():
    asked: list[LeftToEngine] = []
    parts = parts_with(asked.append, Queue(fresh=100, ahead=30))
    assert parts._why_left(OFFER) is None
    (question,) = asked
    assert question.offer is OFFER
    assert question.view.fresh_tokens == 30


@pytest.mark.parametrize(("why", "left"), [("no room", 10 * PAGE), (None, 0)])
def test_those_behind_a_request_are_told_what_of_it_sglang_loads(why, left):
    queue = Queue(fresh=0, ahead=0)
    assert parts_with(lambda question: why, queue)._why_left(OFFER) == why
    assert queue.left_tokens == {"r": left}


def test_a_planner_that_fails_leaves_the_prefix_to_sglang_and_is_counted():
    def fails(question):
        raise ValueError("a defect")

    parts = parts_with(fails, Queue(fresh=0, ahead=0))
    assert parts._why_left(OFFER) == "planner failed"
    assert parts.engine.counters.planner_failures == 1


def test_whether_one_waits_is_asked_with_the_empty_pages_of_host_memory():
    asked: list[Any] = []

    def held_back(*question):
        asked.append(question)
        return True

    parts = parts_with(None, Queue(fresh=0, ahead=0))
    parts.context.host = SimpleNamespace(available=lambda: 7 * PAGE)
    parts.queue = SimpleNamespace(held_back=held_back)
    req: Any = object()
    assert parts.held_back(req)
    assert asked == [(req, 7, 3.0)]


def parts_that_order(proof: Proof) -> tuple[Parts, list[float]]:
    """Parts whose queue notes when it was sorted."""
    parts, sorted_at = parts_with(None, Queue(fresh=0, ahead=0)), list[float]()
    parts.context.tree = SimpleNamespace(pp_size=1)
    parts.engine.proof = proof
    queue = SimpleNamespace(sort=lambda waiting, now: sorted_at.append(now), in_force=True)
    parts.queue = queue
    return parts, sorted_at


def test_the_queue_is_ordered_while_restoring_is_proven_and_no_more_once_refuted():
    proof = Proof(looks=True)
    parts, sorted_at = parts_that_order(proof)
    parts.order_queue([])
    assert proof.state is State.PROVING
    assert sorted_at == [3.0] and parts.orders
    proof.refute()
    parts.order_queue([])
    assert sorted_at == [3.0] and not parts.orders


def test_where_nothing_is_compared_the_queue_is_ordered_from_the_start():
    parts, sorted_at = parts_that_order(Proof())
    parts.order_queue([])
    assert sorted_at == [3.0]


def test_a_cache_of_sglangs_own_has_no_parts():
    assert parts_of(SimpleNamespace()) is None


# The one record of a request: what ends with its stay, what stays, and what a sweep finds.


HANDLE: Any = SimpleNamespace(rid="a")
NO_REQ: Any = None


def full(requests: Requests) -> Any:
    """A record with something in every field that ends with a stay in the queue or the batch."""
    record = requests.record("a")
    record.arrived = record.order_round = record.sglang_loads = 3
    record.turn_read = TurnRead(16)
    record.candidate = Candidate(Waits.SGLANG_READS, HANDLE)
    requests.note_candidate(record)
    return record


def test_a_request_that_is_gone_leaves_no_record():
    requests = Requests()
    full(requests)
    requests.forget("a")
    requests.forget("never seen")
    assert not requests.records and not requests.candidates


def test_a_retracted_request_is_still_known_to_the_planner_and_nothing_else():
    requests = Requests()
    full(requests).announced = announced = Announced(NO_REQ, (), "s", 16)
    requests.forget("a")
    record = requests.get("a")
    assert record is not None and record.announced is announced
    assert not (record.arrived or record.order_round or record.sglang_loads)
    assert record.turn_read is None and record.candidate is None and not requests.candidates
    assert requests.drop_announced("a") is announced
    assert requests.get("a") is None and requests.drop_announced("a") is None


def test_a_look_at_a_request_outlives_it_until_the_next_tick():
    requests = Requests()
    record = requests.record("a")
    record.look = Look(HANDLE, None)
    requests.note_candidate(record)
    requests.forget("a")
    assert list(requests.candidates) == ["a"]


def test_a_record_says_in_one_line_what_every_part_knows_of_it():
    requests = Requests()
    record = full(requests)
    record.look = Look(HANDLE, None)
    record.announced = Announced(NO_REQ, (), "s", 16)
    record.restoration = SimpleNamespace(
        mode=None, resident=1, pages=9, front=2, loads=[SimpleNamespace(ended=False)], admitted=True
    )
    assert str(record) == (
        "request a: arrived as number 3; left to SGLang: its first 3 tokens; storage has 16 "
        "tokens, read again 0 times; offered in the next tick; candidate: SGLang reads it; "
        "restoration: no answer yet, pages 1 to 9, prefill cursor at 2, 1 loads in flight, "
        "admitted; session s, 0 pages named, has not run"
    )
    assert str(requests.record("b")) == "request b: nothing noted"


def test_no_request_is_forgotten_while_it_is_restored():
    requests = Requests()
    restored: Any = SimpleNamespace()
    requests.record("a").restoration = restored
    with pytest.raises(AssertionError, match="while it is restored"):
        requests.forget("a")


def test_candidates_keep_the_order_in_which_they_came():
    requests = Requests()
    for rid in ("a", "b"):
        record = requests.record(rid)
        record.look = Look(SimpleNamespace(rid=rid), None)
        requests.note_candidate(record)
    first = requests.record("a")
    first.look, first.candidate = None, Candidate(Waits.OLD_LOADS, HANDLE)
    requests.note_candidate(first)
    assert list(requests.candidates) == ["a", "b"]


def test_who_left_without_a_call_is_gone_after_two_sweeps_and_who_comes_back_is_not():
    requests, gone = Requests(), list[str]()
    for rid in ("a", "b", "c"):
        requests.record(rid).prefix = torch.empty(0)
    requests.sweep({"c"}, gone.append)
    requests.sweep({"b", "c"}, gone.append)
    requests.sweep({"c"}, gone.append)
    assert gone == ["a"] and list(requests.records) == ["b", "c"]
