"""What makes room: folders that a store made, whole and only those, whatever a stranger's folder is
called.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from store_pages import IDENTITY, key, named, open_at, put, stored_at

from sgl_kvtier.errors import StoreError
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.disk.removal import remove_namespace
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup

OTHER = Identity({"model": "other"}, "other")
CAP = 4 << 20
NAMED_ALIKE = "finetune-00c0ffee00c0ffee"


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below a folder: the bytes of files, the targets of links, None for the rest."""
    found: dict[str, bytes | None] = {}
    for path in sorted(root.rglob("*")):
        data = None
        if path.is_symlink():
            data = os.readlink(path).encode()
        elif path.is_file():
            data = path.read_bytes()
        found[str(path.relative_to(root))] = data
    return found


def fill(store: DiskStore, pages: int = 150) -> DiskStore:
    put(store, named(((store.folder, i) for i in range(pages)), 30_000))
    return store


def old_store(root: Path) -> Path:
    """The folder of another identity that nobody has open."""
    pages = named(range(20), 30_000)
    folder = stored_at(root, pages, identity=OTHER, capacity_bytes=CAP, segment_bytes=512 << 10)
    return folder.parent


def need_room(root: Path) -> DiskStore:
    """A store that has asked for more room than there is beside the others'."""
    return fill(open_at(root, capacity_bytes=CAP, segment_bytes=512 << 10))


def model_folder(folder: Path) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "README").write_text("mine")
    config = {"architectures": ["Llama"], "identity": {"fields": {}}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "checkpoints" / "model.bin").write_bytes(os.urandom(3 << 20))
    (folder / "checkpoints" / "lock").write_text("")


def a_copied_config(folder: Path) -> None:
    """A config.json of a store, of another identity than the folder's name says."""
    folder.mkdir()
    shutil.copy(old_store(folder.parent) / "config.json", folder)
    shutil.rmtree(folder.parent / OTHER.directory_name)
    (folder / "thesis.tex").write_text("a year's work")


@pytest.mark.parametrize("make", [model_folder, a_copied_config])
def test_a_folder_that_is_only_named_like_an_identitys_stays_and_does_not_count(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / NAMED_ALIKE)
    before = tree(tmp_path / NAMED_ALIKE)
    caplog.clear()
    store = need_room(tmp_path)
    alone = open_at(tmp_path / "alone", capacity_bytes=CAP)
    assert store.stats().capacity_bytes == alone.stats().capacity_bytes
    assert tree(tmp_path / NAMED_ALIKE) == before
    about = [r.getMessage() for r in caplog.records if NAMED_ALIKE in r.getMessage()]
    assert len(about) == 1 and "move" in about[0] and "remove it yourself" in about[0]


def a_file_beside_the_ranks(namespace: Path) -> None:
    (namespace / "notes.txt").write_text("mine")


def a_file_beside_the_pages(namespace: Path) -> None:
    (namespace / "tp0" / "backup.tar").write_bytes(b"mine")


def a_folder_two_deep(namespace: Path) -> None:
    (namespace / "tp0" / "deep" / "deeper").mkdir(parents=True)
    (namespace / "tp0" / "deep" / "deeper" / "text").write_text("mine")


def a_rank_that_is_none(namespace: Path) -> None:
    (namespace / "zz").mkdir()
    (namespace / "zz" / "text").write_text("mine")


def a_linked_rank(namespace: Path) -> None:
    (namespace.parent / "elsewhere").mkdir()
    (namespace.parent / "elsewhere" / "lock").write_text("mine")
    (namespace / "zz").symlink_to(namespace.parent / "elsewhere")


def a_linked_file(namespace: Path) -> None:
    (namespace.parent / "mine").write_text("mine")
    (namespace / "tp0" / "seg-000000ff").symlink_to(namespace.parent / "mine")


def a_folder_named_as_a_segment(namespace: Path) -> None:
    (namespace / "tp0" / "seg-000000ff").mkdir()


def a_stranger_named_as_a_segment(namespace: Path) -> None:
    (namespace / "tp0" / "seg-000000ff").write_bytes(b"\x89PNG" + bytes(9000))


def a_segment_of_another_user(namespace: Path) -> None:
    if os.geteuid():
        pytest.skip("giving a file away needs root")
    os.chown(namespace / "tp0" / "seg-00000001", 65534, 65534)


STRANGERS = [
    a_file_beside_the_ranks,
    a_file_beside_the_pages,
    a_folder_two_deep,
    a_rank_that_is_none,
    a_linked_rank,
    a_linked_file,
    a_folder_named_as_a_segment,
    a_stranger_named_as_a_segment,
    a_segment_of_another_user,
]


@pytest.mark.parametrize("put_in", STRANGERS)
def test_one_file_of_a_stranger_keeps_the_whole_folder(
    tmp_path: Path, put_in: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    namespace = old_store(tmp_path)
    put_in(namespace)
    before = tree(tmp_path)
    with pytest.raises(StoreError, match=r"[Rr]emove"):
        remove_namespace(Env(), str(namespace))
    store = need_room(tmp_path)
    store.close()
    shutil.rmtree(tmp_path / IDENTITY.directory_name)
    assert tree(tmp_path) == before
    assert len([r for r in caplog.records if "needs the room" in r.getMessage()]) == 1


def test_everything_that_a_store_makes_can_be_removed(tmp_path: Path) -> None:
    namespace = old_store(tmp_path)
    drafts = ("config.json.77.new", ".restore-profile.json.77", ".proof.json.77")
    for name in (*drafts, "restore-profile.json", "proof.json"):
        (namespace / name).write_text("{")
    for name in ("probe", "index.log.new", "seg-00000fff"):
        (namespace / "tp0" / name).write_bytes(b"")
    (namespace / "tp1").mkdir()
    (namespace / "tp1" / "seg-00000001").write_bytes(bytes(64 << 10))
    assert remove_namespace(Env(), str(namespace)) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_removal_that_was_broken_off_goes_on_the_next_time(tmp_path: Path) -> None:
    namespace = old_store(tmp_path)

    class Broken(Env):
        left = 2

        def unlink(self, path: str) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(5, "the device fails")
            super().unlink(path)

    with pytest.raises(OSError, match="device"):
        remove_namespace(Broken(), str(namespace))
    assert (namespace / "config.json").exists()
    assert remove_namespace(Env(), str(namespace)) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_begins_while_others_are_removed_keeps_its_folder(tmp_path: Path) -> None:
    namespace = old_store(tmp_path)
    begun: list[DiskStore] = []

    class Late(Env):
        def remove_directory(self, path: str) -> None:
            super().remove_directory(path)
            if not begun:
                begun.append(open_at(tmp_path, OTHER, rank="tp1"))

    remove_namespace(Late(), str(namespace))
    put(begun[0], {key(1): b"page"})
    begun[0].close()
    assert open_at(tmp_path, OTHER, rank="tp1").lookup([key(1)]) == [Lookup.HIT]


def test_a_file_that_comes_while_a_folder_is_removed_stays(tmp_path: Path) -> None:
    namespace = old_store(tmp_path)

    class Late(Env):
        def remove_directory(self, path: str) -> None:
            super().remove_directory(path)
            (namespace / "notes.txt").write_text("mine")

    remove_namespace(Late(), str(namespace))
    assert tree(namespace).keys() == {"config.json", "notes.txt"}


@pytest.mark.skipif(os.geteuid() != 0, reason="giving folders away needs root")
def test_nothing_is_removed_where_others_may_exchange_folders(tmp_path: Path) -> None:
    namespace = old_store(tmp_path)
    tmp_path.chmod(0o777)
    os.chown(tmp_path, 65534, 65534)
    before = tree(tmp_path)
    with pytest.raises(StoreError, match="they could put folders of theirs"):
        remove_namespace(Env(), str(namespace))
    assert tree(tmp_path) == before


def test_a_folder_that_is_left_alone_is_looked_through_once(tmp_path: Path) -> None:
    namespace = old_store(tmp_path)
    a_file_beside_the_ranks(namespace)
    looked: list[str] = []

    class Counting(Env):
        def status(self, path: str) -> os.stat_result:
            looked.append(os.path.basename(path))
            return super().status(path)

    store = open_at(tmp_path, capacity_bytes=CAP, segment_bytes=512 << 10, env=Counting())
    for i in range(5):
        put(store, named(((i, n) for n in range(100)), 30_000))
    assert looked.count("notes.txt") == 1
    room = store.stats().capacity_bytes
    shutil.rmtree(namespace)
    fill(store)
    assert store.stats().capacity_bytes > room


def test_the_folder_of_another_user_is_left_to_him(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid():
        pytest.skip("giving a folder away needs root")
    namespace = old_store(tmp_path)
    os.chown(namespace, 65534, 65534)
    before = tree(namespace)
    store = need_room(tmp_path)
    store.close()
    assert tree(namespace) == before
    assert [r.levelno for r in caplog.records if "belongs to user 65534" in r.getMessage()] == [
        logging.WARNING
    ]
