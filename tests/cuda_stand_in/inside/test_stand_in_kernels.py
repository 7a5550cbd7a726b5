"""Kernels on the stand-in: Triton's, SGLang's and the project's as their PTX, against plain Python."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from stand_in.control import launched_kernels

driver = ctypes.CDLL("libcuda.so.1")
NO_BINARY = 209


@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def sums(x, y, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    tl.store(y + row, tl.sum(tl.load(x + row * WIDTH + tl.arange(0, WIDTH)), axis=0))


@triton.jit
def bounds(x, y, WIDTH: tl.constexpr):
    values = tl.load(x + tl.arange(0, WIDTH))
    tl.store(y, tl.min(values, axis=0))
    tl.store(y + 1, tl.max(values, axis=0))


@triton.jit
def running_sums(x, y, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(y + at, tl.cumsum(tl.load(x + at), axis=0))


@pytest.mark.parametrize("n", [1, 100, 128, 300])
def test_a_kernel_of_triton_writes_what_it_should_and_nothing_else(n: int) -> None:
    x, y = torch.arange(512, device="cuda"), torch.full((512,), -1, device="cuda")
    before = launched_kernels()
    add_one[(4,)](x, y, n, 128)
    assert launched_kernels() == before + 1
    assert y.tolist() == [i + 1 if i < n else -1 for i in range(512)]


@pytest.mark.parametrize("width", [32, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_threads_that_reduce_together_get_the_sum(width: int, dtype: torch.dtype) -> None:
    x = torch.randint(-1000, 1000, (3, width), dtype=dtype)
    y, z, both = (torch.zeros(size, dtype=dtype, device="cuda") for size in (3, width, 2))
    bounds[(1,)](x[1].to("cuda"), both, width)
    sums[(3,)](x.to("cuda"), y, width)
    running_sums[(1,)](x[0].to("cuda"), z, width)
    assert y.tolist() == x.sum(1).tolist()
    assert z.tolist() == x[0].cumsum(0).tolist()
    assert both.tolist() == [x[1].min().item(), x[1].max().item()]


@pytest.mark.parametrize("layer_major", [False, True], ids=["page first", "page first direct"])
@pytest.mark.parametrize(
    ("page", "layers", "row"), [(16, 2, 4096), (64, 3, 256), (4, 2, 24), (16, 1, 6), (8, 2, 5)]
)
def test_the_projects_kernel_puts_every_byte_where_plain_python_does(
    page: int, layers: int, row: int, layer_major: bool
) -> None:
    from types import SimpleNamespace

    from sgl_kvtier.runtime.cuda.page_shape import PageShape
    from sgl_kvtier.runtime.cuda.scatter import TritonScatter

    shape, pages, slots = PageShape(page, layers, row, layer_major), 5, 11 * page
    room = torch.randint(0, 256, (2 * pages * shape.half_bytes,), dtype=torch.uint8)
    buffers = [
        torch.full((slots, row), 238, dtype=torch.uint8, device="cuda") for _ in range(2 * layers)
    ]
    chosen = random.Random(1).sample(range(11), 3)
    at = torch.tensor([p * page + t for p in chosen for t in range(page)])
    scatter = TritonScatter(shape, pages, buffers)
    scatter.prepare()
    scatter.launch(SimpleNamespace(memory=room.to("cuda")), at.to("cuda"))
    wanted = [torch.full((slots, row), 238, dtype=torch.uint8) for _ in buffers]
    halves = room.view(2, pages, shape.half_bytes)
    for half in range(2):
        for n, p in enumerate(chosen):
            for layer in range(layers):
                for token in range(page):
                    first = layer * shape.layer_step + token * shape.token_step
                    wanted[half * layers + layer][p * page + token] = halves[
                        half, n, first : first + row
                    ]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(buffers, wanted, strict=True))


HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
SHUFFLED = (
    HEAD
    + """.visible .entry shuffled(.param .u64 out) .reqntid 64 {
    .reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %rd<4>;
    .shared .align 4 .b8 words[256];
    ld.param.b64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.lo.s32 %r2, %r1, 3;
    setp.lt.u32 %p1, %r1, 32;
    @!%p1 bra $second;
    shfl.sync.up.b32 %r2, %r2, 1, 0, -1;
    shfl.sync.down.b32 %r2, %r2, 2, 31, -1;
$second:
    mov.u32 %r4, words;
    shl.b32 %r5, %r1, 2;
    add.s32 %r6, %r4, %r5;
    st.shared.b32 [%r6], %r2;
    bar.sync 0;
    xor.b32 %r7, %r5, 252;
    add.s32 %r7, %r7, %r4;
    ld.shared.b32 %r3, [%r7];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3], %r3;
    ret;
}"""
)
BITS = (
    HEAD
    + """.visible .entry bits(.param .u64 out, .param .u32 a, .param .u32 b) .reqntid 1 {
    .reg .b32 %r<12>; .reg .b64 %rd<3>; .reg .b16 %rs<3>;
    ld.param.b64 %rd1, [out];
    ld.param.b32 %r1, [a];
    ld.param.b32 %r2, [b];
    bfe.u32 %r3, %r1, 4, 9;
    bfe.s32 %r4, %r1, 4, 9;
    prmt.b32 %r5, %r1, %r2, 0x4B10;
    shf.l.wrap.b32 %r6, %r1, %r2, 5;
    shr.s32 %r7, %r1, 40;
    mul.hi.u32 %r8, %r1, %r2;
    mov.b32 {%rs1, %rs2}, %r1;
    mov.b32 %r9, {%rs2, %rs1};
    div.s32 %r10, %r1, 7;
    rem.s32 %r11, %r1, 7;
    st.global.v4.b32 [%rd1], {%r3, %r4, %r5, %r6};
    st.global.v4.b32 [%rd1+16], {%r7, %r8, %r9, %r10};
    st.global.b32 [%rd1+32], %r11;
    ret;
}"""
)
NOT_KNOWN = HEAD + ".visible .entry tensor() { .reg .b32 %r<2>; wgmma.fence.sync.aligned; ret; }"


def function_of(ptx: str, name: str) -> tuple[int, ctypes.c_void_p]:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuModuleLoadData(ctypes.byref(module), ptx.encode()) == 0
    return driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), function


def launch(ptx: str, name: str, threads: int, *arguments: ctypes._SimpleCData) -> None:
    error, function = function_of(ptx, name)
    assert error == 0
    params = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert driver.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, params, None) == 0


def test_warps_shuffle_and_a_block_meets_at_a_barrier_whatever_each_warp_did_before() -> None:
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    launch(SHUFFLED, "shuffled", 64, ctypes.c_uint64(out.data_ptr()))
    words = [3 * n for n in range(64)]
    up = [words[max(n - 1, 0)] for n in range(32)]
    down = [up[n + 2] if n + 2 < 32 else up[n] for n in range(32)]
    said = down + words[32:]
    assert out.tolist() == [said[63 - n] for n in range(64)]


def test_bits_are_taken_and_moved_as_by_a_gpu() -> None:
    a, b = 0x9ABCDEF1, 0x12345678
    out = torch.zeros(9, dtype=torch.int32, device="cuda")
    launch(BITS, "bits", 1, ctypes.c_uint64(out.data_ptr()), ctypes.c_uint32(a), ctypes.c_uint32(b))
    field = a >> 4 & 511
    signed = a - (1 << 32)
    bytes_of = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
    permuted = [bytes_of[0], bytes_of[1], 255 if bytes_of[3] & 128 else 0, bytes_of[4]]
    quotient = -(-signed // 7)
    wanted = [
        field, field - 512 if field & 256 else field, int.from_bytes(permuted, "little"), (b << 5 | a >> 27) & 0xFFFFFFFF, -1, a * b >> 32,
        (a & 0xFFFF) << 16 | a >> 16, quotient, signed - 7 * quotient,
    ]  # fmt: skip
    assert [word & 0xFFFFFFFF for word in out.tolist()] == [word & 0xFFFFFFFF for word in wanted]


def test_an_instruction_that_is_not_translated_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    error, _ = function_of(NOT_KNOWN, "tensor")
    assert error != 0
    assert "wgmma.fence.sync.aligned" in capfd.readouterr().err


def test_a_kernel_that_is_not_translated_leaves_the_others_of_its_module(
    capfd: pytest.CaptureFixture[str],
) -> None:
    module = BITS + NOT_KNOWN.removeprefix(HEAD)
    error, function = function_of(module, "tensor")
    assert error == 0
    assert driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, None, None) == NO_BINARY
    assert "wgmma.fence.sync.aligned" in capfd.readouterr().err
    out = torch.zeros(9, dtype=torch.int32, device="cuda")
    launch(
        module, "bits", 1, ctypes.c_uint64(out.data_ptr()), ctypes.c_uint32(16), ctypes.c_uint32(0)
    )
    assert out[0].item() == 1


def alone(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, for a device that breaks stays broken."""
    head = (
        "import torch, triton, triton.language as tl\n"
        "from test_stand_in_kernels import add_one\n"
        "x = torch.zeros(64, dtype=torch.int64, device='cuda')\n"
    )
    folder = os.path.dirname(__file__)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}"}
    return subprocess.run(
        [sys.executable, "-c", head + code], check=False, capture_output=True, text=True, env=environment, timeout=300
    )  # fmt: skip


def test_an_illegal_address_breaks_the_device_for_good_and_names_the_kernel() -> None:
    done = alone(
        "add_one[(1 << 14,)](x, x, 1 << 30, 128)\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        torch.cuda.synchronize()\n"
        "    except torch.AcceleratorError as error:\n"
        "        print('broken:', str(error).splitlines()[0])\n"
    )
    assert done.stdout.count("broken: CUDA error: an illegal memory access was encountered") == 2
    assert "add_one: an illegal address: it " in done.stderr


def test_a_misaligned_address_breaks_the_device() -> None:
    done = alone(
        "add_one[(1,)](x.view(torch.uint8)[1:].data_ptr() and x, x, 0, 128)\n"
        "y = torch.zeros(1024, dtype=torch.uint8, device='cuda')\n"
        "class At:\n"
        "    dtype = torch.int64\n"
        "    def data_ptr(self): return y.data_ptr() + 4\n"
        "add_one[(1,)](At(), x, 8, 128)\n"
        "try:\n"
        "    torch.cuda.synchronize()\n"
        "except torch.AcceleratorError as error:\n"
        "    print('broken:', str(error).splitlines()[0])\n"
    )
    assert "broken: CUDA error: misaligned address" in done.stdout, done.stderr
