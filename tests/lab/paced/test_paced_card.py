"""The copies that a card would choose, on a paced device: which they are, what they move, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_pools import latent_pools

from sgl_kvtier.lab.gpu.pools import controller, pools, slots
from sgl_kvtier.lab.paced import clock, device
from sgl_kvtier.lab.paced.clock import Link, Stream, StreamContext
from sgl_kvtier.lab.paced.copies import Copies, Damage, Pages
from sgl_kvtier.policy import shape
from sgl_kvtier.runtime.cpu.platform import STAND_IN
from sgl_kvtier.runtime.cuda import card_memory
from sgl_kvtier.runtime.cuda.staged_copies import StagedCopies
from sgl_kvtier.runtime.restore.copy_device import CARDS, CpuCopies, StreamCopies, copies_for

PAGE, LAYERS, ROW = 16, 4, 2 * 8 * 4  # a layer's K of a token: 2 heads of 8, in fp32
PAGE_BYTES = PAGE * LAYERS * 2 * ROW
SCALE = 512.0
LINK_S = PAGE_BYTES / 1e4
"""Of a page."""


class Card:
    """A paced card with a link of 10,000 bytes a second at hand, and pools."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, layout: str = "page_first_direct", damage: str = ""
    ) -> None:
        self.now = 100.0
        monkeypatch.setattr(clock, "now", lambda: self.now)
        monkeypatch.setenv(STAND_IN, "a paced device")
        for module, name in device._SIZES:
            monkeypatch.setattr(module, name, getattr(module, name))
        card: Any = SimpleNamespace(current_device=lambda: "cpu", set_device=lambda _: None)
        clock.stand_in(card)
        monkeypatch.setattr(torch, "get_device_module", lambda *_: card)
        monkeypatch.setitem(CARDS, "cpu", lambda _: ())
        self.pages, self.damage = Pages(PAGE), Damage(damage)
        self.link = Link(1e-5 * SCALE)
        settings = device.Settings("h100-llama8b", 1.0, SCALE, PAGE, 1.0, 1.0, "unused")
        device._copy_as_a_card(
            settings, Copies(self.link, Link(1.0), SCALE, self.pages, self.damage)
        )
        self.forwards, self.schedule = Stream(), Stream()
        self.pool, self.host = pools(
            "cpu", layout, page=PAGE, dtype=torch.float32, heads=2, dim=8, layers=LAYERS
        )
        self.controller = controller(self.pool, self.host, "direct", self.forwards)

    def staged(self) -> StagedCopies:
        found = copies_for(self.controller)
        assert isinstance(found, StagedCopies)
        return found

    def rows(self) -> list[torch.Tensor]:
        return [rows.clone() for rows in (*self.pool.k_buffer, *self.pool.v_buffer)]


def of(*numbers: int) -> torch.Tensor:
    return slots(list(numbers), PAGE)


def test_keys_and_values_go_through_staging_as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Card(monkeypatch).staged()
    # As many pages of 16 KiB times 512 as 16 MiB hold.
    assert copies.most_tokens == (16 << 20) // int(SCALE) // PAGE_BYTES * PAGE
    assert (128 << 20) // int(SCALE) == shape.WHOLE_LOAD_BYTES


def test_a_server_that_restores_nothing_and_latents_have_sglangs_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card(monkeypatch)
    latents = controller(*latent_pools("cpu", "page_first_direct"), "direct")
    for found in (copies_for(card.controller, restores=False), copies_for(latents)):
        assert isinstance(found, StreamCopies)


@pytest.mark.parametrize("layout", ["page_first_direct", "page_first"])
@pytest.mark.parametrize("native", [True, False])
def test_every_row_is_the_one_that_a_plain_copy_gives(
    monkeypatch: pytest.MonkeyPatch, layout: str, native: bool
) -> None:
    if not native:
        monkeypatch.setattr(card_memory, "_native", None)
    card = Card(monkeypatch, layout)
    copies, into = card.staged(), of(2, 9, 4)
    assert (copies._driver_copy is not None) == (native and card_memory._native is not None)
    copy = copies.begin(of(7, 5, 6), into, copies.fence())
    assert copy is not None
    copy.place()
    found = card.rows()
    for rows in (*card.pool.k_buffer, *card.pool.v_buffer):
        rows.zero_()
    halves = card.host.kv_buffer
    for half, buffers in enumerate((card.pool.k_buffer, card.pool.v_buffer)):
        for layer, rows in enumerate(buffers):
            for page, at in zip((7, 5, 6), (2, 9, 4), strict=True):
                rows[at * PAGE : (at + 1) * PAGE] = (
                    halves[half][page, layer]
                    if layout == "page_first_direct"
                    else halves[half][page * PAGE : (page + 1) * PAGE, layer]
                )
    assert all(map(torch.equal, found, card.rows()))


def test_the_bus_does_not_wait_for_a_forward_and_the_scatter_waits_for_the_bus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card(monkeypatch)
    copies = card.staged()
    card.forwards.launch(50.0)
    with StreamContext(card.schedule):
        fence = copies.fence()
    copy = copies.begin(of(5, 3), of(1, 2), fence)
    assert copy is not None
    assert (copy._begun.at, copy._come.at) == pytest.approx((100.0, 100.0 + 2 * LINK_S))
    assert fence.at == 150.0 and not fence.query()
    card.now = 150.0
    copy.place()
    assert copy._ended.at == pytest.approx(150.0 + 2 * LINK_S * 0.03)
    assert copy.seconds == pytest.approx(2 * LINK_S)


def test_a_page_keeps_the_tier_that_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    copies = card.staged()
    card.pages.allocated(of(5, 6, 7))
    card.pages.saved(of(6))
    copy = copies.begin(of(6, 7, 5), of(1, 2, 3), copies.fence())
    assert copy is not None
    copy.place()
    tiers = [card.pages.tier(page * PAGE) for page in (1, 2, 3)]
    assert tiers == ["host memory", "storage", "storage"]


def test_damage_on_purpose_strikes_what_was_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, damage="device")
    copies = card.staged()
    copy = copies.begin(of(5), of(1), copies.fence())
    assert copy is not None
    copy.place()
    found, plain = card.rows(), CpuCopies(card.controller).begin(of(5), of(1), None)
    plain.place()
    bits = sum(
        bin(byte).count("1")
        for mine, right in zip(found, card.rows(), strict=True)
        for byte in (mine.view(torch.uint8) ^ right.view(torch.uint8)).flatten().tolist()
    )
    assert bits == 1
