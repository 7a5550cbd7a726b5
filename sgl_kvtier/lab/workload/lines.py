"""Trace files as numbered lines: plain or gzip, streamed, with every damaged line noted and passed
over.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import TraceError
from sgl_kvtier.outside import MOST_WHOLE, is_number, is_text, is_whole, parse_json, shown

MOST_LINE_BYTES = 64 << 20
"""The longest line of the existing traces has under 1 MB. A packed file of 1 MB may hold one of a
GB.
"""
MOST_DOCUMENT_BYTES = 256 << 20
"""The longest trace that is one JSON object. All 145 sessions of swe_mini_deepseek take 21 MB."""
MOST_BAD_LINES = 10_000
"""Bad lines after which a file is given up: each is kept with its reason."""
MOST_TOKENS = 1 << 24
"""Most tokens of one prompt or output: a damaged count must not fill the memory. The longest
prompts recorded have under a million.
"""
_PIECE = 1 << 20
_FOREIGN = {
    b"\x28\xb5\x2f\xfd": "packed by Zstandard: unpack it with `zstd -d`",
    b"\xfd7zXZ\x00": "packed by xz: unpack it with `xz -d`",
    b"BZh": "packed by bzip2: unpack it with `bzip2 -d`",
    b"PK\x03\x04": "a zip archive: unpack it, and name a file of it",
    b"PAR1": "a Parquet table: write its rows as lines of JSON",
    b"ARROW1": "an Arrow table: write its rows as lines of JSON",
    b"\xff\xfe": "a text of UTF-16: write it as UTF-8",
    b"\xfe\xff": "a text of UTF-16: write it as UTF-8",
}
"""What files that are no text begin with, and what to do with them."""
MOST_SECONDS = 1e9
"""Thirty years, in which no session waits."""


class BadRecord(ValueError):
    """One line is not what its format says. Caught where lines are read, and noted as a
    `BadLine`.
    """


@contextmanager
def inside(what: str) -> Iterator[None]:
    """Names the part of a record in the reason of a BadRecord: `turn 3: ...`."""
    try:
        yield
    except BadRecord as error:
        raise BadRecord(f"{what}: {error}") from error


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was passed over, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def read_lines(path: Path, bad: list[BadLine]) -> Iterator[tuple[int, str]]:
    """The non-empty lines with their numbers from 1; no more of the file than one line is in
    memory.

    Lines that are not UTF-8 or longer than `MOST_LINE_BYTES`, and a file that breaks off, go to
    `bad`. Raises TraceError when the file cannot be opened, is unreadable from the start, or has
    too many bad lines.
    """
    number = 0
    with _open(path) as stream:
        while True:
            try:
                raw, whole_line = _next_line(stream)
            except (OSError, EOFError, zlib.error) as error:
                if not number:
                    raise TraceError(f"cannot read {path}: {error}. Copy the file again") from error
                note(bad, path, number + 1, f"the file breaks off here: {error}")
                return
            if not raw:
                return
            number += 1
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if not whole_line:
                note(bad, path, number, f"longer than {MOST_LINE_BYTES >> 20} MiB")
                continue
            if not raw.strip():
                continue
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                note(bad, path, number, f"not UTF-8 at byte {error.start}")
                continue
            yield number, text


def beginning_of(path: Path, nbytes: int) -> str:
    """The first bytes of a file as text, unpacked; of a damaged one what can be read. Raises
    TraceError when it cannot be opened.
    """
    with _open(path) as stream:
        try:
            return stream.read(nbytes).decode("utf-8", "replace").removeprefix("\ufeff")
        except (OSError, EOFError, zlib.error):
            return ""


def read_document(path: Path) -> str:
    """A whole file as text, unpacked. Raises TraceError when it cannot be read, is not UTF-8 or has
    more than `MOST_DOCUMENT_BYTES`.
    """
    with _open(path) as stream:
        try:
            raw = stream.read(MOST_DOCUMENT_BYTES + 1)
            if len(raw) > MOST_DOCUMENT_BYTES:
                most = MOST_DOCUMENT_BYTES >> 20
                raise TraceError(f"{path} has more than {most} MiB. Split it")
            return raw.decode("utf-8-sig")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise TraceError(f"cannot read {path}: {error}. Copy the file again") from error


def note(bad: list[BadLine], path: Path, number: int, reason: str) -> None:
    """Adds a line that was passed over. Raises TraceError when there were too many."""
    bad.append(BadLine(str(path), number, reason))
    if len(bad) > MOST_BAD_LINES:
        raise TraceError(
            f"{path} has more than {MOST_BAD_LINES} bad lines, the first: {bad[0]}. It is no such "
            "trace, or damaged"
        )


def parse_document(text: str) -> Any:
    """JSON text of any kind. Raises BadRecord."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadRecord(f"not JSON: {error}") from error


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object on one line. Raises BadRecord when it is anything else."""
    record = parse_document(text)
    if not isinstance(record, dict):
        raise BadRecord(f"a JSON object is expected, not {type(record).__name__}")
    return record


def text_of(record: dict[str, Any], key: str, default: str | None = None) -> str:
    """A text field; null and a missing key give `default`. Raises BadRecord."""
    value = record.get(key)
    if value is None and default is not None:
        return default
    if not is_text(value, MOST_LINE_BYTES):
        raise BadRecord(f"{key!r} must be a text, not {shown(value)}")
    return value


def count_of(record: dict[str, Any], key: str) -> int:
    """A whole number from 0 to `MOST_TOKENS`. Raises BadRecord."""
    return whole(record.get(key), repr(key), MOST_TOKENS)


def seconds_of(record: dict[str, Any], key: str) -> float | None:
    """A number of seconds from 0 to 1e9, or None when it is null or missing. Raises BadRecord."""
    value = record.get(key)
    if value is None:
        return None
    if not is_number(value, 0, MOST_SECONDS):
        raise BadRecord(
            f"{key!r} must be a number of seconds from 0 to {MOST_SECONDS:g}, not {shown(value)}"
        )
    return float(value)


def milliseconds_of(record: dict[str, Any], key: str) -> float | None:
    """A time of milliseconds in seconds, or None when it is null or missing. Raises BadRecord."""
    value = record.get(key)
    if value is None:
        return None
    if not is_number(value, 0, MOST_SECONDS * 1000):
        raise BadRecord(f"{key!r} must be a number of milliseconds from 0 on, not {shown(value)}")
    return float(value) / 1000


def list_of(record: dict[str, Any], key: str) -> list[Any]:
    """A list. Raises BadRecord."""
    value = record.get(key)
    if not isinstance(value, list):
        raise BadRecord(f"{key!r} must be a list, not {shown(value)}")
    return value


def whole(value: object, what: str, most: int = MOST_WHOLE) -> int:
    """`value` if it is a whole number from 0 to `most`. Raises BadRecord naming `what`."""
    if not is_whole(value, 0, most):
        raise BadRecord(
            f"{what} must be a whole number of at least 0 and at most {most}, not {shown(value)}"
        )
    return value


def _next_line(stream: io.BufferedReader | gzip.GzipFile) -> tuple[bytes, bool]:
    """A line, and True; of one beyond the limit its last piece and False. Empty at the end."""
    raw = stream.readline(MOST_LINE_BYTES)
    if len(raw) < MOST_LINE_BYTES or raw.endswith(b"\n"):
        return raw, True
    del raw
    while True:
        piece = stream.readline(_PIECE)
        if len(piece) < _PIECE or piece.endswith(b"\n"):
            return b"\n", False


def _open(path: Path) -> io.BufferedReader | gzip.GzipFile:
    if path.exists() and not path.is_file() and not path.is_dir():
        raise TraceError(
            f"{path} is no file, and a trace is read more than once: save it to a file"
        )
    try:
        stream = path.open("rb")
    except IsADirectoryError as error:
        raise TraceError(f"{path} is a folder; name one of the files in it") from error
    except OSError as error:
        raise TraceError(
            f"cannot read {path}: {error.strerror}. `kvtier trace list` shows what there is"
        ) from error
    # By its first bytes, not its name: downloads lose or gain a .gz.
    start = stream.peek(8)[:8]
    for mark, what in _FOREIGN.items():
        if start.startswith(mark):
            stream.close()
            raise TraceError(f"{path} is {what}")
    return gzip.GzipFile(fileobj=stream) if start[:2] == b"\x1f\x8b" else stream
