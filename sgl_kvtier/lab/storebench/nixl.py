"""NIXL's POSIX backend with io_uring as the benchmark drives it: one O_DIRECT file per page, as
SGLang's backend keeps them.

It reads in the order that ours reads in: at random, or as the pages were written. The latter lets
the system join neighbouring files into one request. It goes round as much memory as ours does,
since memory that was used just before is still in the processors' caches.
"""

from __future__ import annotations

from sgl_kvtier.lab.storebench.peer import Peer

_PROGRAM = r"""
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


class NixlPeer(Peer):
    """Only `write`, `read_cold` (in random order) and `read_prefix` mean anything here. `slots`:
    how many pages its memory holds.
    """

    program = _PROGRAM
    name = "nixl"
    option = "--nixl-python"

    def __init__(self, python: str, folder: str, page_bytes: int, nbytes: int, slots: int) -> None:
        super().__init__(python, folder, page_bytes, nbytes, slots)

    def read_prefix(self) -> float:
        """In the order the pages were written."""
        return float(self._ask("prefix"))
