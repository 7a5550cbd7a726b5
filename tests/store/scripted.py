"""An operating system that does what a test says."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from sgl_kvtier.lab.stress.store.faults import HookedEnv, fail
from sgl_kvtier.store.disk.format import BLOCK


def only(*calls: str) -> Callable[[str], bool]:
    """Which calls are meant: those whose names begin so."""
    return lambda call: bool(calls) and call.startswith(calls)


class Scripted(HookedEnv):
    """Calls have names: what is written is a "page", the "head" of a slot, a "segment" (its own
    head), the "log" or another "file"; a "read" is of pages, a "look" of less; the rest is called
    as its method and, where it has one, the name of its file, as "open /dir/index.log", "unlink
    seg-00000001" or "sync tp0".

    Calls that `holds` wait until `gate` is open, of which `entered` tells; those that `fails` raise
    the error of number `error`; `before` is told of every call first. The monotonic clock is
    `seconds` ahead, that of the host `ahead_s`.
    """

    native_module = None

    def __init__(self, *, native: bool = False) -> None:
        self.native = native
        """Whether pages are read and written beside it, by the compiled I/O threads."""
        self.gate, self.entered = threading.Event(), threading.Event()
        self.holds: Callable[[str], bool] = only()
        self.fails: Callable[[str], bool] = only()
        self.before: Callable[[str], object] = only()
        self.error = 5
        self.seconds = 0.0
        self.ahead_s = 0
        self._names: dict[int, str] = {}

    def around(self, call: str, act: Callable[..., Any], *args: Any) -> Any:
        name = self._called(call, *args)
        self.before(name)
        if self.holds(name):
            self.entered.set()
            assert self.gate.wait(60)
        if self.fails(name):
            raise fail(self.error)
        found = act(*args)
        if call == "open":
            self._names[found] = os.path.basename(args[0]).removesuffix(".new")
        return found

    def _called(self, call: str, *args: Any) -> str:
        match call:
            case "preadv":
                return "read" if sum(map(len, args[1])) > BLOCK else "look"
            case "pwritev":
                name, whole = self._names[args[0]], sum(map(len, args[1])) > BLOCK
                if name.startswith("index.log"):
                    return "log"
                if not name.startswith("seg-"):
                    return "file"
                return "page" if whole else "head" if args[2] else "segment"
            case "sync":
                return f"sync {self._names[args[0]]}"
            case "open" | "list":
                return f"{call} {args[0]}"
            case "unlink":
                return f"unlink {os.path.basename(args[0])}"
            case "rename":
                return f"rename {os.path.basename(args[1])}"
        return call

    def pause(self, seconds: float) -> None:
        """Nothing changes while a test waits."""

    def now(self) -> float:
        return super().now() + self.seconds

    def wall_ns(self) -> int:
        return super().wall_ns() + self.ahead_s * 10**9


def once(call: str, work: Callable[[], object]) -> Scripted:
    """Something happens once, right before the first call of this name."""
    env, left = Scripted(native=True), [work]

    def before(made: str) -> None:
        if left and made == call:
            left.pop()()

    env.before = before
    return env
