"""Mooncake's own client in a process of its own: what a batch of gets takes without anything of
ours. Run by `command`, one JSON line per question.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import time

from sgl_kvtier.remote.child.engine import Code
from sgl_kvtier.remote.child.mooncake import MooncakeEngine
from sgl_kvtier.remote.child.settings import RemoteSettings


def main() -> None:
    """Puts pages, then times one get of all of them for every line of standard input."""
    master, pages, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory = mmap.mmap(-1, 2 * pages * nbytes)
    memory.write(bytes(range(256)) * (pages * nbytes // 256))
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    settings = RemoteSettings(engine="mooncake", master=master)
    engine = MooncakeEngine(settings, base, len(memory))
    names = [f"peer/{nbytes}/{i}" for i in range(pages)]
    sizes = [nbytes] * pages
    starts = [base + i * nbytes for i in range(pages)]
    ends = [at + pages * nbytes for at in starts]
    said = engine.put(names, starts, sizes)
    print(json.dumps(all(code is Code.OK for code in said)), flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        codes = engine.get(names, ends, sizes)
        took = time.perf_counter() - begun
        print(json.dumps(took if all(code is Code.OK for code in codes) else None), flush=True)


if __name__ == "__main__":
    main()
