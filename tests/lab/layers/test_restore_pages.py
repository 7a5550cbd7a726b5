"""Pages on their way from a store's parts to the device's layers, with SGLang's own pools."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_pools import controller, pools, rows, same, slots, wanted_rows
from store_pages import key, open_at

from sgl_kvtier.lab.front.wrappers import LayerParts, pool_of
from sgl_kvtier.lab.layers import forward
from sgl_kvtier.lab.layers.restore import Layers, Pass
from sgl_kvtier.runtime.backend.host_pages import parts_of
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.store.base import PageWrite
from sgl_kvtier.types import Link, Span, Tier

PAGE, PAGES = 16, 3
KEYS = tuple(key(n) for n in range(PAGES))
STORED, BOUNCE, OWN = [0, 1, 2], [4, 6, 5], [3, 7, 1]


class Slots:
    """Host pages that are lent and come back."""

    lent = 0
    room = True

    def claim_host(self, tokens: int) -> torch.Tensor | None:
        if not self.room:
            return None
        self.lent += tokens
        return slots(BOUNCE[: tokens // PAGE], PAGE)

    def put_back_host(self, back: torch.Tensor) -> None:
        self.lent -= len(back)


class Scene:
    """Three stored pages, and a request that waits for them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.host = pools("cpu", "page_first_direct", heads=2, dim=32)
        self.parts = int(self.host.layer_num)
        self.store = open_at(folder)
        behind = LayerParts(self.store, self.parts)
        pages = parts_of(self.host, PAGES, slots(STORED, PAGE))
        behind.put([PageWrite(name, page) for name, page in zip(KEYS, pages, strict=True)])
        control = controller(self.device, self.host, "direct")
        control.storage_backend = SimpleNamespace(
            begin_read=None,
            mem_pool_host=self.host,
            begin_reads=lambda reads, on_page: behind.read(reads, on_page=on_page),
        )
        self.slots = Slots()
        page_bytes = sum(piece.nbytes for piece in pages[0])
        self.context: Any = SimpleNamespace(
            tree=SimpleNamespace(cache_controller=control),
            slots=self.slots,
            page=PAGE,
            page_bytes=page_bytes,
        )
        monkeypatch.setattr(forward, "architectures_of", lambda _: ["LlamaForCausalLM"])
        monkeypatch.setattr(forward, "serve", lambda _: None)
        args = SimpleNamespace(tp_size=1, pp_size=1, dp_size=1, chunked_prefill_size=2 * PAGE)
        self.counters = RestoreCounters()
        self.layers = Layers(self.context, args, self.parts, self.counters)
        nothing = torch.zeros(0, dtype=torch.int64)
        self.r = Restoration(
            "r", None, PAGES * PAGE + 1, 0, PAGES, ((Span(0, PAGES), Tier.STORAGE),), KEYS, nothing
        )

    def came(self) -> None:
        for _, job in self.layers._jobs["r"]._reads:
            assert job.wait(30)

    def batch(self, tokens: int, prefix: int = 0) -> Any:
        return SimpleNamespace(
            forward_mode=SimpleNamespace(name="EXTEND"),
            lora_ids=None,
            rids=["r"],
            extend_seq_lens_cpu=[tokens],
            extend_prefix_lens_cpu=[prefix],
            out_cache_loc=slots(OWN, PAGE)[prefix : prefix + tokens],
        )

    def taken(self, tokens: int, prefix: int = 0) -> Pass:
        run = self.layers.take(self.batch(tokens, prefix))
        assert run is not None
        return run

    def holds(self, pages: int) -> bool:
        """Whether the first pages of the request's slots are those that were stored."""
        return same(
            rows(self.device, slots(OWN[:pages], PAGE)),
            wanted_rows(self.host, slots(STORED[:pages], PAGE)),
        )


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.layers.reset()
    assert made.slots.lent == 0
    made.store.close()


def test_every_layer_comes_into_the_requests_own_slots(scene: Scene) -> None:
    assert scene.layers.begin(scene.r)
    scene.came()
    run = scene.taken(PAGES * PAGE)
    assert run.at(0) == [(PAGES - 1) * PAGE], "the last page holds the last token"
    assert scene.holds(PAGES - 1)
    run.end()
    assert not scene.layers.all_computed()
    assert scene.layers.all_computed(), "asked once per batch"
    assert scene.slots.lent == 0
    loaded = (PAGES - 1) * scene.context.page_bytes
    assert scene.counters.bytes_loaded[Link.STORAGE_TO_DEVICE] == loaded


def test_a_prefix_of_two_chunks_is_taken_chunk_by_chunk(scene: Scene) -> None:
    assert scene.layers.begin(scene.r)
    scene.came()
    first = scene.taken(2 * PAGE)
    assert first.at(0) == [PAGE]
    first.end()
    assert scene.slots.lent == PAGES * PAGE
    second = scene.taken(PAGE + 1, prefix=2 * PAGE)
    second.shares[0].slots = slots(OWN, PAGE)[2 * PAGE :]
    assert second.at(0) == [PAGE]
    second.end()
    assert scene.slots.lent == 0


def test_a_part_that_was_damaged_is_computed(scene: Scene) -> None:
    scene.store.damage(KEYS[1], pool_of(0), bit=99)
    assert scene.layers.begin(scene.r)
    scene.came()
    run = scene.taken(PAGES * PAGE)
    assert run.at(0) == [0]
    assert run.at(1) == [(PAGES - 1) * PAGE]
    run.end()


def test_an_abort_gives_its_host_pages_back(scene: Scene) -> None:
    assert scene.layers.begin(scene.r)
    scene.layers.forget("r")
    scene.layers.reset()
    assert scene.slots.lent == 0
    assert scene.layers.take(scene.batch(PAGES * PAGE)) is None


def test_what_storage_does_not_have_at_the_end_is_computed(scene: Scene) -> None:
    scene.r.sources = ((Span(0, PAGES), Tier.HOST),)
    assert not scene.layers.begin(scene.r)
    scene.r.sources = ((Span(0, 2), Tier.STORAGE),)
    assert not scene.layers.begin(scene.r)


def test_without_room_in_host_memory_it_is_computed(scene: Scene) -> None:
    scene.slots.room = False
    assert not scene.layers.begin(scene.r)
