"""Files of JSON lines that a bench keeps what it measured in, one line at a time, and goes on from.

A run that is killed while it writes leaves a torn last line. It is passed over when the file is
read, and cut off before the next line is written, which would else be glued to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.outside import parse_json


class JsonLines:
    """One such file. Without a path there is nothing to read, and nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._end: int | None = None
        """In bytes, where what is kept of a file ends that does not end with a whole line."""

    def read(self, take: Callable[[int, Any], None]) -> bool:
        """Hands every line and its number, from 1, to `take`; False where there is none. The file
        stays as it is.

        Raises BenchError when the file cannot be read, and when a line is not JSON or `take` does
        not know it, which it says with ValueError, TypeError or KeyError. A first line is never
        taken for torn: the file may be somebody else's.
        """
        if self._path is None or not self._path.exists():
            return False
        try:
            raw = self._path.read_bytes()
        except OSError as error:
            raise BenchError(f"cannot read {self._path}: {error.strerror}") from error
        if not raw:
            return False
        lines = raw.removesuffix(b"\n").split(b"\n")
        if len(lines) > 1 and not _is_json(lines[-1]):
            lines.pop()
            self._end = len(b"\n".join(lines))
        elif not raw.endswith(b"\n"):
            self._end = len(raw)
        for number, line in enumerate(lines, 1):
            try:
                take(number, parse_json(line))
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                raise BenchError(
                    f"{self._path}:{number}: not a line of this bench ({error!s:.200}). Name another --log"
                ) from error
        return True

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds a line; its folder is made where there is none. Raises BenchError when it cannot be
        written.
        """
        if self._path is None:
            return
        text = json.dumps(line).encode() + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                if self._end is not None:
                    file.truncate(self._end)
                    text = b"\n" + text
                file.write(text)
        except OSError as error:
            raise BenchError(f"cannot write {self._path}: {error.strerror}") from error
        self._end = None


def check_about(path: Path | None, found: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Raises BenchError, naming what differs, unless a log was made with the settings that this run
    has.
    """
    for name, value in json.loads(json.dumps(dict(about))).items():
        if found.get(name) != value:
            raise BenchError(
                f"{path}: its trials were made with {name} = {found.get(name)}, and now it is {value}. Name another --log"
            )


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return False
    return True
