"""Copies from host pages to the device in SGLang's real pools."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from pools import latent_host_pool, latent_pool, slots
from sglang.srt.mem_cache.l2_transfer import L2Transfer

from sgl_kvtier.runtime.restore.copy_device import CpuCopies


def test_a_drafts_layer_comes_to_the_device_with_the_others():
    target, draft = latent_pool(2), latent_pool(1)
    host = latent_host_pool(target, drafts=(draft,))
    host.kv_buffer.copy_(
        torch.randn(host.kv_buffer.shape, generator=torch.Generator().manual_seed(1))
    )
    pages, places = [3, 7], [2, 5]

    def transfers(host_slots: torch.Tensor, device_slots: torch.Tensor) -> list[L2Transfer]:
        """As SGLang describes them: the draft's layer lies behind the target's, and goes with the
        first of them.
        """
        behind = {0: target.layer_num}
        return [
            L2Transfer(host, target, host_slots, device_slots, layer_mapper=lambda layer: layer),
            L2Transfer(
                host, draft, host_slots, device_slots, layer_mapper=behind.get, is_draft=True
            ),
        ]

    controller = SimpleNamespace(
        _l2_load_transfers=transfers,
        transfer_layer_id_max=2,
        io_backend="direct",
        mem_pool_host=host,
    )
    copy = CpuCopies(controller).begin(slots(pages), slots(places), None)
    copy.place()
    assert copy.done()
    for layer, rows in enumerate([*target.kv_buffer, *draft.kv_buffer]):
        assert torch.equal(
            rows[slots(places)].view(2, -1), host.kv_buffer[pages, layer].reshape(2, -1)
        ), f"layer {layer}"
