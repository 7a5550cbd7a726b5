"""The compiled I/O threads: the same checksums, the same bytes on disk, the same outcomes as the Python
ones.
"""

from __future__ import annotations

import ctypes
import platform
import random
import shutil
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest
import xxhash
from patience import all_of, beside, until
from store_pages import (
    IO_KINDS,
    begin,
    content,
    found,
    io_settings,
    key,
    named,
    open_at,
    put,
    stored_at,
)

from sgl_kvtier.store.base import PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.format import SlotHead, heads_of
from sgl_kvtier.store.index.slots import words
from sgl_kvtier.store.io import native_threads
from sgl_kvtier.store.io.native_threads import NATIVE

if not NATIVE:
    pytest.skip("the native I/O threads are not built here", allow_module_level=True)

from sgl_kvtier.store import _native

COMPILED = IO_KINDS[:2]
SIZES = (1, 1000, 4096, 65_536, 300_001)


def test_checksums_equal_the_reference_however_the_bytes_are_cut() -> None:
    chance = random.Random(1)
    lengths = [
        *range(241, 1300),
        *(64 * i + d for i in range(20, 60) for d in (-1, 0, 1)),
        *(1024 * i for i in range(1, 40)),
    ]
    for length in lengths:
        data = chance.randbytes(length)
        parts, at = [], 0
        while at < length:
            step = chance.choice([1, 7, 63, 64, 65, 512, chance.randrange(1, 3000)])
            parts.append(data[at : at + step])
            at += step
        assert _native.checksum(parts) == xxhash.xxh3_128(data).digest()


def expected_code() -> str:
    """The name of the code that this processor's vectors allow."""
    if platform.machine() == "aarch64":
        return "neon"
    return "avx2" if "avx2" in Path("/proc/cpuinfo").read_text("utf-8").split() else "plain"


def test_checksums_run_with_the_vectors_that_the_processor_has() -> None:
    assert expected_code() == _native.CHECKSUM_CODE


BOTH_CODES = """
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#ifdef NEON
#undef __x86_64__
#define __AARCH64EL__ 1
#endif
#include "xxh3.h"
const char *choose(void) { return xxh3_choose(); }
void digest(void *data, size_t size, uint8_t *into) { xxh3_128(&(struct iovec){data, size}, 1, into); }
"""
NEON_IN_C = """
typedef uint8_t uint8x16_t __attribute__((vector_size(16)));
typedef uint32_t uint32x2_t __attribute__((vector_size(8)));
typedef uint32_t uint32x4_t __attribute__((vector_size(16)));
typedef uint64_t uint64x2_t __attribute__((vector_size(16)));
static uint8x16_t vld1q_u8(const uint8_t *p) { uint8x16_t v; memcpy(&v, p, 16); return v; }
static uint64x2_t vld1q_u64(const uint64_t *p) { uint64x2_t v; memcpy(&v, p, 16); return v; }
static void vst1q_u64(uint64_t *p, uint64x2_t v) { memcpy(p, &v, 16); }
static uint8x16_t vextq_u8(uint8x16_t a, uint8x16_t b, int first) {
    uint8x16_t both[2] = {a, b};
    return vld1q_u8((uint8_t *)both + first);
}
#define veorq_u8(a, b) ((a) ^ (b))
#define vaddq_u64(a, b) ((a) + (b))
#define vreinterpretq_u32_u8(a) ((uint32x4_t)(a))
#define vreinterpretq_u64_u8(a) ((uint64x2_t)(a))
#define vget_low_u32(a) ((uint32x2_t){(a)[0], (a)[1]})
#define vuzp1q_u32(a, b) ((uint32x4_t){(a)[0], (a)[2], (b)[0], (b)[2]})
#define vuzp2q_u32(a, b) ((uint32x4_t){(a)[1], (a)[3], (b)[1], (b)[3]})
#define vmlal_u32(a, b, c) ((a) + (uint64x2_t){(uint64_t)(b)[0] * (c)[0], (uint64_t)(b)[1] * (c)[1]})
#define vmlal_high_u32(a, b, c) ((a) + (uint64x2_t){(uint64_t)(b)[2] * (c)[2], (uint64_t)(b)[3] * (c)[3]})
"""
"""The instructions of arm_neon.h that xxh3.h uses, as the compiler's vectors of any processor."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
@pytest.mark.parametrize("code", ["neon", "of this processor"])
def test_the_plain_code_and_the_one_with_vectors_give_the_same_checksums(
    tmp_path: Path, code: str
) -> None:
    (tmp_path / "both.c").write_text(BOTH_CODES)
    includes = [f"-I{Path(__file__).parents[2] / 'sgl_kvtier' / 'store' / 'native'}"]
    if code == "neon":
        (tmp_path / "arm_neon.h").write_text(NEON_IN_C)
        includes += ["-DNEON", f"-I{tmp_path}"]
    flags = ["-std=gnu11", "-O1", "-w", "-shared", "-fPIC", *includes]
    built = tmp_path / "both.so"
    subprocess.run(["cc", *flags, str(tmp_path / "both.c"), "-o", str(built)], check=True)
    library = ctypes.CDLL(str(built))
    library.choose.restype = ctypes.c_char_p
    data = random.Random(2).randbytes(70_000)
    memory = ctypes.create_string_buffer(data)

    def compare() -> None:
        into = ctypes.create_string_buffer(16)
        for first, length in [*((n % 17, n) for n in range(241, 2200)), (0, 65_536), (7, 65_537)]:
            start = ctypes.byref(memory, first)
            library.digest(start, ctypes.c_size_t(length), into)
            assert into.raw == xxhash.xxh3_128(data[first : first + length]).digest(), length

    compare()
    assert library.choose().decode() == ("neon" if code == "neon" else expected_code())
    compare()


def test_short_input_is_refused_rather_than_hashed_wrongly() -> None:
    with pytest.raises(ValueError, match="241"):
        _native.checksum([b"x" * 240])


def test_many_headers_at_once_are_the_same_as_one_by_one() -> None:
    heads = [SlotHead(b"\x07" * 32, key(i), "kv", 1000 + i, 10 * i, 3, i) for i in range(5)]
    columns = heads_of(
        b"\x07" * 32,
        words([h.key for h in heads]),
        [b"kv"] * 5,
        range(1000, 1005),
        range(0, 50, 10),
        [3] * 5,
        range(5),
    )
    assert [column.tobytes() for column in columns] == [head.fields() for head in heads]
    assert len(heads[0].fields()) == _native.HEAD_BYTES


@pytest.mark.parametrize("reader", IO_KINDS)
@pytest.mark.parametrize("writer", IO_KINDS)
def test_any_kind_of_lanes_reads_what_any_other_wrote(
    tmp_path: Path, writer: str, reader: str
) -> None:
    pages = {key((size, i)): content((size, i), size) for size in SIZES for i in range(9)}
    stored_at(tmp_path, pages, **io_settings(writer), capacity_bytes=64 << 20)
    store = open_at(tmp_path, **io_settings(reader), capacity_bytes=64 << 20)
    assert store.io == reader
    assert found(store, pages) == len(pages)


@pytest.mark.parametrize("kind", COMPILED)
def test_a_queue_that_cannot_be_served_in_time_ends_late_while_its_lane_is_busy(
    tmp_path: Path, kind: str
) -> None:
    large = {"capacity_bytes": 256 << 20, "segment_bytes": 64 << 20}
    store = open_at(tmp_path, **io_settings(kind), io_threads=1, **large)
    nbytes = 8 << 20
    big = named(range(8), nbytes)
    put(store, big)
    first = begin(store, big, nbytes)
    second = begin(store, big, nbytes, deadline_s=0.0)
    assert second.wait(60)
    assert second.outcomes == [ReadOutcome.LATE] * 8
    third = begin(store, big, nbytes)
    third.cancel()
    assert third.wait(60) and set(third.outcomes) <= {ReadOutcome.CANCELLED, ReadOutcome.OK}
    assert first.wait(60) and first.outcomes == [ReadOutcome.OK] * 8


@pytest.mark.parametrize("kind", COMPILED)
def test_a_job_nobody_asks_about_gives_its_slots_back(tmp_path: Path, kind: str) -> None:
    store = open_at(tmp_path, **io_settings(kind))
    put(store, named(range(10)))
    begin(store, named(range(10)))
    until(lambda: store.stats().pages_read == 10)


def test_cancelling_leaves_what_has_ended_to_who_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_threads, "_SWEEP_S", 3600.0)
    store = open_at(tmp_path, **io_settings("threads"), io_threads=1)
    put(store, named(range(2)))
    assert store.damage(key(0), bit=1)
    damaged = begin(store, [key(0)])
    assert found(store, named([1])) == 1, "by the same thread: the other one has ended"
    damaged.cancel()
    assert store.stats().pages_corrupt == 0
    assert damaged.outcomes == [ReadOutcome.CORRUPT] and store.stats().pages_corrupt == 1


@pytest.mark.parametrize("kind", COMPILED)
def test_callbacks_come_from_another_thread_in_the_order_of_the_outcomes(
    tmp_path: Path, kind: str
) -> None:
    store = open_at(tmp_path, **io_settings(kind), io_threads=1)
    put(store, named(range(10)))
    seen: list[tuple[int, int]] = []
    job = begin(
        store,
        [key(3), key(99), key(1)],
        on_page=lambda i, _: seen.append((i, threading.get_ident())),
    )
    assert job.wait(60)
    ended = job.drain()
    assert sorted(ended, key=lambda page: page[0]) == [
        (0, ReadOutcome.OK),
        (1, ReadOutcome.MISS),
        (2, ReadOutcome.OK),
    ]
    assert [i for i, _ in seen] == [i for i, _ in ended]
    if kind == "threads":  # one thread reads one after the other; a ring has all of them under way
        assert [i for i, _ in seen] == [0, 1, 2]
    assert threading.get_ident() not in {thread for _, thread in seen}


@pytest.mark.parametrize("kind", COMPILED)
def test_writes_and_reads_at_once_from_many_threads_stay_apart(tmp_path: Path, kind: str) -> None:
    store = open_at(tmp_path, **io_settings(kind), capacity_bytes=4 << 20, segment_bytes=512 << 10)

    def work(worker: int) -> None:
        chance = random.Random(worker)
        for _ in range(60):
            names = [chance.randrange(200) for _ in range(6)]
            size = chance.choice((3000, 20_000))
            pages = [
                PageWrite(key((n, size)), [memoryview(content((n, size), size))]) for n in names
            ]
            assert PutOutcome.REFUSED not in store.put(pages)
            found(store, named(((n, size) for n in names), size))

    all_of([beside(partial(work, i)) for i in range(4)])
    assert store.stats().pages_evicted > 0
