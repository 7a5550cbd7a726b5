"""The check at start on the virtual device: its reads and writes run when their stream comes to it,
and a stream runs no further than somebody waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from sglang_streams import Rig
from virtual_device import INDEX

from sgl_kvtier.runtime.backend.loaded_pools import keys_and_values
from sgl_kvtier.runtime.proof.start import Rows

_PATIENCE_S = 30.0


class LateRows(Rows):
    """The pools of a rig. Nothing is declared, so that the check itself has to see a mistake."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.device.module, [keys_and_values(rig.pool, list(rig.k), list(rig.v))])
        self._rig = rig
        self.held: list[Callable[[], None]] = []
        """What lets a busy stream go on."""

    def fill(self, slots: torch.Tensor, byte: int) -> None:
        now, into = super().fill, slots.clone()
        self._rig.device.launch("the check writes", does=lambda: now(into, byte))

    def read(self, half: int, layer: int, slots: torch.Tensor) -> torch.Tensor:
        now, at = super().read, slots.clone()
        found = torch.zeros(len(slots), self.row_bytes[half], dtype=torch.uint8)
        self._rig.device.launch("the check reads", does=lambda: _put(found, now(half, layer, at)))
        return found

    def all_are(self, half: int, layer: int, slots: torch.Tensor, byte: int) -> torch.Tensor:
        now, at, found = super().all_are, slots.clone(), torch.zeros((), dtype=torch.bool)
        self._rig.device.launch(
            "the check looks", does=lambda: _put(found, now(half, layer, at, byte))
        )
        return found

    def fetch(self, rows: torch.Tensor) -> torch.Tensor:
        self.module.current_stream().synchronize()
        return rows

    def busy(self, seconds: float) -> None:
        self.held.append(self._rig.device.hold(self._rig.device.current))


def _put(found: torch.Tensor, rows: torch.Tensor) -> None:
    found.copy_(rows)


@contextmanager
def running(rig: Rig, rows: LateRows) -> Iterator[None]:
    """Streams run in an order that chance chooses, as far as a thread waits for it. One that is
    busy goes on when nothing else can.
    """
    device, over = rig.device, threading.Event()
    waiting: list[Callable[[], bool]] = []
    ordinary = device.wait

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + _PATIENCE_S
        with device.changed:
            waiting.append(condition)
            device.changed.notify_all()
            while not condition():
                assert time.monotonic() < end, "what is waited for never comes"
                device.changed.wait(1.0)
            waiting.remove(condition)

    def run() -> None:
        device.index = INDEX
        with device.changed:
            while not over.is_set():
                if all(condition() for condition in waiting):
                    device.changed.wait(0.01)
                elif not device.step() and rows.held:
                    rows.held.pop(0)()

    device.wait = wait  # type: ignore[method-assign]
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        device.wait = ordinary  # type: ignore[method-assign]
