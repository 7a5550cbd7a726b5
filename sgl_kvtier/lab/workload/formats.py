"""The formats of traces as data: what each is known by, and what reads it. A format that is known
and not read is refused by its name.

A file is lines of JSON objects, one JSON document, or CSV. A document is one object that is a
record itself, one that holds a list of them, or a list. What a record is, its fields say; the
file's name says nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.workload.agentic import AgenticReader, conversations_of
from sgl_kvtier.lab.workload.chats import ChatReader
from sgl_kvtier.lab.workload.hashed import (
    AZURE_COLUMNS,
    BURST_COLUMNS,
    BURST_SESSION_COLUMNS,
    ClaudeCodeReader,
    CsvReader,
    LengthReader,
)
from sgl_kvtier.lab.workload.lines import (
    BadLine,
    BadRecord,
    beginning_of,
    parse_document,
    parse_object,
    read_document,
    read_lines,
)
from sgl_kvtier.lab.workload.reader import Reader
from sgl_kvtier.lab.workload.swe import SweReader
from sgl_kvtier.outside import shown

_SNIFFED_LINES = 20
_SNIFFED_BYTES = 1 << 16
_MOST_FIELDS = 8
CAPTURES = "Claude Code captures (Weka)"


@dataclass(frozen=True, slots=True)
class Format:
    """One format. `reader` None: it is refused, with `instead` as what to do."""

    name: str
    reader: type[Reader] | None
    method: str = "sessions"
    """Of the reader: what makes sessions of a record."""
    knows: Callable[[dict[str, Any]], bool] = bool
    instead: str = ""
    inside: Callable[[dict[str, Any]], list[Any]] | None = None
    """The records in a document of this format; None: an object of it is a record."""
    columns: tuple[str, ...] = ()
    """The header of a CSV file."""
    gathers: bool = False
    """Whether several records may be one session, which the end of the file completes."""
    sized: bool = False
    """Whether --block-tokens can say how many tokens its blocks have."""


def _has_list(record: dict[str, Any], key: str, *inner: str) -> bool:
    """Whether a field is a list, and an object in it has one of `inner`."""
    value = record.get(key)
    if not isinstance(value, list):
        return False
    fields = {field for one in value if isinstance(one, dict) for field in one}
    return not inner or any(field in fields for field in inner)


FORMATS: tuple[Format, ...] = (
    Format(
        "vLLM's settings for generated conversations",
        None,
        knows=lambda r: r.get("filetype") == "generate_conversations",
        instead="it holds no conversations: run vLLM's benchmark_serving_multi_turn.py with "
        "--output-file, and read what that writes",
    ),
    Format("ShareGPT", ChatReader, "share_gpt", lambda r: _has_list(r, "conversations", "from")),
    Format(
        "agentic-trace",
        AgenticReader,
        "sessions",
        lambda r: "conversations" in r,
        inside=conversations_of,
    ),
    Format(
        "aiperf's file of inputs",
        ChatReader,
        "payloads",
        lambda r: _has_list(r, "data", "payloads"),
        inside=lambda r: list(r["data"]),
    ),
    Format(
        "a session of aiperf's file of inputs", ChatReader, "payloads", lambda r: "payloads" in r
    ),
    Format(
        "aiperf's multi-turn sessions",
        ChatReader,
        "turns",
        lambda r: _has_list(r, "turns", "text", "texts", "image", "images"),
    ),
    Format(
        "agent sessions (swe)", SweReader, "sessions", lambda r: isinstance(r.get("turns"), list)
    ),
    Format(
        CAPTURES,
        ClaudeCodeReader,
        "sessions",
        lambda r: "block_size" in r and isinstance(r.get("requests"), list),
    ),
    Format("OpenAI's batch", ChatReader, "batch", lambda r: "custom_id" in r and "body" in r),
    Format(
        "messages",
        ChatReader,
        "messages",
        lambda r: isinstance(r.get("messages"), list),
        gathers=True,
    ),
    Format(
        "Qwen-Bailian",
        LengthReader,
        "bailian",
        lambda r: "chat_id" in r and "input_length" in r,
        gathers=True,
        sized=True,
    ),
    Format(
        "Mooncake",
        LengthReader,
        "mooncake",
        lambda r: "input_length" in r and ("output_length" in r or "hash_ids" in r),
        gathers=True,
        sized=True,
    ),
    Format("Azure", CsvReader, "azure", columns=AZURE_COLUMNS),
    Format("BurstGPT", CsvReader, "burst_gpt", columns=BURST_COLUMNS),
    Format("BurstGPT with sessions", CsvReader, "burst_gpt", columns=BURST_SESSION_COLUMNS),
)
_RECORDS = tuple(form for form in FORMATS if not form.columns)


@dataclass(frozen=True, slots=True)
class Recognised:
    """A file's format, and its records: of a document all, of lines none yet."""

    form: Format
    records: list[Any] | None = None


def recognise(path: Path) -> Recognised:
    """The format of a file. Raises TraceError that names it if it is not read, and says which are
    if it is none.
    """
    start = beginning_of(path, _SNIFFED_BYTES).lstrip()
    seen: list[dict[str, Any]] = []
    ignored: list[BadLine] = []
    why = ""
    if start[:1] == "[" or (start[:1] == "{" and not _begins_with_an_object(path)):
        try:
            document = parse_document(read_document(path))
        except BadRecord as error:
            why = str(error)
        else:
            return _of_document(path, document)
    for count, (_, text) in enumerate(read_lines(path, ignored)):
        form = _of_header(text)
        try:
            record = {} if form else parse_object(text)
            form = form or _of_record(record)
        except BadRecord:
            pass  # reported when the file is read for good
        else:
            if form is not None and form.inside is not None:
                return _of_document(path, _document(path))
            if form is not None:
                return Recognised(_read_or_refused(path, form))
            seen.append(record)
        if count == _SNIFFED_LINES:
            break
    if why:
        raise TraceError(f"{path}: {why}. Copy the file again")
    raise _unknown(path, seen, f". Its first bad line: {ignored[0]}" if ignored else "")


def is_trace(path: Path) -> bool:
    """Whether a file is of a format that is read."""
    try:
        return recognise(path).form.reader is not None
    except TraceError:
        return False


def records_of(
    path: Path, found: Recognised, skip: int, bad: list[BadLine]
) -> Iterator[tuple[int, Any]]:
    """The records of a file after `skip` with their numbers: those of lines from 1, undecoded texts
    but in CSV.
    """
    if found.records is not None:
        yield from list(enumerate(found.records, 1))[skip:]
        return
    rows = read_lines(path, bad)
    if found.form.columns:
        next(row for row in rows if _of_header(row[1]))
    for index, row in enumerate(rows):
        if index >= skip:
            yield row


def decoded(form: Format, record: Any) -> Any:
    """A record as its reader takes it. Raises BadRecord."""
    if isinstance(record, (dict, tuple)):  # a tuple is one of `conversations_of`
        return record
    if not isinstance(record, str):
        raise BadRecord(f"a record must be an object, not {shown(record)}")
    if not form.columns:
        return parse_object(record)
    try:
        cells = next(csv.reader([record.strip()]))
    except (csv.Error, StopIteration) as error:
        raise BadRecord(f"not a row of {form.name}: {error}") from error
    if len(cells) != len(form.columns):
        raise BadRecord(f"{len(cells)} values in place of {','.join(form.columns)}")
    return dict(zip(form.columns, cells, strict=True))


def _begins_with_an_object(path: Path) -> bool:
    """Whether a file's first line is an object of its own. One that is too long to read is none."""
    first = next(read_lines(path, []), None)
    try:
        return first is not None and bool(parse_object(first[1]))
    except BadRecord:
        return False


def _document(path: Path) -> Any:
    try:
        return parse_document(read_document(path))
    except BadRecord as error:
        raise TraceError(f"{path}: {error}. Copy the file again") from error


def _of_document(path: Path, document: Any) -> Recognised:
    if isinstance(document, list):
        objects = [one for one in document if isinstance(one, dict)]
        form = next(filter(None, map(_of_record, objects[:_SNIFFED_LINES])), None)
        if form is None or form.inside is not None:
            raise _unknown(path, objects)
        return Recognised(_read_or_refused(path, form), document)
    form = _of_record(document) if isinstance(document, dict) else None
    if form is None:
        raise _unknown(path, [document] if isinstance(document, dict) else [])
    _read_or_refused(path, form)
    try:
        return Recognised(form, [document] if form.inside is None else form.inside(document))
    except BadRecord as error:
        raise TraceError(f"{path}: {error}. Copy the file again") from error


def _of_record(record: dict[str, Any]) -> Format | None:
    return next((form for form in _RECORDS if form.knows(record)), None)


def _of_header(text: str) -> Format | None:
    cells = tuple(cell.strip() for cell in text.split(","))
    return next((form for form in FORMATS if form.columns and form.columns == cells), None)


def _read_or_refused(path: Path, form: Format) -> Format:
    if form.reader is None:
        raise TraceError(f"{path} is {form.name}, which is not read: {form.instead}")
    return form


def _unknown(path: Path, seen: list[dict[str, Any]], more: str = "") -> TraceError:
    fields = [shown(name) for name in (seen[0] if seen else {})][:_MOST_FIELDS]
    has = f" (its first object has {', '.join(fields)})" if fields else ""
    names = dict.fromkeys(form.name for form in FORMATS if form.reader is not None)
    return TraceError(
        f"{path} is in no format this reads{has}: {', '.join(names)}. "
        f"docs/manual/workloads.md describes them{more}"
    )
