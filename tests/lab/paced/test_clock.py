"""Streams, events and links: rules of the clock beside those that SGLang's own objects show
(`test_rules_of_sglang.py`).
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from weakref import WeakValueDictionary

import pytest

from sgl_kvtier.lab.paced import clock
from sgl_kvtier.lab.paced.clock import Disk, Event, Link, Stream, StreamContext, layered


class Time:
    """A monotonic clock that moves when somebody sleeps, and counts how often."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps = 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1


@pytest.fixture
def time(monkeypatch) -> Time:
    found = Time()
    monkeypatch.setattr(clock, "now", lambda: found.now)
    monkeypatch.setattr(clock, "time", SimpleNamespace(sleep=found.sleep))
    monkeypatch.setattr(clock, "_streams", WeakValueDictionary())  # others may not be gone yet
    return found


def test_no_work_begins_before_it_is_launched(time):
    stream = Stream()
    stream.launch(1.0)
    time.now = 105.0
    assert stream.launch(1.0) == (105.0, 106.0)


def test_an_event_that_was_never_recorded_is_over(time):
    assert Event().query()


def test_synchronizing_the_device_waits_for_all_streams(time):
    one, other = Stream(), Stream()
    one.launch(1.0)
    other.launch(5.0)
    clock.synchronize()
    assert time.now == 105.0


def test_a_driver_knows_a_stream_by_its_number(time):
    one, other = Stream(), Stream()
    assert [clock.stream_of(stream.cuda_stream) for stream in (one, other)] == [one, other]


def test_the_current_stream_is_the_threads_own(time):
    mine, seen = Stream(), []
    with StreamContext(mine):
        other = threading.Thread(target=lambda: seen.append(clock.current_stream()))
        other.start()
        other.join(10)
        assert clock.current_stream() is mine
    assert seen[0] is not mine
    assert clock.current_stream() is not mine


def test_a_copy_takes_the_first_time_that_holds_it_whole(time):
    link, behind = Link(1.0), Stream()
    behind.delay(102.0)
    link.copy(behind, 1e9)
    assert link.copy(Stream(), 3e9) == pytest.approx((103.0, 106.0))
    assert link.copy(Stream(), 2e9) == pytest.approx((100.0, 102.0))


def test_a_link_forgets_what_is_over(time):
    link = Link(1.0)
    for _ in range(100):
        behind = Stream()
        behind.delay(time.now + 1.0)
        link.copy(behind, 1e8)
        time.now += 5.0
    assert len(link._busy) < 3
    assert link.seconds == pytest.approx(10.0)


def test_a_disk_serves_one_after_the_other_at_its_bandwidth(time):
    disk = Disk(1.0)
    for _ in range(10):
        disk.serve(1e8)
    assert time.now == pytest.approx(101.0, abs=0.01)


def test_a_disk_does_not_save_up_bandwidth_while_nobody_reads(time):
    disk = Disk(1.0)
    time.now += 60.0
    disk.serve(1e9)
    assert time.now == pytest.approx(161.0, abs=0.01)


def test_a_load_in_few_parts_stands_for_one_in_as_many_as_the_model_has_layers(time):
    exact = layered(0.0, 3.2, 32, [(n + 1) * 0.15 for n in range(32)], 0.0)
    coarse = layered(0.0, 3.2, 32, [1.2, 2.4, 3.6, 4.8], 0.0)
    assert coarse == pytest.approx(exact)
