"""All hooks of this package on symbols of SGLang, as data: they are registered, verified and
documented from this table.

The hooks of the CPU reference platform (`cpu/hicache.py`) are not included. SGLang applies ours at
the start of each process; a worker that finds itself on a CPU applies those at once.

    python -m sgl_kvtier.runtime.sglang.hooks     # prints the table in patches/README.md
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sgl_kvtier.runtime.sglang.seams import load_manifest

logger = logging.getLogger(__name__)


class Where(Enum):
    """Processes in which a hook is registered: others need not import its target's module."""

    EVERY = "every"
    SCHEDULER = "scheduler"
    HTTP = "HTTP server"


@dataclass(frozen=True)
class Hook:
    """One hook. `kind` is SGLang's hook type (after, around, replace); `function` is `module:name`
    inside sgl_kvtier.runtime. The function accepts and passes on whatever SGLang passes, since it
    is applied even if its feature is off.
    """

    feature: str
    target: str
    kind: str
    function: str
    where: Where
    why: str

    def load(self) -> Callable[..., Any]:
        """Imports and returns the function. ImportError or AttributeError if there is none."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(f"sgl_kvtier.runtime.{module}"), name)


_ROOT = "sglang.srt."
_CONTROLLER = _ROOT + "managers.cache_controller.HiCacheController."
_HYBRID = _ROOT + "mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
_SCHEDULER = _ROOT + "managers.scheduler.Scheduler."
_PARTS = _ROOT + "managers.scheduler_components."
_UPDATER = _PARTS + "weight_updater.SchedulerWeightUpdaterManager."
_STATE = _PARTS + "internal_state.SchedulerInternalStateController."
_OLD_WEIGHTS = "pages of old weights are left behind"

_EVERYWHERE = (
    (
        "arguments",
        _ROOT + "server_args.ServerArgs.add_cli_args",
        "after",
        "plugin:widen_command_line",
        "`kvtier` among the choices of `--hicache-storage-backend`",
    ),
    (
        "arguments",
        _ROOT + "arg_groups.hicache_hook.handle_hicache",
        "after",
        "plugin:check_arguments",
        "settings and seams are checked before a model is loaded",
    ),
    (
        "arguments",
        _ROOT + "arg_groups.pipeline._page_size_default",
        "after",
        "plugin:choose_page_size",
        "pages of 64 tokens on a GPU where `--page-size` is omitted: with SGLang's one token "
        "nothing is restored",
    ),
)
_IN_SCHEDULERS = (
    (
        "storage",
        _ROOT + "mem_cache.storage.backend_factory.StorageBackendFactory._create_builtin_backend",
        "around",
        "backend.hooks:create_backend",
        "its list of names is closed",
    ),
    (
        "zero-copy",
        _CONTROLLER + "attach_storage_backend",
        "after",
        "backend.hooks:use_zero_copy",
        "zero copy for page-contiguous layouts",
    ),
    (
        "zero-copy",
        _CONTROLLER + "_stop_storage_threads",
        "around",
        "backend.hooks:cut_reads_short",
        "reads in flight are cut short; with several ranks they come to rest first",
    ),
    (
        "zero-copy",
        _CONTROLLER + "_page_transfer",
        "around",
        "backend.hooks:read_ahead",
        "the next pages of a prefix are in flight while SGLang waits for 128 of them",
    ),
    (
        "zero-copy",
        _CONTROLLER + "_reduce_prefetch_ack",
        "around",
        "backend.hooks:note_reduction",
        "notes that a reduction of the ranks is in flight",
    ),
    (
        "zero-copy",
        _HYBRID + "_reduce_prefetch_ack",
        "around",
        "backend.hooks:note_reduction",
        "the same with side pools, which add a reduction",
    ),
    (
        "zero-copy",
        _HYBRID + "_page_transfer",
        "around",
        "backend.hooks:note_transfer",
        "notes that states of side pools are read after the KV pages",
    ),
    (
        "tenants",
        _ROOT + "mem_cache.unified_radix_cache.UnifiedRadixCache.write_backup_storage",
        "around",
        "backend.hooks:note_tenant",
        "whose the pages of a node are that will be written",
    ),
    (
        "tenants",
        _HYBRID + "_page_backup",
        "around",
        "backend.hooks:write_for_tenant",
        "they are written as that tenant's",
    ),
    (
        "weights",
        _UPDATER + "record_weight_version_after_update",
        "after",
        "backend.hooks:leave_old_weights",
        _OLD_WEIGHTS,
    ),
    (
        "weights",
        _UPDATER + "begin_weight_update",
        "after",
        "backend.hooks:leave_old_weights",
        _OLD_WEIGHTS,
    ),
    (
        "weights",
        _UPDATER + "end_weight_update",
        "after",
        "backend.hooks:leave_old_weights",
        _OLD_WEIGHTS,
    ),
    (
        "weights",
        _UPDATER + "flush_cache_after_weight_update",
        "after",
        "backend.hooks:leave_old_weights",
        _OLD_WEIGHTS,
    ),
    (
        "weights",
        _UPDATER + "update_weights_from_disk",
        "around",
        "backend.hooks:leave_weights_in_doubt",
        "an update that fails half-way leaves neither the old weights nor the new ones",
    ),
    (
        "weights",
        _UPDATER + "update_weights_from_ipc",
        "around",
        "backend.hooks:leave_weights_in_doubt",
        "an update that fails half-way leaves neither the old weights nor the new ones",
    ),
    (
        "weights",
        _UPDATER + "release_memory_occupation",
        "after",
        "backend.hooks:leave_lost_weights",
        "weights whose memory was given back without a copy are lost",
    ),
    (
        "weights",
        _UPDATER + "check_weights",
        "after",
        "backend.hooks:leave_random_weights",
        "a check may have replaced the weights by random ones",
    ),
    (
        "restore",
        _ROOT + "mem_cache.registry.create_unified_radix_cache",
        "around",
        "scheduler.hooks:build_tree",
        "our radix cache, where a prefix can be restored or the server looks ahead",
    ),
    (
        "restore",
        _SCHEDULER + "_process_hicache_events",
        "after",
        "scheduler.hooks:run_tick",
        "the tick: what landed is agreed on, the planner is asked, its plan carried out",
    ),
    (
        "restore",
        _SCHEDULER + "get_prefill_adder_class",
        "after",
        "scheduler.hooks:adder_class",
        "our prefill adder",
    ),
    (
        "restore",
        _ROOT + "managers.schedule_policy.SchedulePolicy.calc_priority",
        "after",
        "scheduler.hooks:order_queue",
        "waiting requests run in the planner's order, where SGLang's is that of arrival",
    ),
    (
        "restore",
        _SCHEDULER + "_get_new_batch_prefill_raw",
        "after",
        "scheduler.hooks:repair_parked",
        "a restoring request that waits for loads keeps its place",
    ),
    (
        "restore",
        _SCHEDULER + "get_next_batch_to_run",
        "after",
        "scheduler.hooks:after_pass",
        "what has to be put right once a batch was chosen",
    ),
    (
        "restore",
        _SCHEDULER + "_prefetch_after_device_hit_loss",
        "around",
        "scheduler.hooks:read_first",
        "stored prefixes are read in the order of the queue",
    ),
    (
        "restore",
        _SCHEDULER + "run_batch",
        "around",
        "scheduler.hooks:time_batch",
        "how long chunks take",
    ),
    (
        "restore",
        _SCHEDULER + "process_batch_result",
        "after",
        "scheduler.hooks:time_result",
        "how long chunks take",
    ),
    (
        "restore",
        _SCHEDULER + "is_fully_idle",
        "around",
        "scheduler.hooks:is_fully_idle",
        "not idle while a load is in flight",
    ),
    (
        "restore",
        _PARTS + "invariant_checker.SchedulerInvariantChecker._get_total_uncached_sizes",
        "after",
        "scheduler.hooks:count_private",
        "private slots of restorations are known to SGLang's memory checks",
    ),
    (
        "control",
        _STATE + "set_internal_state",
        "around",
        "control:set_internal_state",
        "settings of a running server",
    ),
    (
        "hints",
        _STATE + "get_internal_state",
        "around",
        "hints.scheduler:get_internal_state",
        "clients' hints",
    ),
)
_IN_HTTP = (
    (
        "hints",
        _ROOT + "managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators",
        "after",
        "hints.route:add_route",
        "the route `POST /kvtier/hint`",
    ),
)

HOOKS = tuple(
    Hook(feature, target, kind, function, where, why)
    for where, rows in (
        (Where.EVERY, _EVERYWHERE),
        (Where.SCHEDULER, _IN_SCHEDULERS),
        (Where.HTTP, _IN_HTTP),
    )
    for feature, target, kind, function, why in rows
)


def targets(*features: str) -> tuple[str, ...]:
    """The symbols that these features hook, in the table's order: for `seams.require_hooks`."""
    return tuple(hook.target for hook in HOOKS if hook.feature in features)


def register(*places: Where) -> None:
    """Registers the hooks of these kinds of processes; SGLang applies them afterwards. A hook whose
    target this SGLang lacks is skipped: its feature is off (`features.py`).
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in HOOKS:
        if hook.where not in places:
            continue
        try:
            pkgutil.resolve_name(hook.target)
            function = hook.load()
        except (ImportError, AttributeError) as error:
            logger.debug("kvtier: no hook on %s: %s", hook.target, error)
        else:
            HookRegistry.register(hook.target, function, HookType[hook.kind.upper()])


def table() -> str:
    """The hooks as a Markdown table, each with its port in the manifest."""
    ports = {seam.symbol: seam.port for seam in load_manifest()}
    rows = (
        f"| `{h.target.removeprefix(_ROOT)}` | {ports[h.target]} | {h.kind} | {h.why} | "
        f"{h.where.value} |"
        for h in HOOKS
    )
    head = ("| hook on | port | kind | what for | process |", "|---|---|---|---|---|")
    return "\n".join((*head, *rows))


if __name__ == "__main__":
    print(table())
