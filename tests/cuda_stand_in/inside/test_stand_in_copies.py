"""Copies of the stand-in have CUDA's rules."""

from __future__ import annotations

import ctypes

import torch
from stand_in.control import Gate, pageable_copies, pinned_copies

runtime = ctypes.CDLL(None)
INVALID, MISSING = 1, 801
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3


def copy(
    to: int, source: int, nbytes: int, kind: int, stream: torch.cuda.Stream | None = None
) -> int:
    handle = ctypes.c_void_p(stream.cuda_stream if stream else 0)
    error: int = runtime.cudaMemcpyAsync(
        ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), kind, handle
    )
    return error


def allocated(nbytes: int) -> int:
    """Device memory that is no part of torch's."""
    memory = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(nbytes)) == 0
    assert memory.value is not None
    return memory.value


def test_a_copy_of_pinned_memory_does_not_wait_and_reads_its_source_later() -> None:
    stream = torch.cuda.Stream()
    source, target = torch.zeros(64).pin_memory(), torch.zeros(64, device="cuda")
    torch.cuda.synchronize()
    gate = Gate(stream)
    before = pinned_copies()
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    assert pinned_copies() == before + 1
    source.fill_(7)  # a mistake, which shows here as on a GPU
    gate.open()
    stream.synchronize()
    assert target.cpu().unique().tolist() == [7]


def test_a_copy_of_pageable_memory_is_counted_and_has_read_its_source_when_it_returns() -> None:
    source, target = torch.zeros(64), torch.empty(64, device="cuda")
    before = pageable_copies()
    target.copy_(source, non_blocking=True)
    source.fill_(7)
    assert pageable_copies() == before + 1
    assert target.cpu().unique().tolist() == [0]


def test_a_copy_over_the_border_of_its_allocation_is_an_error_that_is_told_once() -> None:
    pinned = torch.zeros(4096, dtype=torch.uint8).pin_memory()
    device = allocated(1000)
    assert copy(device, pinned.data_ptr(), 1000, TO_DEVICE) == 0
    assert copy(device, pinned.data_ptr(), 1001, TO_DEVICE) == INVALID
    assert runtime.cudaPeekAtLastError() == INVALID
    assert runtime.cudaGetLastError() == INVALID
    assert runtime.cudaGetLastError() == 0
    assert copy(device, pinned.data_ptr(), 8, TO_DEVICE) == 0, "the device is as before"


def test_an_error_that_nobody_took_is_that_of_torchs_next_kernel() -> None:
    device = allocated(16)
    assert copy(device, device, 17, ON_DEVICE) == INVALID
    try:
        torch.zeros(4).pin_memory().to("cuda", non_blocking=True)
        torch.cuda._sleep(1)
    except torch.AcceleratorError as error:
        assert "invalid argument" in str(error)
    else:
        raise AssertionError("torch did not see it")
    runtime.cudaGetLastError()


def test_a_copy_of_another_kind_than_its_pointers_is_an_error() -> None:
    pinned, device = torch.zeros(16).pin_memory(), allocated(64)
    assert copy(pinned.data_ptr(), device, 64, TO_DEVICE) == INVALID
    assert copy(device, pinned.data_ptr(), 64, TO_HOST) == INVALID
    assert copy(device, pinned.data_ptr(), 64, ON_DEVICE) == INVALID
    runtime.cudaGetLastError()


def test_memory_ends_at_what_the_device_has() -> None:
    free, total = torch.cuda.mem_get_info()
    device = allocated(1 << 20)
    assert torch.cuda.mem_get_info() == (free - (1 << 20), total)
    assert runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(total)) == 2
    runtime.cudaGetLastError()
    assert runtime.cudaFree(ctypes.c_void_p(device)) == 0
    assert torch.cuda.mem_get_info() == (free, total)


def test_new_device_memory_holds_no_zeros() -> None:
    memory = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    assert memory.cpu().max() > 0


def test_a_function_that_is_missing_says_its_name(capfd) -> None:
    assert runtime.cudaGraphicsUnregisterResource(None) == MISSING
    assert runtime.cudaGraphicsUnregisterResource(None) == MISSING
    runtime.cudaGetLastError()
    said = capfd.readouterr().err
    assert said.count("cudaGraphicsUnregisterResource is missing") == 1
