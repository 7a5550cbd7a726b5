"""Errors of the device within the compiled I/O threads: the pages they hit fail or are tried again,
and no others.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_pages import Open, aligned, begin, content, io_settings, key, named, open_at, put, read

from sgl_kvtier.lab.stress.store import faults
from sgl_kvtier.lab.stress.store.faults import FOREVER, Call, FaultyEnv, Planned, What, arm, counts
from sgl_kvtier.store.base import PageRead, PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup, PageKey

if not faults.BUILT:
    pytest.skip("the I/O threads with faults are not built here", allow_module_level=True)

from sgl_kvtier.store import _native

OK, FAILED, CORRUPT = ReadOutcome.OK, ReadOutcome.FAILED, ReadOutcome.CORRUPT
STORED, REFUSED = PutOutcome.STORED, PutOutcome.REFUSED
COUNT = 5
ALONE = 600_000
"""Bytes of a page so large that no two of them are moved by one call."""
SMALL = 5000
WHERE = pytest.mark.parametrize("at", [0, COUNT // 2, COUNT - 1], ids=["first", "middle", "last"])
Pages = dict[PageKey, bytes]


@pytest.fixture(params=["io_uring", "threads"])
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens the store of one folder with one compiled I/O thread, whose calls fail by plan."""

    def open_(**settings: object) -> DiskStore:
        how = {"capacity_bytes": 32 << 20, "segment_bytes": 8 << 20, "io_threads": 1}
        how |= io_settings(request.param) | settings
        store = open_at(tmp_path, env=FaultyEnv(), **how)
        assert store.io == request.param
        return store

    arm()
    yield open_
    arm()


def pages(nbytes: int, count: int = COUNT, name: str = "") -> Pages:
    return named(((name, i) for i in range(count)), nbytes)


def reads(store: DiskStore, of: Pages) -> list[ReadOutcome]:
    """How pages are read. What is read is right."""
    found = read(store, {name: len(data) for name, data in of.items()})
    for (outcome, data), wanted in zip(found, of.values(), strict=True):
        assert outcome is not OK or data == wanted
    return [outcome for outcome, _ in found]


def call_of(store: DiskStore) -> Call:
    """The kind of call by which pages are read."""
    return Call.COMPLETION if store.io == "io_uring" else Call.READ


def fails(call: Call, at: int, number: int, last: int | None = None) -> None:
    arm([Planned(call, at, at if last is None else last, What.FAIL, number)])


def all_but(good: object, bad: object, at: int) -> list[object]:
    return [bad if i == at else good for i in range(COUNT)]


@WHERE
def test_an_error_of_a_read_fails_its_page_and_no_other(store: DiskStore, at: int) -> None:
    of = pages(ALONE)
    assert put(store, of) == [STORED] * COUNT
    fails(call_of(store), at, errno.EIO)
    outcomes = reads(store, of)
    assert outcomes.count(FAILED) == 1 and outcomes.count(OK) == COUNT - 1
    if store.io == "threads":  # a ring's reads end in any order
        assert outcomes[at] is FAILED
    assert counts().faults[call_of(store)] == store.stats().reads_failed == 1
    assert reads(store, of) == [OK] * COUNT


@WHERE
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_of_a_write_refuses_its_page_and_no_other(
    opened: Open, at: int, number: int
) -> None:
    store, of, before = opened(), pages(ALONE), pages(ALONE, name="before")
    assert put(store, before) == [STORED] * COUNT
    fails(Call.WRITE, at, number)
    assert put(store, of) == all_but(STORED, REFUSED, at)
    assert counts().faults[Call.WRITE] == store.stats().pages_refused == 1
    arm()
    assert store.lookup(list(of)) == all_but(Lookup.HIT, Lookup.MISS, at)
    assert reads(store, of) == all_but(OK, ReadOutcome.MISS, at)
    assert reads(store, before) == [OK] * COUNT
    store.close()
    again = opened()
    assert reads(again, of) == all_but(OK, ReadOutcome.MISS, at)
    assert put(again, of) == all_but(PutOutcome.KEPT, STORED, at)
    assert reads(again, of) == reads(again, before) == [OK] * COUNT


@WHERE
@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_a_call_that_is_interrupted_is_made_again(store: DiskStore, at: int, number: int) -> None:
    of = pages(ALONE)
    fails(Call.WRITE, at, number, last=at + 50)
    assert put(store, of) == [STORED] * COUNT
    assert counts().faults[Call.WRITE] == 51
    fails(call_of(store), at, number)
    assert reads(store, of) == [OK] * COUNT
    assert counts().faults[call_of(store)] == 1
    fails(Call.READ, 0, number, last=50)
    reads(store, of)
    assert counts().faults[Call.READ] == (51 if store.io == "threads" else 0)


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_calls_that_are_interrupted_without_end_fail(store: DiskStore, number: int) -> None:
    of, more = pages(ALONE), pages(ALONE, name="more")
    put(store, of)
    fails(Call.ANY, 0, number, last=FOREVER)
    assert reads(store, of) == [FAILED] * COUNT
    assert put(store, more) == [REFUSED] * COUNT
    arm()
    assert reads(store, of) == [OK] * COUNT
    assert put(store, more) == [STORED] * COUNT


@WHERE
def test_a_short_transfer_is_continued_where_it_ended(store: DiskStore, at: int) -> None:
    of = pages(ALONE)
    arm([Planned(Call.WRITE, at, at, What.SHORT, 4608)])
    assert put(store, of) == [STORED] * COUNT
    assert counts().calls[Call.WRITE] == COUNT + 1
    arm([Planned(call_of(store), at, at, What.SHORT, 4608)])
    assert reads(store, of) == [OK] * COUNT
    assert counts().calls[Call.ANY] == COUNT + 1


@pytest.mark.parametrize("nbytes", [512, 4096, 40_448, -512])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "by way of a copy"])
def test_a_device_that_moves_little_at_a_time_moves_all(
    opened: Open, nbytes: int, parts: int, shift: int
) -> None:
    store, of = opened(), pages(40_000)
    arm([Planned(Call.ANY, 0, FOREVER, What.SHORT, nbytes)])
    assert put(store, of) == [STORED] * COUNT
    whole = [memoryview(mmap.mmap(-1, 50_000))[shift : shift + 40_000] for _ in of]
    cuts = [0, 40_000] if parts == 1 else [0, 8192, 12_288, 40_000]
    parts_of = [[b[a:z] for a, z in itertools.pairwise(cuts)] for b in whole]
    job = store.read([PageRead(name, into) for name, into in zip(of, parts_of, strict=True)])
    assert job.wait(60) and job.outcomes == [OK] * COUNT
    assert [bytes(b) for b in whole] == list(of.values())
    arm()
    assert reads(store, of) == [OK] * COUNT


@WHERE
def test_a_write_of_nothing_refuses_its_page(store: DiskStore, at: int) -> None:
    of = pages(ALONE)
    arm([Planned(Call.WRITE, at, at, What.SHORT, 0)])
    assert put(store, of) == all_but(STORED, REFUSED, at)
    arm()
    assert reads(store, of) == all_but(OK, ReadOutcome.MISS, at)
    assert put(store, of) == all_but(PutOutcome.KEPT, STORED, at)


@WHERE
def test_a_page_where_the_file_ends_is_damaged_and_gone(store: DiskStore, at: int) -> None:
    of = pages(ALONE)
    put(store, of)
    arm([Planned(call_of(store), at, at, What.SHORT, 0)])
    outcomes = reads(store, of)
    assert outcomes.count(CORRUPT) == 1 and outcomes.count(OK) == COUNT - 1
    arm()
    after = [ReadOutcome.MISS if outcome is CORRUPT else OK for outcome in outcomes]
    assert reads(store, of) == after
    assert put(store, of).count(STORED) == 1
    assert reads(store, of) == [OK] * COUNT


def test_pages_that_one_call_moves_fail_together_and_no_others(opened: Open) -> None:
    store, of = opened(), pages(SMALL, 300)
    fails(Call.WRITE, 1, errno.EIO)
    outcomes = put(store, of)
    there = {name: of[name] for name, o in zip(of, outcomes, strict=True) if o is STORED}
    assert 2 <= outcomes.count(REFUSED) <= 64 and len(there) + outcomes.count(REFUSED) == 300
    arm()
    assert store.lookup(list(of)) == [
        Lookup.HIT if outcome is STORED else Lookup.MISS for outcome in outcomes
    ]
    fails(call_of(store), 1, errno.EIO)
    found = reads(store, there)
    assert 2 <= found.count(FAILED) <= 64
    assert found.count(OK) + found.count(FAILED) == len(there)
    assert reads(store, there) == [OK] * len(there)
    assert put(store, of).count(STORED) == outcomes.count(REFUSED)
    assert reads(store, of) == [OK] * 300


def test_a_ring_whose_short_read_cannot_be_continued_fails_that_page_alone(opened: Open) -> None:
    store, of = opened(), pages(ALONE)
    if store.io != "io_uring":
        pytest.skip("threads have no ring")
    put(store, of)
    short = Planned(Call.COMPLETION, 2, 2, What.SHORT, 8192)
    arm([short, Planned(Call.READ, 0, 0, What.FAIL, errno.EIO)])
    outcomes = reads(store, of)
    assert outcomes.count(FAILED) == 1 and outcomes.count(OK) == COUNT - 1
    assert reads(store, of) == [OK] * COUNT


def test_a_failed_page_is_told_to_its_callback_once(store: DiskStore) -> None:
    of = pages(ALONE)
    put(store, of)
    fails(call_of(store), 2, errno.EIO)
    told: list[tuple[int, ReadOutcome]] = []
    job = begin(store, of, ALONE, on_page=lambda i, outcome: told.append((i, outcome)))
    assert job.wait(60) and job.in_flight == 0
    assert sorted(i for i, _ in told) == list(range(COUNT))
    assert sorted(told) == list(enumerate(job.outcomes))
    assert job.outcomes.count(FAILED) == 1


def test_a_page_that_fails_twice_is_given_up_and_can_be_put_anew(store: DiskStore) -> None:
    of = pages(SMALL, 1)
    put(store, of)
    for _ in range(2):
        assert store.lookup(list(of)) == [Lookup.HIT]
        fails(Call.ANY, 0, errno.EIO, last=FOREVER)
        assert reads(store, of) == [FAILED]
        arm()
    assert store.lookup(list(of)) == [Lookup.MISS]
    assert put(store, of) == [STORED] and reads(store, of) == [OK]


def test_a_job_that_is_cancelled_keeps_its_memory_until_a_hung_read_ends(opened: Open) -> None:
    store, of = opened(), pages(ALONE)
    put(store, of)
    into = [aligned(ALONE) for _ in of]
    arm([Planned(call_of(store), 0, FOREVER, What.DELAY, 60_000_000)])
    job = store.read([PageRead(name, [b]) for name, b in zip(of, into, strict=True)])
    while not counts().faults[call_of(store)]:
        pass
    job.cancel()
    begun = [i for i, outcome in enumerate(job.outcomes) if outcome is None]
    assert 0 < job.in_flight == len(begun) < COUNT and not job.done
    for i in set(range(COUNT)) - set(begun):
        into[i][:] = b"\x5a" * ALONE
    arm()
    assert job.wait(60) and job.in_flight == 0
    for i, (outcome, data) in enumerate(zip(job.outcomes, of.values(), strict=True)):
        assert outcome is (OK if i in begun else ReadOutcome.CANCELLED)
        assert into[i] == (data if i in begun else b"\x5a" * ALONE)


def test_an_urgent_read_goes_before_the_rest_of_a_long_one(store: DiskStore) -> None:
    of = pages(ALONE, 41)
    put(store, of)
    *first, last = of
    arm([Planned(call_of(store), 0, FOREVER, What.DELAY, 60_000_000)])
    long = begin(store, first, ALONE, priority=5)
    while not counts().faults[call_of(store)]:
        pass
    urgent = begin(store, [last], ALONE, priority=0)
    # A ring has 16 reads under way already; the urgent one is among the next 16.
    arm([Planned(call_of(store), 32, FOREVER, What.DELAY, 60_000_000)])
    assert urgent.wait(30) and urgent.outcomes == [OK] and not long.done
    arm()
    assert long.wait(60) and long.outcomes == [OK] * 40


def resident_bytes() -> int:
    """Without what the C library keeps of freed memory."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_failed_calls_leak_neither_descriptors_nor_memory(store: DiskStore) -> None:
    of = pages(ALONE, 3)
    put(store, of)
    # Not aligned: it takes the threads' own memory too.
    into = [memoryview(bytearray(ALONE + 1))[1:] for _ in of]
    plan = [
        Planned(call_of(store), 1, 1, What.FAIL, errno.EIO),
        Planned(Call.WRITE, 0, 0, What.FAIL, errno.ENOSPC),
    ]

    def round_(number: int) -> None:
        arm(plan)
        job = store.read([PageRead(name, [b]) for name, b in zip(of, into, strict=True)])
        assert job.wait(60)
        assert put(store, {key(("new", number)): into[0].tobytes()}) == [REFUSED]
        arm()
        put(store, of)  # what failed twice is gone
        assert reads(store, of) == [OK] * 3

    for number in range(20):
        round_(number)
    gc.collect()
    descriptors, memory = len(os.listdir("/proc/self/fd")), resident_bytes()
    later = []
    for number in range(20, 80):
        round_(number)
        if number >= 70:
            gc.collect()
            later.append(resident_bytes())
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    # A page leaked in each round would be 30 MB by then. Other threads of the process take memory
    # for a moment.
    assert min(later) - memory < 17e6


@pytest.mark.parametrize("seed", range(3))
def test_no_page_is_wrong_whatever_fails(opened: Open, seed: int) -> None:
    chance = random.Random(seed)
    store = opened(io_threads=3, capacity_bytes=2 << 20, segment_bytes=256 << 10)
    sizes = {i: chance.choice((300, 4096, 9000, 70_000)) for i in range(40)}
    errors = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EAGAIN)
    seen: list[object] = []
    for _ in range(100):
        plan = []
        for number in range(12):
            what = chance.choice((What.NOTHING, What.FAIL, What.SHORT, What.DELAY))
            amount = {
                What.FAIL: chance.choice(errors),
                What.SHORT: chance.choice((0, 512, 4096, -512)),
                What.DELAY: chance.choice((100, 2000)),
            }
            if what is not What.NOTHING:
                plan.append(Planned(Call.ANY, number, number, what, amount[what]))
        arm(plan, period=12)
        some = chance.sample(sorted(sizes), 10)
        of = {key(i): content(i, sizes[i]) for i in some}
        seen += put(store, of) + reads(store, of)
        if chance.random() < 0.2:
            store.delete([key(i) for i in some[:3]])
    arm()
    assert {STORED, REFUSED, OK, FAILED, CORRUPT, ReadOutcome.MISS} <= set(seen)
    of = {key(i): content(i, nbytes) for i, nbytes in sizes.items()}
    put(store, of)
    assert set(reads(store, of)) <= {OK, ReadOutcome.MISS}


def test_the_module_that_servers_load_cannot_be_made_to_fail() -> None:
    assert set(dir(_native)) - set(dir(sys)) == {
        *("Pool", "HEAD_BYTES", "CHECKSUM_CODE"),
        *("find", "place", "columns", "probe_io_uring", "checksum"),
        "__file__",
    }
    words = (b"take_fault", b"arm(faults, period)", b"_native_faults")
    assert not any(word in Path(_native.__file__).read_bytes() for word in words)
    assert all(word in Path(faults._faults.__file__).read_bytes() for word in words[1:])


def test_a_store_as_servers_open_it_does_not_load_what_can_fail(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from store_pages import *\n"
        "store = open_at(Path(sys.argv[1])); assert store.io != 'python'\n"
        "assert put(store, {key(1): b'page'}) == [PutOutcome.STORED]; store.close()\n"
        "assert not [name for name in sys.modules if name.startswith('sgl_kvtier.lab')]\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        timeout=60,
    )
