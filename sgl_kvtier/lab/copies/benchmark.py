"""The time a load keeps the interpreter until it is under way, for three ways in turn.

They are SGLang's kernels with a launch per layer, its kernel of all layers, and staging with one
launch. Times are CPU seconds of the calling thread, on a card whose driver does nothing
(`null_card`). So the real driver's share is missing on all sides: a call per layer, one call, or
two copies per run of pages and a launch.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.kvcache import hicache
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.l2_transfer import L2Transfer
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sgl_kvtier.console import Column, Table, check_target, envelope, print_table, write_json
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.copies.null_card import NullMemory, launch_into_nothing, null_module
from sgl_kvtier.runtime.cuda.all_layers import all_layers_of
from sgl_kvtier.runtime.cuda.page_shape import shape_of
from sgl_kvtier.runtime.cuda.scatter import TritonScatter
from sgl_kvtier.runtime.cuda.staged_copies import StagedCopies
from sgl_kvtier.runtime.cuda.staging import pages_of_room
from sgl_kvtier.runtime.restore.copy_device import StreamCopies

SCHEMA = "kvtier.bench.copies/1"
_DIM = 128
_SLOTS = 2048
"""Slots of the host and the device pool. Nothing is read or written, so memory is only
asked for.
"""

_BURST = 8
"""Loads of one way before the other's turn: a restoration begins several at once."""


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes JSON. Raises KVTierError on arguments that cannot be
    measured.
    """
    try:
        layers = [int(text) for text in args.layers.split(",")]
    except ValueError as error:
        raise BenchError("--layers: whole numbers with commas between them") from error
    if min(layers) < 1 or _SLOTS % args.page:
        raise BenchError(f"--layers: at least 1; --page: a part of {_SLOTS}")
    if args.json:
        check_target(args.json)
    rows = measured(layers, args.heads, args.page, args.rounds)
    table = Table(
        f"interpreter per load, {args.heads} heads of {_DIM}, pages of {args.page}",
        (
            Column("layers", "layers"),
            Column("tokens", "tokens"),
            Column("host_pages", "host pages"),
            Column("per_layer_us", "per layer", unit="us", decimals=0),
            Column("all_layers_us", "all layers", unit="us", decimals=0),
            Column("staged_us", "staged", unit="us", decimals=0),
            Column("ratio", "ratio", decimals=1),
        ),
        rows,
        notes=(
            f"medians of {args.rounds} rounds of {_BURST} loads, in turn; a driver that does "
            "nothing",
        ),
    )
    if args.json != "-":
        print_table(table)
    if args.json:
        settings = {"layers": layers, **{k: getattr(args, k) for k in ("heads", "page", "rounds")}}
        write_json(envelope(SCHEMA, sys.argv, {"settings": settings, "loads": rows}), args.json)
    return 0


def measured(layers: Sequence[int], heads: int, page: int, rounds: int) -> list[dict[str, Any]]:
    """The rows. From here on Triton and torch of this process have no card but the null one. Raises
    BenchError where the copies of a load are not compiled.
    """
    if importlib.util.find_spec("sgl_kvtier.runtime.cuda._native") is None:
        raise BenchError(
            "sgl_kvtier.runtime.cuda._native is not compiled: with a C compiler, "
            "python setup.py build_ext --inplace"
        )
    torch.set_grad_enabled(False)
    launch_into_nothing()
    return [
        _measure(n, heads, page, scattered, rounds) for n in layers for scattered in (False, True)
    ]


def _measure(layers: int, heads: int, page: int, scattered: bool, rounds: int) -> dict[str, Any]:
    """One row: a load of a room's size, from pages in one run or all apart."""
    controller = _controller(layers, heads, page)
    pool = controller.mem_pool_host
    shape = shape_of(pool)
    most = min(pages_of_room(shape), _SLOTS // page // 2)
    order = range(0, 2 * most, 2) if scattered else range(most)
    host = (torch.tensor(list(order))[:, None] * page + torch.arange(page)).flatten()
    device = torch.arange(len(host))
    memory: Any = NullMemory()
    scatter = TritonScatter(
        shape, pages_of_room(shape), [*pool.device_k_buffers, *pool.device_v_buffers]
    )
    scatter.prepare()
    ways: dict[str, Any] = {
        "per_layer": StreamCopies(controller, memory),
        "all_layers": StreamCopies(controller, memory, all_layers_of(controller)),
        "staged": StagedCopies(controller, scatter, memory),
    }
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 5):
        for way, copies in ways.items():
            fence = copies.fence()
            begun = time.thread_time()
            for _ in range(_BURST):
                copies.begin(host, device, fence).place()
            if number >= 5:
                spent[way].append((time.thread_time() - begun) / _BURST * 1e6)
    medians = {way: statistics.median(every) for way, every in spent.items()}
    return {
        "layers": layers,
        "tokens": len(host),
        "host_pages": "apart" if scattered else "together",
        "per_layer_us": medians["per_layer"],
        "all_layers_us": medians["all_layers"],
        "staged_us": medians["staged"],
        "ratio": medians["per_layer"] / medians["staged"],
    }


def _controller(layers: int, heads: int, page: int) -> Any:
    """SGLang's host pool and transfer engine on the null card. Its kernels are looked up and called
    as on a real one.
    """
    module = null_module()
    torch.get_device_module = lambda _device=None: module  # this process measures, and ends
    vars(l2_transfer)["device_module"] = module
    kernel = SimpleNamespace(launch_one=_nothing, launch_all=_nothing, fits_device=lambda _: True)
    vars(hicache)["_jit_hicache_tma_module"] = lambda **_: kernel
    vars(hicache)["_jit_hicache_module"] = lambda **_: kernel
    vars(hicache)["use_hicache_tma_kernel"] = lambda **_: True
    k, v = (
        [torch.empty(_SLOTS, heads, _DIM, dtype=torch.bfloat16) for _ in range(layers)]
        for _ in range(2)
    )
    pool: Any = MHATokenToKVPoolHost.__new__(MHATokenToKVPoolHost)
    pool.__dict__.update(
        layout="page_first",
        page_size=page,
        layer_num=layers,
        target_layer_num=layers,
        head_num=heads,
        head_dim=_DIM,
        v_head_dim=_DIM,
        dtype=torch.bfloat16,
        element_dim=heads * _DIM,
        token_stride_size=heads * _DIM * 2,
        dcp_size=1,
        can_use_jit=True,
        pin_memory=True,
        device_k_buffers=k,
        device_v_buffers=v,
        kv_buffer=torch.empty(2, _SLOTS, layers, heads, _DIM, dtype=torch.bfloat16),
    )
    for name, half in (("k", pool.kv_buffer[0]), ("v", pool.kv_buffer[1])):
        pool.__dict__[f"{name}_data_refs"] = list(half.transpose(0, 1))
        for table in (f"{name}_data_ptrs", f"device_{name}_data_ptrs"):
            pool.__dict__[table] = torch.zeros(layers, dtype=torch.uint64)
    return SimpleNamespace(
        device="cuda",
        io_backend="kernel",
        load_fence_stream=module.Stream(),
        transfer_layer_id_max=layers,
        mem_pool_host=pool,
        mem_pool_device=SimpleNamespace(),
        _l2_load_transfers=lambda host, device: [L2Transfer(pool, None, host, device)],
    )


def _nothing(*_: Any) -> None:
    """A launch."""
