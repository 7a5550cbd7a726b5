"""The storage backend a HiCache controller has now: none, ours, or another one that was attached
while the server runs.

SGLang's fault injector, where it is switched on, stands around the backend and keeps it as
`_backend`.
"""

from __future__ import annotations

from typing import Any


def backend_of(controller: Any) -> Any:
    """The backend itself, ours or another; None without a controller or a backend."""
    backend = getattr(controller, "storage_backend", None)
    return getattr(backend, "_backend", backend)


def store_of(controller: Any) -> Any:
    """Our backend (`storage.KVTierStorage`), or None: known by what it can do, as its module is
    imported only where it is used.
    """
    backend = backend_of(controller)
    return backend if hasattr(backend, "begin_read") else None
