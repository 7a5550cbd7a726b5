"""Trace files as numbered lines: plain or gzip, streamed, with every damaged line noted and passed over."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import TraceError

_MOST = 1 << 53
"""No token count, id or time of a trace comes near; a damaged number may be beyond any."""


class BadRecord(ValueError):
    """One line is not what its format says. Caught where lines are read, and noted as a `BadLine`."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was passed over, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def read_lines(path: Path, bad: list[BadLine]) -> Iterator[tuple[int, str]]:
    """The non-empty lines with their numbers from 1. Lines that are not UTF-8, and a file that breaks off, go to `bad`.

    Raises TraceError when the file cannot be opened or is unreadable from the start.
    """
    number = 0
    with _open(path) as stream:
        while True:
            try:
                raw = stream.readline()
            except (OSError, EOFError, zlib.error) as error:
                if not number:
                    raise TraceError(f"cannot read {path}: {error}. Copy the file again") from error
                bad.append(BadLine(str(path), number + 1, f"the file breaks off here: {error}"))
                return
            if not raw:
                return
            number += 1
            if not raw.strip():
                continue
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                bad.append(BadLine(str(path), number, f"not UTF-8 at byte {error.start}"))
                continue
            yield number, text


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object on one line. Raises BadRecord when it is anything else."""
    try:
        record = json.loads(text)
    except RecursionError as error:
        raise BadRecord("JSON nested too deeply") from error
    except ValueError as error:
        raise BadRecord(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadRecord(f"a JSON object is expected, not {type(record).__name__}")
    return record


def text_of(record: dict[str, Any], key: str, default: str | None = None) -> str:
    """A text field; null and a missing key give `default`. Raises BadRecord."""
    value = record.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise BadRecord(f"{key!r} must be a text, not {_shown(value)}")
    return value


def count_of(record: dict[str, Any], key: str) -> int:
    """A whole number of at least 0. Raises BadRecord."""
    return whole(record.get(key), repr(key))


def seconds_of(record: dict[str, Any], key: str) -> float | None:
    """A finite number, or None when it is null or missing. Raises BadRecord."""
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST:
        raise BadRecord(f"{key!r} must be a number of seconds, not {_shown(value)}")
    return float(value)


def list_of(record: dict[str, Any], key: str) -> list[Any]:
    """A list. Raises BadRecord."""
    value = record.get(key)
    if not isinstance(value, list):
        raise BadRecord(f"{key!r} must be a list, not {_shown(value)}")
    return value


def whole(value: object, what: str) -> int:
    """`value` if it is a whole number of at least 0 that a machine word holds. Raises BadRecord naming `what`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
        raise BadRecord(f"{what} must be a whole number of at least 0, not {_shown(value)}")
    return value


def _open(path: Path) -> io.BufferedReader | gzip.GzipFile:
    try:
        stream = path.open("rb")
    except IsADirectoryError as error:
        raise TraceError(f"{path} is a folder; name one of the files in it") from error
    except OSError as error:
        raise TraceError(
            f"cannot read {path}: {error.strerror}. `kvtier trace list` shows what there is"
        ) from error
    # By its first bytes, not its name: downloads lose or gain a .gz.
    packed = stream.peek(2)[:2] == b"\x1f\x8b"
    return gzip.GzipFile(fileobj=stream) if packed else stream


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
