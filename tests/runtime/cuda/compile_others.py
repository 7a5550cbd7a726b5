"""Compiles, for a Hopper card that is not there, a kernel of others that loads may use: LIBRARY
NAME. Caches go where the environment says.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch


def pretend_hopper() -> None:
    """Both libraries ask torch what they compile for."""
    card = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, gcnArchName="", total_memory=80 << 30,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": True, "current_device": 0, "device_count": 1, "get_device_capability": (9, 0),
        "get_device_name": card.name, "get_device_properties": card,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def flashinfer_module(name: str) -> None:
    """`cascade` merges a prefix's attention after each jump; `page` appends."""
    from flashinfer.jit import cascade
    from flashinfer.page import gen_page_module

    made = cascade.gen_cascade_module() if name == "cascade" else gen_page_module()
    made.build(verbose=False)


def sglang_module(name: str) -> None:
    """HiCache's copies of rows of 2048 bytes: by TMA, by registers, and written back."""
    from sglang.kernels.ops.kvcache import hicache

    rows: dict[str, Any] = {"element_size": 2048, "unroll": 1, "block_quota": 2}
    if name == "tma":
        hicache._jit_hicache_tma_module(block_quota=4)
    elif name == "registers":
        hicache._jit_hicache_module(**rows)
    else:
        hicache._jit_hicache_staged_module(**rows)


if __name__ == "__main__":
    pretend_hopper()
    (flashinfer_module if sys.argv[1] == "flashinfer" else sglang_module)(sys.argv[2])
    print("compiled")
