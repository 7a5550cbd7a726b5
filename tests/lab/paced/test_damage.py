"""A page damaged on purpose in each tier is found, named, and changes the answer."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from sgl_kvtier.lab.paced.clock import Link
from sgl_kvtier.lab.paced.copies import Copies, Damage, Pages
from sgl_kvtier.lab.paced.signatures import Extend, Signer, chain_of
from sgl_kvtier.runtime.cpu import copies as host_copies

PAGE, LAYERS, TOKENS = 16, 3, 320
PREFIX = TOKENS - PAGE


@pytest.fixture(params=[torch.float32, torch.uint8], ids=["float32", "fp8"])
def kept(request) -> torch.dtype:
    """The numbers that SGLang keeps rows in: bytes for FP8."""
    return request.param


class Tiers:
    """A device pool, a host pool in SGLang's page_first_direct layout and SGLang's file backend."""

    def __init__(self, folder, damage: Damage, kept: torch.dtype) -> None:
        self.device = [torch.zeros(64 * PAGE, 1, 8, dtype=kept) for _ in range(2 * LAYERS)]
        self.host = [torch.zeros(64, LAYERS, PAGE, 1, 8, dtype=kept) for _ in range(2)]
        self.pages = Pages(PAGE)
        moved = Copies(Link(50.0), Link(50.0), 1.0, self.pages, damage)
        self._load = moved.load(host_copies.transfer_kv_per_layer_direct_pf_lf)
        self._save = moved.save(host_copies.transfer_kv_all_layer_direct_lf_pf)
        named = {
            f"layer {n % LAYERS}, {'kv'[n // LAYERS]}": rows for n, rows in enumerate(self.device)
        }
        self.signer = Signer(named, PAGE, self.pages)
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
        slots = torch.arange(TOKENS) + first_page * PAGE
        known = chain_of(self.prompt)
        one = Extend("r", slots[:cached], slots[cached:], self.prompt[cached:], known)
        token = int(self.signer.extend([one]))
        self.pages.computed(slots[cached:])
        return token

    def save(self) -> None:
        """Device pages from 0 on are copied to host pages from 0 on."""
        slots = torch.arange(PREFIX)
        self.pages.allocated(slots)
        self._save(
            src_ptrs=self.device,
            dst_ptrs=self.host,
            src_indices=slots,
            dst_indices=slots,
            page_size=PAGE,
        )

    def store(self) -> None:
        """Host pages go to files, a file for each page of keys and one for values."""
        for page in range(PREFIX // PAGE):
            for which, pool in zip("kv", self.host, strict=True):
                assert self.files.set(f"{page}{which}", pool[page])

    def read(self) -> None:
        """Files come back into those host pages, which were somebody else's."""
        self.pages.allocated(torch.arange(PREFIX))
        for page in range(PREFIX // PAGE):
            for which, pool in zip("kv", self.host, strict=True):
                assert self.files.get(f"{page}{which}", pool[page]) is not None

    def load(self) -> None:
        """Host pages come to device pages from 32 on."""
        host = torch.arange(PREFIX)
        for layer in range(LAYERS):
            self._load(
                src_ptrs=self.host,
                dst_ptrs=[self.device[layer], self.device[LAYERS + layer]],
                src_indices=host,
                dst_indices=host + 32 * PAGE,
                layer_id=layer,
                page_size=PAGE,
            )


def through_all_tiers(tiers: Tiers, *, hurt_a_file: bool = False) -> int:
    """The answer when the prefix has gone to files and come back."""
    tiers.save()
    tiers.store()
    if hurt_a_file:
        file = sorted(tiers.folder.glob("7v*.bin"))[0]
        data = bytearray(file.read_bytes())
        data[100] ^= 8
        file.write_bytes(data)
    tiers.read()
    tiers.load()
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
    tiers.save()
    tiers.load()
    assert tiers.prefill(PREFIX, 32) != right
    (found,) = tiers.signer.mismatches
    assert (found.tier, found.tokens) == ("host memory", 1)
