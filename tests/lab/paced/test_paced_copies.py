"""Copies on a paced device: their time on a link, where pages came from, damage on purpose."""

from __future__ import annotations

import pytest
import torch

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
from sgl_kvtier.runtime.cpu import copies as host_copies

PAGE, LAYERS = 4, 3


class Pools:
    """Keys and values of a device pool by layer and of a host pool by page, and copies between them."""

    def __init__(self, damage: Damage | None = None, scale: float = 1.0) -> None:
        self.device = [torch.zeros(64, 1, 8) for _ in range(2 * LAYERS)]
        self.host = [torch.zeros(16, LAYERS, PAGE, 1, 8) for _ in range(2)]
        self.down, self.up = Link(1e-6), Link(1e-6)  # 1,000 bytes a second
        self.pages = Pages(PAGE)
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
            page_size=PAGE,
        )

    def load(self, host: torch.Tensor, slots: torch.Tensor) -> None:
        for layer in range(LAYERS):
            self._load(
                src_ptrs=self.host,
                dst_ptrs=[self.device[layer], self.device[LAYERS + layer]],
                src_indices=host,
                dst_indices=slots,
                layer_id=layer,
                page_size=PAGE,
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


def test_a_page_that_was_saved_and_loaded_again_came_from_host_memory():
    pools = Pools()
    pools.pages.allocated(slots(5))
    pools.save(slots(1), slots(5))
    pools.load(slots(5), slots(2))
    assert pools.pages.tier(2 * PAGE) == "host memory"


def test_a_page_of_host_memory_that_nothing_was_saved_into_came_from_storage():
    pools = Pools()
    pools.save(slots(1), slots(5))
    pools.pages.allocated(slots(5))  # somebody else's now
    pools.load(slots(5), slots(2))
    assert pools.pages.tier(2 * PAGE) == "storage"


def test_a_page_that_is_computed_over_what_was_loaded_is_the_devices_again():
    pools = Pools()
    pools.pages.allocated(slots(5))
    pools.load(slots(5), slots(2))
    pools.pages.computed(slots(2)[:1])
    assert pools.pages.tier(2 * PAGE) == "the device"


@pytest.mark.parametrize("tier", ["device", "host"])
def test_damage_on_purpose_changes_one_bit_of_the_named_tier_once(tier):
    damage = Damage(tier)
    pools = Pools(damage)
    pools.save(slots(1, 2), slots(5, 6))
    if tier == "device":
        pools.load(slots(5, 6), slots(3, 4))
    pools.save(slots(1), slots(7))
    there = pools.host if tier == "host" else pools.device
    bits = [
        bin(byte).count("1") for one in there for byte in one.view(torch.uint8).flatten().tolist()
    ]
    assert sum(bits) == 1
    assert damage.done is not None and tier in damage.done


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
