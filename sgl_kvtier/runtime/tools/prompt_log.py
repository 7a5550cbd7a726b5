"""A log of prompts, one request per line: each is compared with the one before it in its session.

Pure: lines in, no files, no network, no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sgl_kvtier.console import format_share, format_value
from sgl_kvtier.outside import parse_json, shown
from sgl_kvtier.runtime.tools.prompt_diff import Parting, Prompt, of_request, part

_SAME: Final = ("extended", "equal")
"""Kinds of pairs in which nothing differs."""
_STAMP: Final = re.compile(rb"\[[-0-9 :]+\] (?=\{)")
"""The prefix that SGLang's --log-requests writes before the JSON of a line."""
_RECEIVED: Final = "request.received"
"""The event in that log that has the prompt as the server computes it; others repeat it."""
_ROUTING_HEADER: Final = "x-smg-routing-key"


class Logged(NamedTuple):
    """A request in a log: its line number, the session that it names, and its prompt."""

    line: int
    session: str | None
    prompt: Prompt


@dataclass(frozen=True)
class Pair:
    """A request and the one before it in its session."""

    session: str | None
    earlier_line: int
    line: int
    parting: Parting
    hit_tokens: int | None
    """Tokens of the later prompt that a cache can have from the earlier one; None, here and below,
    if tokens are not known.
    """
    lost_tokens: int | None
    """Further tokens that a cache could have, had the later prompt begun with the earlier one."""

    @property
    def is_apart(self) -> bool:
        """Whether something differs, so that the later prompt does not extend the earlier one."""
        return self.parting.kind not in _SAME

    @property
    def lost_fraction(self) -> float | None:
        """`lost_tokens` as a fraction of the possible hit; None also if no hit was possible."""
        return _fraction([self])


class Cause(NamedTuple):
    """All pairs with the same kind of difference."""

    kind: str
    text: str
    pairs: int
    lost_tokens: int | None
    lost_fraction: float | None


def read(lines: Iterable[bytes], most_bytes: int) -> Iterator[Logged]:
    """The requests of a log: JSON objects with `messages`, `prompt`, `text` or `input_ids`, or the
    JSON lines of SGLang's --log-requests. Empty lines are skipped. Raises ValueError, which begins
    with the line's number.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(line) > most_bytes:
            raise ValueError(f"line {number}: it has more than {most_bytes} bytes")
        try:
            stamp = _STAMP.match(line)
            found = parse_json(line[stamp.end() :] if stamp else line)
        except json.JSONDecodeError as error:
            said = f"no JSON ({error.msg} at character {error.pos + 1})"
            raise ValueError(f"line {number}: {said}. Write one request a line") from error
        except ValueError as error:
            raise ValueError(f"line {number}: no JSON ({error})") from error
        if not isinstance(found, dict):
            raise ValueError(f"line {number}: {shown(found)} is no request, which is a JSON object")
        request = found
        if "event" in found and isinstance(found.get("obj"), dict):
            if found["event"] != _RECEIVED:
                continue
            request = found["obj"]
        try:
            yield Logged(number, _session_of(request, found.get("headers")), of_request(request))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error


def _session_of(request: Mapping[str, Any], headers: object) -> str | None:
    """The session's name, found as `step/session_name.py` does in a server."""
    params = request.get("session_params")
    names = (
        request.get("session_id"),
        params.get("id") if isinstance(params, Mapping) else None,
        request.get("routing_key"),
        headers.get(_ROUTING_HEADER) if isinstance(headers, Mapping) else None,
    )
    return next((str(name) for name in names if name), None)


def pairs(requests: Iterable[Logged], page_tokens: int) -> Iterator[Pair]:
    """Each request with the one before it in its session; requests without a session form one
    together. Only the last request of each session is kept in memory.
    """
    last: dict[str | None, Logged] = {}
    for later in requests:
        earlier = last.get(later.session)
        last[later.session] = later
        if earlier is not None:
            yield _pair(earlier, later, page_tokens)


def _pair(earlier: Logged, later: Logged, page_tokens: int) -> Pair:
    found = part(earlier.prompt, later.prompt, page_tokens)
    hit = lost = None
    if found.hit_tokens is not None:
        before, now = (len(one.prompt.tokens or ()) for one in (earlier, later))
        # The last token of a prompt is always computed.
        hit = min(found.hit_tokens, (now - 1) // page_tokens * page_tokens)
        lost = min(before, now - 1) // page_tokens * page_tokens - hit
    return Pair(later.session, earlier.line, later.line, found, hit, lost)


def causes(found: Sequence[Pair]) -> list[Cause]:
    """What differs, most frequent first; if equally frequent, most costly first."""
    by_kind: dict[str, list[Pair]] = {}
    for pair in found:
        if pair.is_apart:
            by_kind.setdefault(pair.parting.kind, []).append(pair)
    rows = [
        Cause(kind, same[0].parting.text, len(same), _lost(same), _fraction(same))
        for kind, same in by_kind.items()
    ]
    return sorted(rows, key=lambda row: (-row.pairs, -(row.lost_tokens or 0)))


def _lost(found: Sequence[Pair]) -> int | None:
    known = [pair.lost_tokens for pair in found if pair.lost_tokens is not None]
    return sum(known) if known else None


def _fraction(found: Sequence[Pair]) -> float | None:
    lost = _lost(found)
    possible = (lost or 0) + sum(pair.hit_tokens or 0 for pair in found)
    return lost / possible if lost is not None and possible else None


def summary(found: Sequence[Pair]) -> str:
    """A sentence with the most frequent cause."""
    if not found:
        return "No request follows another one of its session: there is nothing to compare."
    rows = causes(found)
    if not rows:
        return f"All of {len(found)} later prompts go on where the ones before them ended."
    apart, most = sum(row.pairs for row in rows), rows[0]
    said = (
        f"{apart} of {len(found)} later prompts do not go on where the ones before them ended. The "
        f"most frequent cause is {most.kind} ({most.text}): {most.pairs} of {apart}"
    )
    if most.lost_tokens is None:
        return f"{said}."
    cost = f"{format_value(most.lost_tokens)} tokens"
    if most.lost_fraction is not None:
        cost += f", {format_share(most.lost_fraction)} of their hits"
    return f"{said}, which cost {cost}."
