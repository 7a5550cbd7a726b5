"""The command line of an SGLang server with the kvtier tier: its flags, and the device of this
machine.

Sources: SGLang 0.5.23 `--help`; on a CPU HiCache needs the direct copies and the page_first_direct
layout.
"""

from __future__ import annotations

import importlib
import shutil
import socket
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.types import PACED

HOST = "127.0.0.1"
GPU_PAGE = 64
"""Tokens of a page on a GPU. SGLang's default there is one, which restoring cannot follow."""
CPU_TOKENS = 16384
"""Tokens of the device pool on a CPU. SGLang sizes it by free memory and may refuse to start."""


def device_flags(device: str) -> list[str]:
    """Flags for a kind of machine: none on a GPU, where SGLang chooses attention and sampling by
    the model and the GPU. The CPU platform brings an attention backend of its own.
    """
    if device != "cpu":
        return []
    # Without --sleep-on-idle an idle server keeps one core busy, which is half of a small host.
    return [
        "--device",
        "cpu",
        "--sampling-backend",
        "pytorch",
        "--disable-cuda-graph",
        "--sleep-on-idle",
    ]


def cache_flags(device: str, host_ratio: float) -> list[str]:
    """HiCache with a host pool of `host_ratio` device pools, in a page-contiguous layout."""
    copies, layout = (
        ("direct", "page_first_direct") if device == "cpu" else ("kernel", "page_first")
    )
    flags = ["--enable-hierarchical-cache", "--hicache-ratio", f"{host_ratio:g}"]
    return [*flags, "--hicache-io-backend", copies, "--hicache-mem-layout", layout]


def storage_flags(backend: str, settings: str) -> list[str]:
    """Flags of the storage tier: its name and its settings, as JSON text or as @FILE."""
    return [
        "--hicache-storage-backend",
        backend,
        "--hicache-storage-backend-extra-config",
        settings,
    ]


def tier_flags(settings: str) -> list[str]:
    """What this tier adds to a launch line of SGLang's on a GPU. README, the manual, the examples,
    `kvtier serve` and `kvtier doctor` all have these flags in this order. The copies, the host
    layout and the size of the host pool are SGLang's defaults there: it fits the pool to the
    memory of the host only where no --hicache-ratio is named.
    """
    flags = ["--page-size", str(GPU_PAGE), "--enable-hierarchical-cache"]
    return [*flags, *storage_flags("kvtier", settings)]


def serve_flags(model: str, device: str, settings: str, extra: Sequence[str] = ()) -> list[str]:
    """The recommended flags for a user's own server. `settings` are kvtier.json's, as JSON text or
    as @FILE. `extra` comes last, so that its flags win.
    """
    if device == "cpu":
        tier = [
            "--page-size",
            "16",
            *device_flags(device),
            *("--max-total-tokens", str(CPU_TOKENS)),
            *cache_flags(device, 2.0),
            *storage_flags("kvtier", settings),
        ]
    else:
        tier = tier_flags(settings)
    return ["--model-path", model, *tier, "--enable-metrics", "--enable-cache-report", *extra]


def host_of(device: str) -> str:
    """The kind of machine that a server runs on: a paced device is on a CPU."""
    return "cpu" if device.startswith(PACED) else device


def paced_device(device: str, dilation: float, words: Sequence[str] = ()) -> Any:
    """What a server on a paced device is started with (sgl_kvtier/lab/paced/launching.py), or None
    for another device. `words` are the server's further arguments. Raises BenchError where the
    laboratory is not installed or has no such profile, and for another device's dilation.
    """
    if not device.startswith(PACED):
        if dilation != 1.0:
            raise BenchError(f"--dilation: only a paced device has it (--device {PACED}PROFILE)")
        return None
    # By its name: the product works without the laboratory.
    try:
        launching = importlib.import_module("sgl_kvtier.lab.paced.launching")
    except ImportError as error:
        raise BenchError(
            f"--device {device} needs {error.name}. Install it with: {how_to_install('bench')}"
        ) from error
    return launching.parse(device, dilation, words)


def detect_device() -> str:
    """This machine's device: "cuda" where an NVIDIA driver shows one, else "cpu". Loads no torch,
    so it takes milliseconds.
    """
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return "cuda"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "cpu"
    try:
        listed = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if listed.returncode == 0 and "GPU" in listed.stdout else "cpu"


def missing_packages(names: Sequence[str] = ("sglang",)) -> list[str]:
    """The packages that the interpreter of the server does not have. Imports none of them."""
    return [name for name in names if find_spec(name) is None]


def refuse_taken_port(port: int, host: str = HOST) -> None:
    """Raises BenchError if a server cannot listen on `port` of `host`, an address or a name. Names
    the process that listens there, where it can be seen.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: a connection still in TIME_WAIT does not make the port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return
        except OSError as error:
            reason = error.strerror
    raise BenchError(
        f"port {port} of {host} cannot be used: {reason}{_owner(port)}. Stop it or choose another "
        "with --port"
    )


def _owner(port: int) -> str:
    try:
        import psutil  # comes with SGLang and the extra [bench]
    except ImportError:
        return ""
    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.laddr
                and connection.laddr.port == port
                and connection.status == psutil.CONN_LISTEN
            ):
                if connection.pid is None:
                    break
                process = psutil.Process(connection.pid)
                return f" (process {connection.pid}: {' '.join(process.cmdline())[:120]})"
    except psutil.Error:
        pass
    return ""
