"""Each rule of the paced device's clock, on SGLang's own objects: its controller, transfer engine,
layer events, pools, and steps of its scheduler. What is expected is what CUDA's streams demand of
the same calls; the unit of time is what the link has to do with a layer of a page.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import cache_controller
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.pool_host import mha

from sgl_kvtier.lab.gpu.pools import pools
from sgl_kvtier.lab.paced import clock
from sgl_kvtier.lab.paced.clock import Event, Link, Stream, StreamContext
from sgl_kvtier.lab.paced.copies import Copies, Damage, Pages
from sgl_kvtier.lab.paced.device import Device, Settings
from sgl_kvtier.runtime.cpu import copies as host_copies

PAGE, DIM, MODELLED = 16, 8, 32
LAYER_BYTES = PAGE * 2 * DIM * 4
"""K and V of a layer of a page: one head, fp32."""


class SGLang:
    """SGLang's HiCache on the clock of a paced device, its schedule and forward streams, and what
    its scheduler does with them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layers: int = 4) -> None:
        self.now, self.sleeps, self.layers = 100.0, 0, layers
        monkeypatch.setattr(clock, "now", lambda: self.now)
        monkeypatch.setattr(clock, "time", SimpleNamespace(sleep=self._sleep))
        module: Any = SimpleNamespace()
        clock.stand_in(module)
        for user in (cache_controller, l2_transfer):
            monkeypatch.setattr(user, "device_module", module)
        monkeypatch.setattr(l2_transfer, "_timing_events_supported", lambda: True)
        self.down, self.up = Link(LAYER_BYTES / 1e9), Link(LAYER_BYTES / 1e9)
        moved = Copies(self.down, self.up, 1.0, Pages(PAGE), Damage())
        load, save = "transfer_kv_per_layer_direct_pf_lf", "transfer_kv_all_layer_direct_lf_pf"
        self.pool, host = pools(
            "cpu", "page_first_direct", page=PAGE, dtype=torch.float32, heads=1, dim=DIM, layers=layers
        )  # fmt: skip
        monkeypatch.setattr(mha, load, moved.load(getattr(host_copies, load)))
        monkeypatch.setattr(mha, save, moved.save(getattr(host_copies, save)))
        slots = PagedTokenToKVPoolAllocator(
            1024, PAGE, torch.float32, "cpu", self.pool, need_sort=False
        )
        self.controller = HiCacheController(
            slots, host, PAGE, None, threading.Event(), io_backend="direct"
        )
        self.schedule, self.forwards = Stream(), Stream()
        # Scheduler.init_cache_with_memory_pool does so with the runner's forward stream.
        self.controller.load_fence_stream = self.forwards
        self.controller.write_fence_stream = self.forwards

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1

    @property
    def waited(self) -> tuple[float, int]:
        """How long the calling thread has slept, and how often."""
        return self.now - 100.0, self.sleeps

    def load(self, pages: int = 1) -> tuple[int, list[float]]:
        """Loads pages as the scheduler does: the number of its events, and the end of each layer."""
        with StreamContext(self.schedule):
            assert self.controller.load(torch.arange(pages * PAGE)) is not None
            number = self.controller.start_loading()
        events = self.controller.layer_done_counter.events[number].load_events
        return number, [event.at for event in events]

    def write(self, pages: int = 1) -> tuple[float, float]:
        """Begin and end of a write-back."""
        with StreamContext(self.schedule):
            assert self.controller.write(torch.arange(PAGE, (pages + 1) * PAGE)) is not None
        ack = self.controller.ack_write_queue[-1]
        return ack.start_event.at, ack.finish_event.at

    def consume(self, number: int) -> None:
        worker: Any = SimpleNamespace(
            hicache_layer_transfer_counter=self.controller.layer_done_counter
        )
        TpModelWorker.set_hicache_consumer(worker, number)

    def forward(self, seconds: float) -> list[tuple[float, float]]:
        """A forward whose layers ask SGLang's pool for their keys: begin and end of each."""
        self.forwards.wait_stream(self.schedule)  # Scheduler.run_batch
        with StreamContext(self.forwards):
            spans = []
            for layer in range(self.layers):
                self.pool.get_key_buffer(layer)
                spans.append(self.forwards.launch(seconds / self.layers))
            return spans


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SGLang:
    return SGLang(monkeypatch)


# --- rules 1 and 2: one stream, its events -------------------------------------------------------


def test_loads_go_one_after_the_other_since_the_engine_has_one_stream_for_them(sglang):
    """L2TransferEngine.host_to_device_stream."""
    assert sglang.load()[1] == [101.0, 102.0, 103.0, 104.0]
    assert sglang.load()[1] == [105.0, 106.0, 107.0, 108.0]


def test_each_layer_of_a_load_has_its_event_and_the_last_is_that_of_all(sglang):
    """LayerLoadingEvent.complete, called by submit_host_to_device behind each layer's copy."""
    number, ends = sglang.load(pages=2)
    events = sglang.controller.layer_done_counter.events[number]
    assert ends == [102.0, 104.0, 106.0, 108.0]
    assert events.finish_event is events.load_events[-1]
    assert sglang.controller.ack_load_queue[-1].finish_event.at == 108.0
    sglang.now = 103.0
    assert [event.query() for event in events.load_events] == [True, False, False, False]


def test_a_load_is_as_long_as_its_events_say(sglang):
    """TransferCompletion: both events enclose the copies, not what these waited for."""
    sglang.forwards.launch(10.0)
    sglang.load()
    ack = sglang.controller.ack_load_queue[-1]
    assert ack.start_event.elapsed_time(ack.finish_event) == pytest.approx(4e3)


# --- rule 3: what waits for what -----------------------------------------------------------------


def test_a_load_waits_for_the_forward_that_may_still_write_its_pages(sglang):
    """start_loading: host_to_device_stream.wait_stream(load_fence_stream)."""
    sglang.forwards.launch(10.0)
    assert sglang.load()[1] == [111.0, 112.0, 113.0, 114.0]


def test_a_load_does_not_wait_for_a_forward_that_is_launched_later(sglang):
    """The same fence is one of what the stream holds then."""
    _, ends = sglang.load()
    sglang.forwards.launch(10.0)
    assert ends[-1] == 104.0
    assert sglang.controller.l2_transfer_engine.host_to_device_stream.tail == 104.0


def test_a_load_waits_for_what_the_scheduler_has_launched(sglang):
    """L2TransferEngine._submission: start_event.wait(stream), recorded on the schedule stream."""
    sglang.schedule.launch(3.0)
    assert sglang.load()[1][0] == 104.0


def test_a_write_back_waits_for_the_forward_and_later_forwards_not_for_it(sglang):
    """start_writing: device_to_host_stream.wait_stream(write_fence_stream)."""
    sglang.forwards.launch(10.0)
    assert sglang.write() == (110.0, 114.0)
    assert sglang.forward(4.0)[0] == (110.0, 111.0)


# --- rule 4: streams and links -------------------------------------------------------------------


def test_a_load_and_a_write_back_run_side_by_side(sglang):
    """L2TransferEngine has a stream for each direction, and a bus carries both."""
    assert sglang.load()[1][-1] == 104.0
    assert sglang.write() == (100.0, 104.0)


def test_a_forward_of_others_is_not_slower_beside_a_load(sglang):
    """LayerDoneCounter.wait_until: a batch without a load waits for none."""
    sglang.load()
    sglang.consume(-1)
    assert sglang.forward(4.0)[-1] == (103.0, 104.0)


# --- rule 5: layer by layer ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "begins"),
    [
        (0.4, [101.0, 102.0, 103.0, 104.0]),  # faster than its load: each layer waits for its own
        (40.0, [101.0, 111.0, 121.0, 131.0]),  # slower: the first one alone waits
    ],
)
def test_a_layer_waits_for_its_own_keys_and_values_only(sglang, seconds, begins):
    """KVCache.get_key_buffer: layer_transfer_counter.wait_until(layer)."""
    number, _ = sglang.load()
    sglang.consume(number)
    assert [begin for begin, _ in sglang.forward(seconds)] == pytest.approx(begins)


def test_layers_wait_for_the_load_of_their_own_batch(sglang):
    """LayerDoneCounter.set_consumer: the next batch's load does not delay this batch."""
    first, _ = sglang.load()
    second, _ = sglang.load()
    sglang.consume(first)
    assert sglang.forward(4.0)[-1][1] == 105.0
    sglang.consume(second)
    assert [begin for begin, _ in sglang.forward(0.4)] == pytest.approx(
        [105.0, 106.0, 107.0, 108.0]
    )


LOADS: Sequence[tuple[float, float, float]] = (
    # seconds of the forward; of another in front of it and its load; of one launched behind the load
    (0.5, 0.0, 0.0),
    (32.0, 0.0, 0.0),
    (100.0, 0.0, 0.0),
    (32.0, 7.0, 0.0),
    (3.2, 0.0, 20.0),
    (3.2, 0.0, 90.0),
)


@pytest.mark.parametrize(("seconds", "before", "between"), LOADS)
def test_a_step_of_the_device_ends_where_a_forward_of_as_many_layers_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, before: float, between: float
) -> None:
    """`Device._launch` against SGLang's own calls, layer by layer, of the modelled model. Four
    layers at hand, whose load takes as long, stand for it.
    """
    log = tmp_path / "log"

    def loading(layers: int, pages: int) -> SGLang:
        found = SGLang(monkeypatch, layers)
        found.forwards.launch(before)
        number, _ = found.load(pages)
        found.consume(number)
        found.forwards.launch(between)
        return found

    end = loading(MODELLED, 1).forward(seconds)[-1][1]
    for layers, pages in ((MODELLED, 1), (4, MODELLED // 4)):
        sglang = loading(layers, pages)
        device = Device(Settings("h100-llama8b", 1.0, 1.0, PAGE, 1.0, 1.0, str(log)))
        assert device._profile.layers == MODELLED
        with StreamContext(sglang.forwards):
            begin, ended, waited, _ = device._launch(sglang.pool, seconds, sglang.now)
        assert (ended, waited) == pytest.approx((end, end - begin - seconds))
        assert sglang.forwards.tail == ended


# --- rule 6: who sleeps --------------------------------------------------------------------------


def test_nothing_that_is_launched_makes_the_scheduler_wait(sglang):
    """start_loading, start_writing, set_hicache_consumer and get_key_buffer return at once."""
    number, _ = sglang.load()
    sglang.write()
    sglang.consume(number)
    sglang.forward(4.0)
    assert sglang.waited == (0.0, 0)


def test_a_result_waits_for_its_own_forward_alone(sglang):
    """Scheduler._copy_result_to_cpu, and copy_done.synchronize() of the result's processor."""
    sglang.forwards.launch(5.0)
    copies = Stream()
    scheduler: Any = SimpleNamespace(
        copy_stream=copies,
        copy_stream_ctx=StreamContext(copies),
        forward_stream=sglang.forwards,
        enable_async_d2h_copy=False,
    )
    result = GenerationBatchResult(next_token_ids=torch.tensor([7]), copy_done=Event())
    batch: Any = SimpleNamespace(return_logprob=False, return_hidden_states=False)
    Scheduler._copy_result_to_cpu(scheduler, result, batch)
    sglang.forwards.launch(50.0)  # the next step
    result.copy_done.synchronize()
    assert sglang.waited == (5.0, 1)
    assert sglang.forwards.tail == 155.0, "the next step does not wait for the result's copy"
