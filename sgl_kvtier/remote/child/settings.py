"""The settings of a remote store, and their validation."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.outside import refusal

CALL_S = 2.0
"""Seconds that a call of the store waits for the engine at most, and a read without progress.
SGLang's threads make these calls.
"""
ENGINES = ("off", "mooncake", "memory")
"""`memory` is the test double; `master` is its folder then."""


@dataclass(frozen=True)
class RemoteSettings:
    """A remote store's settings. Raises ConfigError for invalid values.

    `write` is for the caller, which decides what is uploaded. The store itself writes whatever it
    is given unless `write` is `off`.
    """

    engine: str = "off"
    master: str = ""
    """Where the engine's master listens: `host:port`."""
    hostname: str = ""
    """This host's name or address for other hosts; empty: its address on the route to the master.
    """
    protocol: str = "tcp"
    device: str = ""
    """RDMA devices, as the engine names them; empty for tcp."""
    write: str = "all"
    ring_bytes: int = 64 << 20
    exists_wait_ms: int = 20
    deadline_s: float = CALL_S
    """Seconds after which a batch in flight counts as failed and its caller stops waiting."""
    hang_s: float = 5.0
    """Seconds after which a child with such a batch is killed."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(refusal("remote.engine", self.engine, f"one of {', '.join(ENGINES)}"))
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(refusal("remote.protocol", self.protocol, "tcp or rdma"))
        if self.ring_bytes < 1 << 20:
            raise ConfigError(refusal("remote.ring_bytes", self.ring_bytes, "1 MiB or more"))
        if not 0 < self.deadline_s <= self.hang_s:
            raise ConfigError(
                refusal("remote.deadline_s", self.deadline_s, "above 0 and at most remote.hang_s")
            )
        if self.engine == "mooncake":
            address_of(self.master)


def address_of(master: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ConfigError."""
    host, _, port = master.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(refusal("remote.master", master, "host:port, such as 10.0.0.1:50051"))
    return host.strip("[]"), int(port)


def own_hostname(settings: RemoteSettings) -> str:
    """This host's name or address for other hosts. Raises ConfigError for a loopback name if the
    master is on another host, and OSError for a name without an address.
    """
    host, port = address_of(settings.master)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: the kernel only chooses a route
        address = str(probe.getsockname()[0])
    if not settings.hostname:
        return address
    named = settings.hostname.rpartition(":")[0] or settings.hostname
    if _loopback(socket.gethostbyname(named)) and not _loopback(socket.gethostbyname(host)):
        raise ConfigError(
            f"remote.hostname = {settings.hostname} is this host alone: other hosts cannot reach "
            f"it. Set the name by which {host} reaches this host, or leave it empty"
        )
    return settings.hostname


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
