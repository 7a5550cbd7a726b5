"""A store that is dropped without close: its folder is free again, for this process too."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_pages import IO_KINDS, aligned, content, io_settings, key, open_at, put, read

from sgl_kvtier import open_store, page_key
from sgl_kvtier.errors import StoreBusyError
from sgl_kvtier.store.base import PageRead, ReadOutcome
from sgl_kvtier.store.engine import DiskStore


def threads_of_stores() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("kvtier-")}


@pytest.mark.parametrize("alike", ["", "tp0"], ids=["alone", "shared"])
@pytest.mark.parametrize("kind", IO_KINDS)
def test_a_dropped_store_can_be_opened_again_with_its_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, alike: str
) -> None:
    settings = io_settings(kind)
    before = threads_of_stores()
    for turn in range(3):
        store = open_at(tmp_path, alike=alike, **settings)
        assert os.path.basename(store.folder) == "tp0"
        put(store, {key(turn): content(turn, 5000)})
        assert read(store, {key(0): 5000}) == [(ReadOutcome.OK, content(0, 5000))]
        del store
        gc.collect()
        end = time.monotonic() + 30
        while threads_of_stores() - before and time.monotonic() < end:
            time.sleep(0.01)
    assert not threads_of_stores() - before, "no thread of a dropped store is left"
    assert caplog.text.count("was dropped without close()") == 3


def test_a_dropped_mapping_can_be_opened_again(tmp_path: Path) -> None:
    for _ in range(3):
        store = open_store(tmp_path, identity={"m": 1}, capacity_bytes=8 << 20)
        store.put({page_key("a"): b"x" * 100})
        assert store.get(page_key("a")) == b"x" * 100
        del store
        gc.collect()


def test_a_read_in_flight_keeps_a_dropped_store_open_until_it_has_ended(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, {key(i): content(i, 5000) for i in range(100)})
    buffers = [aligned(5000) for _ in range(100)]
    job = store.read([PageRead(key(i), [b]) for i, b in enumerate(buffers)])
    del store
    gc.collect()
    assert job.wait(30)
    assert set(job.outcomes) == {ReadOutcome.OK}
    assert [bytes(b) for b in buffers] == [content(i, 5000) for i in range(100)]


def test_a_closed_store_is_dropped_without_a_word(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    store = open_at(tmp_path)
    store.close()
    del store
    gc.collect()
    assert f"{tmp_path}/" not in caplog.text


def test_the_pages_beneath_stay_open_when_the_mapping_is_dropped(tmp_path: Path) -> None:
    pages = open_store(tmp_path, identity={"m": 1}, capacity_bytes=8 << 20).pages
    gc.collect()
    put(pages, {key(1): content(1, 5000)})
    assert read(pages, {key(1): 5000}) == [(ReadOutcome.OK, content(1, 5000))]
    pages.close()


def test_a_store_that_is_still_open_here_is_named_as_such(opened: Callable[..., DiskStore]) -> None:
    opened()
    with pytest.raises(StoreBusyError, match=r"which is this one.*close\(\).*with"):
        opened()


def test_an_owner_in_another_container_with_the_same_process_id_is_not_taken_for_this_one(
    tmp_path: Path,
) -> None:
    store = open_at(tmp_path)
    folder = Path(store.folder)
    store.close()
    held = os.open(folder / "lock", os.O_RDWR)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / "lock").write_text(f"{os.getpid()}\n")
        with pytest.raises(StoreBusyError, match="which is still running"):
            open_at(tmp_path)
    finally:
        os.close(held)


def test_a_store_dropped_at_the_end_of_a_process_ends_it_without_a_word(tmp_path: Path) -> None:
    code = (
        "from sgl_kvtier import open_store, page_key\n"
        f"s = open_store({str(tmp_path)!r}, identity={{'m': 1}}, capacity_bytes=8 << 20)\n"
        "s.put({page_key('a'): b'x'})\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_forked_child_that_drops_the_store_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, {key(1): content(1, 5000)})
    pid = os.fork()
    if pid == 0:
        del store
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert read(store, {key(1): 5000}) == [(ReadOutcome.OK, content(1, 5000))]
    put(store, {key(2): content(2, 5000)})
    store.close()
