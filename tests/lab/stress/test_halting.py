"""Processes that are halted do nothing until they go on."""

from __future__ import annotations

import mmap
import os
import signal
import time

from sgl_kvtier.lab.stress.trouble import chance, halted, resume


def test_a_halted_process_does_nothing_with_any_thread_and_goes_on_after() -> None:
    memory = mmap.mmap(-1, 8)
    child = os.fork()
    if child == 0:
        while True:
            memory[:] = (int.from_bytes(memory[:], "little") + 1).to_bytes(8, "little")
    try:
        while not any(memory[:]):
            time.sleep(0.001)
        with halted([child]):
            before = memory[:]
            time.sleep(0.05)
            assert memory[:] == before
        while memory[:] == before:
            time.sleep(0.001)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    resume(child)  # it may have ended meanwhile


def test_what_is_drawn_for_one_purpose_depends_on_no_other() -> None:
    def drawn(*about: object) -> float:
        return chance(1, *about).random()

    assert drawn("kill", 3) == drawn("kill", 3)
    assert len({drawn("kill", 3), drawn("kill", 4), drawn("stop", 3)}) == 3
