"""sgl_kvtier: a KV-cache tier for SGLang that keeps pages on SSD and brings them back in time."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = [
    "EngineShape",
    "KVTierConfig",
    "KVTierError",
    "Link",
    "PageKey",
    "Planner",
    "PolicyConfig",
    "PutOutcome",
    "ReadOutcome",
    "Span",
    "Store",
    "Tier",
    "load_config",
    "messages",
    "open_store",
    "page_key",
]

_FROM = {
    "config": ("KVTierConfig", "PolicyConfig", "load_config"),
    "errors": ("KVTierError",),
    "policy.messages": ("messages",),
    "policy.planner": ("Planner",),
    "policy.shape": ("EngineShape",),
    "store.base": ("PutOutcome", "ReadOutcome"),
    "store.simple": ("Store", "open_store", "page_key"),
    "types": ("Link", "PageKey", "Span", "Tier"),
}
_WHERE = {name: module for module, names in _FROM.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports public names when they are first used, so that the command line starts at once."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = f"{__name__}.{_WHERE[name]}"
    if name == "messages":
        value: Any = importlib.import_module(where)
    else:
        value = getattr(importlib.import_module(where), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
