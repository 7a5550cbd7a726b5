"""aten's kernels on the stand-in: on their stream, over the same memory, without holding it."""

from __future__ import annotations

import pytest
import torch
from stand_in.control import Gate
from stand_in.kernels import bytes_now, counts


def test_results_are_those_of_the_cpu() -> None:
    a = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    b = a.to("cuda")
    pairs = [
        (torch.softmax(a @ a.T, -1), torch.softmax(b @ b.T, -1)),
        (a.cumsum(0).sort(1).values, b.cumsum(0).sort(1).values),
        (torch.cat([a, a[3:7] * 2]), torch.cat([b, b[3:7] * 2])),
        (a.to(torch.bfloat16).float(), b.to(torch.bfloat16).float()),
        (torch.where(a > 0, a, -1.0), torch.where(b > 0, b, -1.0)),
    ]
    for wanted, found in pairs:
        assert found.is_cuda and torch.equal(found.cpu(), wanted)


def test_operations_in_place_and_into_results_change_their_tensor() -> None:
    x = torch.zeros(4, device="cuda")
    assert x.add_(2) is x
    out = torch.empty(0, device="cuda")
    torch.mul(x, 3, out=out)
    x[torch.tensor([1, 2], device="cuda")] = 9.0
    assert (x.tolist(), out.tolist()) == ([2, 9, 9, 2], [6, 6, 6, 6])


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


def test_views_and_strides_arrive_over_the_bus() -> None:
    x = torch.arange(24).reshape(2, 3, 4)
    y = x.to("cuda")
    assert torch.equal(y.transpose(0, 2).cpu(), x.transpose(0, 2))
    assert torch.equal(y[:, 1, ::2].to(torch.float16).cpu(), x[:, 1, ::2].to(torch.float16))
    y.transpose(0, 1).copy_(x.transpose(0, 1) + 1)
    assert torch.equal(y.cpu(), x + 1)


def test_bytes_written_by_eights_are_those_of_other_types() -> None:
    x = torch.randn(4, 6).to(torch.float8_e4m3fn)
    y = x.to("cuda")
    assert torch.equal(y.view(torch.uint8).cpu(), x.view(torch.uint8))
    y.view(torch.uint8)[torch.tensor([2], device="cuda")] = 7
    assert y.view(torch.uint8).cpu()[2].unique().tolist() == [7]
