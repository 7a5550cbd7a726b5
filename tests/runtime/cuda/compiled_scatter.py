"""Compiles the scatter for sm_90 where no card is. Prints, by shape: memory accesses, spills."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from sgl_kvtier.runtime.cuda.page_shape import shape_of
from sgl_kvtier.runtime.cuda.scatter import TritonScatter

SHAPES = {
    "8B": (8, 128, 32, 64, "page_first"),
    "8B, direct": (8, 128, 32, 64, "page_first_direct"),
    "70B on 8 ranks": (1, 128, 80, 64, "page_first"),
    "small pages": (8, 128, 32, 16, "page_first"),
}


def launch_into_nothing() -> None:
    """From here on Triton compiles for sm_90 in this process, and its launches do nothing."""
    vars(nvidia)["PyKernelArg"] = SimpleNamespace  # of a module that is loaded with the real driver
    limits = {"max_shared_mem": 228 << 10}
    utils = SimpleNamespace(
        get_device_properties=lambda _device: limits,
        load_binary=lambda *_: (1, 1, 32, 0, 1024),
        unload_module=lambda _module: None,
        launch=lambda *_: None,
        build_signature_metadata=lambda _signature: b"",
    )
    null: Any = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=nvidia.CudaLauncher,
        utils=utils,
    )
    driver.set_active(null)


def accesses(heads: int, dim: int, layers: int, page: int, layout: str) -> dict[str, object]:
    """What the compiler made of one shape."""
    pool = SimpleNamespace(
        head_num=heads, head_dim=dim, dtype=torch.bfloat16, page_size=page, layer_num=layers, layout=layout,
    )  # fmt: skip
    buffers = [torch.zeros(1, dtype=torch.uint8) for _ in range(2 * layers)]
    ptx = TritonScatter(shape_of(pool), 2, buffers).prepare().asm["ptx"]
    return {
        "loads": sorted(set(re.findall(r"ld\.global[.\w:]*", ptx))),
        "stores": sorted(set(re.findall(r"st\.global[.\w:]*", ptx))),
        "spilled": spilled(ptx),
    }


def spilled(ptx: str) -> list[str]:
    """Bytes that did not fit into registers, as the assembler counts them."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [str(ptxas), "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        )
    return re.findall(r"(\d+) bytes spill", done.stdout + done.stderr)


if __name__ == "__main__":
    launch_into_nothing()
    json.dump({name: accesses(*shape) for name, shape in SHAPES.items()}, sys.stdout)
