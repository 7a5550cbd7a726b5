"""The storage backend that a HiCache controller has now: none, ours, or another one attached while
the server runs.

SGLang's fault injector, if switched on, wraps the backend and keeps it as `_backend`.
"""

from __future__ import annotations

from typing import Any


def backend_of(controller: Any) -> Any:
    """The backend itself, ours or another; None without a controller or a backend."""
    backend = getattr(controller, "storage_backend", None)
    return getattr(backend, "_backend", backend)


def store_of(controller: Any) -> Any:
    """Our backend (`storage.KVTierStorage`), or None. It is recognized by a method, since its
    module is imported only where it is used.
    """
    backend = backend_of(controller)
    return backend if hasattr(backend, "begin_read") else None
