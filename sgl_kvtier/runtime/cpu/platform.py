"""An out-of-tree SGLang platform for hosts without an accelerator.

Found by SGLang through the entry point group `sglang.srt.platforms` (name `kvtier_cpu`). It offers itself only where no
accelerator is present, or when chosen with SGLANG_PLATFORM=kvtier_cpu. With it `sglang serve` runs with its usual flags:
the user's choices stay, and what cannot work on a CPU is defaulted or refused with a message.
"""

from __future__ import annotations

import glob
import logging
import os
from typing import Any

NAME = "kvtier_cpu"
ATTENTION = "kvtier_cpu"
"""Name of the attention backend registered by `attention.register`."""

_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/davinci[0-9]*", "/dev/accel/accel[0-9]*", "/dev/dri/renderD*")

logger = logging.getLogger(__name__)


def activate() -> str | None:
    """The platform's class path when this host should run on its CPU, else None. Called by SGLang before any import."""
    if os.environ.get("SGLANG_PLATFORM") == NAME:
        return f"{__name__}_class.CpuPlatform"
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or accelerators():
        return None
    return f"{__name__}_class.CpuPlatform"


def accelerators() -> list[str]:
    """What looks like an accelerator on this host, by device files and by torch. Empty on a plain CPU host.

    A render node alone (/dev/dri) may be a display chip that torch cannot use, so it counts only when torch agrees.
    """
    sure = [path for pattern in _DEVICE_FILES[:-1] for path in sorted(glob.glob(pattern))]
    if sure:
        return sure
    import torch  # heavy: only reached where no device file decides

    found = [name for name in ("cuda", "xpu", "mps", "npu", "musa") if _available(torch, name)]
    return found


def _available(torch: Any, name: str) -> bool:
    module = getattr(torch, name, None) or getattr(torch.backends, name, None)
    return bool(module is not None and module.is_available())


def threads_per_rank(ranks: int, cores: list[int]) -> str:
    """SGLANG_CPU_OMP_THREADS_BIND for `ranks` processes on `cores`: equal runs of cores, shared when there are too few.

    >>> threads_per_rank(2, [0, 1, 2, 3])
    '0-1|2-3'
    >>> threads_per_rank(2, [0])
    '0|0'
    """
    share = max(1, len(cores) // ranks)
    groups = []
    for rank in range(ranks):
        first = (rank * share) % len(cores)
        mine = cores[first : first + share]
        contiguous = mine[-1] - mine[0] == len(mine) - 1 and len(mine) > 1
        groups.append(f"{mine[0]}-{mine[-1]}" if contiguous else ",".join(map(str, mine)))
    return "|".join(groups)
