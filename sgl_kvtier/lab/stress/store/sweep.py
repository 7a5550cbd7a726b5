"""Fails system call number N, for every N, in every way: once, and from then on. It goes on until
no call is left to fail.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sgl_kvtier.errors import StoreError
from sgl_kvtier.lab.stress.store.faults import FAULT_KINDS, Call, FailingEnv, Fault, counts, engines
from sgl_kvtier.lab.stress.store.oracle import Oracle, Verdict, content, open_at, page_key
from sgl_kvtier.store.base import PageWrite, PutOutcome


@dataclass(slots=True)
class Sweep:
    """The outcome of a sweep: `io_faults` injected, `exceptions` that reached the caller, `wrong`
    pages.
    """

    io_faults: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    """Faults by the error, once or from then on."""
    by_engine: dict[str, Counter[str]] = field(default_factory=dict)
    """Faults by the I/O threads that the store had, as `DiskStore.io` calls them, and by the call
    that failed.
    """
    calls: int = 0
    deletes: int = 0
    exceptions: list[str] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)


def sweep(root: str, stride: int = 1, step: Callable[[int], None] = lambda _: None) -> Sweep:
    """Runs a store's life once per kind of I/O threads, call and kind of failure. Every
    `stride`-th call is taken, another one with each kind of threads.
    """
    result = Sweep()
    kinds = engines()
    for index, (engine, settings) in enumerate(kinds.items()):
        for kind in FAULT_KINDS:
            for forever in (False, True):
                number = index * stride // len(kinds)
                while _one(root, engine, settings, Fault(number, kind, forever), result):
                    number += stride
                    step(1)
    return result


def _one(root: str, engine: str, settings: dict[str, Any], fault: Fault, result: Sweep) -> bool:
    """One life. False where it ended before the call that was to fail."""
    env = FailingEnv(fault)
    folder = os.path.join(root, "sweep")
    try:
        _life(folder, env, settings, result)
    except Exception as error:
        result.exceptions.append(f"{fault} with {engine}: {type(error).__name__}: {error}")
    shutil.rmtree(folder, ignore_errors=True)
    failed = counts().faults
    if not failed[Call.ANY]:
        return False
    name = fault.kind if isinstance(fault.kind, str) else errno.errorcode[fault.kind]
    result.io_faults += failed[Call.ANY]
    result.by_kind[f"{name}, {'from then on' if fault.forever else 'once'}"] += failed[Call.ANY]
    where = result.by_engine.setdefault(engine, Counter())
    for call in (Call.READ, Call.WRITE, Call.COMPLETION, Call.OTHER):
        where[_CALLS[call]] += failed[call]
    result.calls = max(result.calls, fault.at + 1)
    return True


_CALLS = {
    Call.READ: "page reads",
    Call.WRITE: "page writes",
    Call.COMPLETION: "completions of rings",
    Call.OTHER: "calls of Python",
}


def _life(root: str, env: FailingEnv, settings: dict[str, Any], result: Sweep) -> None:
    """Opens, writes more than fits, reads, deletes, closes; twice. Only opening may fail, and only
    as StoreError.
    """
    oracle = Oracle()
    for life in range(2):
        try:
            store = open_at(
                root,
                env,
                capacity_bytes=384 << 10,
                segment_bytes=64 << 10,
                io_threads=1,
                durable=True,
                **settings,
            )
        except StoreError:
            continue
        for batch in range(5):
            names = list(range(batch * 10, batch * 10 + 10))
            pages = [PageWrite(page_key(n), [memoryview(content(n, life))]) for n in names]
            for n, outcome in zip(names, store.put(pages), strict=True):
                oracle.intends(n, life)
                if outcome is PutOutcome.STORED:
                    oracle.stored(n, life)
        result.verdict.add(oracle.check(store, range(50)))
        store.delete([page_key(n) for n in range(40, 45)])
        result.deletes += _deleted(range(40, 45), env, oracle)
        store.lookup([page_key(n) for n in range(50)])
        if life:
            store.clear()
            result.deletes += _deleted(range(50), env, oracle)
        store.close()
    if not env.lasting:
        store = open_at(root, capacity_bytes=384 << 10, segment_bytes=64 << 10, io_threads=1)
        result.verdict.add(oracle.check(store, range(50)))
        store.close()


def _deleted(names: Iterable[int], env: FailingEnv, oracle: Oracle) -> bool:
    """One failure must not bring back what was deleted; where every call fails from then on nothing
    can be promised.
    """
    for name in [] if env.lasting else names:
        oracle.deleted(name)
    return not env.lasting
