"""What the adder charges and grants for restoring requests. SGLang's adder is asked for real;
engine and budget are fakes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sgl_kvtier.policy.messages import Compute
from sgl_kvtier.runtime.scheduler.prefill_adder import KVTierPrefillAdder
from sgl_kvtier.types import Span

PAGE = 16


class Budget:
    """So many tokens are free; nothing can be evicted."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.total_offset = 1000

    def _available_and_evictable(self) -> int:
        return self.free

    def available_chunk_tokens(self, limit: int) -> int:
        return limit


def adder_with(engine: Any, free: int = 4096) -> KVTierPrefillAdder:
    adder = KVTierPrefillAdder.__new__(KVTierPrefillAdder)
    adder.tree_cache = SimpleNamespace(kvtier=SimpleNamespace(engine=engine))
    adder.page_size = PAGE
    adder.memory_budget = Budget(free)
    adder.can_run_list = []
    adder.new_chunked_req = None
    adder.rem_chunk_tokens = 256
    adder.chunked_req_limit = None
    adder.running_batch = SimpleNamespace(reqs=[])
    return adder


def test_a_page_that_is_spliced_at_admission_is_not_credited_a_second_time(monkeypatch):
    r = SimpleNamespace(resident=0, front=0, owner=dict.fromkeys(range(4)))
    splice = Compute("r", Span(0, 3), None)
    engine = SimpleNamespace(of=lambda rid: r, computes={"r": splice}, trusted=lambda r, span: True)
    adder, seen = adder_with(engine), []

    def charged(self: Any, req: Any, has_chunked_req: bool, align: int | None) -> AddReqResult:
        seen.append((self.memory_budget.total_offset, req.prefix_len))
        return AddReqResult.OTHER

    monkeypatch.setattr(PrefillAdder, "add_one_req", charged)
    req = SimpleNamespace(rid="r", prefix_len=0, host_hit_length=64)
    adder.add_one_req(req, False, None)
    # three of the four loaded pages are its prefix; only the fourth is room it will not take
    assert seen == [(1000 - PAGE, 3 * PAGE)]
    assert (adder.memory_budget.total_offset, req.prefix_len, req.host_hit_length) == (1000, 0, 64)


def test_the_next_chunk_of_any_request_is_what_there_is_room_for(monkeypatch):
    given: list[int] = []
    engine = SimpleNamespace(of=lambda rid: None, holds_memory=True, give_room=given.append)
    limits: list[int | None] = []

    def add(self: Any, req: Any) -> None:
        limits.append(self.chunked_req_limit)

    monkeypatch.setattr(PrefillAdder, "add_chunked_req", add)
    req = SimpleNamespace(rid="other", prefix_len=0, full_untruncated_fill_ids=[0] * 300)
    assert adder_with(engine, free=1000).add_chunked_req(req) is None
    assert adder_with(engine, free=100).add_chunked_req(req) is None
    assert adder_with(engine, free=20).add_chunked_req(req) is req, "it waits for this pass"
    assert limits == [None, 80]
    assert given == [256 + PAGE - 100, 256 + PAGE - 20]
