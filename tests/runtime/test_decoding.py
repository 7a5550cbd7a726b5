"""The guard against slower decoding: what it takes for slower, and when all ranks pause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ticks import bare_tree, idle_tick

from sgl_kvtier.runtime.proof.decoding import PAUSE_S, SLOWER, SURE, WINDOW, DecodeGuard, p99
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.scheduler.hooks import _forward_stream
from sgl_kvtier.runtime.sglang.step import decoding_elsewhere, is_longest
from sgl_kvtier.runtime.step.chunk_clock import Chunk, ChunkClock
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.polls import LANDED
from sgl_kvtier.types import Span

GAP_S = 0.010


class Lab:
    """A guard, a clock, and whether a load is in flight."""

    def __init__(self) -> None:
        self.now, self.in_flight = 0.0, False
        self.guard = DecodeGuard(1, lambda: self.in_flight, lambda: self.now)

    def step(self, seconds: float = GAP_S, kind: str = "decode", **batch: int) -> None:
        """A batch that is launched and processed at once, as with overlap off."""
        self.launch(kind)
        self.now += seconds
        self.process(kind, **batch)

    def launch(self, kind: str) -> None:
        self.guard.launching(batch_of(kind))

    def process(self, kind: str, **batch: int) -> None:
        self.guard.processed(batch_of(kind, **batch))

    def quiet(self, count: int, seconds: float = GAP_S, **batch: int) -> None:
        """So many gaps without loads, and a step before that begins them."""
        self.in_flight = False
        self._gaps(count, seconds, **batch)

    def loading(self, count: int, seconds: float = GAP_S, **batch: int) -> None:
        """The same while a load is in flight, which it is from then on."""
        self.in_flight = True
        self._gaps(count, seconds, **batch)

    def _gaps(self, count: int, seconds: float, **batch: int) -> None:
        self.step(kind="extend")
        for _ in range(count + 1):
            self.step(seconds, **batch)

    @property
    def asks(self) -> bool:
        return self.guard.poll.local[0] != LANDED


def batch_of(kind: str, requests: int = 4, tokens: int = 1000) -> Any:
    lengths = torch.full((requests,), tokens, dtype=torch.int64)
    mode = SimpleNamespace(is_decode=lambda: kind == "decode")
    return SimpleNamespace(forward_mode=mode, reqs=[None] * requests, seq_lens_cpu=lengths)


@pytest.fixture
def lab() -> Lab:
    return Lab()


def quiet_then_loading(lab: Lab, slow: int, seconds: float) -> None:
    """A window of gaps without loads, then one with loads, of which some are longer."""
    lab.quiet(WINDOW)
    lab.loading(WINDOW - slow)
    lab.loading(slow, seconds)


@pytest.mark.parametrize(
    ("slow", "seconds", "asks"),
    [
        (SURE, GAP_S, False),
        (SURE, 1.26 * GAP_S, True),
        (SURE - 1, 10 * GAP_S, False),
        (WINDOW, 1.24 * GAP_S, False),
        (WINDOW, 1.26 * GAP_S, True),
    ],
)
def test_it_asks_where_enough_gaps_are_longer_by_more_than_a_quarter(lab, slow, seconds, asks):
    quiet_then_loading(lab, slow, seconds)
    assert lab.asks is asks


def test_it_says_nothing_before_it_has_seen_as_many_of_each_kind(lab):
    lab.quiet(WINDOW - 1)
    lab.loading(2 * WINDOW, 5 * GAP_S)
    assert not lab.asks
    lab.quiet(1)
    lab.loading(WINDOW, 5 * GAP_S)
    assert lab.asks


def test_long_gaps_that_are_as_long_without_loads_ask_for_nothing(lab):
    """The collector of garbage, or another process, now and then."""
    for gaps in (lab.quiet, lab.loading):
        for _ in range(10):
            gaps(WINDOW // 10 - 2)
            gaps(2, 8 * GAP_S)
    assert not lab.asks


def test_a_prefill_between_two_tokens_is_not_held_against_restoration(lab):
    lab.quiet(WINDOW)
    lab.in_flight = True
    for _ in range(WINDOW):
        lab.step(20 * GAP_S, "extend")
        lab.step(20 * GAP_S)
        lab.step()
    assert not lab.asks


def test_with_overlap_a_prefill_that_is_launched_before_a_result_breaks_the_gap(lab):
    """The next batch is launched before the last one's result is there."""
    lab.quiet(WINDOW)
    lab.in_flight = True
    lab.launch("decode")
    for _ in range(2 * WINDOW):
        for batches in ("extend decode", "decode extend", "decode decode"):
            launched, processed = batches.split()
            lab.launch(launched)
            lab.now += 20 * GAP_S
            lab.process(processed)
    assert not lab.asks


@pytest.mark.parametrize("when", ["begins", "ends", "begins and ends"])
def test_a_load_that_is_in_flight_for_a_part_of_a_gap_counts(lab, when):
    """Most loads from host memory are shorter than a decode step."""
    lab.quiet(WINDOW)
    for _ in range(WINDOW):
        lab.in_flight = when == "ends"
        lab.step(kind="extend")
        lab.step()
        lab.launch("decode")
        if when != "ends":
            lab.guard.load_begins()
        lab.now += 2 * GAP_S
        lab.in_flight = when == "begins"
        lab.process("decode")
    assert lab.asks


def test_a_larger_batch_is_compared_with_batches_of_its_size(lab):
    """Longer steps of more requests, or of longer ones, are no work of the loads'."""
    lab.quiet(WINDOW)
    lab.loading(2 * WINDOW, 3 * GAP_S, requests=32, tokens=125)  # as many tokens together
    lab.loading(2 * WINDOW, 3 * GAP_S, tokens=100_000)
    assert not lab.asks
    lab.quiet(WINDOW, GAP_S, requests=32, tokens=125)
    lab.loading(WINDOW, 3 * GAP_S, requests=32, tokens=125)
    assert lab.asks


def test_after_a_pause_it_measures_anew(lab):
    quiet_then_loading(lab, WINDOW, 2 * GAP_S)
    assert lab.asks and lab.guard.settle(bytes(lab.guard.poll.local))
    assert not lab.asks and not lab.guard.settle(bytes(lab.guard.poll.local))
    lab.loading(WINDOW - 20, 2 * GAP_S)
    assert not lab.asks
    lab.loading(20, 2 * GAP_S)
    assert lab.asks


def test_of_200_gaps_the_99th_percentile_is_the_third_largest():
    assert p99(range(200)) == 197
    assert p99([1.0]) == 1.0


# --- all ranks ------------------------------------------------------------------------------------------


class Rank:
    """One rank's tick; both reduce over each other's."""

    def __init__(self, alone: bool = False) -> None:
        self.other: Rank = self
        self.context = StepContext(bare_tree(_all_reduce=self.reduce), alone=alone)
        self.engine = RestoreEngine(self.context, None, 0, lambda offer: None)
        self.lab = Lab()
        self.engine.guard = self.lab.guard
        self.tick = idle_tick(self.engine, 1 if alone else 2)

    def reduce(self, data: torch.Tensor, op: Any) -> None:
        """As if the other rank had given the same times."""
        data[-1] = min(int(data[-1]), *self.other.lab.guard.poll.local)


def test_all_ranks_pause_in_the_same_step_until_an_agreed_time():
    ranks = Rank(), Rank()
    ranks[0].other, ranks[1].other = ranks[1], ranks[0]
    quiet_then_loading(ranks[1].lab, WINDOW, 2 * GAP_S)
    assert ranks[1].lab.asks
    ranks[0].tick.report_facts()
    ranks[1].tick.report_facts()
    for rank in ranks:
        assert not rank.engine.is_on and rank.engine.counters.paused == {SLOWER: 1}
        assert rank.engine.offers.paused_until == rank.context.now + PAUSE_S
        # The clock of a server that restores nothing has to go on all the same.
        assert rank.engine.busy
        rank.context.now += PAUSE_S - 1
        assert not rank.engine.is_on
        rank.context.now += 1
        assert rank.engine.is_on and not rank.engine.busy


def test_a_rank_alone_pauses_by_its_own_clock(monkeypatch):
    rank = Rank(alone=True)
    now = [100.0]
    monkeypatch.setattr(rank.context, "moment", lambda: now[0])
    quiet_then_loading(rank.lab, WINDOW, 2 * GAP_S)
    rank.tick._observe(100.0)
    assert not rank.engine.is_on and not rank.engine.busy
    now[0] += PAUSE_S
    assert rank.engine.is_on
    rank.engine.offers.is_on = False  # an operator's word stays in force
    assert not rank.engine.is_on


# Prefill chunks on an accelerator, by events that may not have come yet.


class Event:
    """Elapsed time may only be asked for once it has come, as with torch."""

    come = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        """On a stream."""

    def query(self) -> bool:
        return self.come

    def elapsed_time(self, other: Event) -> float:
        assert other.come, "device not ready"
        return 250.0


def prefill(number: int = 0) -> Any:
    """A batch of one chunk of 64 tokens."""
    return SimpleNamespace(
        extend_num_tokens=64,
        reqs=[SimpleNamespace(rid="r")],
        prefix_lens=[0],
        extend_lens=[64],
        forward_iter=number,
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        decoding_reqs=None,
    )


@pytest.fixture
def noted() -> list[Chunk]:
    return []


@pytest.fixture
def clock(noted) -> ChunkClock:
    return ChunkClock(lambda chunk, follows: noted.append(chunk) or True)


def test_a_chunk_whose_forward_still_runs_ends_without_a_time(clock, noted, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    stream = SimpleNamespace(device="cuda")
    for number, come in enumerate([False, True]):
        batch = prefill(number)
        clock.launched(clock.launch(batch, stream), batch)
        monkeypatch.setattr(Event, "come", come)
        clock.processed(batch)
    # As many facts on every rank, whichever of them have waited; 0 seconds teach nothing.
    assert [chunk.seconds for chunk in noted] == [None, 0.0, None, 0.25]
    clock.launched(clock.launch(batch, stream), batch, whole=False)
    assert len(noted) == 5  # it has not ended yet
    clock.processed(batch)
    assert noted[-1].seconds == 0.0


@pytest.mark.parametrize(
    ("tokens_by_rank", "longest"),
    [(None, True), ([64], True), ([64, 64], True), ([64, 0], True), ([64, 65], False)],
)
def test_only_the_longest_rank_of_a_step_tells_how_long_its_tokens_take(tokens_by_rank, longest):
    batch = SimpleNamespace(extend_num_tokens=64, global_num_tokens=tokens_by_rank)
    assert is_longest(batch) is longest


@pytest.mark.parametrize(
    ("mode", "counts", "prefills", "elsewhere"),
    [
        ("decode", None, False, 0),
        ("decode", [3], False, 0),
        ("decode", [3, 0, 5, 300], False, 305),
        ("idle", [0, 4], False, 4),
        ("extend", [5, 512], True, 5),
        ("extend", [512, 512], True, 0),
        ("decode", [3, 512, 7], True, 7),
        ("extend", [5, 530], True, 5),
        ("prebuilt", [0, 4], False, 4),
    ],
)
def test_requests_that_other_replicas_decode_are_counted(mode, counts, prefills, elsewhere):
    modes = {
        f"is_{name}": lambda name=name: name == mode for name in ("decode", "idle", "prebuilt")
    }
    batch = SimpleNamespace(
        global_num_tokens=counts,
        forward_mode=SimpleNamespace(**modes),
        batch_size=lambda: 3,
        extend_num_tokens=512,
        is_extend_in_batch=prefills,
    )
    assert decoding_elsewhere(batch) == elsewhere
    assert decoding_elsewhere(None) == 0


def test_a_forward_that_computed_less_than_its_tokens_teaches_nothing(clock, noted):
    batch = prefill()
    clock.launched(clock.launch(batch), batch, whole=False)
    assert [chunk.seconds for chunk in noted] == [None, 0.0]


@pytest.mark.parametrize(
    ("overlap", "stages", "stream"),
    [(True, 1, "forward"), (False, 2, "forward"), (False, 1, "schedule")],
)
def test_forwards_are_timed_on_the_stream_they_run_on(overlap, stages, stream):
    streams = {"forward_stream": "forward", "schedule_stream": "schedule"}
    tree = SimpleNamespace(pp_size=stages)
    scheduler = SimpleNamespace(enable_overlap=overlap, tree_cache=tree, **streams)
    assert _forward_stream(scheduler) == stream


def test_requests_that_decode_in_a_mixed_step_are_no_chunks_and_share_no_tokens(clock, noted):
    batch = prefill()
    batch.decoding_reqs = [SimpleNamespace(rid="d"), SimpleNamespace(rid="e")]
    batch.reqs = [SimpleNamespace(rid="q"), *batch.reqs, *batch.decoding_reqs]
    batch.prefix_lens, batch.extend_lens = [0, 192, 700, 800], [32, 64, 1, 1]
    clock.launched(clock.launch(batch), batch)
    started, ended = noted[:2], noted[2:]
    for chunks in (started, ended):
        assert [(chunk.rid, chunk.tokens, chunk.shared_tokens) for chunk in chunks] == [
            ("q", Span(0, 32), 64),
            ("r", Span(192, 256), 32),
        ]
