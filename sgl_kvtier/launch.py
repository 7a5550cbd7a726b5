"""The command line of an SGLang server with kvtier: its flags, and the kind of device of this
machine.

Sources: `--help` of SGLang 0.5.23. On a CPU, HiCache needs the direct I/O backend and the
page_first_direct layout.
"""

from __future__ import annotations

import errno
import importlib
import random
import shutil
import socket
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.outside import shown
from sgl_kvtier.types import PACED

HOST = "127.0.0.1"
GPU_PAGE = 64
"""Page size on a GPU, in tokens. SGLang's default there is 1, with which restoration does not work.
"""
CPU_TOKENS = 16384
"""Size of the KV pool on a CPU, in tokens. SGLang sizes it by free memory and may refuse to start.
"""


def device_flags(device: str) -> list[str]:
    """Flags for a device type. None on a GPU, where SGLang chooses the attention and sampling
    backends by model and GPU. On a CPU kvtier's platform has its own attention backend.
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
    """Flags of HiCache: a host pool of `host_ratio` times the device pool, in contiguous pages."""
    copies, layout = (
        ("direct", "page_first_direct") if device == "cpu" else ("kernel", "page_first")
    )
    flags = ["--enable-hierarchical-cache", "--hicache-ratio", f"{host_ratio:g}"]
    return [*flags, "--hicache-io-backend", copies, "--hicache-mem-layout", layout]


def storage_flags(backend: str, settings: str) -> list[str]:
    """Flags of the storage backend: its name, and its settings as JSON text or as @FILE."""
    return [
        "--hicache-storage-backend",
        backend,
        "--hicache-storage-backend-extra-config",
        settings,
    ]


MIXED = "--enable-mixed-chunk"
"""Requests that decode get a token in steps that also compute a prompt. Without it they stand still
meanwhile, in SGLang until the whole prompt is computed.
"""
_NEVER_MIXED = (
    "--speculative-algorithm",
    "--enable-hisparse",
    "--enable-encoder-swa-bounded-replay",
    "--enable-megamoe-for-layernorm-sp",
    "--dsa-prefill-backend",
    "--attn-cp-size",
    "--dcp-size",
)
"""With these flags SGLang refuses `MIXED`, for some models or values; with the first one a server
that restores does not mix.
"""


def tier_flags(settings: str) -> list[str]:
    """The flags that kvtier adds to SGLang's launch line on a GPU. README, the manual, the
    examples, `kvtier serve` and `kvtier doctor` all have these flags in this order. I/O backend,
    host layout and host pool size are left at SGLang's defaults: it fits the pool to the host's
    memory only if no --hicache-ratio is given.
    """
    flags = ["--page-size", str(GPU_PAGE), MIXED, "--enable-hierarchical-cache"]
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
        if any(word.partition("=")[0] in _NEVER_MIXED for word in extra):
            tier.remove(MIXED)
    return ["--model-path", model, *tier, "--enable-metrics", "--enable-cache-report", *extra]


def host_of(device: str) -> str:
    """The device type on which a server runs: an emulated device runs on a CPU."""
    return "cpu" if device.startswith(PACED) else device


def paced_device(device: str, dilation: float, words: Sequence[str] = ()) -> Any:
    """How a server with an emulated device is started (sgl_kvtier/lab/paced/launching.py), or None
    for a real device. `words` are the server's other arguments. Raises BenchError if the laboratory
    is not installed or has no such profile, and if a real device is given a dilation.
    """
    if not device.startswith(PACED):
        if dilation != 1.0:
            raise BenchError(f"--dilation: only a paced device has it (--device {PACED}PROFILE)")
        return None
    # Imported by name, since the product works without the laboratory.
    try:
        launching = importlib.import_module("sgl_kvtier.lab.paced.launching")
    except ImportError as error:
        raise BenchError(
            f"--device {device} needs {error.name}. Install it with: {how_to_install('bench')}"
        ) from error
    return launching.parse(device, dilation, words)


def detect_device() -> str:
    """This machine's device: "cuda" if an NVIDIA driver shows a GPU, else "cpu". Takes
    milliseconds, since it does not import torch.
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
    """The packages among `names` that this interpreter cannot import. Imports none of them."""
    return [name for name in names if find_spec(name) is None]


def refuse_missing_model(model: str) -> None:
    """Raises BenchError if `model` is empty, or can only be a path and nothing is there."""
    if not model or (model.startswith(("/", "./", "../", "~")) and not Path(model).exists()):
        raise BenchError(
            f"{shown(model)}: no such folder. Give a model's folder, or ORGANIZATION/NAME"
        )


def refuse_taken_port(port: int, host: str = HOST) -> None:
    """Raises BenchError if a server cannot listen on `port` of `host`, an address or a name. The
    message names the process that listens there, if it is visible.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Servers set this too: a connection in TIME_WAIT does not make the port taken.
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


def free_port(host: str = HOST) -> int:
    """A TCP port of `host` that nothing uses now, for a server that starts in some seconds.

    It lies below the ports that Linux gives to outgoing connections and to sockets that asked for
    none: those can take any of theirs before the server listens, and a client that asks whether the
    server is there can even be connected to itself. OSError if `host` is not this machine's.
    """
    try:
        last = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) - 1
    except (OSError, ValueError, IndexError):
        last = 0
    lowest = 10_000  # well-known services have lower ones
    tries = random.sample(range(lowest, last), 64) if last > lowest + 64 else []
    for port in [*tries, 0]:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if port and error.errno == errno.EADDRINUSE:
                    continue
                raise
            return int(probe.getsockname()[1])
    raise AssertionError("the last try is any free port")


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
