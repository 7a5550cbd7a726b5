"""Prefill chunks on an accelerator, by events that may not have come yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kvtier.runtime.scheduler.hooks import _forward_stream
from sgl_kvtier.runtime.sglang.step import is_longest
from sgl_kvtier.runtime.step.chunk_clock import Chunk, ChunkClock


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


def test_a_chunk_whose_forward_still_runs_ends_without_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    noted: list[Chunk] = []
    clock = ChunkClock(lambda chunk, follows: noted.append(chunk) or True)  # type: ignore[func-returns-value]
    stream = SimpleNamespace(device="cuda")
    for number, come in enumerate([False, True]):
        batch = SimpleNamespace(
            extend_num_tokens=64,
            reqs=[SimpleNamespace(rid="r")],
            prefix_lens=[0],
            extend_lens=[64],
            forward_iter=number,
        )
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
def test_only_the_longest_rank_of_a_step_tells_how_long_its_tokens_take(
    tokens_by_rank: list[int] | None, longest: bool
) -> None:
    batch = SimpleNamespace(extend_num_tokens=64, global_num_tokens=tokens_by_rank)
    assert is_longest(batch) is longest


def test_a_forward_that_computed_less_than_its_tokens_teaches_nothing() -> None:
    noted: list[Chunk] = []
    clock = ChunkClock(lambda chunk, follows: noted.append(chunk) or True)  # type: ignore[func-returns-value]
    batch = SimpleNamespace(
        extend_num_tokens=64, reqs=[SimpleNamespace(rid="r")], prefix_lens=[0], extend_lens=[64]
    )
    clock.launched(clock.launch(batch), batch, whole=False)
    assert [chunk.seconds for chunk in noted] == [None, 0.0]


@pytest.mark.parametrize(
    ("overlap", "stages", "stream"),
    [(True, 1, "forward"), (False, 2, "forward"), (False, 1, "schedule")],
)
def test_forwards_are_timed_on_the_stream_they_run_on(
    overlap: bool, stages: int, stream: str
) -> None:
    tree = SimpleNamespace(pp_size=stages)
    scheduler = SimpleNamespace(
        enable_overlap=overlap,
        tree_cache=tree,
        forward_stream="forward",
        schedule_stream="schedule",
    )
    assert _forward_stream(scheduler) == stream
