"""Status of a remote store's master, over HTTP."""

from __future__ import annotations

import http.client
import urllib.request
from dataclasses import dataclass

from sgl_kvtier.errors import StoreError

_WAIT_S = 2.0
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class MasterStatus:
    """Sums over all hosts that contribute memory."""

    keys: int
    """Objects of all servers and models."""
    nbytes: int
    capacity_bytes: int
    evicted_keys: int
    """Objects evicted since the master was started."""
    clients: int
    segments: tuple[str, ...]
    """Addresses of the hosts that contribute memory."""


def look(address: str) -> MasterStatus:
    """Queries Mooncake's master at `host:port`, 2 s per request at most. Raises StoreError."""
    figures = {}
    for line in _get(address, "metrics").splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            figures[name] = value
    try:
        return MasterStatus(
            keys=_whole(figures["master_key_count"]),
            nbytes=_whole(figures["master_allocated_bytes"]),
            capacity_bytes=_whole(figures["master_total_capacity_bytes"]),
            evicted_keys=_whole(figures["master_evicted_key_count"]),
            clients=_whole(figures["master_active_clients"]),
            segments=tuple(_get(address, "get_all_segments").split()),
        )
    except (KeyError, ValueError, OverflowError) as error:
        raise StoreError(f"http://{address}/metrics is no Mooncake master's") from error


def _whole(text: str) -> int:
    return int(float(text))


def _get(address: str, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/{path}", timeout=_WAIT_S) as response:
            return str(response.read(_MOST_BYTES).decode(errors="replace"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise StoreError(
            f"no answer from http://{address}/{path} ({why}). Give the master's address and its "
            "--metrics_port (9003 unless it was set)"
        ) from error
