"""What a planner is asked in a server is asked in the simulator too, and the engine's own loads run
beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scenes import COST, MODEL, PAGE, Scripted, keys, machine

from sgl_kvtier.lab.sim.baselines import Served
from sgl_kvtier.lab.sim.requests import SimRequest, SimResult
from sgl_kvtier.lab.sim.run import engine_shape, simulate
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.ahead.budget import reads_due
from sgl_kvtier.policy.messages import (
    ChunkBeside,
    HeldBack,
    LeftToEngine,
    PagesDropped,
    Question,
    ReadsDue,
    RestoreOffered,
    RunOrder,
    StepView,
)
from sgl_kvtier.types import Link, PageKey, Tier

SPEC = ServerSpec(page_tokens=PAGE, step_tokens=512, device_pages=40, host_pages=80, consulted=True)


class Asked(Scripted):
    """A planner that restores nothing, keeps what it was asked, and leaves what it is told to."""

    def __init__(self, why: Callable[[RestoreOffered, StepView], str | None]) -> None:
        super().__init__()
        self.why = why
        self.questions: list[Question[Any]] = []

    def query(self, question: Question[Any]) -> Any:
        self.questions.append(question)
        if isinstance(question, LeftToEngine):
            return self.why(question.offer, question.view)
        if isinstance(question, ReadsDue):
            return reads_due(question)
        if isinstance(question, ChunkBeside):
            return min(question.most, question.left_tokens)
        if isinstance(question, HeldBack):
            return False
        assert isinstance(question, RunOrder)
        return tuple(one.rid for one in question.waiting)

    def of(self, kind: type[Question[Any]]) -> list[Any]:
        return [question for question in self.questions if type(question) is kind]


def left(offer: RestoreOffered, view: StepView) -> str:
    del offer, view
    return "for the test"


def _run(
    planner: Asked, requests: list[SimRequest], least: int = 0, spec: ServerSpec = SPEC
) -> SimResult:
    served = Served(planner, engine_shape(spec, MODEL), spec, least)
    return simulate(served, machine(1024.0), MODEL, requests, server=spec, cost=COST)


def _chain(name: str, pages: int, **when: Any) -> SimRequest:
    chain: tuple[PageKey, ...] = keys(name, pages)
    return SimRequest(
        when.pop("rid", name), when.pop("at", 0.0), pages * PAGE + 1, keys=chain, **when
    )


def _then_back(pages: int) -> list[SimRequest]:
    """One session's prompt, two others that push it out of the device, and it again."""
    return [
        _chain("a", pages),
        _chain("b", 36, at=50.0),
        _chain("c", 36, at=100.0),
        _chain("a", pages, rid="again", at=150.0),
    ]


def test_what_is_left_is_read_by_the_engine_and_copied_at_its_turn() -> None:
    planner = Asked(left)
    again = _run(planner, _then_back(36)).requests[-1]
    (question,) = planner.of(LeftToEngine)
    assert question.offer.rid == "again"
    assert again.spliced_tokens + again.resident_tokens == 36 * PAGE
    assert again.computed_tokens == 1
    assert again.restore_mode in ("load", "compute")  # fetched first, or all in host memory


def test_what_is_not_left_is_offered_to_the_planner_and_not_loaded_by_the_engine() -> None:
    planner = Asked(lambda offer, view: None)
    result = _run(planner, _then_back(36))
    assert [f.rid for f in planner.facts if isinstance(f, RestoreOffered)] == ["again"]
    assert result.links[Link.STORAGE_TO_HOST].nbytes == 0


def test_a_prefix_too_short_to_restore_is_left_without_a_question() -> None:
    planner = Asked(lambda offer, view: None)
    result = _run(planner, _then_back(36), least=1000)
    assert planner.of(LeftToEngine) == []
    assert result.requests[-1].spliced_tokens > 0


def test_the_question_counts_only_requests_before_it_in_the_queue() -> None:
    seen: list[StepView] = []

    def why(offer: RestoreOffered, view: StepView) -> str:
        del offer
        seen.append(view)
        return "for the test"

    busy = _chain("d", 32, at=149.5)
    _run(Asked(why), [*_then_back(36), _chain("e", 20, at=149.8), busy])
    assert seen[-1].fresh_tokens == seen[-1].wanted_tokens == 20 * PAGE + 1


def test_stored_pages_are_read_in_the_order_of_the_queue_as_far_as_there_is_room() -> None:
    planner = Asked(left)
    spec = ServerSpec(
        page_tokens=PAGE, step_tokens=64, device_pages=40, host_pages=40, consulted=True
    )
    first = [_chain(name, 36, at=60.0 * place) for place, name in enumerate("abcd")]
    back = [_chain(name, 36, rid=f"{name}2", at=300.0 + place) for place, name in enumerate("abc")]
    result = _run(planner, first + back, spec=spec)
    reads = planner.of(ReadsDue)
    assert reads and all(
        [one.rid for one in read.queue] == sorted(one.rid for one in read.queue) for read in reads
    )
    assert [request.rid for request in result.requests[-3:]] == ["a2", "b2", "c2"]
    assert all(request.computed_tokens < 36 * PAGE for request in result.requests[-3:])


def test_a_short_one_runs_beside_the_chunks_of_a_long_one_as_in_a_server() -> None:
    long, short = SimRequest("long", 0.0, 4096), SimRequest("short", 1.0, 16)
    spec = ServerSpec(page_tokens=PAGE, step_tokens=64, consulted=True)

    class Halving(Asked):
        def query(self, question: Question[Any]) -> Any:
            found = super().query(question)
            return 32 if isinstance(question, ChunkBeside) else found

    whole, beside = (_run(kind(left), [long, short], spec=spec) for kind in (Asked, Halving))
    late, early = (
        {one.rid: one.first_token_s for one in result.requests} for result in (whole, beside)
    )
    assert early["short"] < early["long"] and late["short"] >= late["long"]


def test_one_that_would_take_a_sessions_pages_waits_as_in_a_server() -> None:
    class Patient(Asked):
        def query(self, question: Question[Any]) -> Any:
            found = super().query(question)
            if isinstance(question, HeldBack):
                return question.request.rid == "b" and question.now < 103.0
            return sorted(found) if isinstance(question, RunOrder) else found

    first, back = _chain("a", 24), _chain("a", 24, rid="again", at=101.0)
    requests = [first, _chain("b", 24, at=100.0), back]
    planner = Patient(left)
    waits, goes = (
        {one.rid: one for one in _run(kind, requests).requests} for kind in (planner, Asked(left))
    )
    asked = [question for question in planner.of(HeldBack) if question.request.rid == "b"]
    assert len(asked) > 100
    assert asked[0].host_empty == 80 - 24, "the other one has its copies there"
    assert waits["again"].resident_tokens == 24 * PAGE > goes["again"].resident_tokens
    assert (waits["b"].first_chunk_s or 0.0) >= 103.0


def test_room_on_the_device_is_made_in_the_maps_order_as_in_a_server() -> None:
    soon, late = keys("soon", 16), keys("late", 16)
    requests = [_chain("soon", 16), _chain("late", 16, at=50.0), _chain("other", 16, at=100.0)]

    def dropped(victims: Callable[[int], tuple[PageKey, ...]] | None) -> set[PageKey]:
        planner = Asked(left)
        served = Served(planner, engine_shape(SPEC, MODEL), SPEC, 0)
        link = machine(1024.0)
        simulate(served, link, MODEL, requests, server=SPEC, cost=COST, victims=victims)
        drops = [fact for fact in planner.facts if isinstance(fact, PagesDropped)]
        return {key for fact in drops if fact.tier is Tier.DEVICE for key in fact.keys}

    by_last_use, by_the_map = dropped(None), dropped(lambda count: late[::-1])
    assert by_last_use and by_last_use <= set(soon)
    assert by_the_map and by_the_map <= set(late)


def test_a_server_with_nothing_to_run_asks_its_planner_as_time_goes_by() -> None:
    planner = Asked(left)
    _run(planner, [_chain("a", 4), _chain("b", 4, at=50.0)])
    assert sum(20 < view.now < 21 for view in planner.views) > 50
