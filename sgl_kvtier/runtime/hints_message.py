"""A client's hint as JSON: what may stand in it, and the form in which it goes from the HTTP server to the schedulers.

    {"session": "agent-7", "expected_delay_s": 12.5, "priority": 1, "ttl_s": 600, "tool": "pytest"}
    {"tokens": [1, 2, 3, ...], "expected_delay_s": 3}          the session whose prompts begin so; also as "text"

Pure functions. Everything a client may do wrong raises HintError with a sentence that says what to do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.policy.sessions import Hint
from sgl_kvtier.runtime.hints_session import known_as
from sgl_kvtier.types import PageKey

MARK = "kvtier.hint:"
"""What the scheduler knows a hint by among SGLang's control messages."""
MOST_BYTES = 8 << 20
"""Of a request's body: a prefix of a million tokens."""
_WHO = ("session", "tokens", "text")
_FIELDS = (*_WHO, "expected_delay_s", "priority", "ttl_s", "tool", "extra_key", "cache_salt")


class HintError(KVTierError):
    """A hint that cannot be read. The text says what is wrong and what to send instead."""


@dataclass(frozen=True)
class Asked:
    """What a client sent, checked. One of `session`, `tokens`, `text` says whose hint it is."""

    hint: Hint
    session: str | None = None
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True)
class Sent:
    """A hint on its way to the schedulers: for a session by name, or for those whose prompts have the page `page`.

    `at` is the HTTP server's monotonic clock, in seconds: one time for all ranks.
    """

    hint: Hint
    at: float
    session: str | None = None
    page: PageKey | None = None


def read(body: bytes) -> Asked:
    """What the body of a request asks for. Raises HintError."""
    if len(body) > MOST_BYTES:
        raise HintError(f"the hint has {len(body)} bytes, at most {MOST_BYTES} are read: name the session instead of its text")
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HintError(f"not JSON: {error}. Send an object such as {_EXAMPLE}") from error
    if not isinstance(data, dict):
        raise HintError(f"a hint is an object, not {type(data).__name__}. Send {_EXAMPLE}")
    unknown = [name for name in data if name not in _FIELDS]
    if unknown:
        raise HintError(f"unknown: {', '.join(unknown)}. A hint may have {', '.join(_FIELDS)}")
    given = {name: value for name, value in data.items() if value is not None}
    who = [name for name in _WHO if name in given]
    if len(who) != 1:
        raise HintError(f"a hint needs exactly one of {', '.join(_WHO)} to say whose it is; it has {len(who)}. Send {_EXAMPLE}")
    hint = Hint(
        expected_delay_s=_seconds(given, "expected_delay_s"),
        priority=_whole(given, "priority"),
        ttl_s=_seconds(given, "ttl_s"),
        tool=_text(given, "tool"),
    )
    if hint == Hint():
        raise HintError("the hint says nothing: add expected_delay_s, priority, ttl_s or tool")
    session = _text(given, "session")
    return Asked(
        hint=hint,
        session=None if session is None else known_as(session),
        tokens=_tokens(given),
        text=_text(given, "text"),
        extra_key=_text(given, "extra_key"),
        cache_salt=_text(given, "cache_salt"),
    )


def pack(sent: Sent) -> str:
    """The form that travels inside one of SGLang's control messages."""
    page = None if sent.page is None else sent.page.hex()
    return MARK + json.dumps({"hint": asdict(sent.hint), "at": sent.at, "session": sent.session, "page": page})


def unpack(text: str) -> Sent:
    """The reverse of `pack`."""
    data: Mapping[str, Any] = json.loads(text[len(MARK) :])
    page = None if data["page"] is None else PageKey(bytes.fromhex(data["page"]))
    return Sent(Hint(**data["hint"]), data["at"], data["session"], page)


_EXAMPLE = '{"session": "agent-7", "expected_delay_s": 12.5}'


def _seconds(given: Mapping[str, Any], name: str) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise HintError(f"{name} = {_shown(value)}: must be a number of seconds of at least 0")
    return float(min(value, 1e12))  # a whole number may be larger than any float


def _whole(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 1 << 31:
        raise HintError(f"{name} = {_shown(value)}: must be a whole number; above 0 keeps pages longer, below 0 shorter")
    return value


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise HintError(f"{name} = {_shown(value)}: must be a text that is not empty")
    return value


def _tokens(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = given.get("tokens")
    if value is None:
        return None
    good = isinstance(value, list) and value and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    if not good:
        raise HintError(f"tokens = {_shown(value)}: must be a list of token ids, the beginning of the session's prompts")
    return tuple(value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:59] + "…"
