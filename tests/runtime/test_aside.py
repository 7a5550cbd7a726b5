"""A request that gave up the slot for chunked prefill comes back, or leaves, in every way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sgl_kvtier.runtime.step.aside import Aside


class Scheduler:
    """The parts of SGLang's scheduler that know of the slot."""

    def __init__(self) -> None:
        self.chunked_req: Any = None
        self._pending_chunked_abort_req: Any = None
        self.ended: list[Any] = []

    def process_pending_chunked_abort(self) -> None:
        assert self._pending_chunked_abort_req is self.chunked_req
        self.ended.append(self.chunked_req)
        self.chunked_req = self._pending_chunked_abort_req = None


LONG, SHORT = SimpleNamespace(rid="long"), SimpleNamespace(rid="short")


def given_up() -> tuple[Aside, Scheduler]:
    """The long one gave up the slot to the short one."""
    aside, scheduler = Aside(), Scheduler()
    aside.asked = "long"
    assert aside.takes(LONG)  # type: ignore[arg-type]
    scheduler.chunked_req = SHORT
    aside.come_back(scheduler)  # type: ignore[arg-type]
    return aside, scheduler


def test_only_whom_the_plan_names_gives_it_up() -> None:
    aside = Aside()
    aside.asked = "other"
    assert not aside.takes(LONG)  # type: ignore[arg-type]
    assert aside.requests == ()


def test_while_one_is_aside_no_other_gives_the_slot_up() -> None:
    aside, _ = given_up()
    aside.asked = "short"
    assert not aside.takes(SHORT)  # type: ignore[arg-type]
    assert aside.requests == (LONG,)


def test_it_comes_back_when_the_slot_is_free() -> None:
    aside, scheduler = given_up()
    assert (scheduler.chunked_req, aside.requests) == (SHORT, (LONG,))
    scheduler.chunked_req = None
    aside.come_back(scheduler)  # type: ignore[arg-type]
    assert (scheduler.chunked_req, aside.requests) == (LONG, ())


def test_the_word_of_a_plan_holds_for_one_pass() -> None:
    aside, scheduler = given_up()
    scheduler.chunked_req, aside.asked = None, "long"
    aside.come_back(scheduler)  # type: ignore[arg-type]
    assert not aside.takes(LONG)  # type: ignore[arg-type]


def test_an_aborted_one_ends_as_sglang_ends_the_one_in_the_slot_which_keeps_it() -> None:
    aside, scheduler = given_up()
    aside.abort("lon", every=False)
    aside.come_back(scheduler)  # type: ignore[arg-type]
    assert (scheduler.ended, scheduler.chunked_req, aside.requests) == ([LONG], SHORT, ())
    assert scheduler._pending_chunked_abort_req is None


def test_aborting_others_leaves_it_alone_and_aborting_all_does_not() -> None:
    aside, scheduler = given_up()
    aside.abort("short", every=False)
    aside.come_back(scheduler)  # type: ignore[arg-type]
    assert aside.requests == (LONG,)
    aside.abort("", every=True)
    aside.come_back(scheduler)  # type: ignore[arg-type]
    assert scheduler.ended == [LONG]


def test_the_next_one_is_not_taken_for_aborted() -> None:
    aside, scheduler = given_up()
    aside.abort("long", every=False)
    aside.come_back(scheduler)  # type: ignore[arg-type]
    aside.asked = "short"
    assert aside.takes(SHORT)  # type: ignore[arg-type]
    scheduler.chunked_req = None
    aside.come_back(scheduler)  # type: ignore[arg-type]
    assert (scheduler.ended, scheduler.chunked_req) == ([LONG], SHORT)
