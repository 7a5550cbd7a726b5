"""The storage backend's hooks in SGLang's scheduler processes, in addition to its interface."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sgl_kvtier.runtime.backend import identity, quiet_stop
from sgl_kvtier.runtime.backend.host_pages import is_page_contiguous
from sgl_kvtier.runtime.settings import BACKEND
from sgl_kvtier.runtime.sglang import features
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.tree_nodes import whose

logger = logging.getLogger(__name__)

_WEIGHTS = "weights"
"""SGLang's tag of the device memory that holds them."""


def create_backend(
    original: Callable[..., Any],
    cls: Any,
    name: str,
    backend_class: Any,
    storage_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if name == BACKEND:
        return backend_class(storage_config, {})
    return original(cls, name, backend_class, storage_config, *args, **kwargs)


def use_zero_copy(result: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after a storage backend was attached: passes pages to ours by address if a page lies in
    few pieces. No operation is queued yet at this point.
    """
    del result, args, kwargs
    if store_of(controller) is None:
        return
    if "backup_skip" in vars(controller):
        # Releases before 0.5.23 decide this before there is a backend. Ours chooses what a rank
        # writes.
        controller.backup_skip = False
    if features.moved("zero-copy"):
        return
    if is_page_contiguous(controller.storage_host_pool):
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy


def cut_reads_short(
    original: Callable[..., Any], controller: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook around the end of HiCache's storage threads, at a flush or a detach. SGLang waits 10 s
    for each thread and ends the server after that. So neither a long read of pages that are no
    longer needed, nor a long write to a slow disk, nor another rank may delay them.
    """
    backend = store_of(controller)
    if backend is None:
        return original(controller, *args, **kwargs)
    with backend.reads_cut_short():
        if not quiet_stop.wait(controller):
            logger.warning("kvtier: HiCache's storage threads are stopped with reads under way")
        return original(controller, *args, **kwargs)


def note_reduction(original: Callable[..., Any], controller: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around the reduction by which ranks agree on the progress of a read from storage."""
    with quiet_stop.busy(controller, "reducing"):
        return original(controller, *args, **kwargs)


def note_transfer(original: Callable[..., Any], controller: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around the read of a prefix with its side pools, whose states are read after the KV
    pages: the ranks agree on these too.
    """
    with quiet_stop.busy(controller, "reading"):
        return original(controller, *args, **kwargs)


def read_ahead(
    original: Callable[..., Any], controller: Any, operation: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook around SGLang's read of one prefix from storage, 128 pages at a time: the next pages are
    in flight already. SGLang reuses host slots that were not filled only after this has returned.
    """
    backend = store_of(controller)
    if backend is None or features.moved("zero-copy"):
        return original(controller, operation, *args, **kwargs)
    with (
        quiet_stop.busy(controller, "reading"),
        backend.reading_ahead(operation.hash_value, operation.host_indices),
    ):
        return original(controller, operation, *args, **kwargs)


def note_tenant(
    original: Callable[..., Any], tree: Any, node_id: int, *args: Any, **kwargs: Any
) -> Any:
    """Hook around SGLang's queueing of a node's pages for storage: notes their tenant."""
    backend = store_of(getattr(tree, "cache_controller", None))
    if backend is not None and not features.moved("tenants"):
        found = whose(tree.tree_core, node_id)
        if found is not None and found.salt:
            backend.note_tenant(found.first, found.salt)
    return original(tree, node_id, *args, **kwargs)


def write_for_tenant(
    original: Callable[..., Any], controller: Any, operation: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook around SGLang's write of these pages, on its own thread: names their tenant."""
    backend = store_of(controller)
    if backend is None or not operation.hash_value:
        return original(controller, operation, *args, **kwargs)
    with backend.writing_for_tenant_of(operation.hash_value[0]):
        return original(controller, operation, *args, **kwargs)


def leave_old_weights(result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after weights changed at run time, or may be changed from outside from now on: pages
    written so far belong to other weights and are not served any more. If several of these hooks
    see one change, the first acts.
    """
    del args, kwargs
    if getattr(result, "success", True) is False:
        return  # a call that was refused
    _leave(updater)


def leave_weights_in_doubt(
    original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook around an update that writes weights in place. If it fails, on this rank or another,
    some weights may be new: pages are no longer served or stored, whatever its result.
    """
    try:
        return original(updater, *args, **kwargs)
    finally:
        _leave(updater)


def leave_lost_weights(result: Any, updater: Any, message: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after device memory was given back. Without a copy in host memory
    (--enable-weights-cpu-backup) the weights in it are lost: until others are loaded, the memory
    that comes back holds any numbers.
    """
    del result, args, kwargs
    tags = getattr(message, "tags", None) or (_WEIGHTS,)
    kept = getattr(updater.scheduler.server_args, "enable_weights_cpu_backup", False)
    if updater.memory_saver_adapter.enabled and _WEIGHTS in tags and not kept:
        _leave(updater)


def leave_random_weights(
    result: Any, updater: Any, message: Any, *args: Any, **kwargs: Any
) -> None:
    """Hook after a check of weights, which may have replaced them by random ones."""
    del result, args, kwargs
    if getattr(message, "action", None) == "reset_tensors":
        _leave(updater)


def _leave(updater: Any) -> None:
    identity.weights_changed()
    tree = getattr(updater.scheduler, "tree_cache", None)
    backend = store_of(getattr(tree, "cache_controller", None))
    if backend is not None:
        backend.leave_identity()
