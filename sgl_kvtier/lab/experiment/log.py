"""The records of an experiment, one line of JSON each; a later run goes on from them.

The first line says what all records have in common; a run with other settings is refused. A run
that is killed while it writes leaves a torn last line. It is passed over when the file is read, and
cut off before the next line is written.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from sgl_kvtier.errors import BenchError
from sgl_kvtier.outside import parse_json

_Log = TypeVar("_Log", bound="Log")


class Log:
    """Records of a few kinds, in memory and with a path on disk before the next one is made.

    `kinds` names the type of each kind of record: dataclasses, and what JSON has.
    """

    kinds: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.continued = 0
        """Records that were in the file already."""
        self._end: int | None = None
        """In bytes, where what is kept of a file ends that does not end with a whole line."""

    @classmethod
    def open(cls: type[_Log], path: Path | None, about: Mapping[str, Any]) -> _Log:
        """The log in a file, or a new one; `about` is what its records have to have in common.

        Raises BenchError when the file cannot be read, is no log of this kind, or was made with
        other settings. A first line is never taken for torn: the file may have been written by
        another program.
        """
        log = cls(path)
        lines = log._lines()
        for number, line in enumerate(lines, 1):
            try:
                data = parse_json(line)
                if number > 1:
                    ((kind, value),) = data.items()
                    log.take(kind, _revived(log.kinds[kind], value))
                elif "about" not in data:
                    raise ValueError("it does not say what its trials were made with")
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                raise BenchError(
                    f"{path}:{number}: not a line of this bench ({error!s:.200}). Name another --log"
                ) from error
            if number == 1:
                log._check(data["about"], about)
        log.continued = max(len(lines) - 1, 0)
        if not lines:
            log._write({"about": dict(about)})
        return log

    def take(self, kind: str, record: Any) -> None:
        """Puts a record into memory, one just made or one that was read."""
        raise NotImplementedError

    def add(self, kind: str, record: Any) -> None:
        """Keeps a record. Raises BenchError when it cannot be written."""
        self.take(kind, record)
        self._write({kind: _plain(record)})

    def _lines(self) -> list[bytes]:
        if self.path is None or not self.path.exists():
            return []
        try:
            raw = self.path.read_bytes()
        except OSError as error:
            raise BenchError(f"cannot read {self.path}: {error.strerror}") from error
        if not raw:
            return []
        lines = raw.removesuffix(b"\n").split(b"\n")
        if len(lines) > 1 and not _is_json(lines[-1]):
            lines.pop()
            self._end = len(b"\n".join(lines))
        elif not raw.endswith(b"\n"):
            self._end = len(raw)
        return lines

    def _check(self, found: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        for name, value in json.loads(json.dumps(dict(about))).items():
            if found.get(name) != value:
                raise BenchError(
                    f"{self.path}: its trials were made with {name} = {found.get(name)}, and now it is {value}. "
                    "Name another --log"
                )

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        text = json.dumps(line).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                if self._end is not None:
                    file.truncate(self._end)
                    text = b"\n" + text
                file.write(text)
        except OSError as error:
            raise BenchError(f"cannot write {self.path}: {error.strerror}") from error
        self._end = None


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True


def _plain(record: Any) -> Any:
    """A record in JSON's types. What is no dataclass may say itself, with `to_json`."""
    if dataclasses.is_dataclass(record):
        return {f.name: _plain(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, list | tuple):
        return [_plain(one) for one in record]
    return record.to_json() if hasattr(record, "to_json") else record


def _revived(kind: Any, value: Any) -> Any:
    """The value that `_plain` was given. Raises TypeError, KeyError or ValueError where it does not
    fit.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if value is None or kind is Any:
        return value
    if origin in (Union, UnionType):
        return _revived(next(one for one in inside if one is not NoneType), value)
    if origin is list or inside[1:] == (Ellipsis,):
        return origin(_revived(inside[0], one) for one in value)
    if origin is tuple:
        return tuple(_revived(each, one) for each, one in zip(inside, value, strict=True))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        types = _types(kind)
        return kind(**{name: _revived(types[name], one) for name, one in value.items()})
    return kind.from_json(value) if hasattr(kind, "from_json") else value


_types = cache(get_type_hints)
