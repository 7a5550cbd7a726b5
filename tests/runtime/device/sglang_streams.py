"""As much of SGLang around copies as they touch: its streams, its transfer engine, its forwards."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.l2_transfer import L2Transfer
from virtual_device import Memory, VirtualDevice

from sgl_kvtier.runtime.restore.copy_device import StreamCopies

LAYERS = 3


class Rig:
    """A schedule stream (the default one), a forward stream, two pools and `StreamCopies`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, *, overlap: bool = True
    ) -> None:
        self.device = VirtualDevice(seed)
        self.kv, self.host = Memory("device"), Memory("host")
        module = self.device.module
        monkeypatch.setattr(torch, "get_device_module", lambda _device=None: module)
        monkeypatch.setattr(l2_transfer, "device_module", module)
        l2_transfer._timing_events_supported.cache_clear()
        self.forward_stream = module.Stream() if overlap else self.device.default
        self.pool = SimpleNamespace(
            load_to_device_per_layer_physical=self._copy_layer,
            prepare_transfer_indices=lambda host, device, io: (host, device),
            layer_num=LAYERS,
        )
        self.controller: Any = SimpleNamespace(
            device="cuda",  # as SGLang writes it: without a number
            io_backend="kernel",
            load_fence_stream=self.forward_stream if overlap else module.Stream(),
            transfer_layer_id_max=LAYERS,
            move_indices=lambda host, device: (host, device),
            _l2_load_transfers=lambda host, device: [L2Transfer(self.pool, None, host, device)],
        )
        self.copies = StreamCopies(self.controller)

    def _copy_layer(
        self, _pool: Any, host: torch.Tensor, device: torch.Tensor, layer: int, _io: str, **_: Any
    ) -> None:
        self.device.launch(
            f"copy of layer {layer}",
            reads=[(self.host, host.tolist())],
            writes=[(self.kv, [(slot, layer) for slot in device.tolist()])],
        )

    def forward(self, what: str, reads: Iterable[int], writes: Iterable[int] = ()) -> None:
        """As `run_batch`: behind what the scheduler has done, on the forward stream."""
        self.forward_stream.wait_stream(self.device.default)
        with self.device.on(self.forward_stream):
            self.device.launch(
                what, reads=[(self.kv, every_layer(reads))], writes=[(self.kv, every_layer(writes))]
            )


def every_layer(slots: Iterable[int]) -> list[tuple[int, int]]:
    """A slot has a place in every layer."""
    return [(slot, layer) for slot in slots for layer in range(LAYERS)]
