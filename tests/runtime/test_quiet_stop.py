"""When storage threads may be stopped: not before they have come to rest, where ranks wait for each
other.
"""

from __future__ import annotations

import threading
import time
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvtier.runtime.backend import quiet_stop


def controller(ranks: int) -> Any:
    groups = ["a group"] if ranks > 1 else []
    return SimpleNamespace(
        prefetch_completion_sync_groups=groups,
        prefetch_queue=Queue(),
        prefetch_buffer=Queue(),
        prefetch_sync_queue=Queue(),
    )


def test_one_rank_waits_for_nobody():
    alone = controller(1)
    alone.prefetch_buffer.put(1)
    assert quiet_stop.wait(alone)


def test_a_rank_waits_until_reads_and_reductions_are_over():
    one = controller(2)
    for queue in (one.prefetch_buffer, one.prefetch_sync_queue):
        queue.put(1)
    order: list[str] = []

    def works() -> None:
        with quiet_stop.busy(one, "reading"):
            one.prefetch_buffer.get()
            time.sleep(0.1)
            order.append("read")
        with quiet_stop.busy(one, "reducing"):
            one.prefetch_sync_queue.get()
            time.sleep(0.1)
            order.append("reduced")

    thread = threading.Thread(target=works)
    thread.start()
    assert quiet_stop.wait(one)
    order.append("stopped")
    thread.join()
    assert order == ["read", "reduced", "stopped"]


def test_what_never_comes_to_rest_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quiet_stop, "_LONGEST_S", 0.05)
    one = controller(2)
    with quiet_stop.busy(one, "reading"):
        assert not quiet_stop.wait(one)
    assert quiet_stop.wait(one)
