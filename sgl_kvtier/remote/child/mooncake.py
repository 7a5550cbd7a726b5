"""Mooncake Store as an engine. Only the child process imports this module.

Mooncake's timeouts are environment variables, read when its library is imported. They are set here,
so that they affect only the child.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Sequence
from typing import Any

from sgl_kvtier.extras import how_to_install
from sgl_kvtier.remote.child.engine import Code, EngineError, Removed
from sgl_kvtier.remote.child.settings import RemoteSettings, address_of, own_hostname

_ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_TCP_LANES_PER_PEER": "4",
    "MC_LOG_LEVEL": "ERROR",
}
_CODES = {
    -200: Code.REFUSED,
    -600: Code.CORRUPT,
    -703: Code.MISS,
    -704: Code.MISS,
    -707: Code.MISS,
    -900: Code.UNREACHABLE,
    -901: Code.UNREACHABLE,
}
"""Being written (-703), not there (-704) and an expired lease (-707) are misses; -600 is an object
larger than requested. All others, such as a failed transfer (-800), are FAILED.
"""
_CONNECT_S = 0.5
_BUFFER_BYTES = 16 << 20


class MooncakeEngine:
    """A client of Mooncake Store that contributes no memory. Raises EngineError.

    It first checks that the master accepts connections: without one the library's setup takes 90 s.
    """

    def __init__(self, settings: RemoteSettings, base: int, nbytes: int) -> None:
        host, port = address_of(settings.master)
        try:
            hostname = own_hostname(settings)
            socket.create_connection((host, port), _CONNECT_S).close()
        except OSError as error:
            raise EngineError(
                f"no Mooncake master answers at {settings.master} ({error}). Start "
                "mooncake_master there, or correct remote.master"
            ) from error
        self._store = _library(settings.protocol).MooncakeDistributedStore()
        given = (hostname, "P2PHANDSHAKE", 0, _BUFFER_BYTES, settings.protocol, settings.device)
        code = self._store.setup(*given, settings.master)
        if code:
            raise EngineError(f"Mooncake does not start: setup() says {code}")
        code = self._store.register_buffer(base, nbytes)
        if code:
            raise EngineError(f"Mooncake does not take the ring's memory: it says {code}")

    def exists(self, names: Sequence[str]) -> list[Code]:
        answers = self._store.batch_is_exist(list(names))
        return [Code.MISS if n == 0 else Code.OK if n == 1 else _code(n) for n in answers]

    def get(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[Code]:
        got = self._store.batch_get_into(list(names), list(addresses), list(sizes))
        return [
            _code(n) if n < 0 else Code.OK if n == size else Code.CORRUPT
            for n, size in zip(got, sizes, strict=True)
        ]

    def put(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[Code]:
        if not names:
            return []
        put = self._store.batch_put_from(list(names), list(addresses), list(sizes))
        return [Code.OK if n == 0 else _code(n) for n in put]

    def remove(self, names: Sequence[str]) -> list[Removed]:
        prefixes = [name for name in names if name.endswith("/")]
        whole = [name for name in names if not name.endswith("/")]
        counts = [self._store.remove_by_regex(f"^{re.escape(p)}", True) for p in prefixes]
        removed = [Removed(Code.OK, n) if n >= 0 else Removed(_kept(n)) for n in counts]
        if whole:
            codes = self._store.batch_remove(whole, True)
            removed += [Removed(Code.OK, 1) if n == 0 else Removed(_kept(n)) for n in codes]
        return removed

    def close(self) -> None:
        self._store.close()


def _code(number: int) -> Code:
    return _CODES.get(number, Code.FAILED)


def _kept(number: int) -> Code:
    """The code of a removal: an object that is being written (-703) will exist afterwards."""
    return Code.REFUSED if number == -703 else _code(number)


def _library(protocol: str) -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if protocol == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise EngineError(what_to_install(error)) from error


def what_to_install(error: ImportError) -> str:
    """What to do about a library that cannot be imported."""
    if "libibverbs" in str(error) or "librdmacm" in str(error):
        return f"Mooncake needs libibverbs ({error}): apt-get install libibverbs1"
    if "libcud" in str(error):
        return (
            f"this build of Mooncake needs CUDA ({error}): "
            "pip install mooncake-transfer-engine-non-cuda"
        )
    return f"Mooncake is not installed ({error}): {how_to_install('remote')}"
