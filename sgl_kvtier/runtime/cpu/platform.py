"""An out-of-tree SGLang platform for hosts without an accelerator.

SGLang finds it through the entry point group `sglang.srt.platforms` (name `kvtier_cpu`). It is
active only where no accelerator is present, or when chosen with SGLANG_PLATFORM=kvtier_cpu. With it
`sglang serve` runs with its usual flags: the user's choices stay, and whatever cannot work on a CPU
gets another default or is refused with a message.
"""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.runtime.sglang import features

logger = logging.getLogger(__name__)

NAME = "kvtier_cpu"
ATTENTION = "kvtier_cpu"
"""Name of the attention backend registered by `attention.register`."""

RESERVE_BYTES = 1 << 30
"""Memory that host pools leave free. SGLang leaves 10 GiB, as on a GPU host: on a machine with 16
GiB no second server would start.
"""

STAND_IN = "KVTIER_CPU_DEVICE"
"""Environment variable that names a function, `module:name`, called in each worker before its pools
are built. The function replaces the CPU by an emulated device with streams. For tests and the
laboratory only.
"""

_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "davinci[0-9]*", "accel/accel[0-9]*")


def activate() -> str | None:
    """The platform's class path if this host runs on its CPU, else None; also None if this SGLang
    lacks what the platform needs. SGLang of any release calls it.
    """
    if os.environ.get("SGLANG_PLATFORM") != NAME and (
        os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or accelerators()
    ):
        return None
    line = features.line("cpu")
    if line is not None:
        logger.warning("kvtier: %s", line)
        return None
    return f"{__name__}_class.CpuPlatform"


def works_at_once(device: Any) -> bool:
    """Whether forwards and copies on this device have ended when the call that launches them
    returns: on the CPU, unless an emulated device with streams replaces it.
    """
    return str(device).partition(":")[0] == "cpu" and not os.environ.get(STAND_IN)


def stand_in() -> None:
    """Calls the function that `STAND_IN` names, if set. Raises ConfigError if it does not exist."""
    named = os.environ.get(STAND_IN)
    if not named:
        return
    module, _, function = named.partition(":")
    try:
        install = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{STAND_IN}={named}: there is no such function ({error}). Unset it, or name one as "
            "module:name"
        ) from error
    install()


def accelerators() -> list[str]:
    """This host's accelerators: device files, else those torch can use. Empty on a plain CPU."""
    sure = [str(path) for pattern in _DEVICE_FILES for path in sorted(Path("/dev").glob(pattern))]
    if sure:
        return sure
    import torch  # heavy: only reached where no device file decides

    return [name for name in ("cuda", "xpu", "mps", "npu", "musa") if _available(torch, name)]


def _available(torch: Any, name: str) -> bool:
    module = getattr(torch, name, None) or getattr(torch.backends, name, None)
    return bool(module is not None and module.is_available())


def threads_per_rank(ranks: int, cores: list[int]) -> str:
    """SGLANG_CPU_OMP_THREADS_BIND for `ranks` processes on `cores`: equal runs of cores, shared
    when there are too few.

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
