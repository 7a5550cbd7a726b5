"""The speed of the disk itself: fio where it is installed, plain threads with preadv and pwritev
where not.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass

from sgl_kvtier.errors import BenchError


@dataclass(frozen=True)
class Reference:
    """Measures one file of `nbytes` in `folder`; rates in bytes per second. `tool` says what
    measured.
    """

    folder: str
    nbytes: int
    runtime_s: float

    @property
    def tool(self) -> str:
        return "fio" if shutil.which("fio") else "built-in psync threads"

    @property
    def path(self) -> str:
        return os.path.join(self.folder, "reference")

    def prepare(self) -> None:
        """Lays the file out and fills it with random bytes."""
        block = os.urandom(1 << 20)
        with open(self.path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.nbytes)
            for _ in range(self.nbytes >> 20):
                file.write(block)
            os.fsync(file.fileno())

    def read(self, page_bytes: int) -> float:
        """Random O_DIRECT reads of pages. It is the mean of io_uring at depth 32 (64 MiB at most)
        and of 8 psync jobs.
        """
        if not shutil.which("fio"):
            return self.read_threads(page_bytes, 8)
        depth = max(1, min(32, (64 << 20) // page_bytes))
        uring = self._fio("randread", page_bytes, f"--ioengine=io_uring --iodepth={depth}")
        return (uring + self.read_threads(page_bytes, 8)) / 2

    def read_threads(self, page_bytes: int, threads: int) -> float:
        """Random O_DIRECT reads by `threads` threads, each with one read under way."""
        if shutil.which("fio"):
            return self._fio(
                "randread",
                page_bytes,
                f"--ioengine=psync --numjobs={threads} --group_reporting --thread",
            )
        return _threads(self.path, self.nbytes, page_bytes, threads, self.runtime_s)

    def write(self, page_bytes: int) -> float:
        """Overwrites the file once with O_DIRECT, io_uring at depth 16, and syncs."""
        if not shutil.which("fio"):
            return _overwrite(self.path, self.nbytes, page_bytes)
        depth = max(1, min(16, (64 << 20) // page_bytes))
        return self._fio(
            "write", page_bytes, f"--ioengine=io_uring --iodepth={depth} --end_fsync=1", once=True
        )

    def _fio(self, kind: str, page_bytes: int, how: str, once: bool = False) -> float:
        length = (
            ""
            if once
            else f"--time_based --ramp_time={self.runtime_s / 2} --runtime={self.runtime_s}"
        )
        command = (
            f"fio --name=r --filename={self.path} --size={self.nbytes} --rw={kind} "
            f"--bs={page_bytes} --direct=1 --randrepeat=0 --norandommap --output-format=json "
            f"{length} {how}"
        )
        done = subprocess.run(
            command.split(), capture_output=True, text=True, check=False, env=huge_pages()
        )
        if done.returncode:
            raise BenchError(
                f"fio failed: {done.stderr.strip()[-300:] or done.stdout.strip()[-300:]}"
            )
        data = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][
            "read" if "read" in kind else "write"
        ]
        return float(data["bw_bytes"])


def huge_pages() -> dict[str, str]:
    """The environment of a child whose memory should lie in huge pages, as the store's does while
    it is measured.
    """
    return os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def _threads(path: str, nbytes: int, page_bytes: int, threads: int, runtime_s: float) -> float:
    until = time.monotonic() + runtime_s
    moved = [0] * threads

    def read(worker: int) -> None:
        chance = random.Random(worker)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, page_bytes)
        while time.monotonic() < until:
            moved[worker] += os.preadv(
                fd, [buffer], chance.randrange(nbytes // page_bytes) * page_bytes
            )
        os.close(fd)

    workers = [threading.Thread(target=read, args=(i,)) for i in range(threads)]
    started = time.monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(moved) / (time.monotonic() - started)


def _overwrite(path: str, nbytes: int, page_bytes: int) -> float:
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, page_bytes)
    started = time.monotonic()
    for offset in range(0, nbytes - page_bytes + 1, page_bytes):
        os.pwritev(fd, [buffer], offset)
    os.fdatasync(fd)
    os.close(fd)
    return nbytes / (time.monotonic() - started)
