"""aten's kernels on the stand-in: on their stream, over the same memory, without holding it."""

from __future__ import annotations

import pytest
import torch
from stand_in.control import Gate
from stand_in.kernels import bytes_now, counts


def test_a_kernel_runs_on_its_stream_and_reads_what_is_there_then() -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    gate = Gate(stream)
    with torch.cuda.stream(stream):
        y = x + 1
    x.fill_(5)
    torch.cuda.current_stream().synchronize()
    assert bytes_now(x).view(torch.float32).tolist() == [5] * 4
    gate.open()
    stream.synchronize()
    assert y.cpu().tolist() == [6] * 4


def test_results_whose_shape_depends_on_data_wait_and_are_refused_in_sync_debug_mode() -> None:
    x = torch.tensor([0, 3, 0, 4], device="cuda")
    _put, waited = counts()
    assert x.nonzero().flatten().tolist() == [1, 3]
    assert x[x > 3].tolist() == [4]
    assert counts()[1] >= waited + 2
    torch.cuda.set_sync_debug_mode("error")
    try:
        _ = x + 1
        for waits in (x.nonzero, lambda: x.sum().item(), lambda: x[x > 3], x.cpu):
            with pytest.raises(RuntimeError, match="synchroniz"):
                waits()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bytes_written_by_eights_are_those_of_other_types() -> None:
    x = torch.randn(4, 6).to(torch.float8_e4m3fn)
    y = x.to("cuda")
    assert torch.equal(y.view(torch.uint8).cpu(), x.view(torch.uint8))
    y.view(torch.uint8)[torch.tensor([2], device="cuda")] = 7
    assert y.view(torch.uint8).cpu()[2].unique().tolist() == [7]
