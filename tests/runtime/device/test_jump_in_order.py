"""The jump: a request's row is written while the chunk before it still runs and reads that row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_lab import EngineLab, lab_of
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang_streams import PAGE
from virtual_device import Race

from sgl_kvtier.policy.messages import Compute
from sgl_kvtier.runtime.scheduler.prefill_adder import KVTierPrefillAdder
from sgl_kvtier.runtime.step.polls import LANDED
from sgl_kvtier.types import Span

FRONT = 4
"""Pages computed by the chunk that still runs; the other four are loaded."""


class Jump:
    """A request whose front chunk runs, whose back has landed, and the adder of the next pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
        self.lab: EngineLab = lab_of(monkeypatch, overlap=overlap)
        self.rig, self.row = self.lab.rig, torch.zeros(64, dtype=torch.int32)
        self.lab.store.chance.random = lambda: 1.0
        r = self.lab.begin()
        assert r is not None
        self.r = r
        self.lab.ask(r, Span(FRONT, r.pages))
        for _ in range(r.pages - FRONT):
            self.lab.store.read()
        (load,) = self.lab.engine.loads
        self.lab.until(lambda: set(load.poll.local) == {LANDED})
        self.lab.tick()
        own = self.lab.device.alloc(FRONT * PAGE)
        assert own is not None
        self.write((0, slice(0, FRONT * PAGE)), own.to(torch.int32))
        r.front = FRONT
        self.release = self.rig.hold()
        self.forward("the chunk before the jump", FRONT * PAGE, writes=own.tolist())
        self.r.req = self.req = SimpleNamespace(
            rid=r.rid, prefix_len=FRONT * PAGE, kv=SimpleNamespace(req_pool_idx=0), retracted_stain=False,
            cached_tokens_host=0, cached_tokens_storage=0, full_untruncated_fill_ids=[0] * (r.pages + 1) * PAGE,
            extend_end=(r.pages + 1) * PAGE, sampling_params=SimpleNamespace(max_new_tokens=1),
        )  # fmt: skip
        self.lab.engine.computes = {r.rid: Compute(r.rid, Span(FRONT, r.pages), None)}
        self.adder = KVTierPrefillAdder.__new__(KVTierPrefillAdder)
        self.adder.tree_cache = SimpleNamespace(
            kvtier=SimpleNamespace(engine=self.lab.engine),
            req_to_token_pool=SimpleNamespace(write=self.write, req_to_token=self.row),
        )
        budget = SimpleNamespace(
            total_offset=0,
            _available_and_evictable=lambda: 1000,
            available_chunk_tokens=lambda limit: limit,
        )
        for name, value in {
            "page_size": PAGE, "can_run_list": [], "memory_budget": budget, "rem_chunk_tokens": 256, "chunked_req_limit": None,
            "running_batch": SimpleNamespace(reqs=[]), "log_hit_tokens": 0, "log_host_hit_tokens": 0,
            "log_storage_hit_tokens": 0,
        }.items():  # fmt: skip
            setattr(self.adder, name, value)
        monkeypatch.setattr(
            PrefillAdder, "add_chunked_req", lambda adder, req: adder.can_run_list.append(req)
        )

    def write(self, where: tuple[int, slice], slots: torch.Tensor) -> None:
        """As ReqToTokenPool.write: a kernel on the schedule stream."""
        places = range(where[1].start, where[1].stop)
        self.rig.device.launch(
            "the row's slots",
            writes=[(self.rig.rows, places)],
            does=lambda: self.row[where[1]].copy_(slots),
        )

    def forward(self, what: str, prefix: int, writes: list[int]) -> None:
        """A chunk behind `prefix` tokens: it reads their slots in the row, late."""
        rig = self.rig
        if rig.forward_stream is not rig.device.default:
            rig.forward_stream.wait_stream(rig.device.default)
        with rig.device.on(rig.forward_stream):
            rig.device.launch(f"{what} reads its row", reads=[(rig.rows, range(prefix))])
        rig.forward(what, [], writes)

    def jump(self) -> None:
        """The pass that splices, and its forward."""
        self.adder.add_chunked_req(self.req)
        assert self.adder.can_run_list == [self.req] and self.req.prefix_len == self.r.pages * PAGE
        rig = self.rig
        self.forward("the chunk behind the jump", self.req.prefix_len, writes=[])
        slots = [int(slot) for page in self.loaded for slot in page]
        rig.forward("its attention", slots)
        self.release()
        rig.device.drain()

    @property
    def loaded(self) -> torch.Tensor:
        return (
            self.lab.engine.loads[0].device_slots.view(-1, PAGE)
            if self.lab.engine.loads
            else (self.r.loads[0].device_slots.view(-1, PAGE))
        )


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_the_row_is_written_behind_the_front_while_the_front_is_read(monkeypatch, overlap):
    jump = Jump(monkeypatch, overlap)
    jump.jump()
    jump.rig.device.check()
    assert jump.row[FRONT * PAGE : jump.r.pages * PAGE].tolist() == [
        int(slot) for page in jump.loaded for slot in page
    ]
    jump.lab.engine.close()


def test_a_row_written_where_the_running_chunk_reads_it_is_seen(monkeypatch):
    jump = Jump(monkeypatch, overlap=True)
    with pytest.raises(Race, match="may still read"):
        jump.write((0, slice(PAGE, 2 * PAGE)), torch.zeros(PAGE, dtype=torch.int32))
    jump.release()
    jump.rig.device.drain()
    jump.lab.engine.close()
