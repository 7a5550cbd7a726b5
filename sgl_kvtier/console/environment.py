"""The machine and software a result was measured on: date, versions, processor, memory,
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
"""Installed distributions whose versions belong to a result. They are never imported."""


def environment() -> dict[str, Any]:
    """The machine and the software at this moment, as plain data. Never fails: unknown values are
    None.

    Runs `nvidia-smi` and `git` where they exist, each for 10 seconds at most.
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
    """The names of this machine's NVIDIA cards. Never fails; runs `nvidia-smi` where it exists."""
    return [card["name"] for card in _gpus()]


def planner_build() -> str:
    """How the planner runs: "compiled" where it is an extension module, "source" where it is
    Python. Imports neither.
    """
    found = importlib.util.find_spec("sgl_kvtier.policy.planner")
    return "source" if found is None or str(found.origin).endswith(".py") else "compiled"


def package_version(name: str) -> str | None:
    """The version of an installed distribution, which is not imported; None where there is none."""
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
    """Number of cores this process may use: its affinity, less if its control group has a quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if affinity and len(quota) == 2 and quota[0].isdigit():
        return min(affinity, round(int(quota[0]) / int(quota[1]), 2))
    return affinity


def _memory_limit() -> int | None:
    """The control group's memory limit in bytes, or None when there is none."""
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
    """The commit of the checkout this package runs from, with "-dirty" for local changes; None when
    installed.
    """
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
