"""Whose room in the ring is, call by call: of calls that failed, that were given up and answered
late, and of children that die. The test plays the child, so each answer comes when it says.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from fake_child import Child, never, span
from patience import beside, until
from remote_pages import IDENTITY, NAMESPACE
from store_pages import content, key, named

from sgl_kvtier.remote import breaker, link, removals
from sgl_kvtier.remote.channel import NativeChannel
from sgl_kvtier.remote.child.engine import Code
from sgl_kvtier.remote.child.messages import Op, Request
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.page import Namespace
from sgl_kvtier.remote.store import RemoteStore
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.types import Lookup

OK, MISS, FAILED, LATE = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.FAILED, ReadOutcome.LATE
CORRUPT = ReadOutcome.CORRUPT
STORED, REFUSED = PutOutcome.STORED, PutOutcome.REFUSED
RING = 1 << 20
SIZE = 20_000
BIG = 200_000
"""Of the ring a batch has a sixteenth: three small pages, or one big one."""


class Family:
    """A store, and the children that it starts, the newest last."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.failures = 0
        """How many children cannot be started from now on."""

    def start(self, *given: object) -> Child:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        _, _, ring, wake_fd = given
        self.children.append(Child(ring, wake_fd, 1000 + len(self.children)))  # type: ignore[arg-type]
        return self.children[-1]

    def open(self, **settings: float) -> RemoteStore:
        chosen = {"deadline_s": 0.3, "hang_s": 60.0, "ring_bytes": RING, **settings}
        self.store = RemoteStore(RemoteSettings("memory", "", **chosen), NAMESPACE)  # type: ignore[arg-type]
        return self.store

    @property
    def child(self) -> Child:
        """The newest child."""
        until(lambda: self.children)
        return self.children[-1]

    def usable(self, **settings: float) -> tuple[RemoteStore, Child]:
        self.open(**settings)
        return self.store, self.probed()

    def probed(self, count: int = 1) -> Child:
        """The last of so many children, once it is usable."""
        until(lambda: len(self.children) == count)
        self.child.probe()
        assert self.store.wait_usable(20)
        return self.child

    @property
    def taken(self) -> int:
        return self.store.condition().ring_taken_bytes


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    monkeypatch.setattr(breaker, "FIRST_S", 0.02)
    monkeypatch.setattr(breaker, "LONGEST_S", 0.05)
    monkeypatch.setattr(removals, "RETRY_S", 0.02)
    family = Family()
    monkeypatch.setattr(link, "Agent", family.start)
    yield family
    for child in family.children:
        child.dies = True
    family.store.close()


class Read:
    """A read of pages of one size, and its memory."""

    def __init__(self, store: RemoteStore, *names: object, size: int = SIZE, **how: object) -> None:
        self.into = [bytearray(size) for _ in names]
        pages = [PageRead(key(n), [memoryview(b)]) for n, b in zip(names, self.into, strict=True)]
        self.job = store.read(pages, **how)  # type: ignore[arg-type]

    def ended(self) -> list[ReadOutcome | None]:
        assert self.job.wait(20) and self.job.in_flight == 0
        return self.job.outcomes

    @property
    def untouched(self) -> bool:
        return not any(map(any, self.into))


def transferred(child: Child, request: Request, *names: object, size: int = SIZE) -> None:
    pages = named(names, size)
    child.transfer(request, NAMESPACE, list(pages), list(pages.values()))


def pages_of(*names: object, size: int = BIG) -> list[PageWrite]:
    return [PageWrite(k, [memoryview(data)]) for k, data in named(names, size).items()]


def removing(store: RemoteStore, *names: object) -> Future[int]:
    return beside(lambda: store.delete([key(n) for n in names]))


def answered_right(store: RemoteStore, child: Child, *names: object) -> set[int]:
    """A read that goes well, and where in the ring its pages were."""
    read = Read(store, *names)
    request = child.call(Op.GET)
    transferred(child, request, *names)
    child.answer(request, *[Code.OK] * len(names))
    assert read.ended() == [OK] * len(names)
    assert [bytes(b) for b in read.into] == [content(n, SIZE) for n in names]
    return span(request)


@pytest.mark.parametrize("codes", [(Code.FAILED, Code.OK), (Code.OK, Code.FAILED)])
def test_the_room_of_a_get_that_failed_is_not_used_while_its_child_may_write_there(
    family: Family, codes: tuple[Code, Code]
) -> None:
    store, child = family.usable(hang_s=1.0, deadline_s=1.0)
    read = Read(store, 1, 2)
    request = child.call(Op.GET)
    transferred(child, request, 1, 2)
    child.answer(request, *codes)
    assert FAILED in read.ended()
    assert family.taken >= 2 * SIZE
    assert not answered_right(store, child, 3) & span(request)
    until(lambda: family.taken == 0, 10)
    assert answered_right(store, child, 4) & span(request)


def test_room_that_rests_is_free_again_after_the_time_that_a_child_may_hang(family: Family) -> None:
    store, child = family.usable(hang_s=0.4)
    Read(store, 1)
    child.answer(child.call(Op.GET), Code.FAILED)
    never(lambda: family.taken == 0, 0.25)
    until(lambda: family.taken == 0, 10)
    assert not child.killed


def test_the_room_of_a_call_that_was_given_up_is_not_used_until_it_is_answered(
    family: Family,
) -> None:
    store, child = family.usable(deadline_s=60.0)
    read = Read(store, 1, 2, deadline_s=0.05)
    request = child.call(Op.GET)
    assert read.ended() == [FAILED, FAILED]
    assert not answered_right(store, child, 3) & span(request)
    transferred(child, request, 1, 2)
    child.answer(request, Code.OK, Code.OK)
    until(lambda: family.taken == 0, 10)
    assert read.untouched, "a page landed in memory that is its owner's again"
    assert answered_right(store, child, 4) & span(request)


def test_a_get_that_fails_after_it_was_given_up_rests_too(family: Family) -> None:
    store, child = family.usable(deadline_s=0.5, hang_s=1.5)
    read = Read(store, 1, deadline_s=0.05)
    request = child.call(Op.GET)
    assert read.ended() == [FAILED]
    child.answer(request, Code.FAILED)
    assert not answered_right(store, child, 3) & span(request)
    never(lambda: family.taken == 0)
    until(lambda: family.taken == 0, 10)


def test_a_page_that_lands_while_its_call_is_given_up_is_a_page_that_landed(family: Family) -> None:
    """The store's thread is held up until after the deadline; pages land beside it."""
    store, child = family.usable(deadline_s=60.0)
    if not isinstance(child.channel._channel, NativeChannel):  # type: ignore[attr-defined]
        pytest.skip("pages land beside the store's thread with the compiled channel only")
    read = Read(store, 1, deadline_s=0.4)
    request = child.call(Op.GET)
    transferred(child, request, 1)
    time.sleep(0.15)
    with store._link.lock:
        time.sleep(0.4)
        child.answer(request, Code.OK)
        until(lambda: bytes(read.into[0]) == content(1, SIZE), 10)
        time.sleep(0.05)
    assert read.ended() == [OK]
    until(lambda: family.taken == 0, 10)


def test_nothing_is_asked_of_a_child_that_has_not_answered_a_call_that_was_given_up(
    family: Family,
) -> None:
    store, child = family.usable()
    read = Read(store, 1)
    request = child.call(Op.GET)
    assert read.ended() == [FAILED] and not store.usable
    assert child.next(0.4) is None
    child.answer(request, Code.MISS)
    child.probe()
    assert store.wait_usable(20) and store.condition().starts == 1


def test_a_child_is_killed_for_a_call_that_was_given_up_long_ago(family: Family) -> None:
    store, child = family.usable(deadline_s=0.2, hang_s=0.4)
    Read(store, 1, deadline_s=0.05)
    child.call(Op.GET)
    until(lambda: child.killed, 10)
    family.probed(2)
    assert family.taken == 0


def test_a_childs_room_is_not_used_before_it_is_dead(family: Family) -> None:
    store, child = family.usable(hang_s=0.4)
    read = Read(store, 1)
    child.call(Op.GET)
    child.dies = False
    assert read.ended() == [FAILED]
    until(lambda: child.killed, 10)
    never(lambda: family.taken == 0 or len(family.children) > 1)
    child.die()
    until(lambda: len(family.children) == 2)
    assert family.taken == 0
    answered_right(store, family.probed(2), 2)


def test_room_that_rests_is_given_back_once_when_its_child_dies(family: Family) -> None:
    store, child = family.usable(hang_s=0.6)
    Read(store, 1)
    child.answer(child.call(Op.GET), Code.FAILED)
    never(lambda: family.taken == 0, 0.05)
    child.die()
    family.probed(2)
    assert family.taken == 0
    time.sleep(0.8)  # the first child's rest would be over now
    answered_right(store, family.child, 2)
    assert store.condition().starts == 2


def test_pages_of_an_earlier_call_that_still_lie_in_the_ring_are_not_this_ones(
    family: Family,
) -> None:
    """The child says that it has brought a page, and has not."""
    store, child = family.usable()
    before = answered_right(store, child, 1)
    read = Read(store, 2)
    request = child.call(Op.GET)
    assert span(request) & before
    child.answer(request, Code.OK)
    assert read.ended() == [CORRUPT]
    assert child.call(Op.REMOVE).keys == [key(2)]


@pytest.mark.parametrize(
    "namespace",
    [Namespace(bytes(32), "tp0"), Namespace(IDENTITY.fingerprint, "tp1")],
    ids=["identity", "rank"],
)
def test_a_whole_page_of_another_identity_or_rank_is_not_this_one(
    family: Family, namespace: Namespace
) -> None:
    store, child = family.usable()
    read = Read(store, 1)
    request = child.call(Op.GET)
    child.transfer(request, namespace, [key(1)], [content(1, SIZE)])
    child.answer(request, Code.OK)
    assert read.ended() == [CORRUPT]


def test_reads_leave_room_for_writes(family: Family) -> None:
    store, child = family.usable(deadline_s=60.0)
    reads = [Read(store, n, size=BIG, deadline_s=1.0) for n in range(20)]
    requests = []
    while (request := child.next(0.3)) is not None:
        requests.append(request)
    assert 2 <= len(requests) < 5
    writing = beside(lambda: store.put(pages_of("new")))
    child.answer(child.call(Op.PUT), Code.OK)
    assert writing.result(20) == [STORED]
    for request in requests:
        child.answer(request, Code.MISS)
    for read in reads:
        while (request := child.next(0.05)) is not None:
            child.answer(request, Code.MISS)
        read.ended()
    until(lambda: family.taken == 0)


def test_a_child_that_takes_no_calls_costs_no_room(family: Family) -> None:
    store, child = family.usable()
    child.deaf = True
    assert Read(store, 1, 2).ended() == [MISS, MISS]
    assert store.put(pages_of(3)) == [REFUSED]
    assert family.taken == 0
    child.deaf = False
    answered_right(store, child, 3)


def test_reads_of_many_times_the_ring_go_through_it_in_parts(family: Family) -> None:
    store, child = family.usable(deadline_s=20.0)
    names = range(40)
    read = Read(store, *names, size=BIG)
    for _ in range(1000):
        if (request := child.next(0.05)) is None:
            if read.job.done:
                break
            continue
        assert family.taken <= RING
        which = [n for n in names if key(n) in request.keys]
        transferred(child, request, *which, size=BIG)
        child.answer(request, *[Code.OK] * len(which))
    assert read.ended() == [OK] * 40
    assert [bytes(b) for b in read.into] == [content(n, BIG) for n in names]
    assert family.taken == 0


@pytest.mark.parametrize("codes", [(), (Code.OK,), (Code.OK,) * 3, (Code.OK, 77)])
def test_an_answer_that_makes_no_sense_fails_its_pages(
    family: Family, codes: tuple[int, ...]
) -> None:
    store, child = family.usable()
    read = Read(store, 1, 2)
    request = child.call(Op.GET)
    transferred(child, request, 1, 2)
    child.answer(request, *codes)
    assert read.ended() in ([FAILED, FAILED], [OK, FAILED])


def test_answers_to_no_call_change_nothing(family: Family) -> None:
    store, child = family.usable(deadline_s=20.0)
    read = Read(store, 1)
    request = child.call(Op.GET)
    transferred(child, request, 1)
    for other in (request.id + 1, request.id + (1 << 32), 0, (1 << 64) - 1):
        child.answer(request._replace(id=other), Code.OK)
    never(lambda: read.job.done, 0.1)
    assert read.untouched
    child.answer(request, Code.OK)
    assert read.ended() == [OK]


def test_a_put_is_refused_for_pages_that_were_deleted_after_it_began(family: Family) -> None:
    """Its first batches are under way: what follows is not begun."""
    store, child = family.usable(deadline_s=5.0)
    writing = beside(lambda: store.put(pages_of(*range(5))))
    first, second = child.call(Op.PUT), child.call(Op.PUT)
    deleting = removing(store, 4)
    until(lambda: store.removals_waiting)
    child.answer(first, Code.OK)
    child.answer(second, Code.OK)
    removals: list[Request] = []
    while not writing.done():
        if (request := child.next(0.05)) is None:
            continue
        if request.op is Op.REMOVE:
            removals.append(request)  # not done yet
            continue
        assert key(4) not in request.keys
        child.answer(request, Code.OK)
    assert writing.result() == [STORED] * 4 + [REFUSED]
    child.answer(*(removals or [child.call(Op.REMOVE)]), Code.MISS)
    deleting.result(20)
    assert store.removals_waiting == 0


def test_what_is_not_wanted_any_more_is_not_begun_to_be_written(family: Family) -> None:
    store, child = family.usable(deadline_s=5.0)
    assert store.put(pages_of(1), lambda: False) == [REFUSED]
    assert child.next(0.2) is None
    assert family.taken == 0


def test_a_removal_is_sent_after_the_writes_that_were_begun_before_it(family: Family) -> None:
    store, child = family.usable(deadline_s=0.3)
    assert store.put(pages_of(1)) == [REFUSED]
    request = child.call(Op.PUT)
    until(lambda: not store._link._calls)  # it was given up
    assert store.delete([key(1)]) == 0
    assert child.next(0.2) is None, "a removal went before a write that is still to be done"
    child.answer(request, Code.OK)
    removal = child.call(Op.REMOVE)
    assert removal.keys == [key(1)]
    assert store.removals_waiting == 1
    child.answer(removal, Code.OK, removed=1)
    until(lambda: store.removals_waiting == 0)


def test_a_removal_follows_a_write_that_was_given_up_while_the_engine_is_usable(
    family: Family,
) -> None:
    """It was begun shortly before its caller's time was over, which says nothing of the engine."""
    store, child = family.usable(deadline_s=0.6)
    writing = beside(lambda: store.put(pages_of(*range(3))))
    first, second = child.call(Op.PUT), child.call(Op.PUT)
    time.sleep(0.3)
    child.answer(first, Code.OK)
    child.answer(second, Code.OK)
    third = child.call(Op.PUT)
    assert writing.result(20) == [STORED, STORED, REFUSED]
    until(lambda: not store._link._calls)
    assert store.usable
    store.delete([key(2)])
    assert child.next(0.1) is None
    child.answer(third, Code.OK)
    child.answer(child.call(Op.REMOVE), Code.OK, removed=1)
    until(lambda: store.removals_waiting == 0)


def test_pages_are_hidden_before_anything_else_is_deleted_and_removed_after_it(
    family: Family,
) -> None:
    store, child = family.usable(deadline_s=20.0)
    answered_right(store, child, 1)
    seen: list[object] = []

    def first() -> None:
        seen.append(store.lookup([key(1)]))
        seen.append(store.put(pages_of(1)))
        seen.append(Read(store, 1).ended())
        seen.append(child.next(0.2))

    deleting = beside(lambda: store.delete([key(1)], "kv", first))
    until(lambda: len(seen) == 4)
    assert seen == [[Lookup.MISS], [REFUSED], [MISS], None]
    child.answer(child.call(Op.REMOVE), Code.OK, removed=1)
    assert deleting.result(20) == 1


def test_a_removal_does_not_wait_for_writes_of_other_pages(family: Family) -> None:
    store, child = family.usable(deadline_s=20.0)
    writing = beside(lambda: store.put(pages_of(1)))
    request = child.call(Op.PUT)
    deleting = removing(store, 2)
    child.answer(child.call(Op.REMOVE), Code.OK, removed=1)
    assert deleting.result(20) == 1 and store.removals_waiting == 0
    child.answer(request, Code.OK)
    writing.result(20)


@pytest.mark.parametrize("code", [Code.FAILED, Code.UNREACHABLE, Code.REFUSED, Code.LATE])
def test_a_removal_is_sent_again_until_nothing_is_left_under_its_names(
    family: Family, code: Code
) -> None:
    store, child = family.usable()
    deleting = removing(store, 1, 2)
    child.answer(child.call(Op.REMOVE), Code.OK, code, removed=1)
    again = child.call(Op.REMOVE)
    assert store.lookup([key(1)]) == [Lookup.MISS] and store.removals_waiting == 2
    child.answer(again, Code.MISS, Code.OK, removed=1)
    deleting.result(20)
    until(lambda: store.removals_waiting == 0)


def test_what_was_found_out_before_a_delete_does_not_count_after_it(family: Family) -> None:
    store, child = family.usable(deadline_s=20.0)
    assert not store.ask([key(1)], timeout_s=0.01)
    question = child.call(Op.EXISTS)
    deleting = removing(store, 1)
    child.answer(child.call(Op.REMOVE), Code.OK, removed=1)
    deleting.result(20)
    child.answer(question, Code.OK)
    never(lambda: store.lookup([key(1)]) == [Lookup.HIT], 0.2)


def test_what_was_read_is_known_and_what_was_deleted_meanwhile_is_not(family: Family) -> None:
    store, child = family.usable(deadline_s=20.0)
    answered_right(store, child, 1)
    assert store.lookup([key(1)]) == [Lookup.HIT]
    read = Read(store, 1)
    request = child.call(Op.GET)
    deleting = removing(store, 1)
    child.answer(child.call(Op.REMOVE), Code.OK, removed=1)
    deleting.result(20)
    transferred(child, request, 1)
    child.answer(request, Code.OK)
    assert read.ended() == [OK], "it was there when it was read"
    assert store.lookup([key(1)]) == [Lookup.MISS]


def test_a_clear_is_one_call_whatever_there_is(family: Family) -> None:
    store, child = family.usable(deadline_s=20.0)
    clearing = beside(store.clear)
    request = child.call(Op.CLEAR)
    assert store.removals_waiting == 1
    assert Read(store, 1).ended() == [MISS], "nothing is read before the clear is done"
    child.answer(request, Code.OK, removed=12)
    assert clearing.result(20) == 12 and store.removals_waiting == 0
    answered_right(store, child, 1)


def test_without_a_process_for_it_the_store_goes_on_trying(family: Family) -> None:
    family.failures = 3
    store = family.open()
    assert Read(store, 1).ended() == [MISS]
    until(lambda: "no process can be started" in store.condition().trouble)
    answered_right(store, family.probed(), 1)


def test_a_call_that_brought_nothing_for_as_long_as_a_caller_waits_opens_the_breaker(
    family: Family,
) -> None:
    """It was begun late, since a call before it failed: its read has waited long enough."""
    store, child = family.usable(deadline_s=0.6)
    half = RING // 2 - 256  # so that one page is under way at a time
    read = Read(store, 1, 2, size=half)
    request = child.call(Op.GET)
    time.sleep(0.3)
    child.answer(request, Code.FAILED)
    child.call(Op.GET)
    assert read.ended() == [FAILED, FAILED]
    until(lambda: not store.usable, 5)
    assert "longer than 0.6 s" in store.condition().trouble
