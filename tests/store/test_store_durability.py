"""What was said to be stored is found again: although the index log could not be written, and with
`durable` once it is said.
"""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from patience import all_of, beside, waits
from scripted import Scripted, only
from store_pages import IDENTITY, found, key, killed, named, open_at, put

from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.disk import index_log
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import PUT
from sgl_kvtier.store.disk.index_log import IndexLog
from sgl_kvtier.types import Lookup, PageKey

STORED = PutOutcome.STORED


def pages(name: str) -> dict[PageKey, bytes]:
    return named((name, i) for i in range(5))


def full_env() -> Scripted:
    """With `fails` slots can be written, which have their space, and no index log grows or is made."""
    env = Scripted(native=True)
    env.error = errno.ENOSPC
    return env


def test_a_killed_process_loses_no_page_although_the_log_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_log, "_AGAIN_S", 0.0)
    env = full_env()
    store = open_at(tmp_path / "root", env=env)
    kept = pages("before") | pages("full") | pages("still full")
    assert put(store, pages("before") | named(["deleted"])) == [STORED] * 6
    env.fails = only("log")
    assert store.delete([key("deleted")]) == 1
    assert put(store, pages("full")) == put(store, pages("still full")) == [STORED] * 5
    again = open_at(killed(store, tmp_path / "full"))
    assert found(again, kept) == 15
    assert again.lookup([key("deleted")]) == [Lookup.MISS]
    env.fails = only()
    assert put(store, pages("after")) == [STORED] * 5
    records, whole = IndexLog(Env(), store.folder, IDENTITY.fingerprint).load(slots=100)
    assert whole and (records["kind"] == PUT).sum() == 20


def test_a_log_that_cannot_be_made_is_not_tried_with_every_put(tmp_path: Path) -> None:
    env = full_env()
    store = open_at(tmp_path, env=env)
    env.fails = only("log")
    put(store, pages("lost"))
    calls: list[str] = []
    env.before = calls.append
    for i in range(5):
        put(store, pages(f"full {i}"))
    made = [call for call in calls if call.startswith("open") and "index" in call]
    assert made == [f"open {store.folder}/index.log.new"]
    assert not Path(store.folder, "index.log.new").exists()
    env.fails = only()
    store.close()
    assert Path(store.folder, "index.log").exists()


def test_with_durable_a_page_without_its_record_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_log, "_AGAIN_S", 0.0)
    env = full_env()
    store = open_at(tmp_path / "root", env=env, durable=True)
    assert put(store, pages("before")) == [STORED] * 5
    env.fails = only("log")
    for _ in range(2):
        assert put(store, pages("full")) == [PutOutcome.REFUSED] * 5
        assert store.lookup(list(pages("full"))) == [Lookup.MISS] * 5
        assert not store.sync()
    env.fails = only()
    assert put(store, pages("full")) == [STORED] * 5
    assert store.sync()
    assert open_at(killed(store, tmp_path / "copy")).stats().pages == 10


def test_a_page_is_synced_after_it_was_written_whoever_syncs_beside_it(tmp_path: Path) -> None:
    env = Scripted()
    store = open_at(tmp_path, env=env, durable=True)
    put(store, pages("before"))
    slow: list[int] = []
    env.holds = lambda call: call == "page" and threading.get_ident() in slow

    def put_slowly() -> list[PutOutcome]:
        slow.append(threading.get_ident())
        return put(store, pages("slow"))

    putting = beside(put_slowly)
    assert env.entered.wait(60)
    assert put(store, pages("beside")) == [STORED] * 5
    calls: list[str] = []
    env.before = calls.append
    env.gate.set()
    assert putting.result(60) == [STORED] * 5
    assert [call for call in calls if "sync" in call] == ["sync seg-00000001", "sync index.log"]


def test_a_sync_that_leaves_it_to_another_ends_after_it(tmp_path: Path) -> None:
    env = Scripted(native=True)
    store = open_at(tmp_path, env=env)
    put(store, pages("all"))
    calls: list[str] = []
    env.before = calls.append
    env.holds = only("sync seg")
    syncs = [beside(store.sync)]
    assert env.entered.wait(60)
    syncs.append(beside(store.sync))
    assert waits(syncs[1])
    env.gate.set()
    assert all_of(syncs) == [True, True]
    assert calls.count("sync seg-00000001") == 1
