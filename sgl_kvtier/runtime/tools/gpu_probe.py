"""Runs the check at start (`proof/start.py`) on scratch pools, and finds earlier results for this
GPU. Imports torch and Triton, and SGLang only if there is something to read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sgl_kvtier.runtime.backend.loaded_pools import keys_and_values
from sgl_kvtier.runtime.cuda.card_memory import CardMemory
from sgl_kvtier.runtime.cuda.page_shape import shape_of
from sgl_kvtier.runtime.cuda.scatter import TritonScatter
from sgl_kvtier.runtime.cuda.staged_copies import StagedCopies
from sgl_kvtier.runtime.cuda.staging import pages_of_room
from sgl_kvtier.runtime.proof import start
from sgl_kvtier.runtime.proof.start import Rows, StartResult

_PAGE, _LAYERS, _HEADS, _DIM = 64, 8, 8, 128
"""Tokens, layers, KV heads and head size of a page, which has 2 MiB."""
_PAGES = 48
"""Pages of either pool."""


@dataclass(frozen=True)
class Probe:
    """The result for this process's GPU."""

    device: str
    result: StartResult


def try_out() -> Probe:
    """Copies pages through staging as a server does. Takes about 350 MiB of device memory for a
    moment. Raises StartDiffers if copied bytes are wrong, and whatever torch, Triton or the driver
    raises.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    k, v = (
        [
            torch.zeros(_PAGES * _PAGE, _HEADS, _DIM, dtype=torch.bfloat16, device=device)
            for _ in range(_LAYERS)
        ]
        for _ in range(2)
    )
    pool = _host_pool(k, v)
    controller = SimpleNamespace(
        device="cuda", load_fence_stream=None, mem_pool_host=pool, mem_pool_device=None
    )
    shape = shape_of(pool)
    scatter = TritonScatter(shape, pages_of_room(shape), [*k, *v])
    scatter.prepare()
    copies = StagedCopies(controller, scatter, CardMemory(device.index))
    rows = Rows(torch.cuda, [keys_and_values(pool, k, v)])
    return Probe(torch.cuda.get_device_name(), start.check(copies, controller, rows))


def _host_pool(k: list[torch.Tensor], v: list[torch.Tensor]) -> Any:
    """Pinned memory with the layout of SGLang's page_first host pools."""
    shape = (2, _PAGES * _PAGE, _LAYERS, _HEADS, _DIM)
    return SimpleNamespace(
        layout="page_first",
        page_size=_PAGE,
        layer_num=_LAYERS,
        head_num=_HEADS,
        head_dim=_DIM,
        dtype=torch.bfloat16,
        kv_buffer=torch.zeros(shape, dtype=torch.bfloat16, pin_memory=True),
        device_k_buffers=k,
        device_v_buffers=v,
    )


def shown_before(folder: Path, device: str) -> Iterator[tuple[str, int, float, str]]:
    """Earlier results of servers with pages in this folder, on this GPU with the present driver and
    versions, latest first: proven or refuted, number of equal pages, seconds since the epoch, and
    what differed. Empty if SGLang is not installed.
    """
    try:
        from sgl_kvtier.runtime.proof import memory
    except ImportError:
        return
    here = {"device": device, "driver": memory.driver(), "torch": torch.__version__}
    found = [
        shown for path in sorted(folder.glob(f"*/{memory.NAME}")) for shown in memory.read(path)
    ]
    for shown in sorted(found, key=lambda one: one.written, reverse=True):
        if here.items() <= shown.conditions.items():
            yield shown.state, shown.pages, shown.written, shown.what
