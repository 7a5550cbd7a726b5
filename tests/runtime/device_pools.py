"""What device pools hold, and what they should hold, row by row; the pools are the laboratory's."""

from __future__ import annotations

from typing import Any

import torch
from pools import latent_host_pool, latent_pool

from sgl_kvtier.lab.gpu.pools import CPU_WAYS, LAYERS, WAYS, controller, pools, random_bytes, slots

__all__ = [
    "CPU_WAYS",
    "LAYOUTS",
    "WAYS",
    "controller",
    "latent_pools",
    "pools",
    "put",
    "rows",
    "same",
    "slots",
    "wanted_rows",
]
LAYOUTS = tuple(layout for _, layout in WAYS)


def latent_pools(
    device: str, layout: str, *, page: int = 16, tokens: int = 1024
) -> tuple[Any, Any]:
    """A device pool of zeros and a host pool of random bytes, of MLA latents."""
    sizes = {"rank": 512, "rope": 64, "dtype": torch.bfloat16}
    on_device = latent_pool(LAYERS, page=page, tokens=tokens, device=device, **sizes)
    host = latent_host_pool(on_device, layout=layout, tokens=2 * tokens)
    random_bytes(host.kv_buffer)
    return on_device, host


def rows(device: Any, at: torch.Tensor) -> list[torch.Tensor]:
    """Bytes [token, ...] of these slots of the device, of K and V of each layer, or latents."""
    both = (
        zip(device.k_buffer, device.v_buffer, strict=True)
        if hasattr(device, "k_buffer")
        else ((layer,) for layer in device.kv_buffer)
    )
    return [
        piece.view(torch.uint8)[at.to(piece.device)].flatten(1).cpu()
        for two in both
        for piece in two
    ]


def put(device: Any, at: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    """Writes what `rows` gives, row by row: a copy that owes nothing to SGLang's."""
    both = [device.k_buffer, device.v_buffer] if hasattr(device, "k_buffer") else [device.kv_buffer]
    pieces = [layer for two in zip(*both, strict=True) for layer in two]
    for piece, data in zip(pieces, wanted, strict=True):
        flat = piece.view(torch.uint8).view(len(piece), -1)
        flat[at.to(piece.device)] = data.to(piece.device)


def wanted_rows(host: Any, at: torch.Tensor) -> list[torch.Tensor]:
    """What `rows` must be once these host slots were copied: read by what the layout means."""
    buffer = host.kv_buffer.view(torch.uint8)
    pieces = buffer if buffer.dim() > 4 and buffer.shape[0] == 2 else buffer.unsqueeze(0)
    found = []
    for layer in range(host.layer_num):
        for piece in pieces:
            found.append(torch.stack([_token(host, piece, slot, layer) for slot in at.tolist()]))
    return found


def _token(host: Any, piece: torch.Tensor, slot: int, layer: int) -> torch.Tensor:
    page, offset = divmod(slot, host.page_size)
    if host.layout == "layer_first":  # layer, token, head, number
        return piece[layer, slot].flatten()
    if host.layout == "page_first":  # token, layer, head, number
        return piece[slot, layer].flatten()
    if host.layout == "page_first_direct":  # page, layer, token, head, number
        return piece[page, layer, offset].flatten()
    return piece[page, :, offset, layer].flatten()  # page, head, token, layer, number


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether all rows are equal, byte by byte."""
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))
