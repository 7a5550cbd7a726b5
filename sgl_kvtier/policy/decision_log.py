"""A run as lines of JSON: the facts and views a planner was given and the plans it made, to be
replayed and compared.

    {"log": "kvtier.decisions", "version": 4, "config": {...}, "engine": {...}, "profile": null}
    {"type": "RequestArrived", "rid": "r0", "now": 0.0, ...}     facts, in the order observed
    {"type": "StepView", ...}                                    one step: the view,
    {"type": "StepPlan", "starts": [...], ...}                   and the plan for it
    {"type": "Query", "question": {"type": "LeftToEngine", ...}, "answer": "..."}
                                                                 a question between two steps
    {"type": "PlannerFailed", "error": "..."}                    it raised on the line before
    {"type": "LinesDropped", "count": 12}                        a hole: no replay behind it

Spans are [start, stop], tiers their names, links and modes their values. Page keys are hexadecimal
in version 3. In version 4 only their first mention is, which numbers them from 0 on; behind it they
are their number, or [first, last] of numbers that follow one another, up or down. Where there are
`log_keys.MOST_NUMBERED` numbers, the next mention first forgets all. So a log is read from its
beginning.

Floats keep all digits, so decoding and encoding again gives the same line. Fields at their default
are left out. Pure functions: other modules open the files.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sgl_kvtier.config import PolicyConfig, parse_setting
from sgl_kvtier.errors import TraceError
from sgl_kvtier.outside import is_number, is_whole, parse_json, refusal, shown
from sgl_kvtier.policy import messages
from sgl_kvtier.policy.log_keys import IN_FULL, MOST_NUMBERED, Keys, Numbered
from sgl_kvtier.policy.messages import (
    Fact,
    Hint,
    HintAnswer,
    Mode,
    Question,
    RestoreOffered,
    StepPlan,
    StepView,
)
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import PLACES, Link, Span

Answer: TypeAlias = str | int | bool | tuple[str, ...] | HintAnswer | None

NAME = "kvtier.decisions"
VERSION, NUMBERED = 3, 4
"""Of a log with every key in full, and of one with numbers for them."""
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
    """The planner raised on the line before."""

    error: str


@dataclass(frozen=True, slots=True)
class LinesDropped:
    """A number of lines that belong here could not be kept: the writer was behind."""

    count: int


Record: TypeAlias = Fact | StepView | StepPlan | Query | PlannerFailed | LinesDropped


def encode_header(header: Header, version: int = VERSION) -> str:
    """The first line of a log, without its line break. `version` says whether lines will be
    `encode`'s or a `Writer`'s, which are NUMBERED.
    """
    data = {"log": NAME, "version": version, **dataclasses.asdict(header)}
    return json.dumps(data, separators=(",", ":"))


def decode_header(line: str) -> Header:
    """Reads a first line. Raises TraceError when it is none, or of another version."""
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


class Writer:
    """The lines of a log of version NUMBERED, behind its first."""

    def __init__(self, most_numbered: int = MOST_NUMBERED) -> None:
        self._keys = Numbered(most_numbered)

    def encode(self, record: Record) -> str:
        """The next line, without its line break."""
        return json.dumps(_to_plain(record, self._keys), separators=(",", ":"))


class Reader:
    """Reads the lines of a log of any version, behind its first, all and in their order."""

    def __init__(self, most_numbered: int = MOST_NUMBERED) -> None:
        self._keys = Numbered(most_numbered)

    def decode(self, line: str) -> Record:
        """The next line's record. Raises TraceError where it is none."""
        return _decode(line, self._keys)


def encode(record: Record) -> str:
    """One fact, view, plan or question as a line with keys in full, without its line break."""
    return json.dumps(_to_plain(record, IN_FULL), separators=(",", ":"))


def decode(line: str) -> Record:
    """Reads such a line. Raises TraceError for any other."""
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
    data: dict[str, Any] = {"type": type(record).__name__}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if not _is_default(field, value):
            data[field.name] = _codec(field)[0](value, keys)
    return data


def _from_plain(kind: type, data: Mapping[str, Any], keys: Keys) -> Any:
    known = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [name for name in data if name not in known and name != "type"]
    if unknown:
        raise ValueError(
            f"it has fields of another version: {', '.join(map(str, unknown))[:_MOST_SAID]}"
        )
    return kind(
        **{
            name: _codec(known[name])[1](value, keys)
            for name, value in data.items()
            if name != "type"
        }
    )


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
            _plain("float")(value, f"{part}.{name}")
    return dict(data)


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return bool(value == field.default and type(value) is type(field.default))
    return field.default_factory is not dataclasses.MISSING and not value


_Codec: TypeAlias = tuple[Callable[[Any, Keys], Any], Callable[[Any, Keys], Any]]
"""How a field is written and read."""


def _same(value: Any) -> Any:
    return value


def _plain(annotation: str) -> Callable[..., Any]:
    """Returns a function that reads a value of this annotation unchanged. It raises ValueError on
    any other value, and on NaN and infinity.
    """
    kind, optional = annotation.removesuffix(" | None"), annotation.endswith(" | None")

    def read(value: Any, name: str = "a value") -> Any:
        if optional and value is None:
            return None
        if kind in ("int", "float"):
            good = (
                is_whole(value, -_MOST_INT, _MOST_INT)
                if kind == "int"
                else is_number(value, -_MOST_FLOAT, _MOST_FLOAT)
            )
        else:
            good = type(value) is {"str": str, "bool": bool}[kind]
        if not good:
            raise ValueError(refusal(name, value, f"of type {annotation}"))
        return value

    return read


def _codec(field: dataclasses.Field[Any]) -> _Codec:
    return _CODECS[str(field.type)]


def _keyless(write: Callable[[Any], Any], read: Callable[[Any], Any]) -> _Codec:
    return lambda value, _: write(value), lambda value, _: read(value)


def _many(codec: _Codec) -> _Codec:
    return lambda values, keys: [codec[0](v, keys) for v in values], lambda values, keys: tuple(
        codec[1](v, keys) for v in values
    )


def _message(kind: type) -> _Codec:
    return _to_plain, lambda data, keys: _from_plain(kind, data, keys)


def _span(pair: Sequence[Any]) -> Span:
    return Span(*map(_plain("int"), pair))


_KEY: _Codec = (lambda key, keys: keys.write((key,))[0], lambda value, keys: keys.read((value,))[0])
_TIERS = {name: tier for tier, name in PLACES.items()}
_SOURCE = _keyless(
    lambda s: [[s[0].start, s[0].stop], PLACES[s[1]]], lambda s: (_span(s[0]), _TIERS[s[1]])
)


def _question(data: Mapping[str, Any], keys: Keys) -> Any:
    kind = _QUESTIONS.get(str(data["type"]))
    if kind is None:
        raise ValueError(f"no question is of the type {shown(data['type'])}")
    return _from_plain(kind, data, keys)


def _answer(value: Any) -> Answer:
    if isinstance(value, dict):
        given: HintAnswer = _from_plain(HintAnswer, value, IN_FULL)
        return given
    if isinstance(value, list):
        return tuple(map(_plain("str"), value))
    if isinstance(value, int):
        return value
    said: str | None = _plain("str | None")(value)
    return said


def _answer_to_plain(answer: Answer) -> Any:
    if isinstance(answer, HintAnswer):
        return _to_plain(answer, IN_FULL)
    return list(answer) if isinstance(answer, tuple) else answer


_CODECS: dict[str, _Codec] = {
    **{
        kind: _keyless(_same, _plain(kind))
        for kind in ("str", "int", "float", "bool", "str | None", "int | None", "float | None")
    },
    "tuple[int, ...]": _keyless(list, lambda numbers: tuple(map(_plain("int"), numbers))),
    "tuple[str, ...]": _keyless(list, lambda texts: tuple(map(_plain("str"), texts))),
    "Span": _keyless(lambda span: [span.start, span.stop], _span),
    "Tier": _keyless(PLACES.__getitem__, _TIERS.__getitem__),
    "Link": _keyless(lambda link: link.value, Link),
    "Mode": _keyless(lambda mode: mode.value, Mode),
    "PolicyConfig": _keyless(dataclasses.asdict, _config),
    "Hint": _keyless(dataclasses.asdict, lambda data: _from_plain(Hint, data, IN_FULL)),
    "tuple[PageKey, ...]": (
        lambda values, keys: keys.write(values),
        lambda values, keys: keys.read(values),
    ),
    "tuple[tuple[Span, Tier], ...]": _many(_SOURCE),
    "dict[Tier, int]": _keyless(
        lambda pages: {PLACES[tier]: count for tier, count in pages.items()},
        lambda pages: {_TIERS[name]: _plain("int")(count) for name, count in pages.items()},
    ),
    **{
        f"tuple[{kind.__name__}, ...]": _many(_message(kind))
        for kind in (
            messages.RestoreStart,
            messages.Cancel,
            messages.Load,
            messages.Compute,
            messages.Evict,
            messages.Move,
            messages.Queued,
            messages.Waiter,
        )
    },
    **{kind.__name__: _message(kind) for kind in (RestoreOffered, StepView, messages.Waiter)},
    "PageKey": _KEY,
    "Question[Any]": (_to_plain, _question),
    "Answer": _keyless(_answer_to_plain, _answer),
}
"""How a field is written and read, by its annotation in messages.py. A new kind of field fails at
import, just below.
"""

_QUESTIONS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        messages.LeftToEngine,
        messages.ReadsDue,
        messages.Hinted,
        messages.SessionsWith,
        messages.RulesTuned,
        messages.RunOrder,
        messages.ChunkBeside,
        messages.HeldBack,
    )
}
_RECORDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        messages.RequestArrived,
        messages.RequestFinished,
        messages.RestoreOffered,
        messages.TransferDone,
        messages.PagesLost,
        messages.ChunkStarted,
        messages.ChunkDone,
        messages.StepDone,
        messages.PagesPlaced,
        messages.PagesDropped,
        messages.PolicyChanged,
        StepView,
        StepPlan,
        Query,
        PlannerFailed,
        LinesDropped,
    )
}

for _kind in (*_RECORDS.values(), *_QUESTIONS.values(), Hint, HintAnswer):
    for _field in dataclasses.fields(_kind):
        if str(_field.type) not in _CODECS:
            raise TypeError(
                f"{_kind.__name__}.{_field.name}: {_field.type} has no form in the decision log"
            )
