"""A test double of an engine: objects are files in one folder, which several processes may share.

Its file `faults.json` says what fails and may change at any time. The values of `get` are
probabilities per page:

    get     {"flip": 0.1, "flip_head": .., "swap": .., "other_identity": .., "torn": ..,
             "truncate": .., "fail": .., "late": ..}
    hang    names of methods that never return
    slow_s  seconds that every method takes
    crash   names of methods in which the process dies
    ignore  ["remove"]: nothing is removed, and the engine reports REFUSED
    refuse, unreachable    true: put has no space; the master does not respond
    late_s  seconds after which a failed `late` get still writes
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgl_kvtier.remote.child.engine import Code, EngineError, Removed
from sgl_kvtier.remote.page import HEAD_BYTES, SUM_AT, checksum

FAULTS = "faults.json"


class MemoryEngine:
    """Objects in a folder. Any thread. Raises EngineError if there is no such folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise EngineError(f"there is no folder {folder}")
        self._faults: dict[str, Any] = {}
        self._read_at = -1
        self._random = random.Random(os.getpid())

    def exists(self, names: Sequence[str]) -> list[Code]:
        if self._trouble("exists"):
            return [Code.UNREACHABLE] * len(names)
        return [Code.OK if self._file(name).exists() else Code.MISS for name in names]

    def get(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[Code]:
        if self._trouble("get"):
            return [Code.UNREACHABLE] * len(names)
        return [
            self._get(name, names[i - 1], memory_at(address, size))
            for i, (name, address, size) in enumerate(zip(names, addresses, sizes, strict=True))
        ]

    def put(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[Code]:
        if self._trouble("put"):
            return [Code.UNREACHABLE] * len(names)
        if self._faults.get("refuse"):
            return [Code.REFUSED] * len(names)
        for name, address, size in zip(names, addresses, sizes, strict=True):
            # Atomic, also for other processes.
            part = self._folder / f"part-{os.getpid()}-{threading.get_ident()}"
            part.write_bytes(memory_at(address, size))
            part.replace(self._file(name))
        return [Code.OK] * len(names)

    def remove(self, names: Sequence[str]) -> list[Removed]:
        if self._trouble("remove"):
            return [Removed(Code.UNREACHABLE)] * len(names)
        if "remove" in self._faults.get("ignore", ()):
            return [Removed(Code.REFUSED)] * len(names)
        return [self._remove(name) for name in names]

    def close(self) -> None:
        pass

    def _remove(self, name: str) -> Removed:
        if name.endswith("/"):
            start = self._file(name).name
            found = [path for path in self._folder.iterdir() if path.name.startswith(start)]
        else:
            found = [path for path in [self._file(name)] if path.exists()]
        for path in found:
            path.unlink(missing_ok=True)
        return Removed(Code.OK if found else Code.MISS, len(found))

    def _get(self, name: str, other: str, into: memoryview) -> Code:
        fault = self._chosen(self._faults.get("get", {}))
        if fault == "fail":
            return Code.FAILED
        if fault == "late":
            late_s = self._faults.get("late_s", 0.002)
            threading.Timer(late_s, into.__setitem__, (slice(None), b"\7" * len(into))).start()
            return Code.FAILED
        try:
            value = bytearray(self._file(name).read_bytes())
            if fault is not None:
                spoilt = _SPOILT[fault](value, self._random.randrange)
                if fault == "swap" and other != name:
                    spoilt = bytearray(self._file(other).read_bytes())
                value = spoilt
        except FileNotFoundError:
            return Code.MISS
        if len(value) != len(into):
            return Code.CORRUPT
        into[:] = value
        return Code.OK

    def _file(self, name: str) -> Path:
        return self._folder / name.replace("/", ",")

    def _chosen(self, shares: dict[str, float]) -> str | None:
        at = self._random.random() if shares else 1.0
        for fault, share in shares.items():
            at -= share
            if at < 0:
                return fault
        return None

    def _trouble(self, method: str) -> bool:
        """Hangs or dies if the faults say so. Returns whether the master does not respond."""
        try:
            changed = (self._folder / FAULTS).stat().st_mtime_ns
        except FileNotFoundError:
            changed = 0
        if changed != self._read_at:
            self._faults = json.loads((self._folder / FAULTS).read_text()) if changed else {}
            self._read_at = changed  # last, because other threads compare it
        while method in self._faults.get("hang", ()):
            time.sleep(3600)
        time.sleep(self._faults.get("slow_s", 0))
        if method in self._faults.get("crash", ()):
            os._exit(3)
        return bool(self._faults.get("unreachable"))


def set_faults(folder: str | Path, faults: dict[str, Any]) -> None:
    """Sets the faults for every process that uses the folder."""
    part = Path(folder, "faults.part")
    part.write_text(json.dumps(faults))
    part.replace(Path(folder, FAULTS))


def memory_at(address: int, nbytes: int) -> memoryview:
    """Memory of this process as writable bytes."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


Below = Callable[[int], int]
Spoil = Callable[[bytearray, Below], bytearray]


def _flip(value: bytearray, below: Below) -> bytearray:
    value[HEAD_BYTES + below(len(value) - HEAD_BYTES)] ^= 1 << below(8)
    return value


def _flip_head(value: bytearray, below: Below) -> bytearray:
    value[below(HEAD_BYTES)] ^= 1 << below(8)
    return value


def _resealed(value: bytearray, at: int) -> bytearray:
    """Changes one bit of the header and gives it a valid checksum."""
    value[at] ^= 1
    head = bytes(value[:SUM_AT]) + bytes(16)
    value[SUM_AT:HEAD_BYTES] = checksum(head, [memoryview(value)[HEAD_BYTES:]])
    return value


def _other_identity(value: bytearray, below: Below) -> bytearray:
    return _resealed(value, 16 + below(32))


def _other_key(value: bytearray, below: Below) -> bytearray:
    return _resealed(value, 48 + below(32))


def _torn(value: bytearray, below: Below) -> bytearray:
    """A partial transfer: the rest is not what was stored."""
    at = HEAD_BYTES + below(len(value) - HEAD_BYTES)
    value[at:] = bytes(b ^ 0xFF for b in value[at:])
    return value


def _truncate(value: bytearray, below: Below) -> bytearray:
    return value[: below(len(value))]


_SPOILT: dict[str, Spoil] = {
    "flip": _flip,
    "flip_head": _flip_head,
    "swap": _other_key,
    "other_identity": _other_identity,
    "torn": _torn,
    "truncate": _truncate,
}
