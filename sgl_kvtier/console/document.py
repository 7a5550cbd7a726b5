"""Results as one JSON object that says where it came from, and files that are written completely or
not at all.

docs/manual/json.md says what all results have in common, and `kvtier schema` lists the keys of
each. NaN and infinities, which JSON does not have, are written as null.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy

from sgl_kvtier.console.environment import environment
from sgl_kvtier.errors import KVTierError

STDOUT = "-"
"""The target that means standard output."""

ENVELOPE_KEYS = ("schema", "command", "environment")


def envelope(schema: str, command: list[str], results: dict[str, Any]) -> dict[str, Any]:
    """The object that each `--json` writes: `schema`, `command`, `environment`, then the keys of
    the results. Raises ValueError if the results use one of the envelope's keys.
    """
    taken = [key for key in ENVELOPE_KEYS if key in results]
    if taken:
        raise ValueError(f"results may not have the envelope's keys: {', '.join(taken)}")
    # The program's folder is omitted, since it may tell about the machine and its users.
    words = [PurePath(word).name for word in command[:1]] + list(command[1:])
    return {"schema": schema, "command": words, "environment": environment(), **results}


def plain(value: object) -> object:
    """The value in JSON's own types: dataclasses and mappings as objects, numpy and paths
    converted, NaN as None. Raises TypeError for a type without a JSON form.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, numpy.generic):
        return plain(value.item())
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, numpy.ndarray):
        return plain(value.tolist())
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    raise TypeError(f"no JSON form for a {type(value).__name__}: {value!r}")


def to_json(result: dict[str, Any]) -> str:
    """The result as indented JSON text with a final newline, in ASCII, which any pipe carries."""
    return json.dumps(plain(result), indent=2, allow_nan=False) + "\n"


def write_json(result: dict[str, Any], target: str) -> None:
    """Writes the result to a file (all of it or nothing) or, for "-", to standard output. Raises
    KVTierError if the file cannot be written.
    """
    write_text(to_json(result), target)


def write_text(text: str, target: str) -> None:
    """Writes UTF-8 text to a file, or to standard output for "-". The file is replaced atomically,
    so no reader sees half of it. Creates missing parent folders. Raises KVTierError if it cannot be
    written.
    """
    if target == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        _replace(Path(target), text)
    except OSError as error:
        raise _unwritable(target, error) from error


def check_target(target: str) -> None:
    """Raises KVTierError now if `target` could not be written later. Call it before long work."""
    if target == STDOUT:
        return
    path = Path(target)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        probed = path if path.exists() else path.resolve().parent
        if not os.access(probed, os.W_OK):
            raise PermissionError(None, "no permission to write there")
    except OSError as error:
        raise _unwritable(target, error) from error


def _replace(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():
        # A device or a pipe, such as /dev/null, is written to; replacing it with a file would break
        # the machine.
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _unwritable(target: str, error: OSError) -> KVTierError:
    return KVTierError(
        f"cannot write {target}: {error.strerror or error}. Choose a file in a folder you may "
        "write to"
    )


def _key(key: object) -> str:
    key = plain(key)
    if not isinstance(key, (str, int)) or isinstance(key, bool):
        raise TypeError(f"no JSON form for the key {key!r}")
    return str(key)
