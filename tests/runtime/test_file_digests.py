"""Digests of whole files: kept while nothing about a file changed, and read by one process."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sgl_kvtier.runtime.backend import file_digests
from sgl_kvtier.runtime.backend.file_digests import KEPT, LOCK, FileDigests


def later():
    """A clock by which files written just now have settled."""
    return time.time() + 60


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)) * 4096)
    return path


@pytest.fixture
def read(monkeypatch):
    """Bytes read so far, by the name of the file."""
    counted: dict[str, int] = {}
    part = file_digests._part

    class Counting:
        def __init__(self, name, progress):
            self._name, self._progress = name, progress

        def add(self, nbytes):
            counted[self._name] = counted.get(self._name, 0) + nbytes
            self._progress.add(nbytes)

    def counting(path, at, progress):
        return part(path, at, Counting(path.name, progress))

    monkeypatch.setattr(file_digests, "_part", counting)
    return counted


def digest(store, file, now=later):
    (found,) = FileDigests(str(store), now=now).of([file]).values()
    return found


def test_every_byte_of_a_file_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(file_digests, "_PART_BYTES", 1000)
    monkeypatch.setattr(file_digests, "_READ_BYTES", 300)
    seen = set()
    for at in (None, 0, 999, 1000, 5000, 9999):
        data = bytearray(10_000)
        if at is not None:
            data[at] = 1
        path = tmp_path / "weights.bin"
        path.write_bytes(data)
        seen.add(FileDigests().of([path])[path])
    assert len(seen) == 6


def test_a_digest_does_not_depend_on_who_reads_nor_on_where_the_file_lies(tmp_path, file):
    copy = tmp_path / "copy" / "other-name.bin"
    copy.parent.mkdir()
    copy.write_bytes(file.read_bytes())
    assert FileDigests().of([file])[file] == FileDigests().of([copy])[copy]


def test_a_kept_digest_is_used_and_nothing_is_read_again(store, file, read):
    first = digest(store, file)
    assert read == {file.name: file.stat().st_size}
    assert digest(store, file) == first
    assert read == {file.name: file.stat().st_size}
    assert (store / KEPT).stat().st_mode & 0o777 == 0o600


def test_a_touched_file_is_read_again(store, file, read):
    first = digest(store, file)
    os.utime(file, (1, 1))
    assert digest(store, file) == first
    assert read == {file.name: 2 * file.stat().st_size}


def test_a_change_in_place_that_keeps_size_and_modification_time_is_seen(store, file):
    first, before = digest(store, file), file.stat()
    with file.open("r+b") as open_file:
        open_file.seek(5000)
        open_file.write(b"x")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert digest(store, file) != first


def test_a_file_put_in_the_place_of_another_is_read(store, file):
    first, before = digest(store, file), file.stat()
    other = file.with_name("new")
    other.write_bytes(bytes(before.st_size))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert digest(store, file) != first


def test_a_file_that_was_changed_just_now_is_read_again_the_next_time(store, file, read):
    for _ in range(2):
        digest(store, file, now=time.time)
    assert read == {file.name: 2 * file.stat().st_size}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"schema": 9, "files": {}}',
        b'{"schema": 1, "files": 5}', b'{"schema": 1, "files": {"PATH": 5}}',
        b'{"schema": 1, "files": {"PATH": []}}',
        b'{"schema": 1, "files": {"PATH": [1, 2, 3, 4, 5, "short"]}}',
        b'{"schema": 1, "files": {"PATH": [1, 2, 3, 4, 1e400, "STAMP"]}}',
    ],
    ids=range(12),
)  # fmt: skip
def test_kept_digests_that_are_damaged_are_made_again(store, file, read, content):
    first = digest(store, file)
    (store / KEPT).write_bytes(content.replace(b"PATH", str(file).encode()))
    assert digest(store, file) == first
    assert read == {file.name: 2 * file.stat().st_size}
    assert digest(store, file) == first
    assert read == {file.name: 2 * file.stat().st_size}, "kept again"


def test_a_link_in_the_place_of_the_kept_digests_is_not_followed(store, file, tmp_path, read):
    first = digest(store, file)
    foreign = tmp_path / "foreign.json"
    (store / KEPT).rename(foreign)
    kept = json.loads(foreign.read_bytes())
    kept["files"][str(file)][-1] = "0" * 64
    foreign.write_text(json.dumps(kept))
    (store / KEPT).symlink_to(foreign)
    assert digest(store, file) == first


def test_kept_digests_of_other_files_stay(store, tmp_path, read):
    paths = [tmp_path / f"{n}.bin" for n in range(3)]
    for path in paths:
        path.write_bytes(path.name.encode() * 100)
        digest(store, path)
    for path in paths:
        digest(store, path)
    assert read == {path.name: path.stat().st_size for path in paths}


def test_no_more_than_so_many_digests_are_kept(store, tmp_path, monkeypatch):
    monkeypatch.setattr(file_digests, "_MOST_FILES", 2)
    for n in range(4):
        path = tmp_path / f"{n}.bin"
        path.write_bytes(bytes(n))
        digest(store, path)
    kept = json.loads((store / KEPT).read_bytes())["files"]
    assert [Path(path).name for path in kept] == ["2.bin", "3.bin"]


def changing(monkeypatch, times):
    """Files change so many times just before a part of them is read."""
    part, changes = file_digests._part, [b"more"] * times

    def changed_before(path, at, progress):
        if changes:
            with path.open("ab") as open_file:
                open_file.write(changes.pop())
        return part(path, at, progress)

    monkeypatch.setattr(file_digests, "_part", changed_before)


def test_a_file_that_changes_while_it_is_read_has_a_digest_that_nobody_else_has(
    store, file, monkeypatch, caplog
):
    changing(monkeypatch, times=1000)
    with caplog.at_level(logging.WARNING):
        assert digest(store, file) != digest(store, file)
    assert "changes while it is read" in caplog.text
    assert not (store / KEPT).exists()


def test_a_file_that_changed_once_while_it_was_read_is_read_anew(store, file, monkeypatch):
    changing(monkeypatch, times=1)
    assert digest(store, file) == FileDigests().of([file])[file]


def test_a_file_that_cannot_be_read_is_known_by_its_stamp(store, file, monkeypatch):
    def refused(*_):
        raise PermissionError("no")

    monkeypatch.setattr(file_digests, "_part", refused)
    first = digest(store, file)
    assert digest(store, file) == first
    os.utime(file, (1, 1))
    assert digest(store, file) != first


def test_where_digests_cannot_be_kept_files_are_read_and_it_is_said(store, file, caplog):
    (store / KEPT / "in-the-way").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert digest(store, file) == FileDigests().of([file])[file]
    assert f"cannot be kept in {store}" in caplog.text


READER = """
import sys, time
from pathlib import Path
from sgl_kvtier.runtime.backend import file_digests
part, read = file_digests._part, []
def slowly(path, at, progress):
    read.append(at)
    time.sleep(0.2)
    return part(path, at, progress)
file_digests._part = slowly
print("ready", flush=True)
sys.stdin.readline()
digests = file_digests.FileDigests(sys.argv[1], now=lambda: time.time() + 60)
(found,) = digests.of([Path(sys.argv[2])]).values()
print(found, len(read), flush=True)
"""


def test_of_processes_that_start_at_once_one_reads(store, file):
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", READER, str(store), str(file)]
    processes = [subprocess.Popen(command, **ends) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert len({found for found, _ in said}) == 1
    assert sum(int(parts) for _, parts in said) == 1


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_the_lock_of_a_process_that_dies_is_free(store, file, monkeypatch):
    store.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store / LOCK)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    monkeypatch.setattr(file_digests, "_LEAST_WAIT_S", 600.0)
    assert digest(store, file) == FileDigests().of([file])[file]


def test_whoever_holds_the_lock_too_long_is_not_waited_for(store, file, monkeypatch, caplog):
    store.mkdir()
    monkeypatch.setattr(file_digests, "_LEAST_WAIT_S", 0.3)
    with (store / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with caplog.at_level(logging.WARNING):
            assert digest(store, file) == FileDigests().of([file])[file]
    assert "reading them here too" in caplog.text
