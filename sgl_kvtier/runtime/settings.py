"""The settings a server was started with, checked before any model is loaded."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_kvtier.config import KVTierConfig, PolicyConfig, parse_config, parse_setting, read_config
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.launch import GPU_PAGE
from sgl_kvtier.outside import MOST_SETTINGS_BYTES, shown
from sgl_kvtier.policy.pages.eviction import eviction_of
from sgl_kvtier.policy.rules import rules_of
from sgl_kvtier.sizes import format_bytes

logger = logging.getLogger(__name__)

BACKEND = "kvtier"
"""The name in --hicache-storage-backend."""

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
PATH_VARIABLE = "KVTIER_STORE_PATH"
CAPACITY_VARIABLE = "KVTIER_CAPACITY"
"""Environment variables for `store.path` and `store.capacity_bytes`, for settings without them."""

FIXED = tuple(
    f.name
    for f in dataclasses.fields(PolicyConfig)
    if f.name.startswith(("prefetch", "session", "hint"))
    or f.name in ("rules", "eviction", "map_pages", "decision_log", "proof")
)
"""Settings of the policy section that the planner or a file is constructed with; a running server
refuses to change them.
"""

_HOST_ADDED = frozenset({"file_storage_path"})

_MOST_SAID = 500
"""Most characters of a parser's own error that are repeated."""


def of_lab(module: str, named: str) -> Any:
    """The laboratory's module for settings of the section `lab`. It is imported by name, because
    the product does not depend on the laboratory. Raises ConfigError if it is not installed.
    """
    try:
        return importlib.import_module(f"sgl_kvtier.lab.{module}")
    except ImportError as error:
        raise ConfigError(
            f"{named}: the laboratory is not installed here ({error}). Omit the section lab"
        ) from error


def from_extra_config(extra_config: dict[str, Any] | None) -> KVTierConfig:
    """The settings in SGLang's decoded --hicache-storage-backend-extra-config; the classes they
    name are imported. Raises ConfigError.
    """
    given = with_environment(
        {k: v for k, v in (extra_config or {}).items() if k not in _HOST_ADDED}
    )
    config = parse_config(given)
    path = given["store"]["path"]
    if not path.startswith(("/", "~")):
        _say_relative(path, config.store.path)
    rules_of(config.policy.rules)
    eviction_of(config.policy.eviction)
    return config


def of_file(path: str | Path) -> KVTierConfig:
    """The settings of a server with this kvtier.json. Raises ConfigError if it is missing or
    wrong.
    """
    return parse_config(with_environment(read_config(path)))


def with_environment(given: Any) -> Any:
    """Decoded settings, with folder and capacity from the environment if they are missing."""
    if not isinstance(given, dict) or not isinstance(given.get("store"), dict | None):
        return given  # the parser will report what is wrong
    said = dict(given.get("store") or {})
    if said.get("path") in ("", None):
        said.pop("path", None)
    return {**given, "store": {**store_of_environment(), **said}}


def changed(config: PolicyConfig, values: Mapping[str, Any]) -> PolicyConfig:
    """`config` with these values, by name, if a running server may take them. Raises ConfigError on
    an unknown name, a wrong value, or a setting that is fixed at start.
    """
    found = {name: parse_setting("policy", name, value) for name, value in values.items()}
    fixed = [f"policy.{name}" for name in values if name in FIXED]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: fixed when the server starts. Change it in kvtier.json and "
            "restart the server"
        )
    return dataclasses.replace(config, **found)


def store_of_environment() -> dict[str, str]:
    """Folder and capacity of the store for settings without them: from the environment, else this
    user's cache folder.
    """
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if not caches.startswith("/"):  # its specification ignores relative paths
        caches = "~/.cache"
    found = {"path": os.environ.get(PATH_VARIABLE) or f"{caches}/kvtier/pages"}
    capacity = os.environ.get(CAPACITY_VARIABLE)
    return found | ({"capacity_bytes": capacity} if capacity else {})


def wanted_by_environment() -> bool:
    """Whether `KVTIER` turns this backend on. Raises ConfigError for an invalid value."""
    value = os.environ.get("KVTIER", "").strip().lower()
    if value not in ("", *_ON, *_OFF):
        raise ConfigError(
            f"KVTIER = {shown(value)}: 1 turns the kvtier backend on, 0 leaves it off"
        )
    return value in _ON


def where_pages_go(args: Any) -> str:
    """A sentence for the log of a server with this resolved configuration."""
    config = of_server(args)
    return (
        "--enable-hierarchical-cache and --hicache-storage-backend "
        f"{args.hicache_storage_backend} are in force; "
        f"pages of {args.page_size} tokens are stored in {config.store.path}, at most "
        f"{format_bytes(config.store.capacity_bytes)} (store.path, store.capacity_bytes, or "
        f"{PATH_VARIABLE} and {CAPACITY_VARIABLE})"
    )


@functools.cache
def _say_relative(path: str, used: str) -> None:
    logger.warning("kvtier: store.path = %s begins in the working directory: %s", shown(path), used)


def check_server(args: Any) -> KVTierConfig:
    """The settings in a resolved SGLang configuration that uses our backend. Raises ConfigError if
    it cannot work.
    """
    if not args.enable_hierarchical_cache:
        raise ConfigError("--hicache-storage-backend kvtier needs --enable-hierarchical-cache")
    return of_server(args)


def of_server(args: Any) -> KVTierConfig:
    """The settings in a resolved SGLang configuration that uses our backend. Raises ConfigError."""
    return from_extra_config(_extra_config(args))


def _extra_config(args: Any) -> dict[str, Any]:
    """SGLang's decoded storage-backend-extra-config, without its own keys. Raises ConfigError."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    given = args.hicache_storage_backend_extra_config
    # there are three formats, each with its own errors, none of which names the flag
    try:
        nbytes = (
            Path(given[1:]).stat().st_size if (given or "").startswith("@") else len(given or "")
        )
        if nbytes > MOST_SETTINGS_BYTES:
            raise ValueError(f"it has {nbytes} bytes, at most {MOST_SETTINGS_BYTES} are read")
        return dict(HybridCacheController.parse_storage_backend_extra_config(given)[0] or {})
    except Exception as error:
        said = str(error) if len(str(error)) < _MOST_SAID else type(error).__name__
        raise ConfigError(
            f"--hicache-storage-backend-extra-config {shown(given)}: {said}. "
            "Give JSON text of an object, or @ and the path of a .json, .yaml or .toml file"
        ) from error


def uses_backend(args: Any) -> bool:
    """Whether a resolved configuration names our backend, directly or in the dynamic form."""
    if args.hicache_storage_backend != "dynamic":
        return bool(args.hicache_storage_backend == BACKEND)
    try:
        return str(_extra_config(args).get("module_path", "")).startswith("sgl_kvtier.")
    except ConfigError:
        return False  # SGLang itself will report what is wrong


def wants_larger_pages(args: Any) -> bool:
    """Whether a server without --page-size should use pages of GPU_PAGE tokens.

    Not if restoring is refused anyway and larger pages might be refused as well: drafts with
    several branches and states of linear layers may need pages of one token. Prefill and decode
    servers must agree on a size, and a chunk must be whole pages.
    """
    return (
        args.device == "cuda"
        and args.enable_hierarchical_cache
        and uses_backend(args)
        and args.speculative_algorithm is None
        and not args.uses_mamba_radix_cache
        and args.disaggregation_mode == "null"
        and max(0, args.chunked_prefill_size or 0) % GPU_PAGE == 0
    )


def named_features(policy: PolicyConfig) -> tuple[str, ...]:
    """The features (`sglang/features.py`) that these settings request by name. A server that lacks
    one of them is refused, while with auto the feature is off.
    """
    named = {"restore": policy.restore not in ("auto", "off"), "lookahead": looks_ahead(policy)}
    return tuple(name for name, asked in named.items() if asked)


def looks_ahead(policy: PolicyConfig) -> bool:
    """Whether these settings track every page: to prefetch it, or to choose eviction victims."""
    return policy.prefetch == "on" or policy.eviction not in ("auto", "lru")
