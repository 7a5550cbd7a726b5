"""Which waiting request is read for when, on its own: what a server rarely does. The rest is in
test_turn_reads_served.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sgl_kvtier.policy.ahead.budget import reads_due
from sgl_kvtier.runtime.ahead.turn_reads import TurnReads
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.step.context import StepContext

PAGE, THRESHOLD = 16, 64


@dataclass(frozen=True)
class Handle:
    """As far as SGLang's is used here."""

    rid: str


class Lab:
    """A queue before pools of given sizes. `asked` are the requests storage was asked for,
    `reading` those it has pages of.
    """

    def __init__(self, device: int = 512, host: int = 1024) -> None:
        self.asked: list[str] = []
        self.limited = False
        self.queue: list[Any] = []
        controller = SimpleNamespace(
            mem_pool_host=SimpleNamespace(size=host, size_per_token=4),
            prefetch_rate_limited=lambda: self.limited,
            write_policy="write_through",
        )
        self.tree = SimpleNamespace(
            page_size=PAGE,
            pp_size=1,
            prefetch_threshold=THRESHOLD,
            prefetch_stop_policy="wait_complete",
            cache_controller=controller,
            ongoing_prefetch={},
            token_to_kv_pool_allocator=SimpleNamespace(size=device, available_size=lambda: 0),
        )
        self.scheduler = SimpleNamespace(waiting_queue=self.queue, _prefetch_kvcache=self.ask)
        context = self.context = StepContext(self.tree, alone=False)
        context.scheduler = self.scheduler
        self.counters = RestoreCounters()
        self.owned: list[str] = []
        restoring = SimpleNamespace(is_on=True, owned=self.owned)
        planner = SimpleNamespace(query=reads_due)
        self.turns = TurnReads(context, restoring, planner, self.counters.turn_reads)

    def stored(self, rid: str) -> int:
        """Leading tokens of a request's prompt that storage has."""
        read = self.context.requests.turn_read(rid)
        return 0 if read is None else read.end

    def ask(self, req: Any) -> None:
        self.asked.append(req.rid)
        self.tree.ongoing_prefetch[req.cache_request_handle] = True

    def arrives(self, rid: str, stored: int) -> bool:
        """A request whose first `stored` tokens storage has; whether its read is kept back."""
        handle = Handle(rid)
        req = SimpleNamespace(
            rid=rid, cache_request_handle=handle, prefix_len=0, host_hit_length=0, best_match_node=7
        )
        req.init_next_round_input = lambda tree, cow_mamba: None
        self.queue.append(req)
        return self.turns.hit(SimpleNamespace(handle=handle, storage_start=0), stored)

    def lands(self, req: Any, tokens: int, of: int) -> None:
        """SGLang has read `tokens` of the `of` it wanted."""
        operation = SimpleNamespace(
            handle=req.cache_request_handle,
            storage_start=0,
            completed_tokens=tokens,
            storage_hit_count=of,
        )
        req.host_hit_length = tokens
        self.turns.landed(operation)


def test_a_read_is_kept_back_until_those_before_it_leave_room():
    lab = Lab()
    assert [lab.arrives(rid, 320) for rid in ("a", "b", "c")] == [False, True, True]
    b, c = lab.queue[1:]
    assert lab.turns.admissible(b.cache_request_handle) is False
    lab.turns.look(lab.scheduler)
    assert lab.asked == []
    del lab.queue[0]  # it runs
    lab.turns.look(lab.scheduler)
    assert lab.asked == ["b"] and lab.turns.admissible(b.cache_request_handle) is None
    assert lab.turns.kept_back == ["c"] and lab.turns.admissible(c.cache_request_handle) is False
    lab.context.requests.forget("c")
    assert lab.turns.kept_back == []


def test_with_write_back_half_of_host_memory_is_left_for_what_leaves_the_device():
    lab = Lab(device=1024)
    assert [lab.arrives(rid, 240) for rid in ("a", "b")] == [False, True], "the device has copies"
    lab = Lab(device=1024)
    lab.tree.cache_controller.write_policy = "write_back"
    assert [lab.arrives(rid, 240) for rid in ("a", "b", "c")] == [False, False, True]


def test_nothing_is_kept_back_where_no_request_waits_for_its_pages():
    lab = Lab()
    lab.tree.prefetch_stop_policy = "best_effort"
    assert [lab.arrives(rid, 320) for rid in ("a", "b", "c")] == [False] * 3


def test_who_arrives_while_sglang_reads_enough_is_asked_for_later():
    lab = Lab()
    lab.limited = True
    handle = Handle("a")
    assert not lab.turns.declines(handle, THRESHOLD - 1, 0), "too short to be read at all"
    assert lab.turns.declines(handle, 320, 0)
    lab.queue.append(
        SimpleNamespace(rid="a", cache_request_handle=handle, prefix_len=0, host_hit_length=0)
    )
    lab.turns.look(lab.scheduler)
    assert lab.asked == []
    lab.limited = False
    lab.turns.look(lab.scheduler)
    assert lab.asked == ["a"]


def test_what_was_lost_is_read_again_but_not_for_ever():
    lab = Lab()
    lab.arrives("a", 320)
    req = lab.queue[0]
    for _ in range(3):
        lab.lands(req, 320, 320)
        assert not lab.turns.at_turn(lab.scheduler, req), "all of it is there"
        req.host_hit_length = 128
        assert lab.turns.at_turn(lab.scheduler, req)
        lab.turns.hit(SimpleNamespace(handle=req.cache_request_handle, storage_start=0), 320)
    lab.lands(req, 320, 320)
    req.host_hit_length = 128
    assert not lab.turns.at_turn(lab.scheduler, req)
    assert lab.asked == ["a"] * 3 and dict(lab.counters.turn_reads) == {
        "read again": 3,
        "given up": 1,
    }


def test_pages_that_could_not_be_read_are_not_asked_for_again():
    lab = Lab()
    lab.arrives("a", 320)
    lab.lands(lab.queue[0], 160, 320)
    assert not lab.turns.at_turn(lab.scheduler, lab.queue[0])
    assert lab.asked == []


def test_what_was_read_is_to_be_held_until_it_runs():
    lab = Lab()
    lab.arrives("a", 320)
    assert lab.turns.nodes() == []
    lab.lands(lab.queue[0], 320, 320)
    assert lab.turns.nodes() == [7]
    lab.queue.clear()
    assert lab.turns.nodes() == []


def test_a_device_that_hangs_keeps_nobody_waiting_for_long():
    lab = Lab()
    for rid in ("a", "b", "c"):
        lab.arrives(rid, 320)
    for second in range(3):
        lab.context.now = float(second)
        lab.turns.passed(ran=False)
        assert lab.turns.kept_back == (["b", "c"] if second < 2 else ["c"])
    lab.turns.passed(ran=False)
    lab.turns.passed(ran=True)
    lab.context.now += 1.9
    lab.turns.passed(ran=False)
    assert lab.turns.kept_back == ["c"], "something ran meanwhile"
    for _ in range(10_000):
        lab.turns.passed(ran=False)
    assert lab.turns.kept_back == []


def test_what_a_stopped_read_has_not_read_is_still_known_to_be_stored():
    lab = Lab()
    lab.arrives("a", 320)
    (req,) = lab.queue
    lab.owned.append("a")
    lab.lands(req, 64, 320)
    assert lab.stored("a") == 320
    lab.owned.clear()
    lab.lands(req, 64, 320)
    assert lab.stored("a") == 64


def test_who_is_kept_back_again_is_read_for_when_there_is_room():
    lab = Lab()
    lab.arrives("a", 320)
    (req,) = lab.queue
    lab.turns.keep_back("nobody")
    lab.turns.keep_back("a")
    assert lab.turns.kept_back == ["a"]
    assert lab.turns.admissible(req.cache_request_handle) is False
    lab.turns.look(lab.scheduler)
    assert lab.asked == ["a"] and lab.turns.kept_back == []
