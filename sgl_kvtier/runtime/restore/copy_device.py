"""Copies from host pages into device slots, apart from those that HiCache does for the tree.

On an accelerator they run on streams of their own and wait on the device for what was launched
before the slots were allocated, since a slot that was just freed may still be read or written by
it. On a CPU a copy is done when `begin` returns. Both go through HiCache's own transfer
descriptions, so layouts and layer mappings are SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_kvtier.runtime.restore.page_mover import Copy, CopyDevice


class _Done:
    def done(self) -> bool:
        return True


class CpuCopies:
    """Copies by the calling thread, with one torch thread so that the forward keeps its cores."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._set = False

    def fence(self) -> None:
        """Nothing runs beside the scheduler's thread: what was launched before has ended."""

    def begin(self, host_slots: torch.Tensor, device_slots: torch.Tensor, fence: Any) -> Copy:
        """Copies all layers and returns."""
        del fence
        if not self._set:
            torch.set_num_threads(1)  # counts for the calling thread; the scheduler's keeps its own
            self._set = True
        controller = self._controller
        for transfer in controller._l2_load_transfers(host_slots, device_slots):
            for layer in range(controller.transfer_layer_id_max):
                local = transfer.layer_mapper(layer) if transfer.layer_mapper is not None else layer
                if local is not None:
                    transfer.host_pool.load_to_device_per_layer_physical(
                        transfer.device_pool, transfer.host_indices, transfer.device_indices, local, controller.io_backend,
                        is_draft=transfer.is_draft,
                    )  # fmt: skip
        return _Done()


class _Submitted:
    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())


class StreamCopies:
    """Copies on a transfer engine of our own, so that HiCache's layer counters and acknowledgements
    are not involved. Built on the scheduler's thread.
    """

    def __init__(self, controller: Any) -> None:
        from sglang.srt.mem_cache.l2_transfer import L2TransferEngine

        self._controller = controller
        self._module = torch.get_device_module(controller.device)
        # SGLang's "cuda" has no index, and the mover's thread no device of its own.
        self._index = self._module.current_device()
        self._engine = L2TransferEngine(controller.io_backend)

    def fence(self) -> Any:
        """An event behind every forward launched so far, and behind the allocation of the slots."""
        event = self._module.Event()
        stream = self._controller.load_fence_stream
        if stream is None:
            event.record()
            return event
        stream.wait_stream(self._module.current_stream())
        event.record(stream)
        return event

    def begin(self, host_slots: torch.Tensor, device_slots: torch.Tensor, fence: Any) -> Copy:
        """Submits the copy of all layers behind `fence`."""
        controller, engine = self._controller, self._engine
        self._module.set_device(self._index)
        with self._module.stream(engine.host_to_device_stream):
            engine.host_to_device_stream.wait_event(fence)
            host, device = controller.move_indices(host_slots, device_slots)
            completion = engine.submit_host_to_device(
                controller._l2_load_transfers(host, device),
                transfer_layer_id_max=controller.transfer_layer_id_max,
                start_event=fence,
            )
        return _Submitted(completion.finish_event)


def copies_for(controller: Any) -> CopyDevice:
    """The copies of the device that this HiCache controller serves."""
    return (
        CpuCopies(controller)
        if torch.device(controller.device).type == "cpu"
        else StreamCopies(controller)
    )
