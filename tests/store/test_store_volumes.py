"""The volumes that Kubernetes gives a container, with the modes and owners that its node agent
(kubelet) sets, opened by processes of other users. Needs root.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_pages import IDENTITY, found, named, open_at, put
from volumes import GROUP, ME, in_memory, kubelet, loose

from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.disk.namespace import DIGESTS, DIGESTS_LOCK
from sgl_kvtier.types import Lookup

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")

NEIGHBOUR = ME + 1
PAGES = named(range(20))


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder of root's that every user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-volume-"))
    folder.chmod(0o755)
    (folder / "volume").mkdir()
    yield folder / "volume"
    shutil.rmtree(folder)


def as_user(uid: int, groups: list[int], function: Callable[[], Any]) -> str:
    """What a function returns, or its error and what was logged, in a process of this user."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        said: list[str] = []
        try:
            logging.getLogger().handlers[:] = [Listening(said)]
            os.setgroups(groups)
            os.setgid(groups[0] if groups else uid)
            os.setuid(uid)
            os.umask(0o022)
            said.insert(0, f"returned {function()}")
        except BaseException as error:
            said.insert(0, f"{type(error).__name__}: {error}")
        os.write(writing, "\n".join(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


class Listening(logging.Handler):
    """Keeps warnings."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def serve(path: Path) -> Callable[[], str]:
    """One life of a server: stores pages that are not there, and reads all of them."""

    def run() -> str:
        store = open_at(path)
        before = store.lookup(list(PAGES)).count(Lookup.HIT)
        put(store, PAGES)
        assert found(store, PAGES) == 20
        store.close()
        return f"{before} found"

    return run


def test_an_empty_dir_is_used_by_a_user_and_the_danger_is_said(volume: Path) -> None:
    volume.chmod(0o777)
    assert as_user(ME, [], serve(volume)).startswith("returned 0 found")
    again = as_user(ME, [], serve(volume))
    assert again.startswith("returned 20 found")
    assert again.count("they cannot read or change pages") == 1
    assert not loose(volume)


def test_an_empty_dir_is_used_by_root_and_gets_the_sticky_bit_once(volume: Path) -> None:
    volume.chmod(0o777)
    first = as_user(0, [0], serve(volume))
    assert first.startswith("returned 0 found") and "it has the sticky bit now" in first
    assert as_user(0, [0], serve(volume)) == "returned 20 found"


@pytest.mark.parametrize("path", [".", "kvtier"])
@pytest.mark.parametrize("bits", [0o777, 0o755])
def test_a_volume_with_an_fs_group_is_used_at_every_start_of_a_pod(
    volume: Path, path: str, bits: int
) -> None:
    volume.chmod(bits)
    for start in range(4):
        kubelet(volume)
        said = as_user(ME, [GROUP], serve(volume / path))
        assert said.startswith(f"returned {20 * bool(start)} found"), said
        assert said.count("could be written by other users") == bool(start)
        assert not loose(volume / path)


@pytest.fixture
def small_volume(volume: Path) -> Iterator[Path]:
    """An emptyDir of 2 MiB in memory."""
    with in_memory(volume, "2m", "777"):
        yield volume


def pod(path: Path, promised: Path, *, ends_after: int | None) -> Callable[[], str]:
    """A container's life: counts the pages that earlier lives were promised, and stores new ones.
    SIGTERM ends it amid a write after so many of them; None: when the volume is full.
    """

    def run() -> str:
        store = open_at(path, capacity_bytes=64 << 20, segment_bytes=256 << 10)
        before = [int(line) for line in promised.read_text().split()]
        pages = named(before)
        hits = store.lookup(list(pages)).count(Lookup.HIT)
        (promised.parent / "found").write_text(f"{hits} {found(store, pages)} {len(before)}")
        number = len(before)
        with promised.open("ab", buffering=0) as file:
            while True:
                (outcome,) = put(store, named([number]))
                # KEPT: the life before was ended between storing this page and noting it.
                if outcome is PutOutcome.REFUSED or store.stats().pages_evicted:
                    break
                file.write(b"%d\n" % number)
                number += 1
                if number - len(before) == ends_after:
                    threading.Thread(target=signal.raise_signal, args=(signal.SIGTERM,)).start()
        assert found(store, named([number - 1])) == 1
        store.close()
        return "full"

    return run


@pytest.mark.parametrize("path", [".", "kvtier"])
def test_a_pod_finds_its_pages_again_until_its_volume_is_full(
    small_volume: Path, path: str
) -> None:
    """SIGTERM, another container, another pod with kubelet's modes, a full volume, and a last pod."""
    promised, seen = (small_volume.parent / name for name in ("promised", "found"))
    for file in (promised, seen):
        file.touch()
        os.chown(file, ME, GROUP)
    store = small_volume / path
    for ends_after, kubelets in ((30, True), (30, False), (30, True)):
        before = promised.read_text().count("\n")
        if kubelets:
            kubelet(small_volume)
        assert as_user(ME, [GROUP], pod(store, promised, ends_after=ends_after)) == ""
        assert seen.read_text() == f"{before} {before} {before}"
    said = as_user(ME, [GROUP], pod(store, promised, ends_after=None))
    assert said.startswith("returned full") and said.count("no room for more pages") == 1
    kubelet(small_volume)
    said = as_user(ME, [GROUP], pod(store, promised, ends_after=None))
    assert said.startswith("returned full") and said.count("could be written by other users") == 1
    hits, right, asked = map(int, seen.read_text().split())
    assert 0 < hits == right <= asked and not loose(store)


def test_the_warning_counts_what_others_could_write(volume: Path) -> None:
    kubelet(volume)
    as_user(ME, [GROUP], serve(volume / "kvtier"))
    kubelet(volume)
    store = volume / "kvtier" / IDENTITY.directory_name
    count = 1 + len(list(store.rglob("*")))
    assert f"\n{count} folders and files" in as_user(ME, [GROUP], serve(volume / "kvtier"))
    assert "folders and files" not in as_user(ME, [GROUP], serve(volume / "kvtier"))


@pytest.mark.parametrize("name", [DIGESTS, DIGESTS_LOCK])
def test_what_servers_keep_beside_the_pages_is_made_private_too(volume: Path, name: str) -> None:
    kubelet(volume)
    assert as_user(ME, [GROUP], lambda: (volume / name).write_text("{}")) == "returned 2"
    kubelet(volume)
    said = as_user(ME, [GROUP], serve(volume))
    assert "\n1 folders and files" in said and not loose(volume)


def test_a_folder_below_a_volume_is_said_nothing_about(volume: Path) -> None:
    kubelet(volume)
    assert as_user(ME, [GROUP], serve(volume / "kvtier")) == "returned 0 found"
    assert stat.S_IMODE((volume / "kvtier").stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("groups", [[], [GROUP]], ids=["other group", "same group"])
def test_pages_of_another_user_are_refused_and_stay(volume: Path, groups: list[int]) -> None:
    kubelet(volume)
    volume.chmod(0o2777)
    as_user(ME, [GROUP], serve(volume))
    said = as_user(NEIGHBOUR, groups, serve(volume))
    assert f"belongs to user {ME}, and this process runs as user {NEIGHBOUR}" in said
    assert as_user(ME, [GROUP], serve(volume)).startswith("returned 20 found")


def test_what_a_member_of_the_group_plants_is_not_used(volume: Path) -> None:
    """A neighbour with the same fsGroup can write between two starts: a file of theirs is known by
    its owner.
    """
    kubelet(volume)
    as_user(ME, [GROUP], serve(volume / "kvtier"))
    kubelet(volume)
    (segment,) = volume.rglob("seg-*")

    def plant() -> str:
        data = segment.read_bytes()
        segment.unlink()
        segment.write_bytes(data)
        return "planted"

    assert as_user(NEIGHBOUR, [GROUP], plant) == "returned planted"
    said = as_user(ME, [GROUP], serve(volume / "kvtier"))
    assert said.startswith("returned 0 found") and "until the next start" in said
    assert segment.stat().st_uid == NEIGHBOUR, "it is not removed either"


def test_a_folder_that_cannot_be_written_says_so(volume: Path) -> None:
    said = as_user(ME, [], serve(volume))
    assert said.startswith("StoreError") and "this user can write" in said
