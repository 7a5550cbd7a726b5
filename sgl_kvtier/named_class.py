"""Classes that kvtier.json names as package.module:Class: imported, checked, and made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from sgl_kvtier.errors import ConfigError

_MOST_SAID = 200
"""Characters of another module's error that are repeated."""


def load_class(key: str, name: str, unfit: Callable[[Any], str | None]) -> Callable[[], Any]:
    """The class that the setting `key` names, which can be made without arguments. `unfit` says
    what one made of it lacks, or None.

    Raises ConfigError with one line that names the setting. Runs the module's code: for the thread
    that starts a server or a tool.
    """
    module, _, wanted = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), wanted, None)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise _refused(
            key,
            name,
            f"{module} cannot be imported: {_said(error)}. Install it where the server runs, or "
            "put its folder into PYTHONPATH",
        ) from error
    if not isinstance(found, type):
        raise _refused(key, name, f"{module} has no class {wanted}")
    try:
        lacking = unfit(found())
    except Exception as error:  # the same of the class
        raise _refused(key, name, f"it cannot be made: {_said(error)}") from error
    if lacking is not None:
        raise _refused(key, name, lacking)
    return found


def lacking_method(made: object, asked: Mapping[str, int], of: type) -> str | None:
    """Which method an object lacks, or None. `asked` are their names, with the number of arguments
    each is given; `of` is the class that has them.
    """
    for name, count in asked.items():
        try:
            signature(getattr(made, name)).bind(*[0] * count)
        except (AttributeError, TypeError, ValueError):
            return (
                f"{type(made).__name__} has no method {name} that takes {count} "
                f"argument{'s' * (count != 1)}, as {of.__module__}.{of.__qualname__} has"
            )
    return None


def _refused(key: str, name: str, why: str) -> ConfigError:
    return ConfigError(f'{key} = "{name}": {why}')


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MOST_SAID]}"
