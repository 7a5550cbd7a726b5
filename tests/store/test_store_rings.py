"""I/O threads with io_uring: what they have in flight, what they do not touch, and a kernel that forbids
them.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import all_of, beside
from store_pages import aligned, begin, found, hang, io_settings, named, open_at, put

from sgl_kvtier.store.base import PageRead, PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.io import native_threads
from sgl_kvtier.store.io.native_threads import NATIVE, ring_threads

if not NATIVE:
    pytest.skip("the native I/O threads are not built here", allow_module_level=True)

NBYTES = 64 << 10


def open_rings(path: Path, **settings: object) -> DiskStore:
    roomy = {"capacity_bytes": 128 << 20, "segment_bytes": 32 << 20}
    store = open_at(path, **(roomy | io_settings("io_uring") | settings))
    assert store.io == "io_uring"
    return store


def test_more_pages_than_fit_the_rings_come_back_whole_and_in_any_order_asked_for(
    tmp_path: Path,
) -> None:
    store = open_rings(tmp_path, io_threads=1)
    pages = named(range(1000), 4096)
    put(store, pages)
    for seed in range(3):
        names = list(pages)
        random.Random(seed).shuffle(names)
        assert found(store, {name: pages[name] for name in names}) == 1000


def test_pages_not_begun_are_cancelled_and_their_memory_is_left_alone(tmp_path: Path) -> None:
    store = open_rings(tmp_path, io_threads=1)
    pages = named(range(600), NBYTES)
    put(store, pages)
    names = list(pages)
    random.Random(1).shuffle(names)  # not neighbours, so that each page is a read of its own
    into = [aligned(NBYTES) for _ in names]
    for _ in range(100):
        for buffer in into:
            buffer[:] = b"\xa5" * NBYTES
        job = store.read([PageRead(name, [b]) for name, b in zip(names, into, strict=True)])
        job.cancel()
        left = [i for i, outcome in enumerate(job.outcomes) if outcome is ReadOutcome.CANCELLED]
        if left:  # a machine may be slow enough to read all 600 before it is cancelled
            break
    assert left
    for i in left:
        into[i][:] = b"\x5a" * NBYTES
    assert job.wait(60) and job.in_flight == 0
    for i, outcome in enumerate(job.outcomes):
        assert outcome in (ReadOutcome.OK, ReadOutcome.CANCELLED)
        assert into[i] == (pages[names[i]] if outcome is ReadOutcome.OK else b"\x5a" * NBYTES)
    # What was begun was begun in the order given.
    begun = [i for i, outcome in enumerate(job.outcomes) if outcome is ReadOutcome.OK]
    assert begun == list(range(len(begun)))


def test_a_job_that_is_dropped_ends_before_its_memory_does(tmp_path: Path) -> None:
    store = open_rings(tmp_path)
    pages = named(range(300), NBYTES)
    put(store, pages)
    for _ in range(20):
        job = begin(store, pages, NBYTES)
        job.cancel()
        del job
    assert found(store, pages) == 300


def test_writes_go_on_beside_reads_without_end_and_reads_beside_writes(tmp_path: Path) -> None:
    store = open_rings(tmp_path, io_threads=2)
    pages = named(range(512), 4096)
    put(store, pages)
    stop = threading.Event()

    def work() -> None:
        names = list(pages)
        while not stop.is_set():
            random.shuffle(names)
            assert found(store, {name: pages[name] for name in names}) == 512

    reading = [beside(work) for _ in range(3)]
    try:
        for i in range(20):
            assert put(store, named(((i, k) for k in range(32)), 4096)) == [PutOutcome.STORED] * 32
    finally:
        stop.set()
    all_of(reading)


def test_which_lanes_are_chosen() -> None:
    io_settings("io_uring")
    assert ring_threads("threads", direct=True, threads=8) == 0
    assert ring_threads("auto", direct=False, threads=8) == 0
    rings = ring_threads("io_uring", direct=False, threads=8)
    assert rings == ring_threads("auto", direct=True, threads=8) > 0
    assert ring_threads("auto", direct=True, threads=1) == 1


def test_a_callback_tells_of_a_deadline_though_every_lane_hangs_and_nobody_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_threads, "_SWEEP_S", 3600.0)
    store = open_rings(tmp_path, io_threads=1)
    pages = named(range(42), 4096)
    names = list(pages)
    put(store, pages)
    device = hang(store)
    first = begin(store, names[:40:2], 4096)  # more runs than a ring has under way
    while first.in_flight < 16 and not first.done:
        time.sleep(0.001)
    late = threading.Event()
    job = begin(store, names[41:], 4096, deadline_s=0.01, on_page=lambda i, outcome: late.set())
    hung, told = first.in_flight, late.wait(10)
    os.close(device)
    assert hung == 16 and told
    assert job.wait(60) and job.outcomes == [ReadOutcome.LATE]
    assert first.wait(60)


_FORBID = r"""
import ctypes, os, struct, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from store_pages import aligned, content, hang, key, open_at, put, read
from sgl_kvtier.store.base import PageRead, ReadOutcome

def forbid(*steps):
    program = b"".join(struct.pack("HBBI", *step) for step in steps)
    class Filter(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0):
        sys.exit(77)
    # SECCOMP_SET_MODE_FILTER for every thread of this process.
    if libc.syscall(317, 1, 1, ctypes.byref(Filter(len(steps), program))):
        sys.exit(77)
"""


_FORBIDDEN = (
    _FORBID
    + r"""
call, when, error = int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
program = (0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)
if when == "before":
    forbid(*program)
store = open_at(Path(sys.argv[2]), io=sys.argv[6], capacity_bytes=64 << 20)
pages = {key(i): content(i, 20_000) for i in range(200)}
put(store, pages)
lengths = dict.fromkeys(pages, 20_000)
wanted = [(ReadOutcome.OK, data) for data in pages.values()]
if when == "after":
    assert store.io == "io_uring"
    assert read(store, lengths) == wanted
    forbid(*program)
else:
    assert store.io == "threads", store.io
for _ in range(5):
    assert read(store, lengths) == wanted
store.close()
"""
)


x86_64 = pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="the filter names system calls by their x86-64 numbers"
)


def in_process(code: str, *arguments: object) -> None:
    """A process with rings that may forbid itself a system call."""
    io_settings("io_uring")
    command = [sys.executable, "-c", code, str(Path(__file__).parent), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77:
        pytest.skip("this process may not install a seccomp filter")
    assert done.returncode == 0, done.stderr


@x86_64
@pytest.mark.parametrize(
    ("call", "when", "error", "setting"),
    [
        (425, "before", "EPERM", "auto"),
        (425, "before", "ENOSYS", "io_uring"),
        (426, "before", "EPERM", "io_uring"),
        (426, "before", "ENOSYS", "auto"),
        (426, "after", "EPERM", "auto"),
        (426, "after", "ENOSYS", "io_uring"),
    ],
)
def test_a_kernel_that_forbids_rings_gets_threads(
    tmp_path: Path, call: int, when: str, error: str, setting: str
) -> None:
    in_process(_FORBIDDEN, tmp_path, call, when, getattr(errno, error), setting)


_NO_MORE = (
    _FORBID
    + r"""
store = open_at(Path(sys.argv[2]), io="io_uring", io_threads=1)
names = [key(i) for i in range(12)]
put(store, {name: content(i, 4096) for i, name in enumerate(names)})
device = hang(store)
hung = store.read([PageRead(name, [aligned(4096)]) for name in names[:8:2]])
while hung.in_flight < 4:
    time.sleep(0.01)
time.sleep(0.2)  # for the I/O thread to hand them over
# io_uring_enter may go on waiting for what it has, and hand over no more.
forbid((0x20, 0, 0, 0), (0x15, 0, 3, 426), (0x20, 0, 0, 24), (0x15, 1, 0, 0), (0x06, 0, 0, 0x00050000 | int(sys.argv[3])), (0x06, 0, 0, 0x7FFF0000))
other = store.read([PageRead(names[10], [aligned(4096)])])
assert other.wait(30) and other.outcomes == [ReadOutcome.FAILED]  # read without the ring, which a pipe at an offset refuses
assert hung.in_flight == 4
os.close(device)
assert hung.wait(30)
assert hung.outcomes == [ReadOutcome.CORRUPT] * 4
store.close()
"""
)


@x86_64
@pytest.mark.parametrize("error", [1, 11], ids=["EPERM", "EAGAIN"])
def test_what_a_ring_has_under_way_ends_after_it_was_given_up(tmp_path: Path, error: int) -> None:
    in_process(_NO_MORE, tmp_path, error)
