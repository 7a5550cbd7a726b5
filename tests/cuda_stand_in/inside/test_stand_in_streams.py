"""Streams and events of the stand-in have CUDA's order, and no more."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from stand_in.control import Gate

runtime = ctypes.CDLL(None)
NOT_READY, INVALID_HANDLE = 600, 400


def test_an_event_that_was_never_recorded_has_come() -> None:
    assert torch.cuda.Event().query()


def test_a_stream_waits_for_the_recording_that_there_was_not_for_a_later_one() -> None:
    first, second, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    event.record(first)
    second.wait_event(event)
    gate = Gate(first)
    event.record(first)  # again, behind the gate
    second.synchronize()
    assert not event.query()
    gate.open()


def test_the_default_stream_waits_for_blocking_streams_and_they_for_it() -> None:
    made = ctypes.c_void_p()
    assert runtime.cudaStreamCreateWithFlags(ctypes.byref(made), 0) == 0
    blocking = torch.cuda.ExternalStream(made.value)
    gate = Gate(blocking)
    behind = torch.cuda.Event()
    behind.record(torch.cuda.default_stream())
    assert not behind.query()
    gate.open()
    behind.synchronize()
    gate = Gate(torch.cuda.default_stream())
    assert runtime.cudaStreamQuery(made) == NOT_READY
    free = torch.cuda.Stream()  # torch's streams do not block
    free.synchronize()
    gate.open()
    blocking.synchronize()


def test_times_are_of_two_events_that_have_come() -> None:
    stream = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    gate = Gate(stream)
    end.record(stream)
    passed = ctypes.c_float()
    handles = [ctypes.c_void_p(event.cuda_event) for event in (start, end)]
    assert runtime.cudaEventElapsedTime(ctypes.byref(passed), *handles) == NOT_READY
    gate.open()
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    untimed = torch.cuda.Event()
    untimed.record(stream)
    untimed.synchronize()
    handle = ctypes.c_void_p(untimed.cuda_event)
    assert runtime.cudaEventElapsedTime(ctypes.byref(passed), handles[0], handle) == INVALID_HANDLE
    runtime.cudaGetLastError()


def test_an_event_of_another_device_is_refused() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    with torch.cuda.device(1):
        other = torch.cuda.Stream()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    handles = (ctypes.c_void_p(event.cuda_event), ctypes.c_void_p(other.cuda_stream))
    assert runtime.cudaEventRecord(*handles) == INVALID_HANDLE
    runtime.cudaGetLastError()


def test_waiting_for_a_stream_leaves_the_interpreter_to_others() -> None:
    stream, seen = torch.cuda.Stream(), []
    gate = Gate(stream)

    def run() -> None:
        seen.append(1)
        gate.open()

    thread = threading.Thread(target=run)
    thread.start()
    stream.synchronize()
    thread.join()
    assert seen == [1]


def test_memory_is_used_again_while_another_stream_still_reads_it_unless_that_is_recorded() -> None:
    """torch's own allocator, on streams that are late."""
    late = torch.cuda.Stream()
    for recorded, wanted in ((False, 9.0), (True, 1.0)):
        lent = torch.full((1 << 20,), 1.0, device="cuda")
        torch.cuda.synchronize()
        gate = Gate(late)
        with torch.cuda.stream(late):
            copied = lent.clone()
        if recorded:
            lent.record_stream(late)
        address = lent.data_ptr()
        del lent
        again = torch.full((1 << 20,), 9.0, device="cuda")
        torch.cuda.current_stream().synchronize()
        gate.open()
        late.synchronize()
        assert (again.data_ptr() == address) == (not recorded)
        assert copied.cpu()[0].item() == wanted
