"""The machine under a measurement: which card, which versions, and processor use by our server and
client, and by others.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from sgl_kvtier import __version__
from sgl_kvtier.console.environment import cards, package_version, planner_build


def made_with(device: str) -> dict[str, Any]:
    """The cards, versions and build of the planner that records of one log have in common."""
    return {
        "cards": cards() if device == "cuda" else [],
        "kvtier": __version__,
        "sglang": package_version("sglang"),
        "planner": planner_build(),
    }


@dataclass(frozen=True, slots=True)
class CpuShare:
    """Processor use over a span of time, in cores (1.0 = one core all the time).

    `foreign_cores` is what other processes used; `stolen_cores` what the hypervisor gave to other
    machines.
    """

    wall_s: float
    own_cores: float
    foreign_cores: float
    stolen_cores: float


class CpuWatch:
    """Measures from its making to `stop`. `own_cpu_s` gives the processor seconds of the server
    being measured.
    """

    def __init__(self, own_cpu_s: Callable[[], float]) -> None:
        self._own_cpu_s = own_cpu_s
        self._started = self._read()

    def stop(self) -> CpuShare:
        """The shares since the beginning."""
        wall, busy, stolen, own = (
            now - then for now, then in zip(self._read(), self._started, strict=True)
        )
        wall = max(wall, 1e-9)
        # A process that ended takes its counted time with it, so differences can fall below zero.
        own = max(own, 0.0)
        return CpuShare(wall, own / wall, max(busy - own, 0.0) / wall, max(stolen, 0.0) / wall)

    def _read(self) -> tuple[float, float, float, float]:
        times = psutil.cpu_times()
        busy = (
            times.user + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
        )
        # Linux counts guests' time in user already, and niced work apart.
        busy += getattr(times, "nice", 0.0)
        own = self._own_cpu_s() + time.process_time()
        return time.monotonic(), busy, getattr(times, "steal", 0.0), own


_PROBE = bytes(4 << 20)


def pace_seconds() -> float:
    """The seconds a fixed piece of computing takes on one core now: the median of three, about 40
    ms together.

    It shows neighbours that no counter of this machine does. They run on the other half of a
    physical core, or take its clock down.
    """
    times = []
    for _ in range(3):
        began = time.perf_counter()
        hashlib.sha256(_PROBE).digest()
        times.append(time.perf_counter() - began)
    return sorted(times)[1]
