"""Streams, events and links: each rule by which work on a device is over, in real time."""

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


def test_work_on_one_stream_runs_in_the_order_of_launches(time):
    stream = Stream()
    assert stream.launch(2.0) == (100.0, 102.0)
    assert stream.launch(1.0) == (102.0, 103.0)


def test_no_work_begins_before_it_is_launched(time):
    stream = Stream()
    stream.launch(1.0)
    time.now = 105.0
    assert stream.launch(1.0) == (105.0, 106.0)


def test_launching_makes_nobody_wait(time):
    Stream().launch(50.0)
    assert (time.now, time.sleeps) == (100.0, 0)


def test_streams_do_not_disturb_each_other(time):
    first, second = Stream(), Stream()
    first.launch(5.0)
    assert second.launch(1.0) == (100.0, 101.0)


def test_an_event_is_over_with_what_was_launched_before_it(time):
    stream, event = Stream(), Event()
    stream.launch(2.0)
    event.record(stream)
    stream.launch(9.0)
    time.now = 101.9
    assert not event.query()
    time.now = 102.0
    assert event.query()


def test_an_event_that_was_never_recorded_is_over(time):
    assert Event().query()


def test_an_event_recorded_again_stands_for_what_came_since(time):
    stream, event = Stream(), Event()
    event.record(stream)
    stream.launch(3.0)
    event.record(stream)
    assert not event.query()


def test_a_stream_that_waits_for_an_event_begins_nothing_before_it(time):
    forward, copies, event = Stream(), Stream(), Event()
    forward.launch(4.0)
    event.record(forward)
    copies.wait_event(event)
    assert copies.launch(1.0) == (104.0, 105.0)


def test_a_stream_that_waits_for_another_does_not_wait_for_what_comes_there_later(time):
    forward, copies = Stream(), Stream()
    forward.launch(4.0)
    copies.wait_stream(forward)
    forward.launch(4.0)
    assert copies.launch(1.0)[0] == 104.0


def test_elapsed_time_is_that_of_the_work_between_two_events(time):
    stream, begin, end = Stream(), Event(), Event()
    begin.record(stream)
    stream.launch(0.25)
    end.record(stream)
    assert begin.elapsed_time(end) == pytest.approx(250.0)


def test_only_synchronizing_waits_and_it_sleeps(time):
    stream, event = Stream(), Event()
    stream.launch(3.0)
    event.record(stream)
    event.synchronize()
    assert (time.now, time.sleeps) == (103.0, 1)


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


def test_the_stand_in_gives_a_module_streams_that_keep_time(time):
    module = SimpleNamespace()
    clock.stand_in(module)
    stream = module.Stream(priority=0)
    with module.stream(stream):
        module.current_stream().launch(2.0)
    event = module.Event(enable_timing=True)
    event.record(stream)
    assert not event.query()


def test_copies_in_one_direction_share_its_link(time):
    link, first, second = Link(1.0), Stream(), Stream()
    assert link.copy(first, 2e9) == pytest.approx((100.0, 102.0))
    assert link.copy(second, 1e9) == pytest.approx((102.0, 103.0))


def test_copies_in_opposite_directions_do_not_share(time):
    down, up, stream = Link(1.0), Link(1.0), Stream()
    down.copy(Stream(), 2e9)
    assert up.copy(stream, 1e9)[0] == 100.0


def test_a_copy_that_waits_for_a_forward_blocks_no_other(time):
    link, behind, ready = Link(1.0), Stream(), Stream()
    behind.delay(110.0)
    assert link.copy(behind, 1e9) == pytest.approx((110.0, 111.0))
    assert link.copy(ready, 1e9) == pytest.approx((100.0, 101.0))


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


def test_a_forward_behind_a_load_that_is_over_takes_its_own_time(time):
    assert layered(100.0, 2.0, 32, [90.0, 95.0], 80.0) == pytest.approx((100.0, 102.0))


def test_a_forward_faster_than_its_load_ends_one_layer_behind_it(time):
    loaded = [101.0, 102.0, 103.0, 104.0]
    assert layered(100.0, 0.32, 32, loaded, 100.0) == pytest.approx((100.125, 104.01))


def test_a_forward_slower_than_its_load_waits_for_the_first_layer_only(time):
    loaded = [100.1, 100.2, 100.3, 100.4]
    assert layered(100.0, 8.0, 32, loaded, 100.0) == pytest.approx((100.0125, 108.0 + 0.4 / 32))


def test_a_load_in_few_parts_stands_for_one_in_as_many_as_the_model_has_layers(time):
    exact = layered(0.0, 3.2, 32, [(n + 1) * 0.15 for n in range(32)], 0.0)
    coarse = layered(0.0, 3.2, 32, [1.2, 2.4, 3.6, 4.8], 0.0)
    assert coarse == pytest.approx(exact)
