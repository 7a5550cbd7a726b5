"""A run as lines of JSON: the facts and views that a planner received and the plans that it made,
to be replayed and compared.

    {"log": "kvtier.decisions", "version": 4, "config": {...}, "engine": {...}, "profile": null}
    {"type": "RequestArrived", "rid": "r0", "now": 0.0, ...}     facts, in the order observed
    {"type": "StepView", ...}                                    one step: the view,
    {"type": "StepPlan", "starts": [...], ...}                   and the plan for it
    {"type": "Query", "question": {"type": "LeftToEngine", ...}, "answer": "..."}
                                                                 a question between two steps
    {"type": "PlannerFailed", "error": "..."}                    it raised on the line before
    {"type": "LinesDropped", "count": 12}                        a gap: no replay after it

Spans are [start, stop], tiers are their names, links and modes are their values. In version 3
(simulated runs) page keys are hexadecimal. In version 4 (servers) only the first mention of a key
is hexadecimal, and numbers the key, from 0 on. Later mentions are that number, or [first, last] for
consecutive numbers, ascending or descending. When `MOST_NUMBERED` keys have numbers, the next new
key discards all numbers first. So a log has to be read from its beginning.

Floats keep all digits, so decoding and encoding again gives the same line. Fields with their
default value are omitted. All functions are pure; other modules open the files.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

from sgl_kvtier.config import PolicyConfig, parse_setting
from sgl_kvtier.errors import TraceError
from sgl_kvtier.outside import is_number, is_whole, parse_json, refusal, shown
from sgl_kvtier.policy.messages import Fact, Hint, HintAnswer, Question, StepPlan, StepView
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import PLACES, PageKey, Span, Tier

Answer: TypeAlias = str | int | bool | tuple[str, ...] | HintAnswer | None

NAME = "kvtier.decisions"
VERSION, NUMBERED = 3, 4
"""Versions of a log with all keys in full, and of one with numbers for them."""
MOST_NUMBERED = 1 << 18
"""Number of keys that can have a number at a time: some 40 MB, in the writer and in the reader."""
_MOST_INT, _MOST_FLOAT = 1 << 63, sys.float_info.max
_MOST_SAID = 200


@dataclass(frozen=True)
class Header:
    """The first line: the arguments of the planner."""

    config: PolicyConfig
    engine: EngineShape
    profile: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """A question to the planner between two steps, and its answer."""

    question: Question[Any]
    answer: Answer = None


@dataclass(frozen=True, slots=True)
class PlannerFailed:
    """The planner raised an exception on the line before."""

    error: str


@dataclass(frozen=True, slots=True)
class LinesDropped:
    """This many lines are missing here, because the writer was behind."""

    count: int


Record: TypeAlias = Fact | StepView | StepPlan | Query | PlannerFailed | LinesDropped


def encode_header(header: Header, version: int = VERSION) -> str:
    """The first line of a log, without its line break. `version`: VERSION for lines by `encode`,
    NUMBERED for lines by a `Writer`.
    """
    data = {"log": NAME, "version": version, **dataclasses.asdict(header)}
    return json.dumps(data, separators=(",", ":"))


def decode_header(line: str) -> Header:
    """Reads the first line. Raises TraceError if it is not one, or has another version."""
    data = _parse(line)
    if data.get("log") != NAME:
        raise TraceError("not a decision log: its first line must name kvtier.decisions")
    if data.get("version") not in (VERSION, NUMBERED):
        raise TraceError(
            f"decision log version {shown(data.get('version'))}: this kvtier reads versions "
            f"{VERSION} and {NUMBERED}; use its own"
        )
    try:
        return Header(_config(data["config"]), _engine(data["engine"]), _profile(data["profile"]))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"the decision log's first line is damaged: {error}") from error


class InFull:
    """Page keys in full."""

    def write(self, keys: Sequence[PageKey]) -> list[Any]:
        """The JSON values for these keys."""
        return [key.hex() for key in keys]

    def read(self, values: Sequence[Any]) -> tuple[PageKey, ...]:
        """The keys for these JSON values. Raises ValueError or TypeError."""
        return tuple(PageKey(bytes.fromhex(text)) for text in values)


class Numbered:
    """Page keys as numbers. One object must process all lines of a log in order. It holds `most`
    keys; one more key discards all of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: dict[PageKey, int] = {}
        self._keys: list[PageKey] = []

    def write(self, keys: Sequence[PageKey]) -> list[Any]:
        found: list[Any] = []
        run: list[int] | None = None
        for key in keys:
            number = self._numbers.get(key)
            if number is None:
                self._add(key)
                found.append(key.hex())
                run = None
            elif run is not None and _goes_on(run, number):
                run[1] = number
            else:
                run = [number, number]
                found.append(run)
        return [one[0] if type(one) is list and one[0] == one[1] else one for one in found]

    def read(self, values: Sequence[Any]) -> tuple[PageKey, ...]:
        keys: list[PageKey] = []
        for value in values:
            if isinstance(value, str):
                key = PageKey(bytes.fromhex(value))
                if key not in self._numbers:
                    self._add(key)
                keys.append(key)
                continue
            first, last = value if isinstance(value, list) else (value, value)
            known = len(self._keys) - 1
            if not (is_whole(first, 0, known) and is_whole(last, 0, known)):
                raise ValueError(f"no page key has the number {shown(value)} here")
            step = 1 if last >= first else -1
            keys += [self._keys[number] for number in range(first, last + step, step)]
        return tuple(keys)

    def _add(self, key: PageKey) -> None:
        if len(self._keys) >= self._most:
            self._numbers.clear()
            self._keys.clear()
        self._numbers[key] = len(self._keys)
        self._keys.append(key)


def _goes_on(run: Sequence[int], number: int) -> bool:
    first, last = run
    return number - last == (1 if last > first else -1) or (first == last == number - 1)


Keys: TypeAlias = InFull | Numbered
IN_FULL = InFull()


class Writer:
    """Writes the lines of a log of version NUMBERED after the first."""

    def __init__(self, most_numbered: int = MOST_NUMBERED) -> None:
        self._keys = Numbered(most_numbered)

    def encode(self, record: Record) -> str:
        """The next line, without its line break."""
        return json.dumps(_to_plain(record, self._keys), separators=(",", ":"))


class Reader:
    """Reads the lines of a log of any version after the first: all of them, in order."""

    def __init__(self, most_numbered: int = MOST_NUMBERED) -> None:
        self._keys = Numbered(most_numbered)

    def decode(self, line: str) -> Record:
        """The record of the next line. Raises TraceError if the line has none."""
        return _decode(line, self._keys)


def encode(record: Record) -> str:
    """One record as a line with keys in full, without its line break."""
    return json.dumps(_to_plain(record, IN_FULL), separators=(",", ":"))


def decode(line: str) -> Record:
    """Reads such a line. Raises TraceError if it is not one."""
    return _decode(line, IN_FULL)


def _decode(line: str, keys: Keys) -> Record:
    data = _parse(line)
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in _RECORDS:
        raise TraceError(
            f"a line of the decision log has the type {shown(kind)}; known are "
            f"{', '.join(_RECORDS)}"
        )
    try:
        record: Record = _from_plain(_RECORDS[kind], data, keys)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise TraceError(f"a {kind} of the decision log is damaged: {error}") from error
    return record


def _parse(line: str) -> dict[str, Any]:
    try:
        data = parse_json(line)
    except ValueError as error:
        raise TraceError(f"a line of the decision log is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise TraceError("a line of the decision log is not an object")
    return data


def _to_plain(record: Any, keys: Keys) -> dict[str, Any]:
    kind: Any = type(record)
    data: dict[str, Any] = {"type": kind.__name__}
    for name, (field, codec) in _fields_of(kind).items():
        value = getattr(record, name)
        if not _is_default(field, value):
            data[name] = codec.write(value, keys)
    return data


def _from_plain(kind: type, data: Mapping[str, Any], keys: Keys) -> Any:
    known = _fields_of(kind)
    unknown = [name for name in data if name not in known and name != "type"]
    if unknown:
        raise ValueError(
            f"it has fields of another version: {', '.join(map(str, unknown))[:_MOST_SAID]}"
        )
    given = {name: value for name, value in data.items() if name != "type"}
    return kind(**{name: known[name][1].read(value, keys) for name, value in given.items()})


def _config(data: Mapping[str, Any]) -> PolicyConfig:
    return PolicyConfig(
        **{name: parse_setting("policy", name, value) for name, value in dict(data).items()}
    )


def _engine(data: Mapping[str, Any]) -> EngineShape:
    for name, value in dict(data).items():
        if name not in ("staged", "accelerator") and not is_whole(value, 1):
            raise ValueError(refusal(name, value, "a whole number of at least 1"))
    return EngineShape(**data)


def _profile(data: Mapping[str, Mapping[str, float]] | None) -> dict[str, Any] | None:
    if data is None:
        return None
    for part, numbers in dict(data).items():
        for name, value in dict(numbers).items():
            _checked(float, value, f"{part}.{name}")
    return dict(data)


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(value == field.default and type(value) is type(field.default))
    return field.default_factory is not dataclasses.MISSING and not value


class _Codec(NamedTuple):
    """How values of one type are written as JSON and read back. Reading raises ValueError,
    TypeError or KeyError if a value does not fit.
    """

    write: Callable[[Any, Keys], Any]
    read: Callable[[Any, Keys], Any]


@cache
def _fields_of(kind: Any) -> dict[str, tuple[dataclasses.Field[Any], _Codec]]:
    """The fields of a message by name, with the codec of each type hint; TypeError without one."""
    hints = get_type_hints(kind)
    return {field.name: (field, _codec(hints[field.name])) for field in dataclasses.fields(kind)}


@cache
def _codec(hint: Any) -> _Codec:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is PageKey:
        return _Codec(lambda key, keys: keys.write((key,))[0], lambda v, keys: keys.read((v,))[0])
    if inner == (PageKey, ...):
        return _Codec(lambda values, keys: keys.write(values), lambda v, keys: keys.read(v))
    if hint == Answer:
        return _Codec(_write_answer, _read_answer)
    if origin is Question:
        return _Codec(_to_plain, _read_question)
    if hint is PolicyConfig:
        return _Codec(lambda config, _: dataclasses.asdict(config), lambda data, _: _config(data))
    if hint is Hint:
        return _Codec(lambda said, _: dataclasses.asdict(said), _reader(Hint))
    if origin is dict:
        return _Codec(_write_counts, _read_counts)
    if origin is tuple and inner[1:] == (...,):
        one = _codec(inner[0])
        return _Codec(
            lambda values, keys: [one.write(value, keys) for value in values],
            lambda values, keys: tuple([one.read(value, keys) for value in values]),
        )
    if origin is tuple:
        several = tuple(map(_codec, inner))
        return _Codec(
            lambda values, keys: [c.write(v, keys) for c, v in zip(several, values, strict=True)],
            lambda values, keys: tuple(
                [c.read(v, keys) for c, v in zip(several, values, strict=True)]
            ),
        )
    if NoneType in inner:
        return _optional(_codec(inner[0]))
    if hint in (str, int, float, bool):
        return _Codec(lambda value, _: value, lambda value, _: _checked(hint, value))
    if hint is Span:
        return _Codec(lambda span, _: [span.start, span.stop], _read_span)
    if hint is Tier:
        return _Codec(lambda tier, _: PLACES[tier], lambda name, _: _TIERS[name])
    if issubclass(hint, enum.Enum):
        return _Codec(lambda one, _: one.value, lambda value, _: hint(value))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _Codec(_to_plain, _reader(hint))
    raise TypeError(f"{hint} has no form in the decision log")


def _reader(kind: type) -> Callable[[Any, Keys], Any]:
    return lambda data, keys: _from_plain(kind, data, keys)


def _optional(codec: _Codec) -> _Codec:
    return _Codec(
        lambda value, keys: None if value is None else codec.write(value, keys),
        lambda value, keys: None if value is None else codec.read(value, keys),
    )


def _checked(kind: type, value: Any, name: str = "a value") -> Any:
    """A value of this type, unchanged. Raises ValueError for any other value, NaN and infinity."""
    if kind is int:
        good = is_whole(value, -_MOST_INT, _MOST_INT)
    elif kind is float:
        good = is_number(value, -_MOST_FLOAT, _MOST_FLOAT)
    else:
        good = type(value) is kind
    if not good:
        raise ValueError(refusal(name, value, f"of type {kind.__name__}"))
    return value


def _read_span(pair: Iterable[Any], keys: Keys) -> Span:
    del keys
    return Span(*(_checked(int, value) for value in pair))


def _write_counts(pages: Mapping[Tier, int], keys: Keys) -> dict[str, int]:
    del keys
    return {PLACES[tier]: count for tier, count in pages.items()}


def _read_counts(pages: Mapping[str, Any], keys: Keys) -> dict[Tier, int]:
    del keys
    return {_TIERS[name]: _checked(int, count) for name, count in pages.items()}


def _read_question(data: Mapping[str, Any], keys: Keys) -> Any:
    kind = _QUESTIONS.get(str(data["type"]))
    if kind is None:
        raise ValueError(f"no question is of the type {shown(data['type'])}")
    return _from_plain(kind, data, keys)


def _write_answer(answer: Answer, keys: Keys) -> Any:
    if isinstance(answer, HintAnswer):
        return _to_plain(answer, keys)
    return list(answer) if isinstance(answer, tuple) else answer


def _read_answer(value: Any, keys: Keys) -> Answer:
    if isinstance(value, dict):
        given: HintAnswer = _from_plain(HintAnswer, value, keys)
        return given
    if isinstance(value, list):
        return tuple([_checked(str, one) for one in value])
    if value is None or isinstance(value, int):
        return value
    said: str = _checked(str, value)
    return said


_TIERS = {name: tier for tier, name in PLACES.items()}
_QUESTIONS: dict[str, type] = {kind.__name__: kind for kind in Question.__subclasses__()}
_RECORDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (*get_args(Fact), StepView, StepPlan, Query, PlannerFailed, LinesDropped)
}
for _kind in (*_RECORDS.values(), *_QUESTIONS.values(), Hint, HintAnswer):
    _fields_of(_kind)
"""A field whose type has no codec fails here, at import."""
