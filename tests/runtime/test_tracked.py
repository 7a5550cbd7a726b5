"""The one record of a request: what ends with its stay, what stays, and what a sweep finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kvtier.runtime.step.tracked import Announced, Candidate, Look, Requests, TurnRead, Waits

HANDLE: Any = SimpleNamespace(rid="a")
NO_REQ: Any = None


def full(requests: Requests) -> Any:
    """A record with something in every field that ends with a stay in the queue or the batch."""
    record = requests.of("a")
    record.arrived = record.order_round = record.sglang_loads = 3
    record.turn_read = TurnRead(16)
    record.candidate = Candidate(Waits.SGLANG_READS, HANDLE)
    requests.note_candidate(record)
    return record


def test_a_request_that_is_gone_leaves_no_record() -> None:
    requests = Requests()
    full(requests)
    requests.forget("a")
    requests.forget("never seen")
    assert not requests.records and not requests.candidates


def test_a_retracted_request_is_still_known_to_the_planner_and_nothing_else() -> None:
    requests = Requests()
    full(requests).announced = announced = Announced(NO_REQ, (), "s", 16)
    requests.forget("a")
    record = requests.get("a")
    assert record is not None and record.announced is announced
    assert not (record.arrived or record.order_round or record.sglang_loads)
    assert record.turn_read is None and record.candidate is None and not requests.candidates
    assert requests.drop_announced("a") is announced
    assert requests.get("a") is None and requests.drop_announced("a") is None


def test_a_look_at_a_request_outlives_it_until_the_next_tick() -> None:
    requests = Requests()
    record = requests.of("a")
    record.look = Look(HANDLE, None)
    requests.note_candidate(record)
    requests.forget("a")
    assert list(requests.candidates) == ["a"]


def test_a_record_says_in_one_line_what_every_part_knows_of_it() -> None:
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
    assert str(requests.of("b")) == "request b: nothing noted"


def test_no_request_is_forgotten_while_it_is_restored() -> None:
    requests = Requests()
    restored: Any = SimpleNamespace()
    requests.of("a").restoration = restored
    with pytest.raises(AssertionError, match="while it is restored"):
        requests.forget("a")


def test_candidates_keep_the_order_in_which_they_came() -> None:
    requests = Requests()
    for rid in ("a", "b"):
        record = requests.of(rid)
        record.look = Look(SimpleNamespace(rid=rid), None)  # type: ignore[arg-type]
        requests.note_candidate(record)
    first = requests.of("a")
    first.look, first.candidate = None, Candidate(Waits.OLD_LOADS, HANDLE)
    requests.note_candidate(first)
    assert list(requests.candidates) == ["a", "b"]


def test_who_left_without_a_call_is_gone_after_two_sweeps_and_who_comes_back_is_not() -> None:
    requests, gone = Requests(), list[str]()
    for rid in ("a", "b", "c"):
        requests.of(rid).prefix = torch.empty(0)
    requests.sweep({"c"}, gone.append)
    requests.sweep({"b", "c"}, gone.append)
    requests.sweep({"c"}, gone.append)
    assert gone == ["a"] and list(requests.records) == ["b", "c"]
