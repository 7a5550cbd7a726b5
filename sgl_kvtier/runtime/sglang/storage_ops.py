"""Access to SGLang's storage operations: one read for each waiting request that lacks tokens, one
write for each node that is backed up.

Scheduler's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.types import Handle, Operation, Req, Scheduler, Tree

logger = logging.getLogger(__name__)


def of(tree: Tree, handle: Handle) -> Operation | None:
    """This request's read that is in flight, or None."""
    operation: Operation | None = getattr(tree.ongoing_prefetch.get(handle), "operation", None)
    return operation


def asked(tree: Tree, handle: Handle) -> bool:
    """Whether a read of this request is in flight."""
    return handle in tree.ongoing_prefetch


def answer_is_due(tree: Tree, handle: Handle) -> bool:
    """Whether storage was queried and has not answered yet how much it has. It answers from memory,
    within a step or two.
    """
    operation = of(tree, handle)
    return (
        operation is not None and operation.host_indices is None and not operation.is_terminated()
    )


def worth_asking(tree: Tree, tokens: int) -> bool:
    """Whether SGLang queries storage for so few tokens."""
    return tokens >= tree.prefetch_threshold


def limited(tree: Tree) -> bool:
    """Whether SGLang is already reading as many tokens as it may at a time."""
    return tree.cache_controller.prefetch_rate_limited()


def ask(scheduler: Scheduler, tree: Tree, req: Req) -> bool:
    """Makes SGLang query storage again; returns whether it does."""
    scheduler._prefetch_kvcache(req)
    return asked(tree, req.cache_request_handle)


def stop(tree: Tree, operation: Operation) -> None:
    """Ends SGLang's read of a prefix: pages read so far go into the tree, and the rest does not
    count as a loss in SGLang's metrics.
    """
    controller = tree.cache_controller
    controller.terminate_prefetch(operation)
    tree.discard_storage_prefetch_accounting(operation.handle)
    backend = store_of(controller)
    if backend is not None:
        backend.stop_reading(operation.hash_value)


def count_loaded(tree: Tree, host_tokens: int, storage_tokens: int) -> None:
    """Adds tokens that a restoration attached, or lookahead read, to SGLang's own counters:
    `sglang:load_back_tokens_total` from host memory, and `sglang:prefetched_tokens_total` from
    storage. Does nothing if SGLang does not count, or counts in another way.
    """
    try:
        device: Any = getattr(tree, "metrics_collector", None)
        if device is not None and host_tokens:
            device.increment_load_back_num_tokens(num_tokens=host_tokens, pool="kv")
        storage: Any = getattr(tree, "storage_metrics_collector", None)
        if storage is not None and storage_tokens:
            storage.log_prefetched_tokens(storage_tokens)
    except (AttributeError, TypeError) as error:
        logger.debug("kvtier: loaded tokens are not in SGLang's metrics: %s", error)


def count_copied(tree: Tree, nbytes: int, seconds: float) -> None:
    """Adds bytes that a restoration copied from host memory to the device, and the duration in
    seconds, to SGLang's own `sglang:load_back_bytes_total` and `sglang:load_back_duration_seconds`;
    for this rank only, as SGLang's are. Does nothing if SGLang does not count, or counts in another
    way.
    """
    try:
        device: Any = getattr(tree, "metrics_collector", None)
        if device is not None:
            device.increment_load_back_num_bytes(nbytes)
            device.observe_load_back_duration(seconds)
    except (AttributeError, TypeError) as error:
        logger.debug("kvtier: copied bytes are not in SGLang's metrics: %s", error)


def watch_writes(tree: Tree, begun: Callable[[int, Sequence[str]], None]) -> Callable[[], None]:
    """Calls `begun` with the number of each write of a node that starts, and the names of its
    pages; returns a function that ends this. The controller has no callbacks, so its method is
    replaced.
    """
    controller = tree.cache_controller
    write = controller.write_storage

    def on_write(
        host_indices: Any, token_ids: Any, hash_value: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        operation = write(host_indices, token_ids, hash_value, *args, **kwargs)
        if hash_value:
            begun(operation, hash_value)
        return operation

    def end() -> None:
        controller.write_storage = write

    controller.write_storage = on_write
    return end


def reads_waiting(tree: Tree) -> int:
    """Reads for waiting requests that are in flight."""
    return len(tree.ongoing_prefetch)


def writes_waiting(tree: Tree) -> int:
    """Writes of nodes that are in flight. Any thread."""
    return len(tree.ongoing_backup)


def written(tree: Tree, operation: int) -> bool:
    """Whether a write has ended."""
    return operation not in tree.ongoing_backup
