"""Values that no setting should have, and every setting there is, by the settings table itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sgl_kvtier.config import KVTierConfig

HOSTILE: dict[str, Any] = {
    "inf": math.inf,
    "nan": math.nan,
    "-inf": -math.inf,
    "-1": -1,
    "1e308": 1e308,
    "10**400": 10**400,
    "empty text": "",
    "list": [],
    "object": {},
    "true": True,
    "null": None,
    "10 MB text": "9" * 10_000_000,
}

SETTINGS: dict[str, dataclasses.Field[Any]] = {
    f"{section.name}.{setting.name}": setting
    for section in dataclasses.fields(KVTierConfig)
    for setting in dataclasses.fields(section.default_factory)  # type: ignore[arg-type, misc]
}


def allowed(setting: dataclasses.Field[Any], value: Any) -> bool:
    """Whether one of these values is right for a setting after all."""
    if isinstance(setting.default, bool):
        return value is True
    if isinstance(setting.default, str):
        return value == "" and not setting.metadata["choices"]
    return type(value) is int and value == setting.metadata["low"] == -1
