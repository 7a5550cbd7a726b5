"""Values from outside: shown short, numbers within their range, JSON text and files of bounded
size.

Settings, requests, arguments, traces and logs are all checked here, so that a hostile or damaged
one ends in one error that names it. The errors are ValueErrors; each room makes its own of them.
Standard library only, any thread.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeGuard

MOST_SHOWN: Final = 60
"""Characters of a value that an error repeats."""
MOST_WHOLE: Final = 1 << 53
"""No real count, size, id or time comes near; every whole number up to here is exact as a float."""
MOST_SETTINGS_BYTES: Final = 1 << 20
"""Largest file of settings or of learned costs, in bytes; real ones have under 10 KB."""
_ITEMS, _LEVELS = 20, 3
_LINE = 2000
"""Characters of a line of an error on a terminal."""


def shown(value: object) -> str:
    """A value as JSON for an error's text: at most `MOST_SHOWN` characters. Never raises."""
    text = _shown(value, 0)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…"


def brief(message: str) -> str:
    """An error's text for a terminal: long words, such as a name of thousands of characters, keep
    their ends, and so do long lines. Never raises.
    """
    lines = re.sub(r"\S{257,}", lambda word: _ends(word[0], MOST_SHOWN), message).split("\n")
    return "\n".join(line if len(line) <= _LINE else _ends(line, _LINE // 2) for line in lines)


def _ends(text: str, each: int) -> str:
    return f"{text[:each]}…{text[-each:]}"


def refusal(name: str, value: object, allowed: str) -> str:
    """The text of an error: the name, its value, and the allowed values."""
    return f"{name} = {shown(value)}: must be {allowed}"


def is_number(
    value: object, low: float = -MOST_WHOLE, high: float = MOST_WHOLE
) -> TypeGuard[float]:
    """Whether `value` is a finite number from `low` to `high`. A bool is not a number."""
    # Written so that NaN, which is neither below nor above anything, fails.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def is_whole(value: object, low: float = -MOST_WHOLE, high: float = MOST_WHOLE) -> TypeGuard[int]:
    """Whether `value` is an int from `low` to `high`; 1.0 is not one."""
    return isinstance(value, int) and is_number(value, low, high)


def is_text(value: object, most: int) -> TypeGuard[str]:
    """Whether `value` is a text of at most `most` characters, without lone surrogates."""
    if not isinstance(value, str) or len(value) > most:
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def parse_json(text: str | bytes) -> Any:
    """The value in a JSON text. Raises ValueError with the position, however deep it is."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error


def read_bounded(path: Path, most: int = MOST_SETTINGS_BYTES) -> str:
    """A UTF-8 file of at most `most` bytes. Raises OSError, and ValueError on any other."""
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise ValueError(f"it has more than {most} bytes, which no such file needs")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of it is not UTF-8 text") from error


def _shown(value: object, level: int) -> str:
    if value is None or isinstance(value, (bool, float)):
        return json.dumps(value)
    if isinstance(value, str):
        quoted = json.dumps(value[:MOST_SHOWN], ensure_ascii=False)
        return quoted.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        # Python refuses to print numbers with thousands of digits, or takes long.
        return (
            str(value)
            if value.bit_length() < 200
            else f"a whole number of {value.bit_length()} bits"
        )
    if isinstance(value, (list, tuple)):
        inner = (
            [_shown(item, level + 1) for item in value[:_ITEMS]]
            if level < _LEVELS
            else ["…"] * bool(value)
        )
        return "[" + ", ".join(inner + ["…"] * (len(value) > _ITEMS)) + "]"
    if isinstance(value, dict):
        pairs = list(islice(value.items(), _ITEMS if level < _LEVELS else 0))
        inner = [f"{_shown(key, level + 1)}: {_shown(item, level + 1)}" for key, item in pairs]
        return "{" + ", ".join(inner + ["…"] * (len(value) > len(pairs))) + "}"
    return f"<{type(value).__name__}>"
