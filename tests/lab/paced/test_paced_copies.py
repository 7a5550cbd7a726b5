"""Copies on an emulated GPU: their time on a link, where pages came from, and damage on purpose, which is
found in each tier.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from sgl_kvtier.lab.paced import clock
from sgl_kvtier.lab.paced.clock import Link, Stream, StreamContext
from sgl_kvtier.lab.paced.copies import (
    Copies,
    Damage,
    Pages,
    file_backend,
    mooncake_backend,
    nixl_backend,
)
from sgl_kvtier.lab.paced.signatures import Extend, Signer, chain_of
from sgl_kvtier.runtime.cpu import copies as host_copies

PAGE, LAYERS = 4, 3


class Pools:
    """Keys and values of a device pool by layer and of a host pool by page, and copies between them."""

    def __init__(
        self,
        damage: Damage | None = None,
        scale: float = 1.0,
        *,
        page: int = PAGE,
        pages: int = 16,
        kept: torch.dtype = torch.float32,
        gbytes_per_s: float = 1e-6,
    ) -> None:
        self.page = page
        self.device = [torch.zeros(pages * page, 1, 8, dtype=kept) for _ in range(2 * LAYERS)]
        self.host = [torch.zeros(pages, LAYERS, page, 1, 8, dtype=kept) for _ in range(2)]
        self.down, self.up = Link(gbytes_per_s), Link(gbytes_per_s)
        self.pages = Pages(page)
        self.copied: list[tuple] = []
        moved = Copies(
            *(self.down, self.up, scale, self.pages, damage or Damage()),
            copied=lambda *copy: self.copied.append(copy),
        )
        self._load = moved.load(host_copies.transfer_kv_per_layer_direct_pf_lf)
        self._save = moved.save(host_copies.transfer_kv_all_layer_direct_lf_pf)

    def save(self, slots: torch.Tensor, host: torch.Tensor) -> None:
        self._save(
            src_ptrs=self.device,
            dst_ptrs=self.host,
            src_indices=slots,
            dst_indices=host,
            page_size=self.page,
        )

    def load(self, host: torch.Tensor, slots: torch.Tensor) -> None:
        for layer in range(LAYERS):
            self._load(
                src_ptrs=self.host,
                dst_ptrs=[self.device[layer], self.device[LAYERS + layer]],
                src_indices=host,
                dst_indices=slots,
                layer_id=layer,
                page_size=self.page,
            )


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def test_a_copy_moves_its_bytes_at_once_and_its_time_is_that_of_the_model(monkeypatch):
    monkeypatch.setattr(clock, "now", lambda: 100.0)
    pools, stream = Pools(scale=2.0), Stream()
    for rows in pools.device:
        rows[slots(3)] = torch.randn(PAGE, 1, 8)
    with StreamContext(stream):
        pools.save(slots(3), slots(5))
    # 4 tokens x 6 buffers x 32 bytes x 2 at 1,000 bytes a second
    assert stream.tail == pytest.approx(100.0 + 1.536)
    assert torch.equal(pools.host[1][5, 2], pools.device[5][slots(3)])


def test_a_load_takes_its_link_layer_by_layer(monkeypatch):
    monkeypatch.setattr(clock, "now", lambda: 100.0)
    pools, stream = Pools(), Stream()
    with StreamContext(stream):
        pools.load(slots(5, 6), slots(1, 2))
    assert stream.tail == pytest.approx(100.0 + 3 * 0.512)
    assert pools.down.seconds == pytest.approx(1.536)


def test_every_copy_is_told_with_its_time_on_the_link_and_the_bytes_at_hand(monkeypatch):
    monkeypatch.setattr(clock, "now", lambda: 100.0)
    pools, stream = Pools(scale=2.0), Stream()
    with StreamContext(stream):
        pools.save(slots(3), slots(5))
        pools.load(slots(5), slots(1))
    first, *layers = pools.copied
    assert first == ("to_host", 100.0, pytest.approx(101.536), 768)
    assert [(to, nbytes) for to, _, _, nbytes in layers] == [("to_device", 256)] * LAYERS
    assert layers[0][1] == first[2] and layers[-1][2] == stream.tail


def test_a_page_that_a_forward_wrote_came_from_the_device():
    pools = Pools()
    pools.pages.computed(slots(1))
    assert pools.pages.tier(PAGE) == "the device"


def test_a_page_that_is_computed_over_what_was_loaded_is_the_devices_again():
    pools = Pools()
    pools.pages.allocated(slots(5))
    pools.load(slots(5), slots(2))
    pools.pages.computed(slots(2)[:1])
    assert pools.pages.tier(2 * PAGE) == "the device"


class Disk:
    def __init__(self) -> None:
        self.served: list[float] = []

    def serve(self, nbytes: float) -> None:
        self.served.append(nbytes)


def test_a_batch_of_nixls_waits_for_the_disk_and_one_that_failed_does_not():
    read, write = Disk(), Disk()
    around = nixl_backend(read, write, 512.0)
    buffers = [(0, 64), (64, 32)]
    assert around(lambda *call: True, None, buffers, ["a", "b"], "READ") is True
    assert around(lambda *call: False, None, buffers, ["a", "b"], "READ") is False
    around(lambda *call: True, None, buffers[:1], ["a"], "WRITE")
    assert (read.served, write.served) == ([96 * 512.0], [64 * 512.0])


def test_pages_that_mooncake_moved_wait_for_the_disk_and_others_do_not():
    read, write = Disk(), Disk()
    get, put = mooncake_backend(read, write, 512.0)
    keys, buffers = ["a", "b", "c"], [0, 64, 128]
    assert get(lambda *call: [64, -704, 32], None, keys, buffers, [64, 64, 32]) == [64, -704, 32]
    assert put(lambda *call: [0, 0, -200], None, keys, buffers, [64, 64, 32], None) == [0, 0, -200]
    assert (read.served, write.served) == ([96 * 512.0], [128 * 512.0])


def test_a_page_of_mooncakes_may_lie_in_several_buffers():
    read, write = Disk(), Disk()
    get, put = mooncake_backend(read, write, 2.0)
    sizes = [[16, 8], [16, 8]]
    get(lambda *call: [24, 24], None, ["a", "b"], [[0, 16], [24, 40]], sizes)
    put(
        lambda *call, **more: [0, -1], None, ["a", "b"], [[0, 16], [24, 40]], sizes, group_ids=["g"]
    )
    assert (read.served, write.served) == ([48 * 2.0], [24 * 2.0])


def test_a_file_page_waits_for_the_disk_and_a_missing_one_does_not():
    class Files:
        def exists(self, key: str) -> bool:
            return key == "old"

    read, write, files = Disk(), Disk(), Files()
    get, put = file_backend(read, write, 512.0)
    page = torch.zeros(16, dtype=torch.float32)
    assert get(lambda store, key, target: target, files, "k", page) is page
    assert get(lambda store, key, target: None, files, "k", page) is None
    put(lambda store, key, value: True, files, "new", page)
    put(lambda store, key, value: True, files, "old", page)
    assert (read.served, write.served) == ([64 * 512.0], [64 * 512.0])


# A page damaged on purpose in each tier is found, named, and changes the answer.

WHOLE, TOKENS = 16, 320
PREFIX = TOKENS - WHOLE


@pytest.fixture(params=[torch.float32, torch.uint8], ids=["float32", "fp8"])
def kept(request) -> torch.dtype:
    """The numbers that SGLang keeps rows in: bytes for FP8."""
    return request.param


class Tiers(Pools):
    """The pools, in SGLang's page_first_direct layout, SGLang's file backend, and what signs rows."""

    def __init__(self, folder: Path, damage: Damage, kept: torch.dtype) -> None:
        super().__init__(damage, page=WHOLE, pages=64, kept=kept, gbytes_per_s=50.0)
        named = {
            f"layer {n % LAYERS}, {'kv'[n // LAYERS]}": rows for n, rows in enumerate(self.device)
        }
        self.signer = Signer(named, WHOLE, self.pages)
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="m",
        )
        self.folder = folder
        self.files = HiCacheFile(config, file_path=str(folder))
        self.prompt = torch.randint(16, 256, (TOKENS,), generator=torch.Generator().manual_seed(1))

    def prefill(self, cached: int, first_page: int) -> int:
        """The prompt with so many tokens of its prefix in device pages from one on; its next token."""
        slots = torch.arange(TOKENS) + first_page * WHOLE
        known = chain_of(self.prompt)
        one = Extend("r", slots[:cached], slots[cached:], self.prompt[cached:], known)
        token = int(self.signer.extend([one]))
        self.pages.computed(slots[cached:])
        return token

    def save_prefix(self) -> None:
        """Device pages from 0 on are copied to host pages from 0 on."""
        self.pages.allocated(torch.arange(PREFIX))
        self.save(torch.arange(PREFIX), torch.arange(PREFIX))

    def store(self) -> None:
        """Host pages go to files, a file for each page of keys and one for values."""
        for page in range(PREFIX // WHOLE):
            for which, pool in zip("kv", self.host, strict=True):
                assert self.files.set(f"{page}{which}", pool[page])

    def read(self) -> None:
        """Files come back into those host pages, which were somebody else's."""
        self.pages.allocated(torch.arange(PREFIX))
        for page in range(PREFIX // WHOLE):
            for which, pool in zip("kv", self.host, strict=True):
                assert self.files.get(f"{page}{which}", pool[page]) is not None

    def load_prefix(self) -> None:
        """Host pages come to device pages from 32 on."""
        self.load(torch.arange(PREFIX), torch.arange(PREFIX) + 32 * WHOLE)


def through_all_tiers(tiers: Tiers, *, hurt_a_file: bool = False) -> int:
    """The answer when the prefix has gone to files and come back."""
    tiers.save_prefix()
    tiers.store()
    if hurt_a_file:
        file = sorted(tiers.folder.glob("7v*.bin"))[0]
        data = bytearray(file.read_bytes())
        data[100] ^= 8
        file.write_bytes(data)
    tiers.read()
    tiers.load_prefix()
    return tiers.prefill(PREFIX, 32)


def test_nothing_damaged_is_found_right_in_every_tier(tmp_path, kept):
    tiers = Tiers(tmp_path, Damage(), kept)
    right = tiers.prefill(0, 0)
    assert through_all_tiers(tiers) == right
    assert tiers.signer.mismatches == []


def test_a_page_damaged_in_storage_is_found_and_named(tmp_path, kept):
    tiers = Tiers(tmp_path, Damage(), kept)
    right = tiers.prefill(0, 0)
    assert through_all_tiers(tiers, hurt_a_file=True) != right
    (found,) = tiers.signer.mismatches
    assert (found.rid, found.tier, found.tokens) == ("r", "storage", 1)
    assert found.page == 32 + 7


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_page_damaged_in_host_memory_or_on_its_way_to_the_device_is_found(tmp_path, kept, where):
    tiers = Tiers(tmp_path, Damage(where, seed=1), kept)
    right = tiers.prefill(0, 0)
    tiers.save_prefix()
    tiers.load_prefix()
    assert tiers.prefill(PREFIX, 32) != right
    (found,) = tiers.signer.mismatches
    assert (found.tier, found.tokens) == ("host memory", 1)
