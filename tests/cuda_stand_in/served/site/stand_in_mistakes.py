"""Mistakes that are put into the project's copies on purpose: a served run on the stand-in has to see
each of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sgl_kvtier.runtime.cuda import fences, scatter, staged_copies
from sgl_kvtier.runtime.sglang import anchors


def exchanged_layers() -> None:
    """The scatter writes each layer's rows into another layer."""
    build = scatter.TritonScatter.__init__

    def exchanged(self: Any, shape: Any, room_pages: int, buffers: list[Any]) -> None:
        layers = shape.layers
        build(self, shape, room_pages, buffers[:layers][::-1] + buffers[layers:][::-1])

    scatter.TritonScatter.__init__ = exchanged  # type: ignore[method-assign]


def fence_without_the_forward() -> None:
    """Slots are written once the schedule stream has come so far. That is behind the forwards unless
    one of them is a decode graph: SGLang goes on when such a graph has read its rows.
    """

    def of_the_schedule(module: Any, controller: Any) -> Any:
        event = fences.sleeping_event(module)
        event.record()
        return event

    staged_copies.fence = of_the_schedule  # type: ignore[assignment]


def no_fence() -> None:
    """Slots are written whatever still uses them: the fence is an event that was never recorded."""
    staged_copies.fence = lambda module, controller: fences.sleeping_event(module)


def spoiled_row() -> None:
    """While the file that STAND_IN_SPOIL names is there, the scatter writes the fourth token's V of
    the last layer with one bit of every byte flipped. So the check at start finds nothing.
    """
    file, launch = Path(os.environ["STAND_IN_SPOIL"]), scatter.TritonScatter.launch

    def spoiled(self: Any, room: Any, slots: torch.Tensor) -> None:
        launch(self, room, slots)
        if file.exists():
            layer, row = self._keep[-1], slots[3:4]
            numbers = layer.view(len(layer), -1).view(torch.uint8)
            numbers[row] = numbers[row] ^ 1

    scatter.TritonScatter.launch = spoiled  # type: ignore[method-assign]


def _spoil_anchors(spoiled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """While the file that STAND_IN_SPOIL names is there, windows and states go to spoiled device
    slots.
    """
    file, transfer = Path(os.environ["STAND_IN_SPOIL"]), anchors.transfer

    def described(pool: str, host_slots: torch.Tensor, device_slots: torch.Tensor) -> Any:
        into = spoiled(device_slots) if file.exists() else device_slots
        return transfer(pool, host_slots[: len(into)], into)

    anchors.transfer = described


def anchors_left_out() -> None:
    """Windows and states do not come."""
    _spoil_anchors(lambda slots: slots[:0])


def windows_exchanged() -> None:
    """A window's pages come into the slots of each other."""
    _spoil_anchors(lambda slots: slots.flip(0))


MISTAKES: dict[str, Callable[[], None]] = {
    mistake.__name__: mistake
    for mistake in (
        exchanged_layers,
        fence_without_the_forward,
        no_fence,
        spoiled_row,
        anchors_left_out,
        windows_exchanged,
    )
}
