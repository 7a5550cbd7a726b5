"""The volumes that Kubernetes gives a container, with the modes and owners that its node agent
(kubelet) sets. Needs root.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ME = 12_345
GROUP = 20_000


def kubelet(volume: Path, group: int = GROUP) -> None:
    """What kubelet does to a volume with an fsGroup at each start of a pod: group, read and write
    for it, and the setgid bit on folders.
    """
    for path in (volume, *volume.rglob("*")):
        os.chown(path, -1, group)
        bits = stat.S_IMODE(path.stat().st_mode)
        path.chmod(bits | (0o2770 if path.is_dir() else 0o660))


def loose(volume: Path) -> list[Path]:
    """What others may write below a volume."""
    return [path for path in volume.rglob("*") if path.stat().st_mode & 0o022]


@contextmanager
def in_memory(folder: Path, size: str, mode: str) -> Iterator[None]:
    """The folder is an emptyDir in memory of this size. Skips the test where it cannot be."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode={mode}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small filesystem is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
