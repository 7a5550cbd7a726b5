"""What the adder charges and grants for restoring requests. SGLang's adder is asked for real;
engine and budget are fakes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sgl_kvtier.policy.messages import Compute
from sgl_kvtier.runtime.scheduler.prefill_adder import KVTierPrefillAdder
from sgl_kvtier.types import Span, Tier

PAGE = 16


class Budget:
    """So many tokens are free; nothing can be evicted."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.total_offset = 1000
        self.current_offset = 0

    @property
    def remaining_total(self) -> int:
        return self.free - self.total_offset

    def _available_and_evictable(self) -> int:
        return self.free

    def available_chunk_tokens(self, limit: int) -> int:
        return limit


class Room:
    """With write-back: so many slots are empty, and nothing more can leave."""

    def __init__(self, free: int | None, transfers: int = 0) -> None:
        self.matters = free is not None
        self.transfers = transfers
        self.asked: list[int] = []
        self._free = free or 0

    def free_up(self, tokens: int) -> int:
        self.asked.append(tokens)
        return self._free


def adder_with(
    engine: Any, free: int = 4096, chunk: Any = None, held: Any = lambda *asked: False
) -> KVTierPrefillAdder:
    """`chunk` is the planner's word on a chunk where it orders the queue, `held` on one that could
    be admitted.
    """
    adder = KVTierPrefillAdder.__new__(KVTierPrefillAdder)
    parts = SimpleNamespace(
        engine=engine,
        orders=chunk is not None,
        chunk_beside=chunk,
        held_back=held,
        ahead=object(),
        context=SimpleNamespace(device=SimpleNamespace(available=lambda: free // 2)),
    )
    engine.context = getattr(engine, "context", None) or SimpleNamespace(
        room=Room(None), anchors=None
    )
    adder.tree_cache = SimpleNamespace(kvtier=parts)
    adder.page_size = PAGE
    adder.memory_budget = Budget(free)
    adder.can_run_list = []
    adder.new_chunked_req = None
    adder.rem_chunk_tokens = 256
    adder.chunked_req_limit = None
    adder.running_batch = SimpleNamespace(reqs=[], batch_is_full=False)
    adder.prefill_max_requests = None
    return adder


def limits_of(monkeypatch: Any) -> list[int | None]:
    """The limits of chunks with which SGLang's own adder is asked to add the next chunk of a
    request; nothing is left of it.
    """
    limits: list[int | None] = []
    monkeypatch.setattr(
        PrefillAdder, "add_chunked_req", lambda self, req: limits.append(self.chunked_req_limit)
    )
    return limits


def test_a_page_that_is_spliced_at_admission_is_not_credited_a_second_time(monkeypatch):
    r = SimpleNamespace(resident=0, front=0, owner=dict.fromkeys(range(4)))
    splice = Compute("r", Span(0, 3), None)
    engine = SimpleNamespace(
        restoration_of=lambda req: r, computes={"r": splice}, trusted=lambda r, span: True
    )
    adder, seen = adder_with(engine), []

    def charged(self, req, has_chunked_req, align):
        seen.append((self.memory_budget.total_offset, req.prefix_len, req.storage_hit_length))
        return AddReqResult.OTHER

    monkeypatch.setattr(PrefillAdder, "add_one_req", charged)
    hit = {"storage_hit_length": 32, "storage_hit_start": 16}
    req = SimpleNamespace(rid="r", prefix_len=0, host_hit_length=64, **hit)
    adder.add_one_req(req, False, None)
    # three of the four loaded pages are its prefix; only the fourth is room it will not take
    assert seen == [(1000 - PAGE, 3 * PAGE, 0)]
    assert (adder.memory_budget.total_offset, req.prefix_len, req.host_hit_length) == (1000, 0, 64)
    assert (req.storage_hit_length, req.storage_hit_start) == (32, 16), "it was not admitted"


def test_what_sglang_had_read_of_a_spliced_prefix_is_counted_as_storages():
    adder = adder_with(SimpleNamespace())
    adder.log_device_hit_tokens = 6 * PAGE
    adder.log_host_hit_tokens = adder.log_storage_hit_tokens = 0
    req = SimpleNamespace(retracted_stain=False)
    r = SimpleNamespace(spliced={Tier.HOST: 4, Tier.STORAGE: 1})
    adder._count_admitted(req, r, Span(PAGE, 6 * PAGE), Span(3 * PAGE, 9 * PAGE))
    cached = req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage
    logged = adder.log_device_hit_tokens, adder.log_host_hit_tokens, adder.log_storage_hit_tokens
    assert cached == logged == (PAGE, PAGE, 4 * PAGE)


def test_the_next_chunk_of_any_request_is_what_there_is_room_for(monkeypatch):
    given: list[int] = []
    engine = SimpleNamespace(
        restoration_of=lambda req: None, holds_memory=True, give_room=given.append
    )
    limits, req = limits_of(monkeypatch), in_chunks("other", 300)
    assert adder_with(engine, free=1000).add_chunked_req(req) is None
    assert adder_with(engine, free=100).add_chunked_req(req) is None
    assert adder_with(engine, free=20).add_chunked_req(req) is req, "it waits for this pass"
    assert limits == [None, 80]
    assert given == [256 + PAGE - 100, 256 + PAGE - 20]


PLAIN = SimpleNamespace(
    restoration_of=lambda req: None, holds_memory=False, give_room=lambda tokens: None
)
"""An engine that restores nothing."""


def in_chunks(rid: str, prompt: int, done: int = 0, output: int = 8) -> Any:
    return SimpleNamespace(
        rid=rid,
        prefix_len=done,
        host_hit_length=0,
        full_untruncated_fill_ids=[0] * prompt,
        output_ids=(),
        sampling_params=SimpleNamespace(max_new_tokens=output),
    )


def asking(tokens: int) -> tuple[KVTierPrefillAdder, list[tuple[str, int, int, int]]]:
    """An adder whose planner grants so many tokens of every chunk, and what it is asked."""
    asked: list[tuple[str, int, int, int]] = []

    def chunk(req: Any, left: int, most: int, room: int) -> int:
        asked.append((req.rid, left, most, room))
        return min(tokens, left, most)

    return adder_with(PLAIN, chunk=chunk), asked


def test_the_next_chunk_is_as_long_as_the_planner_says_and_its_rest_is_kept_for_it(monkeypatch):
    limits: list[int | None] = []

    def add(self, req):
        limits.append(self.chunked_req_limit)
        req.extend_end = req.prefix_len + (self.chunked_req_limit or self.rem_chunk_tokens)
        self.rem_chunk_tokens -= req.extend_end - req.prefix_len
        self.can_run_list.append(req)
        return req

    monkeypatch.setattr(PrefillAdder, "add_chunked_req", add)
    (adder, asked), req = asking(64), in_chunks("long", 1000, 200)
    assert adder.add_chunked_req(req) is req
    assert adder.rem_chunk_tokens == 64, "the others have as many tokens as the chunk"
    rest = 800 + 8 + PAGE
    assert asked == [("long", 800, 256, 4096 - 1000 - rest)]
    assert limits == [64]
    assert adder.memory_budget.total_offset == 1000 + rest - 64
    (whole, _), (full, never) = asking(256), asking(64)
    whole.add_chunked_req(req)
    full.running_batch.batch_is_full = True
    full.add_chunked_req(req)
    alone, neither = asking(64)
    alone.prefill_max_requests = 1
    alone.add_chunked_req(req)
    assert limits == [64, None, None, None]
    assert whole.memory_budget.total_offset == full.memory_budget.total_offset == 1000
    assert not never and not neither, "nobody can run beside it"


def test_the_first_chunk_is_as_long_as_the_planner_says(monkeypatch):
    limits: list[int | None] = []

    def add(self, req, has_chunked_req, align):
        limits.append(self.rem_chunk_tokens)
        req.extend_end = self.rem_chunk_tokens
        self.rem_chunk_tokens, self.new_chunked_req = 0, req
        return AddReqResult.OTHER

    monkeypatch.setattr(PrefillAdder, "add_one_req", add)
    monkeypatch.setattr(PrefillAdder, "budget_state", lambda self: AddReqResult.CONTINUE)
    (adder, asked), req = asking(64), in_chunks("long", 1000)
    assert adder.add_one_req(req, False, None) is AddReqResult.CONTINUE
    rest = 1000 + 8 + PAGE
    assert asked == [("long", 1000, 256, 4096 - 1000 - rest)]
    assert limits == [64]
    assert adder.rem_chunk_tokens == 64, "the others have as many tokens as the chunk"
    assert adder.memory_budget.total_offset == 1000 + rest - 64


def left_to_sglang(monkeypatch: Any) -> list[str]:
    """The requests that SGLang's own adder is asked for from now on; it answers OTHER."""
    seen: list[str] = []

    def add(self: Any, req: Any, has_chunked_req: bool, align: int | None) -> AddReqResult:
        seen.append(req.rid)
        return AddReqResult.OTHER

    monkeypatch.setattr(PrefillAdder, "add_one_req", add)
    return seen


def test_one_that_needs_the_taken_slot_keeps_none_waiting_that_a_chunk_was_cut_for(monkeypatch):
    seen = left_to_sglang(monkeypatch)

    def add_next(self, req):
        req.extend_end = req.prefix_len + 64
        self.can_run_list.append(req)
        return req

    monkeypatch.setattr(PrefillAdder, "add_chunked_req", add_next)
    long, short = in_chunks("long", 1000), in_chunks("short", 1000, 950)
    cut, whole = asking(64)[0], asking(256)[0]
    for adder in (cut, whole):
        adder.add_chunked_req(in_chunks("slot", 1000, 200))
    assert cut.add_one_req(long, True, None) is AddReqResult.CONTINUE
    assert cut.add_one_req(short, True, None) is AddReqResult.OTHER
    passed = [cut.add_one_req(long, True, None) for _ in range(8)]
    assert passed == [AddReqResult.CONTINUE] * 7 + [AddReqResult.OTHER], "not the whole queue"
    assert whole.add_one_req(long, True, None) is AddReqResult.OTHER
    theirs = adder_with(PLAIN)  # another policy of SGLang's is in force
    assert theirs.add_one_req(long, True, None) is AddReqResult.OTHER
    assert seen == ["short", "long", "long", "long"]


def holding(*answers: bool) -> tuple[KVTierPrefillAdder, list[str]]:
    """An adder whose planner answers so when asked whether one waits, and of which it is asked.
    4,096 tokens of the device can be claimed, half of them by evicting; 1,000 are others' already.
    """
    asked: list[str] = []
    left = list(answers)

    def held(req: Any) -> bool:
        asked.append(req.rid)
        return left.pop(0)

    adder = adder_with(PLAIN, chunk=lambda *asked: 256, held=held)
    adder.running_batch.reqs = [1]
    return adder, asked


def test_one_that_fits_waits_where_the_planner_says_so(monkeypatch):
    added = left_to_sglang(monkeypatch)
    adder, asked = holding(True, False)
    large = in_chunks("large", 2000)
    assert adder.add_one_req(large, False, None) is AddReqResult.OTHER
    assert not added, "SGLang ends the pass, and tries again"
    adder.add_one_req(large, False, None)
    adder.add_one_req(in_chunks("small", 1000), False, None)
    adder.add_one_req(in_chunks("huge", 4000), False, None)
    assert asked == ["large"] * 2, "what is empty is enough for one, and the other does not fit"
    assert added == ["large", "small", "huge"]


def test_one_that_could_not_run_anyway_is_not_held_back(monkeypatch):
    left_to_sglang(monkeypatch)
    adder, asked = holding()
    adder.add_one_req(in_chunks("needs the slot", 2000), True, None)
    adder._is_cut = True
    verdict = adder.add_one_req(in_chunks("needs the slot", 2000), True, None)
    assert verdict is AddReqResult.CONTINUE and not asked


def test_nobody_is_held_back_where_nothing_looks_ahead_any_more(monkeypatch):
    left_to_sglang(monkeypatch)
    adder, asked = holding()
    adder.tree_cache.kvtier.ahead = None
    adder.add_one_req(in_chunks("large", 2000), False, None)
    assert not asked


def in_row(front: int, splice: Span) -> tuple[KVTierPrefillAdder, Any, list[Any], list[Any]]:
    """An adder whose request holds the slot with `front` pages computed, and is granted a splice;
    the request, what was spliced, and what was written into its row.
    """
    spliced: list[Span] = []
    written: list[Any] = []

    def take(r: Any, span: Span) -> torch.Tensor:
        spliced.append(span)
        r.spliced = {Tier.STORAGE: len(span)}
        return torch.arange(len(span) * PAGE)

    r = SimpleNamespace(front=front, pages=60, closed=False, owner={}, spliced={})
    engine = SimpleNamespace(
        restoration_of=lambda req: r,
        computes={"r": Compute("r", splice, None)},
        trusted=lambda r, span: True,
        abandon=lambda r, how: setattr(r, "closed", how),
        splice=take,
        advance=lambda r, end: None,
        counters=SimpleNamespace(unpark=lambda r: None),
        holds_memory=False,
        give_room=lambda tokens: None,
    )
    adder = adder_with(engine)
    pool = SimpleNamespace(
        req_to_token=torch.zeros(1, dtype=torch.int32),
        write=lambda where, slots: written.append((where, slots.tolist())),
    )
    adder.tree_cache.req_to_token_pool = pool
    adder.log_hit_tokens = adder.log_host_hit_tokens = adder.log_storage_hit_tokens = 0
    req = in_chunks("r", 1000, front * PAGE)
    req.kv = SimpleNamespace(req_pool_idx=3, kv_allocated_len=0, kv_committed_len=0)
    req.retracted_stain, req.cached_tokens_host, req.cached_tokens_storage = False, 0, 0
    return adder, req, spliced, written


def add_all(self: Any, req: Any) -> None:
    req.extend_end = 1000
    self.can_run_list.append(req)


def test_a_splice_puts_the_slots_behind_the_prefix_and_moves_every_length_with_it(monkeypatch):
    monkeypatch.setattr(PrefillAdder, "add_chunked_req", add_all)
    adder, req, spliced, written = in_row(2, Span(2, 6))
    adder.add_chunked_req(req)
    assert spliced == [Span(2, 6)]
    assert written == [((3, slice(2 * PAGE, 6 * PAGE)), list(range(4 * PAGE)))]
    lengths = req.prefix_len, req.kv.kv_allocated_len, req.kv.kv_committed_len
    assert lengths == (6 * PAGE,) * 3
    assert (req.cached_tokens_host, req.cached_tokens_storage) == (0, 4 * PAGE)
    assert adder.log_storage_hit_tokens == 4 * PAGE


def test_pages_that_were_spliced_in_a_pass_without_a_chunk_are_not_spliced_again(monkeypatch):
    monkeypatch.setattr(PrefillAdder, "add_chunked_req", add_all)
    adder, req, spliced, written = in_row(4, Span(2, 6))
    adder.add_chunked_req(req)
    assert spliced == [Span(4, 6)]
    assert written[0][0] == (3, slice(4 * PAGE, 6 * PAGE))
    done, req, spliced, _ = in_row(6, Span(2, 6))
    done.add_chunked_req(req)
    assert spliced == [] and done.can_run_list == [req]


@pytest.mark.parametrize(
    ("tokens", "pages", "limit"),
    [
        pytest.param(250, 60, 240, id="it ends where a page ends"),
        pytest.param(250, 2, None, id="nothing more can be attached"),
        pytest.param(1000, 60, None, id="the whole rest fits"),
    ],
)
def test_a_chunk_beside_requests_that_decode_ends_where_a_loaded_page_can_follow(
    monkeypatch, tokens, pages, limit
):
    """SGLang takes the tokens of requests that decode off those of a chunk."""
    limits = limits_of(monkeypatch)
    adder, req, _, _ = in_row(2, Span(2, 2))
    adder.rem_chunk_tokens = tokens
    engine = adder.tree_cache.kvtier.engine
    engine.restoration_of(req).pages = pages
    engine.counters.park = lambda r: None
    adder.add_chunked_req(req)
    assert limits == [limit]


ADMISSION = SimpleNamespace(is_chunked=False)


@pytest.fixture
def admits(monkeypatch):
    """SGLang's own adder would admit every request."""
    monkeypatch.setattr(PrefillAdder, "_select_prefill_admission", lambda *a, **how: ADMISSION)


def writing_back(free: int, transfers: int = 0) -> tuple[KVTierPrefillAdder, Room, Any]:
    """An adder that SGLang tells of 4096 tokens, of which so many are empty slots; and a request."""
    room = Room(free, transfers)
    context = SimpleNamespace(room=room, anchors=None, device=SimpleNamespace(tokens=4096))
    adder = adder_with(SimpleNamespace(**{**vars(PLAIN), "context": context}))
    return adder, room, SimpleNamespace(rid="r", prefix_len=0, host_hit_length=0)


@pytest.mark.parametrize(
    ("free", "transfers", "verdict"),
    [
        pytest.param(1500, 1, ADMISSION, id="they fit"),
        pytest.param(1499, 1, AddReqResult.OTHER, id="it waits for what is in flight"),
        pytest.param(1499, 0, AddReqResult.NO_TOKEN, id="only restorations can give up slots"),
    ],
)
def test_with_write_back_a_request_is_admitted_into_empty_slots_alone(
    admits, free, transfers, verdict
):
    adder, room, req = writing_back(free, transfers)
    assert adder._select_prefill_admission(req, total_tokens=500) is verdict
    assert room.asked == [1000 + 500], "what was promised to others is counted"


@pytest.mark.parametrize(
    ("held", "short", "verdict"),
    [
        pytest.param(1, False, ADMISSION, id="there are others"),
        pytest.param(1, True, AddReqResult.OTHER, id="theirs are soon a request's or free"),
        pytest.param(0, True, ADMISSION, id="SGLang's own affair"),
    ],
)
def test_a_request_waits_while_restorations_hold_the_last_slots_of_states(
    admits, held, short, verdict
):
    adder, room, req = writing_back(4096)
    room.matters = False
    context = adder.tree_cache.kvtier.engine.context
    context.anchors = SimpleNamespace(is_short=lambda: short)
    context.slots = SimpleNamespace(anchor_slots=held)
    assert adder._select_prefill_admission(req, total_tokens=500) is verdict


def test_a_front_that_would_begin_without_its_state_is_offered_again(monkeypatch):
    r = SimpleNamespace(resident=2, front=2, owner={})
    again: list[Any] = []
    engine = SimpleNamespace(
        restoration_of=lambda req: r,
        computes={"r": Compute("r", Span(2, 2), None)},
        offer_again=again.append,
        context=SimpleNamespace(room=Room(None)),
    )
    over: list[Any] = []
    engine.context.anchors = SimpleNamespace(
        drop_old_copy=lambda req: None, not_admitted=lambda req: over.append(req.rid)
    )
    adder = adder_with(engine)
    hit = {"prefix_len": 2 * PAGE, "host_hit_length": 0, "mamba_host_hit_length": 1}
    assert adder.add_one_req(SimpleNamespace(rid="r", **hit), False, None) is AddReqResult.CONTINUE
    assert again == [r] and over == ["r"], "SGLang goes on with others and leaves it as it is"


def test_with_write_back_pages_that_a_request_has_in_host_memory_do_not_leave_for_it(
    admits, monkeypatch
):
    adder, room, req = writing_back(4096)
    locked: list[Any] = []
    held: list[Any] = []
    host = SimpleNamespace(pin=lambda node: locked.append(node) or node, unpin=locked.remove)
    adder.tree_cache.kvtier.engine.context.host = host
    monkeypatch.setattr(room, "free_up", lambda tokens: held.extend(locked) or 4096)
    req.host_hit_length, req.best_match_node = 64, 7
    assert adder._select_prefill_admission(req, total_tokens=500) is ADMISSION
    assert (held, locked) == ([7], []), "until it is known"


def test_with_write_back_a_chunk_is_as_long_as_slots_are_empty(monkeypatch):
    limits, req = limits_of(monkeypatch), in_chunks("r", 300)
    assert writing_back(256)[0].add_chunked_req(req) is None
    assert writing_back(80)[0].add_chunked_req(req) is None
    assert writing_back(0)[0].add_chunked_req(req) is req, "it waits although nothing else runs"
    assert limits == [None, 80]
