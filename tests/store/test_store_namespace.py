"""Folders: one owner at a time whoever removes or looks meanwhile, and nobody else's hands in them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted import once
from store_pages import IDENTITY, content, found, key, named, open_at, put, stored_at

from sgl_kvtier.errors import StoreBusyError, StoreError, StoreFormatError
from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.namespace import PATIENT, is_open, lock_folder
from sgl_kvtier.store.disk.removal import remove_namespace
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup

NOBODY = 65534
PAGES = named(range(20))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")


def namespace(root: Path) -> Path:
    return root / IDENTITY.directory_name


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# One owner


def test_a_folder_made_anew_between_opening_and_locking_has_one_owner(tmp_path: Path) -> None:
    stored_at(tmp_path, PAGES)
    first: list[DiskStore] = []

    def remove_and_start() -> None:
        remove_namespace(Env(), str(namespace(tmp_path)))
        first.append(open_at(tmp_path))

    with pytest.raises(StoreBusyError):
        open_at(tmp_path, env=once("lock", remove_and_start))
    put(first[0], PAGES)
    assert first[0].lookup(list(PAGES)) == [Lookup.HIT] * 20


def test_a_folder_removed_between_opening_and_locking_is_made_anew(tmp_path: Path) -> None:
    stored_at(tmp_path, PAGES)
    store = open_at(tmp_path, env=once("lock", lambda: shutil.rmtree(namespace(tmp_path))))
    put(store, PAGES)
    store.close()
    assert open_at(tmp_path).stats().pages == 20


def old_and_new(root: Path, lose: Callable[[Path], None]) -> tuple[DiskStore, DiskStore]:
    """A store that lost its folder, and the one that has it now. Each has pages."""
    old = open_at(root, capacity_bytes=4 << 20, segment_bytes=512 << 10)
    put(old, named(("old", i) for i in range(60)))
    lose(Path(old.folder))
    new = open_at(root, capacity_bytes=4 << 20, segment_bytes=512 << 10)
    put(new, PAGES)
    return old, new


LOSSES = {
    "folder removed": shutil.rmtree,
    "folder moved": lambda path: path.rename(path.with_name("away")),
    "lock removed": lambda path: (path / "lock").unlink(),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_a_server_whose_folder_is_anothers_by_now_changes_no_file_there(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    old, new = old_and_new(tmp_path, lose)
    before = {path.name: path.lstat().st_ino for path in Path(new.folder).iterdir()}
    log = Path(new.folder, "index.log").read_bytes()
    # Many rewritings of the log, and other sizes, for which segments are made and removed.
    for i in range(300):
        put(old, {key(("more", i)): content(i, 5000), key(("big", i)): content(i, 90_000)})
        old.delete([key(("more", i))])
    old.clear()
    old.close()
    assert {path.name: path.lstat().st_ino for path in Path(new.folder).iterdir()} == before
    assert lose is LOSSES["lock removed"] or Path(new.folder, "index.log").read_bytes() == log


def test_a_server_whose_folder_was_removed_takes_no_page_from_the_next_one(tmp_path: Path) -> None:
    old, new = old_and_new(tmp_path, shutil.rmtree)
    old.clear()
    old.close()
    assert found(new, PAGES) == 20
    new.close()
    assert open_at(tmp_path).stats().pages == 20


def test_a_server_whose_folder_was_removed_says_so_once_and_serves_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_at(tmp_path)
    put(store, PAGES)
    shutil.rmtree(namespace(tmp_path))
    for i in range(5):
        assert put(store, {key(("big", i)): content(i, 90_000)}) == [PutOutcome.REFUSED]
    assert found(store, PAGES) == 20
    store.close()
    assert len([r for r in caplog.records if "restart the server" in r.getMessage()]) == 1
    assert not namespace(tmp_path).exists()


# Looking beside a start


class Beside(Env):
    """Another process holds the lock until this one has paused so many times."""

    def __init__(self, folder: Path, pauses: int, *, only_looking: bool) -> None:
        self.left = pauses
        self._fd = os.open(folder / "lock", os.O_RDONLY)
        (self.lock_shared if only_looking else self.lock)(self._fd)

    def pause(self, seconds: float) -> None:
        self.left -= 1
        if self.left == 0:
            os.close(self._fd)


@pytest.mark.parametrize("only_looking", [True, False])
def test_a_start_waits_for_who_has_the_lock_for_a_moment(
    tmp_path: Path, only_looking: bool
) -> None:
    folder = stored_at(tmp_path, PAGES)
    store = open_at(tmp_path, env=Beside(folder, 3, only_looking=only_looking))
    assert store.stats().pages == 20


def test_a_start_does_not_wait_for_ever(tmp_path: Path) -> None:
    folder = stored_at(tmp_path, PAGES)
    env = Beside(folder, PATIENT, only_looking=True)
    with pytest.raises(StoreBusyError):
        open_at(tmp_path, env=env)
    assert env.left == 1
    env.pause(0)


def test_those_who_look_at_the_same_time_do_not_take_each_other_for_the_owner(
    tmp_path: Path,
) -> None:
    folder = stored_at(tmp_path, PAGES)
    env = Beside(folder, 1, only_looking=True)
    assert not is_open(Env(), str(folder))
    env.pause(0)
    open_at(tmp_path)
    assert is_open(Env(), str(folder))


def test_an_owner_that_has_ended_is_not_named_as_the_one_that_runs(tmp_path: Path) -> None:
    folder = stored_at(tmp_path, PAGES)
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    for text in (ended.stdout, "0", "-1", "9" * 30, "x", "1" * 500):
        holder = lock_folder(Env(), str(folder))
        (folder / "lock").write_text(text)
        with pytest.raises(StoreBusyError, match="to another process, which is still running"):
            lock_folder(Env(), str(folder))
        os.close(holder)


LOOKER = """
import sys
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.namespace import is_open
print("looking", flush=True)
while True:
    is_open(Env(), sys.argv[1])
"""


def test_no_start_fails_beside_somebody_who_looks_without_pause(tmp_path: Path) -> None:
    folder = stored_at(tmp_path, PAGES)
    looker = subprocess.Popen([sys.executable, "-c", LOOKER, str(folder)], stdout=subprocess.PIPE)
    try:
        assert looker.stdout is not None and looker.stdout.readline()
        for _ in range(50):
            open_at(tmp_path).close()
    finally:
        looker.kill()
        looker.communicate()


# Others' hands


@needs_root
@pytest.mark.parametrize("what", [".", "tp0", "tp0/lock", "tp0/seg-00000001", "config.json"])
def test_what_another_user_owns_is_refused(tmp_path: Path, what: str) -> None:
    stored_at(tmp_path, PAGES)
    os.chown(namespace(tmp_path) / what, NOBODY, NOBODY)
    whose = rf"belongs to user {NOBODY}, and this process runs as user 0\. Run it as"
    with pytest.raises(StoreError, match=whose):
        open_at(tmp_path)
    os.chown(namespace(tmp_path) / what, 0, 0)
    assert open_at(tmp_path).stats().pages == 20


@needs_root
def test_an_index_of_another_user_is_made_anew_from_the_slots(tmp_path: Path) -> None:
    folder = stored_at(tmp_path, PAGES)
    os.chown(folder / "index.log", NOBODY, NOBODY)
    assert open_at(tmp_path).stats().pages == 20
    assert (folder / "index.log").stat().st_uid == 0


@pytest.mark.parametrize("what", [".", "tp0"])
@pytest.mark.parametrize("bits", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_write_is_made_private_and_said(
    tmp_path: Path, what: str, bits: int, caplog: pytest.LogCaptureFixture
) -> None:
    stored_at(tmp_path, PAGES)
    (namespace(tmp_path) / what).chmod(bits)
    store = open_at(tmp_path)
    assert mode(namespace(tmp_path) / what) == 0o700
    assert store.stats().pages == 20
    assert "1 folders and files of page stores below" in caplog.text


def test_a_folder_on_a_filesystem_that_keeps_no_modes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored_at(tmp_path, PAGES)
    folder.chmod(0o777)
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: None)
    with pytest.raises(StoreError, match=r"may be written by other users.*umask=077"):
        open_at(tmp_path)


def test_what_others_may_only_read_is_taken_from_their_eyes(tmp_path: Path) -> None:
    folder = stored_at(tmp_path, PAGES)
    folder.parent.chmod(0o755)
    folder.chmod(0o750)
    files = [
        folder.parent / "config.json",
        *(folder / name for name in ("lock", "seg-00000001", "index.log")),
    ]
    for path in files:
        path.chmod(0o664)
    store = open_at(tmp_path)
    put(store, {key("more"): b"page"})
    assert (mode(folder.parent), mode(folder)) == (0o700, 0o700)
    assert [mode(path) for path in files] == [0o600] * 4


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = stored_at(tmp_path / "root", PAGES)
    finally:
        os.umask(before)
    assert {mode(path) for path in folder.iterdir()} == {0o600}
    assert [mode(path) for path in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3


@needs_root
@pytest.mark.parametrize("bits", [0o777, 0o757])
def test_a_path_of_somebody_else_whose_folders_others_may_exchange_is_refused(
    tmp_path: Path, bits: int
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, NOBODY, NOBODY)
    shared.chmod(bits)
    advice = rf"mode 0{bits:o}.*Set store\.path to a new folder below it, such as {shared}/kvtier"
    with pytest.raises(StoreError, match=advice):
        open_at(shared)
    open_at(shared / "new")


@needs_root
def test_a_path_of_this_user_that_a_group_of_several_may_write_gets_the_sticky_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    open_at(shared).close()  # root's own group
    assert mode(shared) == 0o770
    os.chown(shared, 0, NOBODY)
    for _ in range(2):
        open_at(shared).close()
    assert mode(shared) == 0o1770
    assert caplog.text.count("it has the sticky bit now") == 1


def test_a_path_in_which_each_has_only_his_own_is_taken(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    open_at(shared)


# What cannot be read


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("tp0/lock", os.mkfifo),
        ("tp0/lock", os.mkdir),
        ("config.json", os.mkfifo),
        ("config.json", os.mkdir),
        ("config.json", lambda path: path.symlink_to("elsewhere")),
    ],
)
def test_what_stands_for_a_lock_or_config_and_is_none_is_refused_at_once(
    tmp_path: Path, what: str, make: Callable[[Path], None]
) -> None:
    stored_at(tmp_path, PAGES)
    (namespace(tmp_path) / what).unlink()
    make(namespace(tmp_path) / what)
    with pytest.raises(StoreError, match=r"[Cc]hoose (a|another) store\.path"):
        open_at(tmp_path)


@pytest.mark.parametrize("text", ["[" * 500_000, '{"about": ', "", "null", '{"identity": 1e999}'])
def test_a_config_that_says_nothing_is_refused(tmp_path: Path, text: str) -> None:
    stored_at(tmp_path, PAGES)
    (namespace(tmp_path) / "config.json").write_text(text)
    with pytest.raises(StoreFormatError, match=r"to start anew|describes other pages"):
        open_at(tmp_path)


def test_a_config_of_terabytes_is_refused(tmp_path: Path) -> None:
    stored_at(tmp_path, PAGES)
    os.truncate(namespace(tmp_path) / "config.json", 1 << 42)
    with pytest.raises(StoreError, match=r"config\.json"):
        open_at(tmp_path)


# Several that start at once


@pytest.mark.parametrize("others", [1, 2])
def test_servers_with_the_same_process_id_start_at_once_on_one_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    # As in containers, each of which counts its processes from 1 on.
    monkeypatch.setattr(os, "getpid", lambda: 1)

    def start() -> None:
        for number in range(others):
            open_at(tmp_path, rank=f"tp{number + 1}").close()

    store = open_at(tmp_path, env=once("rename config.json", start))
    assert put(store, PAGES) == [PutOutcome.STORED] * 20
    store.close()
    assert sorted(path.name for path in namespace(tmp_path).iterdir()) == [
        "config.json",
        *(f"tp{number}" for number in range(others + 1)),
    ]


def test_a_start_removes_the_drafts_of_servers_that_were_killed_while_they_wrote(
    tmp_path: Path,
) -> None:
    stored_at(tmp_path, PAGES)
    drafts = ("config.json.77.new", ".restore-profile.json.77", ".proof.json.77")
    for name in (*drafts, "restore-profile.json", "proof.json"):
        (namespace(tmp_path) / name).write_text("{}")
    open_at(tmp_path)
    assert sorted(path.name for path in namespace(tmp_path).iterdir()) == [
        "config.json",
        "proof.json",
        "restore-profile.json",
        "tp0",
    ]
