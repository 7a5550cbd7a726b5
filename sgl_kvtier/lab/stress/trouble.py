"""What trouble for a store and trouble for a server have in common: one source of chance, how
processes are halted, and the names of what must not happen.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path

from sgl_kvtier.console import Column, Table


class Finding(IntEnum):
    """What must not happen, not once. The store's come first: they are counted in memory that
    processes share.
    """

    WRONG = 0
    """A page was returned whose bytes were never put under its key."""
    RESURRECTED = 1
    """A deleted page was returned."""
    LOST = 2
    """A page that is owed was not found."""
    FAILED_OPEN = 3
    EXCEPTION = 4
    """A call of the store raised, one of its threads ended or logged an exception, or a process
    ended by itself.
    """
    STATS_RAISED = 5
    FOLLOWER_STOPPED = 6
    """What siblings did was not seen for a long time without a call of `follow`."""
    LEAK = 7
    """A server lost memory, or did not become idle."""
    DRIFT = 8
    """Pages were elsewhere than a server's map has them."""
    CRASH = 9
    """A server ended by itself, or its log has an exception."""
    MISMATCH = 10
    """A restored page had other bytes than its source."""
    SCENE = 11
    """A server was not as before after a scene, or did not answer as it must."""

    @property
    def label(self) -> str:
        """Its name in words."""
        return self.name.lower().replace("_", " ")


OF_A_STORE = tuple(finding for finding in Finding if finding < Finding.LEAK)


def chance(seed: int, *about: object) -> random.Random:
    """Random numbers for one purpose: they depend on the seed and on what they are for, and on
    nothing that was drawn before.
    """
    return random.Random(":".join(map(str, (seed, *about))))


def suspend(pid: int) -> None:
    """SIGSTOP. Behind it no thread of the process runs any more, or it has ended."""
    os.kill(pid, signal.SIGSTOP)
    while _is_running(pid):
        time.sleep(0.0002)


def resume(pid: int) -> None:
    """SIGCONT, to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def halted(pids: Sequence[int]) -> Iterator[None]:
    """The processes stand still while the block runs."""
    try:
        for pid in pids:
            suspend(pid)
        yield
    finally:
        for pid in pids:
            resume(pid)


def _is_running(pid: int) -> bool:
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if thread.read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return True
    return False


def counted(title: str, figures: Mapping[str, object], names: Iterable[str] = ()) -> Table:
    """A table of these figures, or of those named: what was tried, or what must be 0."""
    rows = [{"what": name.replace("_", " "), "value": figures[name]} for name in (names or figures)]
    return Table(title, (Column("what", "What"), Column("value", "Count")), rows)
