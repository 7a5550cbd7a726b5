"""A local store and a remote one as one: where pages are found, read from, kept and sent to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import beside, until
from remote_double import RemoteDouble, Shared
from store_pages import aligned, begin, content, key, named, open_at, put, read

from sgl_kvtier.store.base import KV, PageRead, PutOutcome, ReadJob, ReadOutcome
from sgl_kvtier.store.tiered import upload
from sgl_kvtier.store.tiered.keeping import Keeper
from sgl_kvtier.store.tiered.store import TieredStore
from sgl_kvtier.store.tiered.upload import Name, Uploader
from sgl_kvtier.types import Lookup

SIZE = 5000
OK, MISS, FAILED = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.FAILED


class Server:
    """One server's store: a folder of its own, and its view of what all share."""

    def __init__(self, folder: Path, shared: Shared, write: str, capacity_bytes: int) -> None:
        self.local = open_at(folder, capacity_bytes=capacity_bytes)
        self.remote = RemoteDouble(shared)
        self.store = TieredStore(self.local, self.remote, write)

    def found(self, *names: object) -> list[Lookup]:
        return self.store.find([key(n) for n in names])

    def write(self, *names: object) -> list[PutOutcome]:
        return put(self.store, named(names))

    def sent(self, *names: object) -> None:
        self.write(*names)
        self.settled()

    def read(self, *names: object) -> list[ReadOutcome]:
        ended = read(self.store, {key(n): SIZE for n in names})
        for name, (outcome, data) in zip(names, ended, strict=True):
            assert outcome is not OK or data == content(name, SIZE)
        return [outcome for outcome, _ in ended]

    def settled(self) -> None:
        assert self.store.settle(30)

    def begin(self, *names: object, **how: Any) -> ReadJob:
        return begin(self.store, [key(n) for n in names], **how)

    @property
    def remotely(self) -> set[object]:
        """The keys that all servers share."""
        return {key for _, key in self.remote.shared.pages}

    def here(self, *names: object) -> list[bool]:
        return [a is Lookup.HIT for a in self.local.lookup([key(n) for n in names])]


def never() -> bool:
    return False


def uploader_of(server: Server, *, writing: Callable[[], bool] = never, **how: Any) -> Uploader:
    return Uploader(server.local, server.remote, "all", never, writing, **how)


def of(*names: object) -> list[Name]:
    return [Name(key(n), KV, SIZE) for n in names]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Starts servers that share one remote store."""
    monkeypatch.setattr(upload, "PAUSE_S", 0.01)
    shared, servers = Shared(), []

    def started(write: str = "all", capacity_bytes: int = 64 << 20) -> Server:
        servers.append(Server(tmp_path / str(len(servers)), shared, write, capacity_bytes))
        return servers[-1]

    yield started
    for server in servers:
        server.store.close()


def test_what_was_read_from_the_remote_store_is_read_here_the_next_time(start):
    a, b = start(), start()
    a.sent(1, 2)
    b.read(1, 2)
    b.settled()
    assert b.here(1, 2) == [True, True]
    b.remote.down = True
    assert b.read(1, 2) == [OK, OK]


def test_it_says_which_pages_are_on_its_own_disk_without_asking(start):
    a, b = start(), start()
    a.sent(1, 2)
    b.sent(3)
    b.remote.shared.asked.clear()
    assert b.store.own([key(n) for n in (1, 2, 3, 4)]) == [False, False, True, False]
    assert b.remote.shared.asked == []
    b.read(1)
    b.settled()
    assert b.store.own([key(1), key(2)]) == [True, False]


def test_a_look_up_asks_nothing(start):
    a, b = start(), start()
    a.sent(1)
    b.remote.shared.asked.clear()
    assert b.store.lookup([key(1)]) == [Lookup.MISS]
    assert b.remote.shared.asked == []
    assert b.found(1) == [Lookup.HIT]
    assert b.store.lookup([key(1)]) == [Lookup.HIT]


def test_one_call_asks_for_all_pages_of_a_prompt_that_are_not_here(start):
    a, b = start(), start()
    a.sent(*range(300))
    b.sent(*range(100))
    b.remote.shared.asked.clear()
    assert b.found(*range(300)) == [Lookup.HIT] * 300
    assert b.remote.shared.asked == [200]
    b.remote.shared.asked.clear()
    a.found(*range(300))
    assert b.remote.shared.asked == []


@given(
    here=st.lists(st.booleans(), min_size=1, max_size=20), there=st.integers(0), hurry=st.booleans()
)
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_mix_of_places_gives_each_page_its_own_outcome_and_bytes(start, here, there, hurry):
    a, b = start("off"), start("off")
    names = [(object_, hurry, there, tuple(here)) for object_ in range(len(here))]
    local = [n for n, one in zip(names, here, strict=True) if one]
    remote = [n for i, n in enumerate(names) if there >> i & 1]
    if local:
        b.write(*local)
    for n in remote:
        a.remote.shared.pages[KV, key(n)] = content(n, SIZE)
    calls: dict[int, ReadOutcome] = {}
    buffers = [aligned(SIZE) for _ in names]
    job = b.store.read(
        [PageRead(key(n), [into]) for n, into in zip(names, buffers, strict=True)],
        on_page=calls.__setitem__,
    )
    drained: list[tuple[int, ReadOutcome]] = job.drain() if hurry else []
    assert job.wait(30) and job.done and job.in_flight == 0
    drained += job.drain()
    expected = [OK if n in local or n in remote else MISS for n in names]
    assert job.outcomes == expected
    assert calls == dict(enumerate(expected))
    assert sorted(drained, key=lambda one: one[0]) == list(enumerate(expected))
    for n, into, outcome in zip(names, buffers, expected, strict=True):
        assert outcome is not OK or bytes(into) == content(n, SIZE)
    a.store.close()
    b.store.close()


def test_a_job_of_both_is_in_flight_until_the_remote_part_has_ended_and_can_be_cancelled(start):
    a, b = start(), start()
    a.sent(1, 2, 3)
    b.write(0)
    b.remote.open_gate.clear()
    job = b.begin(1, 0, 2, 3)
    until(lambda: job.outcomes[1] is OK and job.in_flight == 1)
    assert not job.wait(0.01) and not job.done
    job.cancel()
    assert job.outcomes[2:] == [ReadOutcome.CANCELLED] * 2
    assert not job.done and job.in_flight == 1
    b.remote.open_gate.set()
    assert job.wait(30)
    assert job.outcomes == [OK, OK, ReadOutcome.CANCELLED, ReadOutcome.CANCELLED]


def test_a_page_that_fails_there_is_a_plain_outcome(start):
    a, b = start(), start()
    a.write(1)
    b.write(2)
    a.settled()
    assert b.found(1, 2) == [Lookup.HIT] * 2
    b.remote.down = True
    assert b.read(1, 2) == [FAILED, OK]
    assert b.found(1, 2) == [Lookup.MISS, Lookup.HIT]


def test_a_mistake_of_the_remote_store_fails_its_pages_and_no_others(start):
    server = start("off")
    server.write(2)
    server.remote.broken = True
    assert server.read(1, 2, 3) == [FAILED, OK, FAILED]
    assert server.read(1) == [FAILED]


def test_a_reader_whose_page_cannot_be_copied_is_told_all_the_same(start, monkeypatch):
    a, b = start(), start()
    a.sent(1)

    def no_memory(*args):
        raise MemoryError

    monkeypatch.setattr(Keeper, "take", no_memory)
    called = []
    job = b.begin(1, on_page=lambda *ended: called.append(ended))
    assert job.wait(30) and called == [(0, OK)]


def test_a_callback_that_exits_leaves_no_page_of_either_store_without_an_answer(start):
    a, b = start(), start()
    a.sent(1, 2)
    b.write(3, 4)

    def leave(index, outcome):
        raise SystemExit

    for _ in range(2):
        job = b.begin(1, 3, 2, 4, on_page=leave)
        assert job.wait(30) and job.outcomes == [OK] * 4


def test_a_write_is_what_the_local_store_says_while_the_remote_one_is_in_trouble(start):
    server = start()
    server.remote.refuses = True
    assert server.write(1) == [PutOutcome.STORED]
    assert server.write(1) == [PutOutcome.KEPT]
    server.remote.down = True
    assert server.write(2) == [PutOutcome.STORED]
    server.remote.broken = True
    assert server.write(3) == [PutOutcome.STORED]


def test_names_wait_while_the_remote_store_does_not_answer_and_are_sent_then(start):
    a = start()
    a.remote.down = True
    a.write(1, 2)
    assert not a.store.settle(0.05)
    a.remote.down = False
    a.settled()
    assert a.remotely == {key(1), key(2)}
    assert a.store.tiered_stats().uploaded == 2


def test_refused_pages_are_counted_and_not_sent_again(start):
    a = start()
    a.remote.refuses = True
    a.sent(1, 2)
    a.remote.refuses = False
    a.sent(3)
    assert a.remotely == {key(3)}
    assert a.store.tiered_stats().refused == 2


def test_pages_that_are_too_large_are_counted_and_named_and_hold_nothing_up(
    start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(upload, "PAUSE_S", 3600.0)
    a = start()
    a.remote.most_page_bytes = SIZE - 1
    a.sent(1, 2)
    put(a.store, {key(3): content(3, 100)})
    a.settled()
    assert a.remote.offered == [key(3)]
    assert (a.store.tiered_stats().refused, a.store.tiered_stats().uploads_dropped) == (2, 0)
    (line,) = (one.message for one in caplog.records if "up to" in one.message)
    assert f"have {SIZE} bytes" in line


def test_a_page_that_is_there_is_not_sent(start):
    a, b = start(), start()
    a.sent(1)
    b.sent(1, 2)
    assert b.store.tiered_stats().uploaded == 1
    assert b.remote.offered == [key(2)]


def test_pages_seen_once_are_not_sent_with_second_hit(start):
    a = start("second-hit")
    a.sent(1, 2, 3)
    assert a.remote.shared.pages == {}
    a.read(1)
    a.sent(2)
    assert a.remotely == {key(1), key(2)}


def test_a_page_is_sent_once_the_disk_admits_it(tmp_path: Path):
    local = open_at(tmp_path, admission="second-hit")
    with closing(TieredStore(local, RemoteDouble())) as store:
        for sent in (0, 1):
            put(store, {key(1): content(1, SIZE)})
            assert store.settle(30)
            stats = store.tiered_stats()
            assert (stats.uploaded, stats.uploads_dropped) == (sent, 0)


def test_with_on_evict_pages_are_sent_when_the_disk_is_full_and_before_they_leave_it(start):
    a = start("on-evict", 16 << 20)
    count = 2 * (16 << 20) // (2 * 4096)  # a slot is of whole blocks
    for low in range(0, count, 100):
        a.write(*range(low, low + 100))
        a.settled()
        if low < count // 4:
            assert a.remote.shared.pages == {}
    here = a.here(*range(count))
    assert not here[0] and here[-1]
    sent = a.remote.shared.pages.keys()
    assert [n for n in range(count) if not here[n] and (KV, key(n)) not in sent] == []
    assert (KV, key(count - 1)) not in sent


def test_with_on_evict_what_was_used_just_now_stays_and_names_beyond_the_limit_go_early(start):
    a = start("on-evict")
    uploader = Uploader(a.local, a.remote, "off", never, never, most_names=2)
    uploader._policy = "on-evict"
    uploader.written(of(0, 1))
    uploader.read(of(0))
    uploader.written(of(2))
    assert list(uploader._waiting) == [(key(1), KV)]


def test_nothing_is_sent_with_off_and_pages_of_others_are_read(start):
    a, b = start(), start("off")
    a.write(1)
    b.write(2)
    a.settled()
    b.settled()
    assert a.remotely == {key(1)}
    assert b.read(1) == [OK]


def test_pools_are_kept_apart(start):
    a, b = start(), start()
    put(a.store, {key(1): content("kv", SIZE)})
    put(a.store, {key(1): content("window", 300)}, pool="window")
    put(a.store, {key(2): content("kv", SIZE)})
    a.settled()
    pages = [PageRead(key(1), [aligned(300)], "window"), PageRead(key(1), [aligned(SIZE)])]
    job = b.store.read(pages)
    assert job.wait(30) and job.outcomes == [OK, OK]
    assert [bytes(p.into[0]) for p in pages] == [content("window", 300), content("kv", SIZE)]
    b.settled()
    assert b.local.lookup([key(1)], "window") == b.local.lookup([key(1)]) == [Lookup.HIT]


def test_reads_go_before_uploads(start):
    a, b = start(), start()
    a.sent(1)
    b.remote.open_gate.clear()
    job = b.begin(1)
    b.write(2)
    assert not b.store.settle(0.1)
    assert b.store.tiered_stats().uploaded == 0
    b.remote.open_gate.set()
    assert job.wait(30)
    b.settled()
    assert b.store.tiered_stats().uploaded == 1


def test_a_clear_holds_in_both_for_pages_on_their_way_too(start):
    a, b = start(), start()
    a.sent(1, 2)
    b.remote.open_gate.clear()
    job = b.begin(1)
    until(lambda: job.in_flight == 1)
    b.remote.down = True
    b.write(3)
    b.remote.down = False
    b.store.clear()
    b.remote.open_gate.set()
    assert job.wait(30)
    b.settled()
    assert b.here(1, 3) == [False, False]
    assert b.remote.shared.pages == {}
    assert b.found(1, 2, 3) == [Lookup.MISS] * 3


def test_a_delete_holds_in_both(start):
    a, b = start(), start()
    a.sent(1, 2)
    b.read(1, 2)
    b.settled()
    assert b.store.delete([key(1)]) == 1
    assert b.found(1, 2) == [Lookup.MISS, Lookup.HIT]
    assert a.remotely == {key(2)}


def test_a_delete_does_not_wait_for_pages_that_are_being_sent_and_holds_for_them_too(start):
    """The remote store takes nothing until the delete has returned."""
    server = start()
    server.remote.put_gate.clear()
    server.write(1)
    until(lambda: server.remote.putting)
    server.write(2)
    assert server.store.delete([key(1)]) == 1
    assert server.store.delete([key(2)]) == 1
    server.remote.put_gate.set()
    server.settled()
    assert server.remote.shared.pages == {}
    assert server.store.tiered_stats().uploads_dropped == 0, "nothing was looked for in vain"
    server.sent(3)
    assert server.remotely == {key(3)}


def test_a_page_that_is_sent_again_while_it_is_deleted_is_not_there_afterwards(start):
    """A read queues it once more right before it leaves the local disk."""
    server = start("second-hit")
    server.write(1)
    delete = server.local.delete

    def delete_beside_a_read(keys, pool=KV):
        server.remote.put_gate.clear()
        server.read(1)
        until(lambda: server.remote.putting)
        return delete(keys, pool)

    server.local.delete = delete_beside_a_read
    assert server.store.delete([key(1)]) == 1
    server.remote.put_gate.set()
    server.settled()
    assert server.remote.shared.pages == {}


def test_a_page_that_came_before_it_was_deleted_is_not_kept(start):
    a, b = start(), start()
    a.sent(1)
    delete = b.remote.delete

    def read_before(keys, pool=KV, first=None):
        assert b.read(1) == [OK]
        return delete(keys, pool, first)

    b.remote.delete = read_before
    b.store.delete([key(1)])
    b.settled()
    assert b.here(1) == [False]


def test_a_page_whose_read_began_before_a_delete_is_not_kept(start):
    server = start()
    keeper = Keeper(server.local)
    before = keeper.epoch
    keeper.forget()
    keeper.take(PageRead(key(1), [aligned(SIZE)]), before)
    keeper.take(PageRead(key(2), [aligned(SIZE)]), keeper.epoch)
    assert keeper.settle(30)
    keeper.close()
    assert server.here(1, 2) == [False, True]


def test_a_delete_waits_for_the_copy_that_is_being_written_and_for_no_other(start):
    server = start()
    keeper = Keeper(server.local)
    with server.local._core.lock:  # its writes wait
        keeper.take(PageRead(key(1), [aligned(SIZE)]), 0)
        until(lambda: keeper._begun == 1)
        forgetting = beside(keeper.forget)
        until(lambda: keeper.epoch == 1)
        keeper.take(PageRead(key(2), [aligned(SIZE)]), 1)
        assert not forgetting.done()
    forgetting.result(30)
    assert keeper.settle(30)
    keeper.close()
    assert server.here(1, 2) == [True, True]


def test_copies_beyond_the_limit_are_not_kept(start):
    server = start()
    keeper = Keeper(server.local, most_bytes=SIZE)
    with server.local._core.lock:  # the keeper's write waits for it
        for n in range(3):
            keeper.take(PageRead(key(n), [aligned(SIZE)]), 0)
    assert keeper.settle(30)
    keeper.close()
    assert server.here(0, 1, 2) == [True, False, False]


def test_the_oldest_names_are_dropped_where_too_many_wait(start):
    server = start("off")
    server.write(*range(5))
    server.remote.down = True
    uploader = uploader_of(server, most_names=3)
    uploader.written(of(0))
    until(lambda: not uploader.waiting)  # it waits for the remote store with this one
    uploader.written(of(*range(1, 5)))
    assert (uploader.waiting, uploader.dropped) == (3, 1)
    server.remote.down = False
    assert uploader.settle(30)
    uploader.close()
    assert server.remotely == {key(n) for n in (0, 2, 3, 4)}


@pytest.mark.parametrize(("deleted", "sent"), [((1,), (0, 2, 3)), ((9,), (0, 1, 2, 3)), (None, ())])
def test_a_deleted_page_keeps_no_other_from_being_sent(start, deleted, sent):
    server = start("off")
    server.write(*range(4))
    server.remote.down = True
    uploader = uploader_of(server)
    uploader.written(of(*range(4)))
    until(lambda: not uploader.waiting)  # it waits for the remote store with all of them
    uploader.forget(None if deleted is None else [key(n) for n in deleted])
    server.remote.down = False
    assert uploader.settle(30)
    uploader.close()
    assert server.remotely == {key(n) for n in sent}


@pytest.mark.parametrize(("writes", "looks"), [(3, 4), (99, 10)])
def test_local_writes_go_first_for_a_while(start, writes, looks):
    server = start("off")
    server.write(1)
    seen: list[int] = []

    def writing() -> bool:
        seen.append(len(server.remote.shared.pages))
        return len(seen) <= writes

    uploader = uploader_of(server, writing=writing)
    uploader.written(of(1))
    assert uploader.settle(30)
    uploader.close()
    assert seen == [0] * looks
    assert uploader.sent == 1


def test_names_are_asked_for_in_batches_before_any_page_is_sent(start):
    server = start()
    server.remote.down = True
    server.write(*range(300))
    until(lambda: server.store.tiered_stats().uploads_waiting <= 172)
    server.remote.down = False
    server.remote.shared.asked.clear()
    server.settled()
    assert max(server.remote.shared.asked) == 128
    assert len(server.remote.shared.pages) == 300


def test_a_page_that_was_evicted_before_its_turn_is_not_sent(start):
    server = start()
    server.remote.down = True
    server.write(1, 2)
    server.local.delete([key(1)])
    server.remote.down = False
    server.settled()
    assert server.remotely == {key(2)}
    assert server.store.tiered_stats().uploads_dropped == 1


def test_it_closes_while_the_remote_store_hangs_in_the_middle_of_everything(start):
    a, b = start(), start()
    a.sent(1)
    b.remote.open_gate.clear()
    job = b.begin(1)
    b.remote.down = True
    b.write(5)
    b.store.close()
    b.store.close()
    assert job.done and b.remote.closed
