"""What a server of SGLang needs to run on the CUDA stand-in: its environment and its flags. It is
started as users start theirs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stand_in import build, environment

HERE = Path(__file__).resolve().parent


def served_environment(**choices: Any) -> dict[str, str]:
    """The environment of a server on the stand-in. `choices` are those of `stand_in.environment`.
    Compiles what is missing, which takes a minute the first time. Raises RuntimeError.
    """
    found = environment(**choices)
    found["PYTHONPATH"] = os.pathsep.join([str(HERE / "site"), found["PYTHONPATH"]])
    found["STAND_IN_ATTENTION"] = str(build.operators(HERE / "attention.cpp"))
    # SGLang's fused kernels (norms, activations, rotary embedding) are binaries: torch's operators.
    found["SGLANG_FORCE_FUSED_OP_BACKEND"] = "torch"
    found["SGLANG_ENABLE_JIT_DEEPGEMM"] = (
        "0"  # it looks for a toolkit, and has kernels for fp8 alone
    )
    return found


def linear_layers() -> dict[str, str]:
    """What the environment of a server has beside, whose model keeps states: all in float32."""
    library = build.operators(HERE / "linear.cpp")
    return {"STAND_IN_LINEAR": str(library), "SGLANG_MAMBA_CONV_DTYPE": "float32"}


def served_flags(graphs: Sequence[int] = (), ranks: int = 1) -> list[str]:
    """Launch arguments of a server on the stand-in, without `--tp-size`. `graphs` are the batch
    sizes of its decode graphs; `ranks` are its tensor-parallel ranks.
    """
    words = ["--attention-backend", "stand_in", "--sampling-backend", "pytorch"]
    words += ["--cuda-graph-backend-prefill", "disabled"]
    if graphs:
        words += ["--cuda-graph-bs-decode", *map(str, graphs)]
    else:
        words += ["--cuda-graph-backend-decode", "disabled"]
    if ranks > 1:  # these exchange memory between GPUs by calls that the stand-in lacks
        words += ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
    return words
