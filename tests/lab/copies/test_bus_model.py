"""Bytes in flight on an emulated GPU: which way the figures go."""

from __future__ import annotations

import pytest

from sgl_kvtier.lab import profile
from sgl_kvtier.lab.copies import bus_model
from sgl_kvtier.lab.copies.bus_model import Found, run

MIB = 1 << 20
H100 = profile.read("h100-llama8b")


def of(mib: int, *, overlap: bool = False) -> Found:
    return run(H100, mib * MIB, overlap=overlap)


def test_a_small_copy_waits_for_what_is_in_flight_and_for_no_more() -> None:
    link = H100.to_device_gbytes_per_s * 1e9
    waits = [of(mib).small_copy_us for mib in (4, 8, 16, 128)]
    assert waits == sorted(waits)
    for mib, wait in zip((4, 8, 16, 128), waits, strict=True):
        assert wait <= (mib * MIB / link + bus_model.UPLOAD_S) * 1e6
    assert of(0).small_copy_us == pytest.approx(bus_model.UPLOAD_S * 1e6)


def test_too_little_in_flight_leaves_the_bus_idle_while_the_sender_wakes_up() -> None:
    rates = [of(mib).gbytes_per_s for mib in (1, 2, 4, 128)]
    assert rates == sorted(rates)
    slice_bytes, slices = bus_model.slices_of(1 * MIB)
    seconds = slice_bytes / H100.to_device_gbytes_per_s / 1e9 + bus_model.WAKE_S
    assert rates[0] == pytest.approx(slices * slice_bytes / seconds / 1e9, rel=0.02)
    assert rates[2] == pytest.approx(H100.to_device_gbytes_per_s, rel=0.01)


def test_tokens_come_later_where_the_scheduler_does_not_work_ahead() -> None:
    assert of(128).gap_p99_ms > of(4).gap_p99_ms + 2.0
    assert of(4).gap_p99_ms == pytest.approx(of(0).gap_p99_ms, abs=0.1)
    assert of(128, overlap=True).gap_p99_ms == pytest.approx(of(0, overlap=True).gap_p99_ms)
