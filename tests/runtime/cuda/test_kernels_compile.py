"""Kernels of SGLang and FlashInfer that loads may use compile for sm_90a, where nvcc is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOOLKIT = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (TOOLKIT / "bin" / "nvcc").exists(), reason=f"no nvcc below {TOOLKIT} (CUDA_HOME)"
    ),
]


@pytest.mark.timeout(580)
@pytest.mark.parametrize(
    ("whose", "name"),
    [
        ("flashinfer", "cascade"),
        ("flashinfer", "page"),
        ("sglang", "tma"),
        ("sglang", "registers"),
        ("sglang", "staged"),
    ],
)
def test_a_kernel_of_others_compiles_for_a_hopper_card(
    whose: str, name: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(whose) is None:
        pytest.skip(f"{whose} is not installed")
    # A host without a card has no driver's library to link with; nothing is called.
    driver = tmp_path / "libcuda.so"
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", str(driver)], check=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_others.py"), whose, name],
        env={
            **os.environ,
            "CUDA_HOME": str(TOOLKIT),
            "LIBRARY_PATH": str(tmp_path),
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path),
            "HOME": str(tmp_path),
            "MAX_JOBS": "2",
        },
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "compiled"
