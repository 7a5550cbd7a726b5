"""What SGLang runs in each of its processes when this package is installed (entry point group sglang.srt.plugins).

It widens the command line, and in scheduler processes it hooks the storage factory. SGLang swallows what goes wrong here,
so nothing is decided here: `storage.KVTierStorage` and `settings.check_server` verify before serving that it worked.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import Any

from sgl_kvtier.runtime import control
from sgl_kvtier.runtime.backend import quiet_stop
from sgl_kvtier.runtime.backend.attached import store_of
from sgl_kvtier.runtime.hints import route as hints_route
from sgl_kvtier.runtime.hints import scheduler as hints
from sgl_kvtier.runtime.scheduler import hooks as restore_hooks
from sgl_kvtier.runtime.settings import BACKEND

logger = logging.getLogger(__name__)

FACTORY = "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory._create_builtin_backend"
ATTACH = "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend"
STOP = "sglang.srt.managers.cache_controller.HiCacheController._stop_storage_threads"
PREFETCH = "sglang.srt.managers.cache_controller.HiCacheController._page_transfer"
REDUCE = "sglang.srt.managers.cache_controller.HiCacheController._reduce_prefetch_ack"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
WEIGHTS = (
    _UPDATER + "record_weight_version_after_update",
    _UPDATER + "begin_weight_update",
    _UPDATER + "end_weight_update",
    _UPDATER + "flush_cache_after_weight_update",
)
COMMAND_LINE = "sglang.srt.server_args.ServerArgs.add_cli_args"
ARGUMENTS = "sglang.srt.arg_groups.hicache_hook.handle_hicache"


def register() -> None:
    """Registers our hooks; SGLang applies them right after. Runs once per process, before arguments are parsed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _know_attention_backend()
    HookRegistry.register(COMMAND_LINE, _widen_command_line, HookType.AFTER)
    HookRegistry.register(ARGUMENTS, _check_arguments, HookType.AFTER)
    if "sglang.srt.managers.scheduler" in sys.modules:  # other processes need not import what these targets import
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

        StorageBackendFactory.register_backend(BACKEND, "sgl_kvtier.runtime.backend.storage", "KVTierStorage")
        HookRegistry.register(FACTORY, _create_backend, HookType.AROUND)
        HookRegistry.register(ATTACH, _use_zero_copy, HookType.AFTER)
        HookRegistry.register(STOP, _cut_reads_short, HookType.AROUND)
        HookRegistry.register(PREFETCH, _read_ahead, HookType.AROUND)
        HookRegistry.register(REDUCE, _note_reduction, HookType.AROUND)
        for target in WEIGHTS:
            HookRegistry.register(target, _leave_old_weights, HookType.AFTER)
        restore_hooks.register()
        HookRegistry.register(control.TARGET, control.set_internal_state, HookType.AROUND)
        HookRegistry.register(hints.TARGET, hints.get_internal_state, HookType.AROUND)
    if _may_serve_http():
        HookRegistry.register(hints_route.TARGET, hints_route.add_route, HookType.AFTER)


def _may_serve_http() -> bool:
    """Not in processes that only schedule or detokenize: they need not import what the route hangs on."""
    if "sglang.srt.entrypoints.engine" in sys.modules:
        return True
    workers = ("sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager")
    return not any(module in sys.modules for module in workers)


def _know_attention_backend() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    from sgl_kvtier.runtime.cpu.platform import ATTENTION, activate

    if activate() is not None and ATTENTION not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION])


def _widen_command_line(result: None, parser: argparse.ArgumentParser) -> None:
    """After SGLang declared its options: our name is among the choices of --hicache-storage-backend."""
    del result
    for action in parser._actions:
        if action.dest == "hicache_storage_backend" and action.choices is not None and BACKEND not in action.choices:
            action.choices = [*action.choices, BACKEND]


def _check_arguments(result: None, server_args: Any) -> None:
    """After SGLang resolved the cache's arguments: a wrong setting or a changed SGLang stops the launch here."""
    del result
    from sglang.srt.arg_groups.model_override_base import resolving_view

    from sgl_kvtier.runtime import settings
    from sgl_kvtier.runtime.sglang import seams

    args = resolving_view(server_args)
    if settings.uses_backend(args):
        seams.require("storage", "hints")
        settings.check_server(args)


def _create_backend(
    original: Callable[..., Any], cls: Any, name: str, backend_class: Any, storage_config: Any, host_pool: Any
) -> Any:
    if name == BACKEND:
        return backend_class(storage_config, {})
    return original(cls, name, backend_class, storage_config, host_pool)


def _use_zero_copy(result: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    """Hands pages to our backend by address where a page lies in few pieces. No operation is queued yet at this point."""
    del result, args, kwargs
    if store_of(controller) is None:
        return
    from sgl_kvtier.runtime.backend.host_pages import is_page_contiguous

    if is_page_contiguous(controller.storage_host_pool):
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy


def _cut_reads_short(original: Callable[..., Any], controller: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the end of HiCache's storage threads, at a flush or a detach. SGLang waits 10 s for each of them and gives the
    server up after that, so neither a long read of pages that nobody wants any more nor another rank may keep one."""
    backend = store_of(controller)
    if backend is None:
        return original(controller, *args, **kwargs)
    with backend.reads_cut_short():
        if not quiet_stop.wait(controller):
            logger.warning("kvtier: HiCache's storage threads are stopped with reads under way")
        return original(controller, *args, **kwargs)


def _note_reduction(original: Callable[..., Any], controller: Any, ack: Any) -> Any:
    """Around the reduction by which ranks agree on how far a read from storage has come."""
    with quiet_stop.busy(controller, "reducing"):
        return original(controller, ack)


def _read_ahead(original: Callable[..., Any], controller: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's read of one prefix from storage, which asks for 128 pages at a time: the next ones are under way already.
    SGLang reuses host slots that were not filled only after this has returned."""
    backend = store_of(controller)
    if backend is None:
        return original(controller, operation, *args, **kwargs)
    with quiet_stop.busy(controller, "reading"), backend.reading_ahead(operation.hash_value, operation.host_indices):
        return original(controller, operation, *args, **kwargs)


def _leave_old_weights(result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    """After weights changed at run time, or may be changed from outside from now on: pages written so far belong to other weights
    and are not served any more. Where several of these hooks see one change, the first does it."""
    del args, kwargs
    if getattr(result, "success", True) is False:
        return  # a call that was refused
    from sgl_kvtier.runtime.backend import identity

    identity.weights_changed()
    tree = getattr(updater.scheduler, "tree_cache", None)
    backend = store_of(getattr(tree, "cache_controller", None))
    if backend is not None:
        backend.leave_identity()
