"""SGLang's queue in the planner's order, where SGLang's own policy is that of arrival."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvtier.policy.messages import ChunkBeside, HeldBack, Mode, Waiter
from sgl_kvtier.runtime.scheduler import hooks
from sgl_kvtier.runtime.scheduler.queue import Queue, in_order_of_arrival
from sgl_kvtier.runtime.scheduler.view import Views
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
        known.record(rid).turn_read = TurnRead(tokens)
    return Queue(planner, known)


def rids(waiting: list[Any]) -> list[str]:
    return [req.rid for req in waiting]


def test_the_planner_sees_the_order_of_arrival_however_the_queue_was_sorted():
    planner = Shortest()
    ordered, waiting = queue(planner), [request("long", 900), request("short", 100)]
    ordered.sort(waiting, 0.0)
    waiting.append(request("new", 10))
    ordered.sort(waiting, 0.0)
    assert [one.rid for one in planner.asked[-1]] == ["long", "short", "new"]
    assert rids(waiting) == ["new", "short", "long"]


@pytest.mark.parametrize(
    ("stored", "device", "host", "told"),
    [(640, 320, 160, (320, 160, 160)), (320, 640, 0, (640, 0, 0))],
    ids=["stored beyond", "pages in memory beyond the stored ones count once"],
)
def test_the_planner_is_told_what_lies_where(stored, device, host, told):
    planner = Shortest()
    queue(planner, a=stored).sort([request("a", 1000, device, host), request("b")], 0.0)
    assert planner.asked[0][0] == Waiter("a", 1000, *told)


def test_while_the_same_requests_wait_the_planner_is_asked_from_time_to_time():
    planner = Shortest()
    ordered, waiting = queue(planner), [request("a", 900), request("b", 100)]
    for now in (5.0, 5.01, 5.02, 5.2, 5.21):
        ordered.sort(waiting, now)
    assert len(planner.asked) == 2


def test_a_queue_that_was_changed_is_sorted_again():
    planner = Shortest()
    ordered, waiting = queue(planner), [request("a", 900), request("b", 100)]
    ordered.sort(waiting, 0.0)
    waiting.reverse()  # as SGLang puts a retracted request back
    ordered.sort(waiting, 0.0)
    assert rids(waiting) == ["b", "a"]


def test_one_that_waits_alone_is_no_question():
    planner = Shortest()
    queue(planner).sort([request("a")], 0.0)
    assert not planner.asked


def test_those_that_ran_are_told_by_their_absence():
    """The last of two is asked about alone, so that the planner learns that the other has run."""
    planner = Shortest()
    ordered, waiting = queue(planner), [request("a"), request("b")]
    ordered.sort(waiting, 0.0)
    ordered.sort(waiting[1:], 0.0)
    assert [len(asked) for asked in planner.asked] == [2, 1]


def test_a_request_that_comes_back_comes_last():
    planner = Shortest()
    ordered = queue(planner)
    ordered.sort([request("a"), request("b")], 0.0)
    ordered.sort([request("b")], 0.0)
    ordered.sort([request("b"), request("a")], 0.0)
    assert [one.rid for one in planner.asked[-1]] == ["b", "a"]


def test_beyond_the_first_that_came_the_order_is_that_of_arrival():
    planner, waiting = Shortest(), [request(f"r{n}", 200 - n) for n in range(100)]
    queue(planner).sort(waiting, 0.0)
    assert len(planner.asked[0]) == 64
    assert rids(waiting)[:64] == [f"r{n}" for n in reversed(range(64))]
    assert rids(waiting)[64:] == [f"r{n}" for n in range(64, 100)]


def test_the_planner_is_asked_for_a_chunk_with_those_that_wait_as_sglang_has_them_now():
    planner = Shortest()
    ordered, waiting = queue(planner), [request("long", 900), request("hit", 500, device=480)]
    assert not ordered.in_force
    ordered.sort(waiting, 0.0)
    assert ordered.in_force
    assert ordered.chunk(request("slot", 5000, device=1000), 4000, 256, 700) == 16
    hit, long = Waiter("hit", 500, device_tokens=480), Waiter("long", 900)
    assert planner.chunks == [ChunkBeside(1000, 4000, 256, 700, (hit, long))]


def test_a_chunk_that_nobody_waits_for_is_no_question():
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


def test_another_policy_of_sglangs_stays_in_force():
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


def test_whether_one_waits_for_a_session_is_the_planners_word():
    planner, one = Holding(), request("one", 900, device=64, host=32)
    ordered = queue(planner, one=400)
    assert ordered.held_back(one, 5, 7.5)
    assert planner.held == [HeldBack(Waiter("one", 900, 64, 32, 304), 5, 7.5)]


def test_one_that_the_planner_has_no_place_for_does_not_wait():
    planner = Holding()
    ordered, waiting = queue(planner), [request(f"r{n}") for n in range(65)]
    ordered.sort(waiting, 0.0)
    assert ordered.held_back(waiting[0], 2, 0.0)
    assert not ordered.held_back(waiting[64], 2, 0.0)
    assert [one.request.rid for one in planner.held] == ["r0"]


def test_the_planner_hears_that_one_held_back_alone_has_gone():
    """It remembers since when such a one waits."""
    planner = Holding()
    ordered, alone = queue(planner), [request("alone")]
    ordered.sort(alone, 0.0)
    assert not planner.asked
    ordered.held_back(alone[0], 2, 0.0)
    ordered.sort(alone, 0.01)
    ordered.sort([request("next")], 5.0)
    assert [[one.rid for one in waiting] for waiting in planner.asked] == [["next"]]


def test_a_pass_that_runs_nothing_beside_waiting_requests_naps(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(hooks.time, "sleep", slept.append)
    parts = SimpleNamespace(
        turns=SimpleNamespace(passed=lambda ran: None),
        views=SimpleNamespace(passed=lambda batch: None),
        engine=SimpleNamespace(loads=[]),
        context=SimpleNamespace(room=SimpleNamespace(is_short=False)),
    )
    tree = SimpleNamespace(kvtier=parts, pp_size=1)
    scheduler = SimpleNamespace(tree_cache=tree, waiting_queue=[request("one")])
    hooks.after_pass(SimpleNamespace(batch_to_run=object()), scheduler)
    assert not slept, "something runs"
    hooks.after_pass(SimpleNamespace(batch_to_run=None), scheduler)
    assert slept == [0.001]
    tree.pp_size = 2
    hooks.after_pass(SimpleNamespace(batch_to_run=None), scheduler)
    assert slept == [0.001], "the batch of another stage may run"
    tree.pp_size = 1
    scheduler.waiting_queue.clear()
    hooks.after_pass(SimpleNamespace(batch_to_run=None), scheduler)
    assert slept == [0.001], "SGLang's own way of being idle"
    parts.context.room.is_short = True
    hooks.after_pass(SimpleNamespace(batch_to_run=None), scheduler)
    hooks.after_pass(SimpleNamespace(batch_to_run=None), scheduler)
    assert slept == [0.001, 0.001], "it waits for room once, and looks again"


# What the planner is shown of the queue: tokens that will be computed, not those that are loaded.


PAGE = 16


def scheduler(*waiting: Any) -> Any:
    batch = SimpleNamespace(reqs=[], batch_is_full=False)
    return SimpleNamespace(
        chunked_req=None,
        waiting_queue=list(waiting),
        running_batch=batch,
        last_batch=None,
        is_mixed_chunk=False,
    )


def views(*restoring: str) -> Views:
    tree = SimpleNamespace(req_to_token_pool=SimpleNamespace(available_size=lambda: 8))
    context = SimpleNamespace(
        tree=tree, page=PAGE, device=SimpleNamespace(claimable=lambda: 1024),
        slots=SimpleNamespace(host_tokens=0), looking_ahead=False, requests=Requests(),
    )  # fmt: skip
    begun: Any = SimpleNamespace(mode=Mode.BOTH)
    for rid in restoring:
        context.requests.record(rid).restoration = begun
    engine = SimpleNamespace(
        context=context,
        restorations=dict.fromkeys(restoring, begun),
        restoration=lambda rid: context.requests.record(rid).restoration,
    )
    return Views(engine, 512, 4096)


def before(shown: Views, queue: Any, rid: str) -> tuple[int, int]:
    view = shown.before(shown.of(queue, 0.0), queue, rid)
    return view.fresh_tokens, view.wanted_tokens


@pytest.mark.parametrize(
    ("waiting", "left", "fresh"),
    [
        pytest.param([("a", 1000, 320, 160)], [], 520, id="what lies in memory is not"),
        pytest.param(
            [("a", 1000), ("b", 600)], [960], 640, id="a stored prefix that SGLang loads is not"
        ),
        pytest.param(
            [("a", 1000, 640)], [320], 360, id="what came to memory beyond the stored prefix is not"
        ),
        pytest.param(
            [("a", 1000)], [960, 0], 1000, id="a prefix that is a candidate after all is not loaded"
        ),
        pytest.param([("restores", 1000), ("b", 600)], [], 600, id="one that restores is apart"),
    ],
)
def test_tokens_that_will_be_computed_are_fresh(waiting, left, fresh):
    shown = views("restores")
    for tokens in left:
        shown.left("a", tokens)
    queue = scheduler(*(request(*one) for one in waiting))
    assert shown.of(queue, 0.0).fresh_tokens == fresh


def test_what_is_not_on_the_device_is_still_to_be_claimed_there():
    queue = scheduler(request("a", 1000, device=320, host=160), request("b", 600))
    shown = views("b")
    shown.left("a", 960)
    assert shown.of(queue, 0.0).wanted_tokens == 680


def test_an_offer_without_an_answer_has_claimed_nothing_yet():
    queue, shown = scheduler(request("a", 1000), request("b", 600)), views("a")
    shown._engine.restorations["a"].mode = None
    assert before(shown, queue, "b") == (0, 1000)


def test_only_requests_before_one_are_computed_before_it():
    queue = scheduler(request("a", 300), request("b", 500, host=400), request("c", 700))
    assert before(views(), queue, "a") == (0, 0)
    assert before(views(), queue, "c") == (400, 800)
    assert before(views(), queue, "not in the queue yet") == (1100, 1500)


def test_the_view_says_how_much_of_it_each_waiting_request_computes():
    queue = scheduler(request("a", 600), request("r", 900), request("b", 300))
    assert views("r").of(queue, 0.0).fresh == (600, 0, 300)
    assert views("r").of(scheduler(request("r", 900)), 0.0).fresh == ()
