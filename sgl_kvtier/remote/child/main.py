"""The child process: receives calls on its socket, makes them with the engine, and sends replies.

It ends when its socket closes, when its parent dies, or when it is killed. Every page goes through
the ring: this process has access to no other memory of its parent.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from sgl_kvtier.remote.child.engine import Code, Engine, EngineError
from sgl_kvtier.remote.child.messages import MOST_REQUEST, Op, Reply, Request, answers
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.page import object_names

_READING_THREADS = 2
"""Two calls overlap each other's gaps; more only take processor time from the engine's threads."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves until the socket closes. The argument is JSON, see `Agent`."""
    given = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != given["parent"]:
        return
    sock = socket.socket(fileno=given["socket"])
    ring = mmap.mmap(given["ring"], given["ring_bytes"])
    base = ctypes.addressof(ctypes.c_char.from_buffer(ring))
    try:
        engine = open_engine(RemoteSettings(**given["settings"]), base, len(ring))
    except Exception as error:
        # Any exception of a library that cannot start: the parent logs it and retries.
        text = str(error) if isinstance(error, EngineError) else repr(error)
        sock.send(Reply(0, Op.DOWN, 0, text.encode()[:4096]).pack())
        return
    sock.send(Reply(0, Op.UP, 0, b"").pack())
    Server(sock, engine, base, given["prefix"]).serve()


def open_engine(settings: RemoteSettings, base: int, nbytes: int) -> Engine:
    """The engine of these settings. Raises EngineError."""
    if settings.engine == "memory":
        from sgl_kvtier.remote.child.memory import MemoryEngine  # a test double

        return MemoryEngine(settings.master)
    from sgl_kvtier.remote.child.mooncake import MooncakeEngine  # imports the engine's library

    return MooncakeEngine(settings, base, nbytes)


class Server:
    """Serves requests from a socket. Reads, writes and all others have separate threads."""

    def __init__(self, sock: socket.socket, engine: Engine, base: int, prefix: str) -> None:
        self._sock = sock
        self._engine = engine
        self._base = base
        self._prefix = prefix

    def serve(self) -> None:
        """Never returns: the process ends when the socket closes, whatever the engine does."""
        reads, writes, questions = (queue.SimpleQueue[Request]() for _ in range(3))
        for todo in (*[reads] * _READING_THREADS, writes, questions):
            threading.Thread(target=self._work, args=(todo,), daemon=True).start()
        queues = {Op.GET: reads, Op.PUT: writes}
        while message := self._receive():
            request = Request.unpack(message)
            queues.get(request.op, questions).put(request)
        os._exit(0)

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(MOST_REQUEST)
        except OSError:
            return b""

    def _work(self, todo: queue.SimpleQueue[Request]) -> None:
        while True:
            request = todo.get()
            try:
                value, codes = self._call(request)
                if len(codes) != answers(request.op, request.keys):
                    raise ValueError("an engine answered for another number of names")
            except Exception:
                # An engine reports errors as codes. Anything else must not end the thread.
                value, codes = 0, [Code.FAILED] * answers(request.op, request.keys)
            try:
                self._sock.send(Reply(request.id, request.op, value, bytes(codes)).pack())
            except OSError:
                os._exit(0)

    def _call(self, request: Request) -> tuple[int, list[Code]]:
        if request.op is Op.CLEAR:
            return self._remove([self._prefix])
        names = object_names(self._prefix, request.pool, request.keys)
        addresses = [self._base + offset for offset in request.offsets]
        if request.op is Op.EXISTS:
            return 0, self._engine.exists(names)
        if request.op is Op.GET:
            return 0, self._engine.get(names, addresses, request.sizes)
        if request.op is Op.REMOVE:
            return self._remove(names)
        return 0, self._put(names, addresses, request.sizes)

    def _remove(self, names: list[str]) -> tuple[int, list[Code]]:
        removed = self._engine.remove(names)
        return sum(one.went for one in removed), [one.code for one in removed]

    def _put(self, names: list[str], addresses: list[int], sizes: Sequence[int]) -> list[Code]:
        """Writes only objects that do not exist: an engine does not report which it kept."""
        codes: list[Code] = [Code.KEPT if c is Code.OK else c for c in self._engine.exists(names)]
        new = [i for i, code in enumerate(codes) if code is Code.MISS]
        written = self._engine.put(
            [names[i] for i in new], [addresses[i] for i in new], [sizes[i] for i in new]
        )
        for i, code in zip(new, written, strict=True):
            codes[i] = code
        return codes


if __name__ == "__main__":
    main()
