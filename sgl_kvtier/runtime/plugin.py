"""The code that SGLang runs in each of its processes when this package is installed (entry point
group sglang.srt.plugins).

The hooks are those of the table in `sglang/hooks.py`. SGLang swallows errors here, so nothing is
decided here: `storage.KVTierStorage` and `settings.check_server` verify before serving that the
hooks are applied.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import Any

from sgl_kvtier.launch import GPU_PAGE
from sgl_kvtier.runtime import settings
from sgl_kvtier.runtime.settings import BACKEND
from sgl_kvtier.runtime.sglang import hooks
from sgl_kvtier.runtime.sglang.hooks import Where

logger = logging.getLogger(__name__)


def register() -> None:
    """Registers our hooks, which SGLang applies right after. Runs once per process, before
    arguments are parsed, with any release of SGLang.
    """
    _know_attention_backend()
    hooks.register(Where.EVERY)
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

        StorageBackendFactory.register_backend(
            BACKEND, "sgl_kvtier.runtime.backend.storage", "KVTierStorage"
        )
        hooks.register(Where.SCHEDULER)
    if _may_serve_http():
        hooks.register(Where.HTTP)


def _may_serve_http() -> bool:
    """False in processes that only schedule or detokenize, which need not import the route."""
    if "sglang.srt.entrypoints.engine" in sys.modules:
        return True
    workers = ("sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager")
    return not any(module in sys.modules for module in workers)


def _know_attention_backend() -> None:
    from sgl_kvtier.runtime.cpu.platform import ATTENTION, activate

    if activate() is None:
        return
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )

    if ATTENTION not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION])


def widen_command_line(
    result: None, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any
) -> None:
    """Hook after SGLang declared its options: adds our name to the choices of
    --hicache-storage-backend, which also turns the hierarchical cache on. With `KVTIER=1` in the
    environment, a server that names no backend uses ours, if it can have the hierarchical cache.
    """
    del result, args, kwargs
    for action in parser._actions:
        if (
            action.dest == "hicache_storage_backend"
            and action.choices is not None
            and BACKEND not in action.choices
        ):
            action.choices = [*action.choices, BACKEND]
            parser.parse_known_args = _with_cache(parser.parse_known_args)  # type: ignore[method-assign]


def _with_cache(parse: Callable[..., Any]) -> Callable[..., Any]:
    """`parse_known_args` of SGLang's parser, whose result also has what our backend needs."""

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        found, rest = parse(*args, **kwargs)
        if settings.wanted_by_environment() and found.hicache_storage_backend is None:
            if found.disable_radix_cache or found.disaggregation_mode != "null":
                logger.warning(
                    "kvtier: KVTIER has no effect with --disable-radix-cache or "
                    "--disaggregation-mode"
                )
            else:
                found.hicache_storage_backend = BACKEND
        if found.hicache_storage_backend == BACKEND:
            found.enable_hierarchical_cache = True
        return found, rest

    return parse_known_args


def check_arguments(result: None, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after SGLang resolved the cache's arguments. Stops the launch on a wrong setting, on an
    SGLang that lacks what storage or a setting needs, and on a host that cannot compile SGLang's
    page hash. Logs a line for everything else that this SGLang lacks.
    """
    del result, args, kwargs
    from sglang.srt.arg_groups.model_override_base import resolving_view

    from sgl_kvtier.runtime.sglang import features, page_hash

    view = resolving_view(server_args)
    if settings.uses_backend(view):
        features.require("storage")
        features.require(*settings.named_features(settings.check_server(view).policy))
        logger.info("kvtier: %s", settings.where_pages_go(view))
        said = [features.untried(), *map(features.line, _SAID_AT_LAUNCH)]
        for line in filter(None, said):
            logger.warning("kvtier: %s", line)
        page_hash.load()


_SAID_AT_LAUNCH = ("arguments", "zero-copy", "hints", "weights", "control")
"""Features that the launcher reports if they are off. The scheduler reports restoring and
lookahead, and the platform itself.
"""


def choose_page_size(
    result: dict[str, Any], view: Any, *args: Any, **kwargs: Any
) -> dict[str, Any] | None:
    """Hook after SGLang chose a page size because the user had not: replaces one token by a size
    that can be stored and restored.
    """
    del args, kwargs

    if result.get("page_size") != 1 or not settings.wants_larger_pages(view):
        return None
    logger.info(
        "kvtier: pages of %d tokens, for no --page-size was given and with SGLang's default of one "
        "token nothing is restored. --page-size 1 keeps that",
        GPU_PAGE,
    )
    return {**result, "page_size": GPU_PAGE}
