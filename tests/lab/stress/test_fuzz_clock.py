"""A process whose time of day is moved from outside while it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.stress.server import clock as fuzz_clock
from sgl_kvtier.lab.stress.server.clock import OwnClock

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="needs a C compiler"
)
SAYS = """
import sys, threading, time
for line in sys.stdin:
    before = time.monotonic()
    threading.Event().wait(0.01)
    print(time.time(), before, time.monotonic(), flush=True)
"""


@contextmanager
def process(clock: OwnClock) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, **clock.env}
    with subprocess.Popen(
        [sys.executable, "-c", SAYS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as one:
        yield one
        one.communicate()


def said(one: subprocess.Popen[str]) -> list[float]:
    assert one.stdin is not None and one.stdout is not None
    print(file=one.stdin, flush=True)
    return [float(word) for word in one.stdout.readline().split()]


@needs_compiler
def test_the_time_of_day_jumps_and_nothing_else(tmp_path: Path) -> None:
    clock = OwnClock(tmp_path)
    with process(clock) as one:
        for seconds in (0, 3600, -3600, 0):
            clock.move(seconds)
            begun, wall = time.monotonic(), time.time()
            of_day, before, after = said(one)
            ended = time.monotonic()
            assert begun <= before <= after <= ended, (
                "the clock that counts from the start is the machine's"
            )
            assert wall + seconds <= of_day <= wall + seconds + (ended - begun) + 1


def test_without_a_compiler_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz_clock.shutil, "which", lambda _: None)
    with pytest.raises(BenchError, match="install gcc"):
        OwnClock(tmp_path)
