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
from store_pages import IDENTITY, content, found, key, open_at, put, read, segments

from sgl_kvtier.config import StoreConfig, parse_config
from sgl_kvtier.errors import StoreBusyError, StoreError, StoreFormatError
from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import DROP
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.disk.index_log import IndexLog
from sgl_kvtier.store.disk.segment import MOST_SEGMENT_NUMBER
from sgl_kvtier.store.engine import DiskStore, open_store
from sgl_kvtier.store.tools import offline
from sgl_kvtier.types import Lookup

PAGES = {key(i): content(i, 5000) for i in range(20)}


def test_pages_are_there_after_a_restart(opened: Callable[..., DiskStore]) -> None:
    first = opened()
    put(first, PAGES)
    first.close()
    again = opened()
    assert read(again, dict.fromkeys(PAGES, 5000)) == [(ReadOutcome.OK, d) for d in PAGES.values()]
    put(again, {key("more"): b"more"})
    again.close()
    assert opened().stats().pages == 21


@pytest.mark.parametrize("name", ["Seiten für Ü 页", "two  words\tand 'quotes' \"50%\" $HOME {x}"])
def test_a_path_with_other_letters_and_spaces_is_a_path(
    opened: Callable[..., DiskStore], tmp_path: Path, name: str
) -> None:
    path = parse_config({"store": {"path": str(tmp_path / name)}}).store.path
    for _ in range(2):
        store = opened(Path(path))
        put(store, PAGES)
        assert Path(store.folder).is_relative_to(tmp_path / name)
        assert found(store, PAGES) == len(PAGES)
        store.close()
    assert os.listdir(tmp_path) == [name]


def test_a_folder_has_one_owner_and_the_message_names_it(store: DiskStore, tmp_path: Path) -> None:
    with pytest.raises(StoreBusyError, match=rf"process {os.getpid()}, which is this one.*close"):
        open_at(tmp_path)
    open_at(tmp_path, rank="tp1").close()
    store.close()
    open_at(tmp_path).close()


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
def test_another_identity_never_meets_these_pages(
    opened: Callable[..., DiskStore], change: dict
) -> None:
    put(opened(), PAGES)
    other = opened(identity=Identity({**IDENTITY.fields, **change}, name="lab"))
    assert set(other.lookup(list(PAGES))) == {Lookup.MISS}
    other.close()
    same = opened(
        identity=Identity(dict(reversed(IDENTITY.fields.items())), name="lab"), rank="tp1"
    )
    assert os.path.dirname(same.folder) == os.path.dirname(opened(rank="tp2").folder)


def test_segments_copied_from_another_identity_hold_no_pages(
    opened: Callable[..., DiskStore],
) -> None:
    mine = opened()
    put(mine, PAGES)
    mine.close()
    other = opened(identity=Identity({"model": "other"}))
    other.close()
    for name in os.listdir(mine.folder):
        if name != "lock":
            Path(other.folder, name).write_bytes(Path(mine.folder, name).read_bytes())
    again = opened(identity=Identity({"model": "other"}))
    assert set(again.lookup(list(PAGES))) == {Lookup.MISS}


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
    store.close()


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "root"
    root.mkdir()
    (root / IDENTITY.directory_name).symlink_to(elsewhere)
    with pytest.raises(StoreError, match="symbolic link"):
        open_at(root)
    (root / IDENTITY.directory_name).unlink()
    store = open_at(root)
    put(store, PAGES)
    store.close()
    for name in ("index.log", "seg-00000001", "lock"):
        path = Path(store.folder, name)
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
    store = open_at(tmp_path)
    store.close()
    config = Path(store.folder).parent / "config.json"
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


def test_a_log_that_is_written_anew_says_the_same(opened: Callable[..., DiskStore]) -> None:
    store = opened(capacity_bytes=64 << 20)
    kept = {key(("kept", i)): content(i, 3000) for i in range(10)}
    put(store, kept)
    put(store, {key(("swa", i)): content(i, 9000) for i in range(10)}, pool="swa")
    for i in range(60):
        names = [key((i, n)) for n in range(10)]
        put(store, dict.fromkeys(names, b"short-lived"))
        store.delete(names)
    log = Path(store.folder, "index.log").stat().st_size
    assert log < 88 * 1000  # every put and delete left a record; most of them are gone again
    store.close()
    again = opened(capacity_bytes=64 << 20)
    assert again.stats().pages == 20
    assert read(again, dict.fromkeys(kept, 3000)) == [(ReadOutcome.OK, d) for d in kept.values()]
    assert [o for o, _ in read(again, {key(("swa", i)): 9000 for i in range(10)}, pool="swa")] == [
        ReadOutcome.OK
    ] * 10


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
    for _ in range(3):
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
        found = read(store, {key(i): 5000 for i in range(kept)})
        assert found == [(ReadOutcome.OK, content(i, 5000)) for i in range(kept)]
        store.close()


def test_one_key_in_two_pools_is_two_pages_also_after_opening(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, {key(i): content(i, 9000) for i in range(10)})
    put(store, {key(i): content(("swa", i), 9000) for i in range(10)}, pool="swa")
    store.close()
    again = open_at(tmp_path)
    assert again.stats().pages == 20
    assert read(again, {key(i): 9000 for i in range(10)}) == [
        (ReadOutcome.OK, content(i, 9000)) for i in range(10)
    ]
    assert read(again, {key(i): 9000 for i in range(10)}, pool="swa") == [
        (ReadOutcome.OK, content(("swa", i), 9000)) for i in range(10)
    ]
    again.close()


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
    store = open_at(tmp_path)
    put(store, PAGES)
    store.close()
    strange = Path(store.folder, f"seg-{number}")
    make(strange)
    kind = strange.lstat().st_mode
    more = {key(("more", i)): content(i, 5000) for i in range(300)}
    again = open_at(tmp_path)
    assert set(put(again, more)) == {PutOutcome.STORED}
    again.close()
    again = open_at(tmp_path)
    assert again.stats().pages == 320
    again.close()
    if make is not Path.touch:  # an empty file is a segment that was never finished
        assert strange.lstat().st_mode == kind


def test_the_last_number_of_a_segment_is_followed_by_the_first_free_one(
    opened: Callable[..., DiskStore],
) -> None:
    store = opened(capacity_bytes=64 << 20)
    put(store, PAGES)
    store.close()
    log = IndexLog(Env(), store.folder, IDENTITY.fingerprint)
    records, _ = log.load(slots=100)
    mentioned = records[-1:].copy()
    mentioned["segment"], mentioned["kind"] = MOST_SEGMENT_NUMBER - 1, DROP
    assert log.resume(len(records)) and log.append(mentioned)
    log.close()
    again = opened(capacity_bytes=64 << 20)
    sizes = {key(("more", i)): content(i, 30_000 + 4096 * i) for i in range(3)}
    assert put(again, sizes) == [PutOutcome.STORED] * 3
    again.close()
    names = [f"seg-{number:08x}" for number in (1, 2, 3, MOST_SEGMENT_NUMBER)]
    assert [path.name for path in segments(again)] == names
    again = opened(capacity_bytes=64 << 20)
    assert put(again, {key("another"): content(0, 90_000)}) == [PutOutcome.STORED]
    kept = PAGES | sizes
    assert read(again, {k: len(d) for k, d in kept.items()}) == [
        (ReadOutcome.OK, d) for d in kept.values()
    ]
    assert [path.name for path in segments(again)] == sorted([*names, "seg-00000004"])


@pytest.mark.parametrize(
    "kind", ["8 TiB", "fifo", "directory", "link", "gone", "empty", "garbage", "cut", "other head"]
)
def test_an_index_that_is_none_is_made_anew_from_the_slots(
    opened: Callable[..., DiskStore], kind: str
) -> None:
    store = opened()
    put(store, PAGES)
    store.close()
    log = Path(store.folder, "index.log")
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
        again = opened()
        assert read(again, dict.fromkeys(PAGES, 5000)) == [
            (ReadOutcome.OK, d) for d in PAGES.values()
        ]
        put(again, {key("more"): b"more"})
        again.close()
    if kind == "directory":
        assert (log / "kept").is_dir()
    else:
        assert log.is_file() and not log.is_symlink() and log.stat().st_size < 1 << 20
    assert opened().stats().pages == 21


@pytest.mark.parametrize("name", ["index.log.new", "probe"])
@pytest.mark.parametrize("make", [as_directory, as_link, os.mkfifo])
def test_what_stands_in_a_temporary_files_place_hinders_nobody(
    opened: Callable[..., DiskStore], name: str, make: Callable[[Path], None]
) -> None:
    store = opened()
    put(store, PAGES)
    store.close()
    Path(store.folder, "index.log").unlink()
    make(Path(store.folder, name))
    again = opened()
    assert again.stats().pages == 20
    again.close()
    assert make is not as_directory or Path(store.folder, name, "kept").is_dir()


# What is said about a folder that cannot hold a store: the cause, and what to do about it.


class Refusing(Env):
    """Opening or locking a rank's lock fails with one error."""

    def __init__(self, number: int, *, when: str) -> None:
        self._number, self._when = number, when

    def open(self, path: str, flags: int) -> int:
        if self._when == "open" and path.endswith("/lock"):
            raise OSError(self._number, os.strerror(self._number), path)
        return super().open(path, flags)

    def lock(self, fd: int) -> None:
        if self._when == "lock":
            raise OSError(self._number, os.strerror(self._number))
        super().lock(fd)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK])
def test_a_filesystem_without_flock_is_named_as_such(tmp_path: Path, number: int) -> None:
    with pytest.raises(StoreError, match=r"takes no locks.*needs flock.*local disk"):
        open_at(tmp_path, env=Refusing(number, when="lock"))


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
    with pytest.raises(StoreError, match=advice) as found:
        open_at(tmp_path, env=Refusing(number, when="open"))
    assert "[Errno" not in str(found.value)


@pytest.mark.parametrize("below", ["", "store/pages"])
def test_a_dangling_link_is_named_with_where_it_points(tmp_path: Path, below: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "not-there")
    with pytest.raises(StoreError, match=r"link is a symbolic link to .*not-there") as found:
        open_at(link / below)
    assert "Make that folder" in str(found.value)
    (tmp_path / "not-there").mkdir()
    open_at(link / below).close()


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
    store = open_at(tmp_path)
    put(store, {key(1): content(1, 5000)})
    store.close()
    (namespace,) = offline.namespaces(Env(), str(tmp_path))
    env = Refusing(number, when="open")
    with pytest.raises(StoreError, match=advice) as found:
        offline.check_rank(env, namespace, store.folder, repair=False)
    assert ("Run this as" in str(found.value)) == (number == errno.EACCES)
