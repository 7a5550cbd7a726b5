"""Other stores as the benchmark drives them, each in a process of its own with the Python that has
it: HiCache's file backend, and NIXL's POSIX backend with io_uring.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.storebench.disk import huge_pages

_HICACHE_FILE = r"""
import json, os, sys, time
folder, page_bytes, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
torch.set_num_threads(1)
def drop():
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w") as f:
        f.write("1")
count = max(1, nbytes // page_bytes)
keys = [os.urandom(32).hex() for _ in range(count)]
pages = torch.randint(0, 255, (min(128, count), page_bytes), dtype=torch.uint8)
shape = (0, 1, 0, 1, 0, 1, False, False, True, "bench")
subject = HiCacheFile(HiCacheStorageConfig(*shape, extra_config=None), folder)
def batches():
    return [keys[i:i + 128] for i in range(0, count, 128)]
def write():
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    os.sync()
    started = time.monotonic()
    for batch in batches():
        assert subject.batch_set(batch, list(pages[:len(batch)]))
    os.sync()
    return count * page_bytes / (time.monotonic() - started)
def read():
    started = time.monotonic()
    for batch in batches():
        assert all(x is not None for x in subject.batch_get(batch, list(pages[:len(batch)])))
    return count * page_bytes / (time.monotonic() - started)
def cold():
    drop()
    return read()
def exists(n):
    asked = (keys * (n // count + 1))[:n]
    started = time.monotonic()
    assert all(subject.exists(key) for key in asked)
    return time.monotonic() - started
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    what, *arguments = json.loads(line)
    print(json.dumps(globals()[what](*arguments)), flush=True)
"""
"""Uses SGLang's public backend class and nothing of ours."""


_NIXL = r"""
import ctypes, json, mmap, os, random, sys, time
folder, page_bytes, nbytes, slots = sys.argv[1], *map(int, sys.argv[2:5])
from nixl._api import nixl_agent, nixl_agent_config
count = max(1, nbytes // page_bytes)
memory = mmap.mmap(-1, page_bytes * slots, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
memory[:] = (os.urandom(1 << 20) * (len(memory) // (1 << 20) + 1))[:len(memory)]
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
agent = nixl_agent("bench", nixl_agent_config(backends=[]))
agent.create_backend("POSIX", {"use_uring": "true"})
agent.register_memory([(start, len(memory), 0, "")], "DRAM")
paths = [os.path.join(folder, str(i)) for i in range(count)]
used = 0
def move(kind, batch):
    global used
    if used + len(batch) > slots:
        used = 0
    into = start + used * page_bytes
    used += len(batch)
    flags = os.O_RDWR | os.O_DIRECT | (os.O_CREAT if kind == "WRITE" else 0)
    fds = [os.open(p, flags, 0o600) for p in batch]
    files = agent.register_memory([(0, page_bytes, fd, "") for fd in fds], "FILE")
    places = [(into + i * page_bytes, page_bytes, 0) for i in range(len(fds))]
    ours = agent.get_xfer_descs(places, "DRAM")
    handle = agent.initialize_xfer(kind, ours, files.trim(), "bench")
    state = agent.transfer(handle)
    while state not in ("DONE", "ERR"):
        time.sleep(0.0001)
        state = agent.check_xfer_state(handle)
    assert state == "DONE", state
    agent.release_xfer_handle(handle)
    agent.deregister_memory(files)
    for fd in fds:
        os.close(fd)
def run(kind, order):
    started = time.monotonic()
    for i in range(0, count, 128):
        move(kind, order[i:i + 128])
    if kind == "WRITE":
        os.sync()
    return count * page_bytes / (time.monotonic() - started)
def write():
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    os.sync()
    return run("WRITE", paths)
def cold():
    return run("READ", random.sample(paths, count))
def prefix():
    return run("READ", paths)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    what, *arguments = json.loads(line)
    print(json.dumps(globals()[what](*arguments)), flush=True)
"""
"""Polls every 100 us, as SGLang's backend does. O_DIRECT: cold without dropping a cache."""


class Peer:
    """The backend, filled on request. Methods return bytes per second or seconds. Raises BenchError
    when it stops.
    """

    program = _HICACHE_FILE
    name = "HiCacheFile"
    option = "--sglang-python"

    def __init__(
        self, python: str, folder: str, page_bytes: int, nbytes: int, slots: int = 0
    ) -> None:
        """`slots`: how many pages NIXL's memory holds."""
        numbers = map(str, (page_bytes, nbytes, slots))
        command = [python, "-W", "ignore", "-c", self.program, folder, *numbers]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=huge_pages(),
            )
        except OSError as error:
            raise BenchError(
                f"cannot start {python}: {error}. Give a Python that has it: {self.option}"
            ) from error
        self._answer()

    def write(self) -> float:
        return float(self._ask("write"))

    def read_cold(self) -> float:
        """With the page cache dropped before; needs root."""
        return float(self._ask("cold"))

    def read_warm(self) -> float:
        return float(self._ask("read"))

    def exists_seconds(self, count: int) -> float:
        return float(self._ask("exists", count))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # its own last words are in stderr: read below
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                continue  # something SGLang printed
        _, errors = self._process.communicate()
        raise BenchError(f"the {self.name} process stopped: {errors.strip()[-400:]}")


class NixlPeer(Peer):
    """One O_DIRECT file per page, as SGLang's backend keeps them.

    It reads in the order that ours reads in: at random, or as the pages were written. The latter
    lets the system join neighbouring files into one request. It goes round as much memory as ours
    does, since memory that was used just before is still in the processors' caches. Only `write`,
    `read_cold` and `read_prefix` mean anything here.
    """

    program = _NIXL
    name = "nixl"
    option = "--nixl-python"

    def read_prefix(self) -> float:
        """In the order the pages were written."""
        return float(self._ask("prefix"))
