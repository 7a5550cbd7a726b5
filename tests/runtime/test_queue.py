"""SGLang's queue in the planner's order, where SGLang's own policy is that of arrival."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sgl_kvtier.policy.messages import ChunkBeside, HeldBack, Waiter
from sgl_kvtier.runtime.scheduler import hooks
from sgl_kvtier.runtime.scheduler.queue import Queue, in_order_of_arrival
from sgl_kvtier.runtime.step.tracked import Requests, TurnRead


def request(rid: str, prompt: int = 100, device: int = 0, host: int = 0) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=range(prompt),
        full_untruncated_fill_ids=(),
        prefix_len=device,
        host_hit_length=host,
    )


class Shortest:
    """A planner that answers with the shortest prompt first, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Waiter, ...]] = []
        self.chunks: list[ChunkBeside] = []

    def query(self, question: Any) -> Any:
        if isinstance(question, ChunkBeside):
            self.chunks.append(question)
            return 16
        self.asked.append(question.waiting)
        order = sorted(question.waiting, key=lambda one: one.prompt_tokens)
        return tuple(one.rid for one in order)


def queue(planner: Any, **stored: int) -> Queue:
    known = Requests()
    for rid, tokens in stored.items():
        known.of(rid).turn_read = TurnRead(tokens)
    return Queue(planner, known)


def rids(waiting: list[Any]) -> list[str]:
    return [req.rid for req in waiting]


def test_the_queue_is_sorted_in_place() -> None:
    waiting = [request("long", 900), request("short", 100), request("middle", 500)]
    queue(Shortest()).sort(waiting, 0.0)
    assert rids(waiting) == ["short", "middle", "long"]


def test_the_planner_sees_the_order_of_arrival_however_the_queue_was_sorted() -> None:
    planner = Shortest()
    ordered, waiting = queue(planner), [request("long", 900), request("short", 100)]
    ordered.sort(waiting, 0.0)
    waiting.append(request("new", 10))
    ordered.sort(waiting, 0.0)
    assert [one.rid for one in planner.asked[-1]] == ["long", "short", "new"]
    assert rids(waiting) == ["new", "short", "long"]


def test_the_planner_is_told_what_lies_where() -> None:
    planner = Shortest()
    queue(planner, a=640).sort([request("a", 1000, device=320, host=160), request("b")], 0.0)
    assert planner.asked[0][0] == Waiter("a", 1000, 320, 160, 160)


def test_pages_in_memory_beyond_the_stored_ones_count_once() -> None:
    planner = Shortest()
    queue(planner, a=320).sort([request("a", 1000, device=640), request("b")], 0.0)
    assert planner.asked[0][0] == Waiter("a", 1000, 640, 0, 0)


def test_while_the_same_requests_wait_the_planner_is_asked_from_time_to_time() -> None:
    planner = Shortest()
    ordered, waiting = queue(planner), [request("a", 900), request("b", 100)]
    for now in (5.0, 5.01, 5.02, 5.2, 5.21):
        ordered.sort(waiting, now)
    assert len(planner.asked) == 2


def test_a_queue_that_was_changed_is_sorted_again() -> None:
    planner = Shortest()
    ordered, waiting = queue(planner), [request("a", 900), request("b", 100)]
    ordered.sort(waiting, 0.0)
    waiting.reverse()  # as SGLang puts a retracted request back
    ordered.sort(waiting, 0.0)
    assert rids(waiting) == ["b", "a"]


def test_one_that_waits_alone_is_no_question() -> None:
    planner = Shortest()
    queue(planner).sort([request("a")], 0.0)
    assert not planner.asked


def test_those_that_ran_are_told_by_their_absence() -> None:
    """The last of two is asked about alone, so that the planner learns that the other has run."""
    planner = Shortest()
    ordered, waiting = queue(planner), [request("a"), request("b")]
    ordered.sort(waiting, 0.0)
    ordered.sort(waiting[1:], 0.0)
    assert [len(asked) for asked in planner.asked] == [2, 1]


def test_a_request_that_comes_back_comes_last() -> None:
    planner = Shortest()
    ordered = queue(planner)
    ordered.sort([request("a"), request("b")], 0.0)
    ordered.sort([request("b")], 0.0)
    ordered.sort([request("b"), request("a")], 0.0)
    assert [one.rid for one in planner.asked[-1]] == ["b", "a"]


def test_beyond_the_first_that_came_the_order_is_that_of_arrival() -> None:
    planner, waiting = Shortest(), [request(f"r{n}", 200 - n) for n in range(100)]
    queue(planner).sort(waiting, 0.0)
    assert len(planner.asked[0]) == 64
    assert rids(waiting)[:64] == [f"r{n}" for n in reversed(range(64))]
    assert rids(waiting)[64:] == [f"r{n}" for n in range(64, 100)]


def test_the_planner_is_asked_for_a_chunk_with_those_that_wait_as_sglang_has_them_now() -> None:
    planner = Shortest()
    ordered, waiting = queue(planner), [request("long", 900), request("hit", 500, device=480)]
    assert not ordered.in_force
    ordered.sort(waiting, 0.0)
    assert ordered.in_force
    assert ordered.chunk(request("slot", 5000, device=1000), 4000, 256, 700) == 16
    hit, long = Waiter("hit", 500, device_tokens=480), Waiter("long", 900)
    assert planner.chunks == [ChunkBeside(1000, 4000, 256, 700, (hit, long))]


def test_a_chunk_that_nobody_waits_for_is_no_question() -> None:
    planner = Shortest()
    ordered = queue(planner)
    ordered.sort([], 0.0)
    assert ordered.chunk(request("slot", 5000, device=4900), 100, 256, 700) == 100
    assert ordered.chunk(request("slot", 5000, device=1000), 4000, 256, 700) == 256
    assert not planner.chunks


def policy(name: str, priorities: bool = False) -> Any:
    return SimpleNamespace(
        policy=SimpleNamespace(value=name), enable_priority_scheduling=priorities
    )


def test_another_policy_of_sglangs_stays_in_force() -> None:
    assert in_order_of_arrival(policy("fcfs"))
    assert not in_order_of_arrival(policy("lpm"))
    assert not in_order_of_arrival(policy("fcfs", priorities=True))


class Holding(Shortest):
    """One that also has everybody wait for a session."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[HeldBack] = []

    def query(self, question: Any) -> Any:
        if not isinstance(question, HeldBack):
            return super().query(question)
        self.held.append(question)
        return True


def test_whether_one_waits_for_a_session_is_the_planners_word() -> None:
    planner, one = Holding(), request("one", 900, device=64, host=32)
    ordered = queue(planner, one=400)
    assert ordered.held_back(one, 5, 7.5)
    assert planner.held == [HeldBack(Waiter("one", 900, 64, 32, 304), 5, 7.5)]


def test_one_that_the_planner_has_no_place_for_does_not_wait() -> None:
    planner = Holding()
    ordered, waiting = queue(planner), [request(f"r{n}") for n in range(65)]
    ordered.sort(waiting, 0.0)
    assert ordered.held_back(waiting[0], 2, 0.0)
    assert not ordered.held_back(waiting[64], 2, 0.0)
    assert [one.request.rid for one in planner.held] == ["r0"]


def test_the_planner_hears_that_one_held_back_alone_has_gone() -> None:
    """It remembers since when such a one waits."""
    planner = Holding()
    ordered, alone = queue(planner), [request("alone")]
    ordered.sort(alone, 0.0)
    assert not planner.asked
    ordered.held_back(alone[0], 2, 0.0)
    assert ordered.holds
    ordered.sort(alone, 0.01)
    assert not ordered.holds, "not in this pass"
    ordered.sort([request("next")], 5.0)
    assert [[one.rid for one in waiting] for waiting in planner.asked] == [["next"]]


def test_a_pass_that_only_holds_back_lets_some_time_pass(monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(hooks.time, "sleep", slept.append)
    parts = SimpleNamespace(
        turns=SimpleNamespace(passed=lambda ran: None),
        engine=SimpleNamespace(loads=[]),
        queue=SimpleNamespace(holds=True),
    )
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(kvtier=parts))
    hooks.after_pass(SimpleNamespace(batch_to_run=object()), scheduler)
    assert not slept, "something runs"
    hooks.after_pass(SimpleNamespace(batch_to_run=None), scheduler)
    assert slept == [0.001]
    parts.queue.holds = False
    hooks.after_pass(SimpleNamespace(batch_to_run=None), scheduler)
    parts.queue = None
    hooks.after_pass(SimpleNamespace(batch_to_run=None), scheduler)
    assert slept == [0.001]
