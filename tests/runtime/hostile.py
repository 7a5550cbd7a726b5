"""Values that no setting should have, and every setting there is, by the settings table itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sgl_kvtier.config import FaultConfig, PolicyConfig, RemoteConfig, StoreConfig, ThrottleConfig

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

_SECTIONS = {
    "store": StoreConfig,
    "remote": RemoteConfig,
    "policy": PolicyConfig,
    "lab.throttle": ThrottleConfig,
    "lab.remote_throttle": ThrottleConfig,
    "lab.faults": FaultConfig,
}
SETTINGS: dict[str, dataclasses.Field[Any]] = {
    f"{section}.{setting.name}": setting
    for section, settings in _SECTIONS.items()
    for setting in dataclasses.fields(settings)
}


def file_with(key: str, value: Any) -> dict[str, Any]:
    """A kvtier.json in which one setting has this value."""
    data = value
    for name in reversed(key.split(".")):
        data = {name: data}
    return data


def allowed(setting: dataclasses.Field[Any], value: Any) -> bool:
    """Whether one of these values is right for a setting after all."""
    if isinstance(setting.default, bool):
        return value is True
    if value is None:
        return setting.default == ""
    if value is True and "on" in setting.metadata["choices"]:
        return True
    if isinstance(setting.default, str):
        return bool(value == "" and (setting.default == "" or not setting.metadata["choices"]))
    return type(value) is int and value == setting.metadata["low"] == -1
