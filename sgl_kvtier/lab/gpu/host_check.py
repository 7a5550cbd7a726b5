"""Whether a GPU host can serve, part by part: `python -m sgl_kvtier.lab.gpu.host_check`.

Each part that a served model needs is tried once, the cheapest first. So a log says which one is
missing. Exit status 1 where one is.
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Callable

import torch

from sgl_kvtier.runtime.cuda.card_memory import CardMemory
from sgl_kvtier.runtime.tools import gpu_probe

_REGISTERED_BYTES = 1 << 30


def main() -> int:
    """Tries every part; the exit status."""
    failed = []
    for name, part in PARTS:
        began = time.monotonic()
        try:
            said, well = part(), True
        except Exception as error:  # whatever a driver or a library raises is what is asked for
            said, well = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", False
            failed.append(name)
        print(
            f"{'ok' if well else 'FAILED':7} {name}: {said} ({time.monotonic() - began:.1f} s)",
            flush=True,
        )
    return 1 if failed else 0


def _versions() -> str:
    found = [f"Python {sys.version.split()[0]}"]
    for package in ("torch", "sglang", "flashinfer-python", "sglang-kernel", "sgl-kvtier"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def _plugin() -> str:
    names = {point.name for point in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    if "kvtier" not in names:
        raise RuntimeError(f"SGLang would not find it among {sorted(names)}: install the wheel")
    return "SGLang finds it"


def _card() -> str:
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def _rmsnorm() -> str:
    import sgl_kernel

    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    found = sgl_kernel.rmsnorm(x, torch.ones(4096, device="cuda", dtype=torch.bfloat16), 1e-6)
    apart = (found.float() - torch.nn.functional.rms_norm(x.float(), (4096,))).abs().max().item()
    if apart > 0.1:
        raise RuntimeError(f"a norm is off by {apart:g}")
    return f"a norm is within {apart:.3g}"


def _pinned() -> str:
    memory = torch.empty(_REGISTERED_BYTES, dtype=torch.uint8)
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status:
        raise RuntimeError(f"cudaHostRegister answers {status}: HiCache cannot run here")
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    return "1 GiB of host memory was registered"


def _driver_copy() -> str:
    if CardMemory(torch.cuda.current_device()).driver_copy() is None:
        raise RuntimeError("torch makes each copy of a load, and a begin takes longer")
    return "pages arrive by the driver's own copy"


def _copies() -> str:
    return gpu_probe.try_out().result.line


def _attention() -> str:
    import flashinfer

    out = torch.randn(8, 16, 128, device="cuda", dtype=torch.bfloat16)
    weights = torch.zeros(8, 16, device="cuda")
    merged, _ = flashinfer.merge_state(out, weights, out, weights)
    apart = (merged.float() - out.float()).abs().max().item()
    if apart > 0.05:
        raise RuntimeError(f"FlashInfer's merge of equal halves is off by {apart:g}")
    return f"FlashInfer merges halves within {apart:.3g}"


def _copy_kernels() -> str:
    from sglang.kernels.ops.kvcache import hicache

    hicache._jit_hicache_module(element_size=2048, unroll=1, block_quota=2)
    hicache._jit_hicache_tma_module(block_quota=hicache.TMA_BLOCK_QUOTA)
    return "SGLang's copy kernels are compiled"


PARTS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("versions", _versions),
    ("plugin", _plugin),
    ("card", _card),
    ("host memory", _pinned),
    ("driver's copy", _driver_copy),
    ("copies", _copies),
    ("sgl_kernel", _rmsnorm),
    ("attention", _attention),
    ("copy kernels", _copy_kernels),
)

if __name__ == "__main__":
    sys.exit(main())
