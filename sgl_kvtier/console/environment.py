"""The machine and software on which a result was measured: date, versions, processor, memory,
accelerator, commit. No host names, no users.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import sgl_kvtier

PACKAGES = ("sglang", "torch", "flashinfer-python", "transformers", "numpy")
"""Installed distributions whose versions are part of a result. They are never imported."""


def environment() -> dict[str, Any]:
    """The current machine and software, as plain data. Never fails: unknown values are None. Runs
    `nvidia-smi` and `git`, if installed, each for 10 seconds at most.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "kvtier": sgl_kvtier.__version__,
        "git_commit": _git_commit(),
        "planner": planner_build(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "count": os.cpu_count(), "usable": _usable_cpus()},
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "memory_limit_bytes": _memory_limit(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "gpus": _gpus(),
    }


def cards() -> list[str]:
    """Names of this machine's NVIDIA GPUs. Never fails; runs `nvidia-smi` if installed."""
    return [card["name"] for card in _gpus()]


def planner_build() -> str:
    """How the planner is installed, without importing it: "compiled" as extension module, or
    "source".
    """
    found = importlib.util.find_spec("sgl_kvtier.policy.planner")
    return "source" if found is None or str(found.origin).endswith(".py") else "compiled"


def package_version(name: str) -> str | None:
    """The version of an installed distribution, or None. Does not import it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    fields = dict(_fields(_read("/proc/cpuinfo")))
    for name in ("model name", "Model", "cpu model"):
        if fields.get(name):
            return fields[name]
    return platform.processor() or None


def _fields(text: str) -> list[tuple[str, str]]:
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return [(name.strip(), value.strip()) for name, value in pairs]


def _usable_cpus() -> float | None:
    """Number of cores that this process may use, by CPU affinity and control group quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if affinity and len(quota) == 2 and quota[0].isdigit():
        return min(affinity, round(int(quota[0]) / int(quota[1]), 2))
    return affinity


def _memory_limit() -> int | None:
    """The memory limit of the control group in bytes, or None."""
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return int(limit) if limit.isdigit() else None


def _gpus() -> list[dict[str, str]]:
    keys = ("name", "memory", "driver")
    query = _output(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    rows = [[cell.strip() for cell in line.split(",")] for line in (query or "").splitlines()]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def _git_commit() -> str | None:
    """The commit of the checkout, "-dirty" with local changes; None outside of a checkout."""
    root = Path(sgl_kvtier.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    return _output(
        "git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    )


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
