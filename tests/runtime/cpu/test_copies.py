"""The three page copies: what goes to the host and back is what was there."""

from __future__ import annotations

import torch

from sgl_kvtier.runtime.cpu import copies

PAGE, LAYERS, HEADS, DIM, PAGES = 4, 3, 2, 8, 10


def device_layers(seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn((PAGES * PAGE, HEADS, DIM), generator=g) for _ in range(LAYERS)]


def slots(pages: list[int]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


def test_pages_keep_their_bytes_on_the_way_to_page_first_and_back():
    k, v = device_layers(1), device_layers(2)
    host = [torch.zeros((PAGES, LAYERS, PAGE, HEADS, DIM)) for _ in range(2)]
    there, at_host, back = slots([7, 2, 5]), slots([1, 9, 0]), slots([3, 4, 6])
    copies.transfer_kv_all_layer_direct_lf_pf([*k, *v], host, there, at_host, PAGE)
    assert torch.equal(host[0][9, 1], k[1][2 * PAGE : 3 * PAGE])
    restored = [[torch.zeros_like(layer) for layer in k] for _ in range(2)]
    for layer in range(LAYERS):
        copies.transfer_kv_per_layer_direct_pf_lf(
            host, [restored[0][layer], restored[1][layer]], at_host, back, layer, PAGE
        )
    for layer in range(LAYERS):
        assert torch.equal(restored[0][layer][back], k[layer][there])
        assert torch.equal(restored[1][layer][back], v[layer][there])
        untouched = torch.ones(PAGES * PAGE, dtype=torch.bool)
        untouched[back] = False
        assert not restored[0][layer][untouched].any()


def test_one_buffer_per_layer_serves_mla():
    latent = device_layers(3)
    host = [torch.zeros((PAGES, LAYERS, PAGE, HEADS, DIM))]
    copies.transfer_kv_all_layer_direct_lf_pf(latent, host, slots([8]), slots([2]), PAGE)
    out = torch.zeros_like(latent[0])
    copies.transfer_kv_per_layer_direct_pf_lf(host, [out], slots([2]), slots([0]), 2, PAGE)
    assert torch.equal(out[:PAGE], latent[2][8 * PAGE : 9 * PAGE])


def test_layer_first_rows_go_where_their_indices_say():
    src, dst = device_layers(4), [torch.zeros_like(layer) for layer in device_layers(4)]
    copies.transfer_kv_direct(src, dst, slots([1, 2]), slots([6, 5]), PAGE)
    for s, d in zip(src, dst, strict=True):
        assert torch.equal(d[5 * PAGE : 6 * PAGE], s[2 * PAGE : 3 * PAGE])
        assert torch.equal(d[6 * PAGE : 7 * PAGE], s[PAGE : 2 * PAGE])
