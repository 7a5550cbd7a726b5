"""Folders: one owner, one identity, nothing followed out of them, and what a later start finds."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted import Scripted
from store_pages import IDENTITY, content, found, key, named, open_at, put, segments, stored_at

from sgl_kvtier.config import StoreConfig, parse_config
from sgl_kvtier.errors import StoreBusyError, StoreError, StoreFormatError
from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import DROP
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.disk.index_log import IndexLog
from sgl_kvtier.store.disk.segment import MOST_SEGMENT_NUMBER
from sgl_kvtier.store.engine import open_store
from sgl_kvtier.store.tools import offline
from sgl_kvtier.types import Lookup

PAGES = named(range(20))


@pytest.mark.parametrize("name", ["Seiten für Ü 页", "two  words\tand 'quotes' \"50%\" $HOME {x}"])
def test_a_path_with_other_letters_and_spaces_is_a_path(tmp_path: Path, name: str) -> None:
    path = parse_config({"store": {"path": str(tmp_path / name)}}).store.path
    stored_at(Path(path), PAGES)
    store = open_at(Path(path))
    assert Path(store.folder).is_relative_to(tmp_path / name)
    assert found(store, PAGES) == len(PAGES)
    assert os.listdir(tmp_path) == [name]


def test_a_folder_has_one_owner_and_the_message_names_it(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    with pytest.raises(StoreBusyError, match=rf"process {os.getpid()}, which is this one.*close"):
        open_at(tmp_path)
    open_at(tmp_path, rank="tp1")
    store.close()
    open_at(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float8"},
        {"page_size": 32},
        {"model": "other"},
        {"weights": "f00d"},
        {"rope": {"theta": 1e6}},
    ],
)
def test_another_identity_never_meets_these_pages(tmp_path: Path, change: dict) -> None:
    put(open_at(tmp_path), PAGES)
    other = open_at(tmp_path, Identity({**IDENTITY.fields, **change}, name="lab"))
    assert set(other.lookup(list(PAGES))) == {Lookup.MISS}
    same = open_at(tmp_path, Identity(dict(reversed(IDENTITY.fields.items())), "lab"), "tp1")
    assert os.path.dirname(same.folder) == os.path.dirname(open_at(tmp_path, rank="tp2").folder)


def test_segments_copied_from_another_identity_hold_no_pages(tmp_path: Path) -> None:
    mine = stored_at(tmp_path, PAGES)
    other = Identity({"model": "other"})
    theirs = stored_at(tmp_path, {}, identity=other)
    for path in mine.iterdir():
        if path.name != "lock":
            (theirs / path.name).write_bytes(path.read_bytes())
    assert set(open_at(tmp_path, other).lookup(list(PAGES))) == {Lookup.MISS}


@pytest.mark.parametrize("rank", ["", "..", "a/b", "/abs", "../up", ".hidden", "a..b", "x" * 80])
def test_a_rank_name_cannot_leave_the_folder(tmp_path: Path, rank: str) -> None:
    with pytest.raises(StoreError, match="rank"):
        open_at(tmp_path, rank=rank)


@pytest.mark.parametrize(
    "name", ["../../etc", "/etc/passwd", "..", "", "a/b\0c", "ключ", "x" * 500]
)
def test_a_models_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    store = open_at(tmp_path / "root", identity=Identity({"model": name}, name=name))
    assert Path(store.folder).parent.parent == tmp_path / "root"


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "root"
    root.mkdir()
    (root / IDENTITY.directory_name).symlink_to(elsewhere)
    with pytest.raises(StoreError, match="symbolic link"):
        open_at(root)
    (root / IDENTITY.directory_name).unlink()
    folder = stored_at(root, PAGES)
    for name in ("index.log", "seg-00000001", "lock"):
        path = folder / name
        kept = elsewhere / name
        path.rename(kept)
        before = kept.read_bytes()
        path.symlink_to(kept)
        try:
            opened = open_at(root)
            put(opened, {key("new"): b"new"})
            opened.close()
        except StoreError:
            pass
        assert kept.read_bytes() == before
        path.unlink(missing_ok=True)
        kept.rename(path)


def test_a_folder_of_another_identity_with_the_same_name_is_refused(tmp_path: Path) -> None:
    config = stored_at(tmp_path, PAGES).parent / "config.json"
    config.write_text(config.read_text().replace("bfloat16", "float32"))
    with pytest.raises(StoreFormatError, match="describes other pages"):
        open_at(tmp_path)
    config.write_text("{")
    with pytest.raises(StoreFormatError, match="damaged"):
        open_at(tmp_path)


def test_a_path_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"store\.path is not set"):
        open_store(StoreConfig(), IDENTITY, "tp0")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"not a folder. Remove it, or choose"):
        open_at(tmp_path / "file")


def test_an_identity_must_be_plain_data() -> None:
    for bad in ({"x": object()}, {1: "x"}, {"x": float("nan")}, {"x": (1, 2)}):
        with pytest.raises(StoreError, match="plain JSON"):
            Identity(bad)  # type: ignore[arg-type]


def test_a_log_that_is_written_anew_says_the_same(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    kept, swa = named(range(10), 3000), {key(i): content(("swa", i), 9000) for i in range(10)}
    put(store, kept)
    put(store, swa, "swa")
    for i in range(60):
        names = [key((i, n)) for n in range(10)]
        put(store, dict.fromkeys(names, b"short-lived"))
        store.delete(names)
    log = Path(store.folder, "index.log").stat().st_size
    assert log < 88 * 1000  # every put and delete left a record; most of them are gone again
    store.close()
    again = open_at(tmp_path)
    assert again.stats().pages == 20
    assert found(again, kept) == found(again, swa, "swa") == 10


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from store_pages import content, key, open_at, put
store = open_at(Path(sys.argv[1]))
n = 0
while True:
    put(store, {key(i): content(i, 5000) for i in range(n, n + 8)})
    n += 8
    print(n, flush=True)
"""


def test_a_killed_writer_leaves_every_page_it_was_told_was_stored(tmp_path: Path) -> None:
    kept = 0
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), os.path.dirname(__file__)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for line in child.stdout:
            kept = int(line)
            if kept >= 200:
                break
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        store = open_at(tmp_path)
        assert found(store, named(range(kept))) == kept
        store.close()


def as_directory(path: Path) -> None:
    (path / "kept").mkdir(parents=True)


def as_link(path: Path) -> None:
    path.symlink_to(path.with_name("lock"))


@pytest.mark.parametrize(
    "number", ["ffffffff", "fffffffe", "ffffff00", "00100001", "00100000", "00000002", "00000000"]
)
@pytest.mark.parametrize("make", [as_directory, as_link, os.mkfifo, Path.touch])
def test_what_is_named_as_a_segment_and_is_none_hinders_nobody(
    tmp_path: Path, number: str, make: Callable[[Path], None]
) -> None:
    strange = stored_at(tmp_path, PAGES) / f"seg-{number}"
    make(strange)
    kind = strange.lstat().st_mode
    stored_at(tmp_path, named(("more", i) for i in range(300)))
    assert open_at(tmp_path).stats().pages == 320
    if make is not Path.touch:  # an empty file is a segment that was never finished
        assert strange.lstat().st_mode == kind


def test_the_last_number_of_a_segment_is_followed_by_the_first_free_one(tmp_path: Path) -> None:
    folder = stored_at(tmp_path, PAGES)
    log = IndexLog(Env(), str(folder), IDENTITY.fingerprint)
    records, _ = log.load(slots=100)
    mentioned = records[-1:].copy()
    mentioned["segment"], mentioned["kind"] = MOST_SEGMENT_NUMBER - 1, DROP
    assert log.resume(len(records)) and log.append(mentioned)
    log.close()
    sizes = {key(("more", i)): content(i, 30_000 + 4096 * i) for i in range(3)}
    stored_at(tmp_path, sizes, capacity_bytes=64 << 20)
    names = [f"seg-{number:08x}" for number in (1, 2, 3, MOST_SEGMENT_NUMBER)]
    assert sorted(path.name for path in folder.glob("seg-*")) == names
    again = open_at(tmp_path, capacity_bytes=64 << 20)
    assert put(again, named(["another"], 90_000)) == [PutOutcome.STORED]
    assert found(again, PAGES | sizes) == 23
    assert [path.name for path in segments(again)] == sorted([*names, "seg-00000004"])


@pytest.mark.parametrize(
    "kind", ["8 TiB", "fifo", "directory", "link", "gone", "empty", "garbage", "cut", "other head"]
)
def test_an_index_that_is_none_is_made_anew_from_the_slots(tmp_path: Path, kind: str) -> None:
    log = stored_at(tmp_path, PAGES) / "index.log"
    data = log.read_bytes()
    spoiled = {"empty": b"", "garbage": b"\x17" * 5000, "cut": data[:-9]}
    spoiled["other head"] = bytes(64) + data[64:]
    if kind == "8 TiB":
        os.truncate(log, 8 << 40)
    elif kind in spoiled:
        log.write_bytes(spoiled[kind])
    else:
        log.unlink()
        if kind != "gone":
            {"fifo": os.mkfifo, "directory": as_directory, "link": as_link}[kind](log)
    for _ in range(2):
        again = open_at(tmp_path)
        assert found(again, PAGES) == 20
        put(again, {key("more"): b"more"})
        again.close()
    if kind == "directory":
        assert (log / "kept").is_dir()
    else:
        assert log.is_file() and not log.is_symlink() and log.stat().st_size < 1 << 20
    assert open_at(tmp_path).stats().pages == 21


@pytest.mark.parametrize("name", ["index.log.new", "probe"])
@pytest.mark.parametrize("make", [as_directory, as_link, os.mkfifo])
def test_what_stands_in_a_temporary_files_place_hinders_nobody(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    folder = stored_at(tmp_path, PAGES)
    (folder / "index.log").unlink()
    make(folder / name)
    assert open_at(tmp_path).stats().pages == 20
    assert make is not as_directory or (folder / name / "kept").is_dir()


# What is said about a folder that cannot hold a store: the cause, and what to do about it.


def refusing(number: int, call: str) -> Scripted:
    """Opening or locking a rank's lock fails with one error."""
    env = Scripted()
    env.error = number
    env.fails = lambda made: made == "lock" if call == "lock" else made.endswith("/lock")
    return env


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK])
def test_a_filesystem_without_flock_is_named_as_such(tmp_path: Path, number: int) -> None:
    with pytest.raises(StoreError, match=r"takes no locks.*needs flock.*local disk"):
        open_at(tmp_path, env=refusing(number, "lock"))


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, "Mount the filesystem writable"),
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EMFILE, "ulimit"),
        (errno.EIO, "kernel log"),
        (errno.EACCES, "this user can write"),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) else "",
)
def test_an_error_on_the_way_to_the_lock_says_what_mends_it(
    tmp_path: Path, number: int, advice: str
) -> None:
    with pytest.raises(StoreError, match=advice) as refused:
        open_at(tmp_path, env=refusing(number, "open"))
    assert "[Errno" not in str(refused.value)


@pytest.mark.parametrize("below", ["", "store/pages"])
def test_a_dangling_link_is_named_with_where_it_points(tmp_path: Path, below: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "not-there")
    with pytest.raises(
        StoreError, match=r"link is a symbolic link to .*not-there.*Make that folder"
    ):
        open_at(link / below)
    (tmp_path / "not-there").mkdir()
    open_at(link / below)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, "mount the filesystem writable, or check a copy"),
        (errno.EACCES, "Run this as the user who owns the store"),
        (errno.EIO, "Check the disk"),
    ],
    ids=["EROFS", "EACCES", "EIO"],
)
def test_fsck_says_why_it_cannot_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    folder = stored_at(tmp_path, PAGES)
    (namespace,) = offline.namespaces(Env(), str(tmp_path))
    env = refusing(number, "open")
    with pytest.raises(StoreError, match=advice) as refused:
        offline.check_rank(env, namespace, str(folder), repair=False)
    assert ("Run this as" in str(refused.value)) == (number == errno.EACCES)
