"""The account that judges owners of one folder notices what is planted, and nothing else."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_kvtier import cli
from sgl_kvtier.config import StoreConfig
from sgl_kvtier.errors import StoreError
from sgl_kvtier.lab.stress.store import campaign, command, owner
from sgl_kvtier.lab.stress.store.campaign import Campaign, Plan
from sgl_kvtier.lab.stress.store.owner import Board, Life, Owner, OwnersEnv, open_owner
from sgl_kvtier.lab.stress.store.shared_oracle import (
    Count,
    Journal,
    SharedLock,
    SharedOracle,
    content,
    now_ns,
    page_of,
)
from sgl_kvtier.lab.stress.trouble import OF_A_STORE, Finding
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome, StoreStats
from sgl_kvtier.types import Lookup

NAMES = np.arange(10)


class Pages:
    """A store in memory that several owners share, and that can be told to misbehave."""

    def __init__(self) -> None:
        self.kept: dict[tuple[bytes, str], bytes] = {}
        self.deaf = False
        self.followed: Callable[[], None] = lambda: None
        self.during_put: Callable[[], None] = lambda: None

    def put(self, pages: list[PageWrite]) -> list[PutOutcome]:
        self.during_put()
        for page in pages:
            self.kept.setdefault((page.key, page.pool), bytes(page.data[0]))
        return [PutOutcome.STORED] * len(pages)

    def read(self, pages: list[PageRead]) -> Any:
        outcomes = []
        for page in pages:
            data = self.kept.get((page.key, page.pool))
            outcomes.append(ReadOutcome.MISS if data is None else ReadOutcome.OK)
            if data is not None:
                page.into[0][:] = data
        return SimpleNamespace(outcomes=outcomes, wait=lambda _: True)

    def delete(self, keys: list[bytes], pool: str) -> int:
        for key in () if self.deaf else keys:
            self.kept.pop((key, pool), None)
        return len(keys)

    def clear(self) -> int:
        if not self.deaf:
            self.kept.clear()
        return 0

    def follow(self) -> None:
        self.followed()

    def stats(self) -> StoreStats:
        return StoreStats(pages_evicted=7)


class Site:
    """Two owners of one folder, in this process."""

    def __init__(self, path: Path) -> None:
        self.oracle = SharedOracle(Journal(str(path / "lock")), 0, len(NAMES), 2)
        self.board = Board(2)
        self.pages = Pages()
        self.first, self.second = self.owner(0), self.owner(1)
        assert self.first.open() and self.second.open()

    def owner(self, slot: int, opener: Any = None) -> Owner:
        life = Life(slot + 1, slot, 1, StoreConfig(path="nowhere"))
        return Owner(self.oracle, self.board, life, opener or (lambda *_: self.pages))

    def faults(self) -> dict[Finding, int]:
        return {
            kind: int(n) for kind, n in zip(OF_A_STORE, self.oracle.fault_counts, strict=True) if n
        }

    def key(self, name: int) -> tuple[bytes, str]:
        page = page_of(0, 1, name)
        return page.key, page.pool

    def history(self) -> str:
        journal = self.oracle.journal
        return "\n".join(line for fault in journal.faults() for line in journal.history(fault))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_store_that_keeps_its_promise_has_no_faults(site: Site) -> None:
    for _ in range(3):
        site.first.put(NAMES)
        site.second.follow()
        site.second.check(NAMES)
        site.second.delete(NAMES[:4])
        site.first.follow()
        site.first.check(NAMES)
    site.first.clear()
    site.first.check(NAMES)
    assert site.faults() == {}
    assert site.oracle.total(Count.LOOKED_FOR) == site.oracle.total(Count.FOUND) == 3 * (10 + 6)
    assert site.oracle.total(Count.GONE_LOOKED_FOR) == 3 * 4 + 10


def one_other_bit(page: bytes) -> bytes:
    return page[:-1] + bytes([page[-1] ^ 1])


WRONG: dict[str, Callable[[Site], bytes]] = {
    "another bit": lambda site: one_other_bit(site.pages.kept[site.key(3)]),
    "another page": lambda site: site.pages.kept[site.key(6)],
    "a generation that nobody put": lambda site: content(page_of(0, 1, 3), 2),
}


@pytest.mark.parametrize("what", WRONG)
def test_other_bytes_are_a_wrong_page(site: Site, what: str) -> None:
    site.first.put(NAMES)
    site.pages.kept[site.key(3)] = WRONG[what](site)
    site.first.check(NAMES)
    assert site.faults() == {Finding.WRONG: 1}


@pytest.mark.parametrize("clears", [False, True])
def test_a_page_that_its_deleter_finds_again_is_resurrected(site: Site, clears: bool) -> None:
    site.first.put(NAMES[:1])
    site.pages.deaf = True
    if clears:
        site.second.clear()
    else:
        site.second.delete(NAMES[:1])
    site.second.check(NAMES)
    assert site.faults() == {Finding.RESURRECTED: 1}
    assert "life 2 " + ("clear" if clears else "delete") + " answered, page 0" in site.history()


def test_a_deleted_page_is_resurrected_for_another_owner_once_that_one_followed(site: Site) -> None:
    site.first.put(NAMES[:1])
    site.pages.deaf = True
    site.second.delete(NAMES[:1])
    site.first.check(NAMES)
    assert site.faults() == {}
    site.first.follow()
    site.first.check(NAMES)
    assert site.faults() == {Finding.RESURRECTED: 1}


def test_an_older_generation_in_place_of_a_new_page_is_resurrected(site: Site) -> None:
    site.first.put(NAMES)
    old = dict(site.pages.kept)
    site.first.delete(NAMES)
    site.first.put(NAMES)
    assert site.pages.kept[site.key(0)] != old[site.key(0)]
    site.pages.kept[site.key(0)] = old[site.key(0)]
    site.first.check(NAMES)
    assert site.faults() == {Finding.RESURRECTED: 1}


def test_a_page_that_was_answered_for_and_is_missing_is_lost(site: Site) -> None:
    site.first.put(NAMES)
    del site.pages.kept[site.key(3)]
    site.second.check(NAMES)
    assert site.faults() == {}  # it has neither opened nor followed since the answer
    site.second.follow()
    site.second.check(NAMES)
    assert site.faults() == {Finding.LOST: 1}
    assert "reading it: MISS (also after another look)" in site.history()
    assert "life 1 put answered, page 3, generation 1 (owed)" in site.history()


def test_who_stored_a_page_must_find_it_at_once(site: Site) -> None:
    site.first.put(NAMES)
    site.pages.kept.clear()
    site.second.check(NAMES)
    assert site.faults() == {}
    site.first.check(NAMES[:4])
    assert site.faults() == {Finding.LOST: 4}


def test_what_was_deleted_or_is_evicted_is_not_owed(site: Site, tmp_path: Path) -> None:
    site.first.put(NAMES)
    site.second.delete(NAMES)
    site.first.follow()
    site.first.check(NAMES)
    evicting = SharedOracle(site.oracle.journal, 1, len(NAMES), 1, owes=False)
    intent = evicting.begin_put(0, 1, 1, NAMES, 1)
    evicting.end_put(0, 1, intent, [PutOutcome.STORED] * len(NAMES), 1)
    assert len(evicting.owed()) == 0 and site.faults() == {}


def test_a_page_that_was_put_while_it_was_deleted_may_stay_or_go(site: Site) -> None:
    site.pages.during_put = lambda: site.second.delete(NAMES)
    site.first.put(NAMES)
    for owner_ in (site.first, site.second):
        owner_.follow()
        owner_.check(NAMES)
    site.pages.kept.clear()
    site.first.check(NAMES)
    assert site.faults() == {}
    site.pages.during_put = lambda: None
    site.first.delete(NAMES)
    assert len(site.oracle.gone()) == len(NAMES)


def test_a_page_that_the_reader_is_putting_itself_may_be_missed(site: Site) -> None:
    site.first.put(NAMES)
    site.second.follow()
    site.pages.kept.clear()
    site.pages.during_put = lambda: site.second.check(NAMES)
    site.second.put(NAMES)
    assert site.faults() == {}
    site.first.follow()
    site.pages.kept.clear()
    site.first.check(NAMES)
    assert site.faults() == {Finding.LOST: len(NAMES)}


def test_a_process_that_died_before_its_answer_owes_nothing_and_deletes_nothing(site: Site) -> None:
    site.second.put(NAMES[5:])
    site.oracle.begin_put(0, 1, 1, NAMES[:3], now_ns())
    site.oracle.begin_delete(0, 1, 1, NAMES[5:])
    with site.oracle.lock:
        site.oracle.bury(0)
    site.second.follow()
    site.second.check(NAMES)
    assert site.faults() == {} and len(site.oracle.owed()) == len(site.oracle.gone()) == 0
    site.second.put(NAMES)
    assert len(site.oracle.owed()) == len(NAMES)


def test_an_open_that_fails_is_a_fault_and_one_that_a_shortage_refuses_is_none(site: Site) -> None:
    errors = [IndexError("of ours"), StoreError("stop"), StoreError("stop")]

    def opener(*_: object) -> Pages:
        if len(errors) == 2:
            site.board.troubles[0] = 1
        if errors:
            raise errors.pop(0)
        return site.pages

    assert site.owner(0, opener).open()
    assert site.faults() == {Finding.FAILED_OPEN: 1}
    assert site.oracle.total(Count.REFUSED_OPENS) == 2
    assert "IndexError: of ours" in site.history()


def test_stats_that_raise_are_a_fault(site: Site) -> None:
    site.first._stats()
    assert site.faults() == {} and site.oracle.total(Count.EVICTED) == 7
    site.pages.stats = lambda: len(SimpleNamespace())  # type: ignore[assignment, arg-type]
    site.first._stats()
    assert site.faults() == {Finding.STATS_RAISED: 1}


def test_what_only_a_call_of_follow_finds_shows_that_the_follower_stopped(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.first.put(NAMES)
    kept, site.pages.kept = site.pages.kept, {}
    site.second.check(NAMES)
    assert site.faults() == {}  # for a while a sibling may not know of it
    site.pages.followed = lambda: site.pages.kept.update(kept)
    monkeypatch.setattr(owner, "PATIENCE_NS", 0)
    site.second.check(NAMES)
    assert site.faults() == {Finding.FOLLOWER_STOPPED: 1}


def test_what_is_not_found_in_trouble_says_nothing_and_what_was_stored_in_trouble_is_owed(
    site: Site,
) -> None:
    site.board.troubles[0] += 1
    site.first.put(NAMES)
    assert len(site.oracle.owed()) == len(NAMES)
    site.second.follow()
    site.pages.kept.clear()
    site.board.troubles[1] += 1
    site.second.check(NAMES)
    assert site.faults() == {}
    site.board.troubles[1] += 1
    site.second.check(NAMES)
    assert site.faults() == {Finding.LOST: len(NAMES)}


@pytest.mark.parametrize("trouble", [True, False])
def test_what_is_evicted_is_not_owed_and_is_a_fault_where_there_was_room(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: bool
) -> None:
    config = StoreConfig(path=str(tmp_path), capacity_bytes=64 << 20, min_free_bytes=0)
    puts, looks = (
        Owner(site.oracle, site.board, Life(7 + slot, slot, 1, config), open_owner)
        for slot in (0, 1)
    )
    assert puts.open() and looks.open()
    monkeypatch.setattr(puts._store._room, "_slots_of_new", lambda _: 2)
    puts.put(NAMES[:5])
    monkeypatch.setattr(puts._store._room, "_slots_of_new", lambda _: 0)
    owed = len(site.oracle.owed())
    site.board.troubles[0] += trouble
    puts.put(NAMES[5:])
    site.board.troubles[0] += trouble
    evicted = puts._store.stats().pages_evicted
    assert evicted > 0 and owed == 5
    pages = [page_of(0, 1, n) for n in NAMES.tolist()]
    there = [puts._store.lookup([page.key], page.pool)[0] is Lookup.HIT for page in pages]
    assert site.oracle.owed().tolist() == np.flatnonzero(there).tolist()
    for reader in (looks, puts):
        reader.follow()
        reader.check(NAMES)
    assert bool(site.faults()) is not trouble
    puts.close()
    looks.close()


def test_a_new_folder_has_other_keys_and_an_empty_account(site: Site) -> None:
    site.first.put(NAMES)
    with site.oracle.lock:
        site.oracle.begin_anew(2)
    site.pages.kept.clear()
    site.first.follow()
    site.first.check(NAMES)
    assert site.faults() == {} and page_of(0, 2, 1).key != page_of(0, 1, 1).key


def test_a_killed_process_lets_go_of_the_lock(tmp_path: Path) -> None:
    lock = SharedLock(str(tmp_path / "lock"))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        lock.attach()
        with lock:
            os.write(writing, b".")
            time.sleep(600)
    os.read(reading, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with lock:
        pass
    lock.close()


def test_a_full_disk_takes_no_new_byte_and_what_is_there_can_be_written(tmp_path: Path) -> None:
    board = Board(1)
    env = OwnersEnv(board, 0)
    fd = env.open(str(tmp_path / "there"), os.O_RDWR | os.O_CREAT)
    env.pwritev(fd, [memoryview(bytes(8192))], 0)
    board.disk_full[0] = True
    assert env.pwritev(fd, [memoryview(bytes(4096))], 4096) == 4096
    for refused in (
        lambda: env.pwritev(fd, [memoryview(bytes(4096))], 8192),
        lambda: env.open(str(tmp_path / "new"), os.O_RDWR | os.O_CREAT),
        lambda: env.allocate(fd, 1 << 20),
    ):
        with pytest.raises(OSError, match="No space") as error:
            refused()
        assert error.value.errno == errno.ENOSPC
    assert env.free_bytes(str(tmp_path)) == 0
    env.close(fd)


class Forgetful:
    """A real store that does not find every third page."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, pages: list[PageRead]) -> Any:
        return _Third(self._store.read(pages)) if len(pages) > 1 else self._store.read(pages)


class _Third:
    def __init__(self, job: Any) -> None:
        self.wait = job.wait
        self._job = job

    @property
    def outcomes(self) -> list[Any]:
        found = list(self._job.outcomes)
        found[::3] = [ReadOutcome.MISS] * len(found[::3])
        return found


def test_pages_are_found_again_behind_a_log_that_ends_in_the_middle_of_a_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "_CUT", 1.0)
    alone = Campaign(str(tmp_path), 5, campaign.alone(6))
    alone.run()
    found = alone.result()
    assert found["cut_log"] == found["kill"] >= 6 and alone.faults == 0
    assert found["found"] == found["looked_for"]


def test_a_process_kills_itself_within_the_call_that_is_named(tmp_path: Path) -> None:
    alone = Campaign(str(tmp_path), 5, campaign.alone(1))
    steps: list[int] = []
    assert alone.kill_at(("pwritev", "within"), 2, steps.append) == 2 == sum(steps)
    assert alone.faults == 0 and alone.result()["kill"] == 2


def test_a_campaign_against_a_forgetful_store_fails_and_prints_histories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opener(*args: Any) -> Forgetful:
        return Forgetful(open_owner(*args))

    monkeypatch.setattr(command, "Campaign", functools.partial(Campaign, opener=opener))
    short = dataclasses.replace(command.QUICK, together=Plan(10, 0.4, 0.2))
    monkeypatch.setattr(command, "QUICK", short)
    out = tmp_path / "torture.json"
    status = cli.main(
        ["bench", "torture", "--quick", "--only", "together", "--dir", str(tmp_path),
         "--json", str(out)]
    )  # fmt: skip
    data = json.loads(out.read_text())
    assert status == 1 and data["lost_pages"] > 0
    assert data["wrong_pages"] == data["resurrected"] == 0
    assert "not any more after another look" in capsys.readouterr().err


def test_a_run_that_is_interrupted_tells_what_went_wrong_until_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Interrupted:
        faults = 1

        def __init__(self, *_: Any) -> None:
            pass

        def run(self, _: Any) -> None:
            raise KeyboardInterrupt

        def result(self) -> dict[str, Any]:
            return {"histories": [["page 7 is lost", "life 2 put began"]]}

    monkeypatch.setattr(command, "Campaign", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        command._together(str(tmp_path), command.QUICK, 1, None)  # type: ignore[arg-type]
    assert "page 7 is lost\nlife 2 put began" in capsys.readouterr().err
