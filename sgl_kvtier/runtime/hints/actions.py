"""`kv_hints`: the envelope of a request (SGLang 0.5.23, `managers/kv_hints.py`), whose actions tell
what to do with the KV of its session or of others.

    kv.retain 1.x    {"directives": [{"start", "end" or "covers_output", "priority": 0 to 100,
                     "duration": seconds}]}, as in vLLM's proposal, or
                     {"block_hashes", "priority", "ttl_seconds"}, as NVIDIA's Dynamo sends it
    kv.evict 1.x     the pages are not needed any more
    kv.demote 1.x    they are needed last
    kv.prefetch 1.x  {"expected_delay_s"}: they are needed in so many seconds, 0 by default

Each may have `execute_at` ("request_completion", the default, or "request_arrival"), `session_id`,
`block_hashes` (SGLang's page hashes in hexadecimal), and `include_current_request`, which is true
by default unless sessions or blocks are named. Pages are kept and evicted by session, so an action
on a part of a prompt applies to the whole session and is reported as clipped.

Pure functions, which raise on no payload. Unknown actions are ignored.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sgl_kvtier.outside import brief, is_number, is_text, shown
from sgl_kvtier.policy.messages import Consulted, Hint, HintAnswer, Hinted, SessionsWith
from sgl_kvtier.runtime.step.session_name import known_as
from sgl_kvtier.runtime.step.tracked import Asking
from sgl_kvtier.types import PageKey

ARRIVAL: Final = "request_arrival"
COMPLETION: Final = "request_completion"
MOST_ACTIONS: Final = 16
"""Most actions of one envelope. Further ones are refused."""
_MOST_NAMED: Final = 64
"""Most blocks or directives of one action."""
_MOST_SESSIONS: Final = 16
_MOST_NAME: Final = 4096
_HIGHEST: Final = 100
_STEPS: Final = 3
"""Priorities of sessions range from -3 to 3 here. kv.retain maps its priority from 0 to 100, by
default 50, to 1 to 3.
"""
_UNSAID: Final = 2
_FOREIGN: Final = (
    "this server has an admin key, so a request's kv_hints are on its own session alone: send POST "
    "/kvtier/hint with the key"
)
_HASH: Final = re.compile(r"[0-9a-fA-F]{64}")
_VERSION: Final = re.compile(r"1(\.\d{1,4})?")


@dataclass(frozen=True)
class Action:
    """An action that was read: a hint for the request's own session, for one by name, and for those
    whose prompts contain one of these pages.
    """

    hint: Hint
    at: str = COMPLETION
    own: bool = True
    session: str | None = None
    pages: tuple[PageKey, ...] = ()
    clipped: str = ""
    """What was not followed exactly as sent."""


@dataclass(frozen=True)
class Refused:
    """An action that cannot be carried out, and why."""

    why: str


def read(action: Any) -> Action | Refused | None:
    """Reads one action of an envelope; None if it is not one of ours."""
    kind, payload = action.action_type, action.payload
    hint_of = _KINDS.get(kind)
    if hint_of is None:
        return None
    if not _VERSION.fullmatch(action.action_version):
        return Refused(f"{kind} has version {shown(action.action_version)}: 1.x is carried out")
    try:
        return _action(payload, hint_of)
    except _Wrong as wrong:
        return Refused(brief(f"{kind}: {wrong}"))


def carry_out(
    planner: Consulted,
    asking: Asking,
    now: float,
    *,
    others: bool,
    retain: Callable[[str, Sequence[PageKey], float], int],
) -> list[HintAnswer]:
    """Carries out the actions of an envelope that are due now, and returns the effect of each.
    Refusals are reported when the request arrives. `others`: whether actions may apply to sessions
    other than the request's own, which an admin key forbids clients. `retain` is the store's
    (`PageStore.retain`): an action with a time is applied there as well, to the pages of the
    request itself.
    """
    envelope, own, when = asking.envelope, asking.session, asking.when
    answers = []
    for action in envelope.actions[:MOST_ACTIONS]:
        found = read(action)
        if isinstance(found, Refused):
            answers += [HintAnswer(False, found.why)] if when == ARRIVAL else []
        elif found is not None and found.at == when:
            foreign = found.session is not None or bool(found.pages)
            answers.append(
                HintAnswer(False, _FOREIGN)
                if foreign and not others
                else _on_disk(_carried_out(planner, found, own, now), found, asking, retain)
            )
    return answers + (_left_out(envelope) if when == ARRIVAL else [])


def refused(envelope: Any, why: str) -> list[HintAnswer]:
    """The results for an envelope on a server that cannot follow hints."""
    ours = [one for one in envelope.actions[:MOST_ACTIONS] if one.action_type in _KINDS]
    return [HintAnswer(False, why) for _ in ours] + _left_out(envelope)


def _left_out(envelope: Any) -> list[HintAnswer]:
    left_out = len(envelope.actions) - MOST_ACTIONS
    if left_out <= 0:
        return []
    return [HintAnswer(False, f"{left_out} actions more than {MOST_ACTIONS}")]


def _on_disk(
    answer: HintAnswer,
    action: Action,
    asking: Asking,
    retain: Callable[[str, Sequence[PageKey], float], int],
) -> HintAnswer:
    seconds = action.hint.ttl_s
    if not answer.accepted or not action.own or seconds is None:
        return answer
    kept = retain(asking.session, asking.keys, seconds)
    if not seconds or kept == len(asking.keys):
        return answer
    less = f"the disk keeps {kept} of {len(asking.keys)} pages: half of it is retained already"
    return replace(answer, reason="; ".join(filter(None, [answer.reason, less])))


def _carried_out(planner: Consulted, action: Action, own: str, now: float) -> HintAnswer:
    sessions = dict.fromkeys([own] if action.own else [])
    if action.session is not None:
        sessions[action.session] = None
    for page in action.pages:
        found = planner.query(SessionsWith(page))
        sessions |= dict.fromkeys(found)
    if not sessions:
        return HintAnswer(False, "no session is known whose prompts have these blocks")
    if len(sessions) > _MOST_SESSIONS:
        return HintAnswer(False, f"{len(sessions)} sessions have these blocks: name the session")
    answers = [planner.query(Hinted(session, action.hint, now)) for session in sessions]
    taken = [answer for answer in answers if answer.accepted]
    if not taken:
        return answers[0]
    said = [action.clipped, *(answer.reason for answer in answers)]
    return HintAnswer(True, "; ".join(dict.fromkeys(filter(None, said))), taken[0].returns_at)


class _Wrong(Exception):
    """A payload that cannot be carried out. The text says what is wrong."""


def _action(payload: Mapping[str, Any], hint_of: Callable[[Any], tuple[Hint, str]]) -> Action:
    hint, clipped = hint_of(payload)
    at = payload.get("execute_at", COMPLETION)
    if at not in (COMPLETION, ARRIVAL):
        raise _Wrong(f"execute_at is {COMPLETION} or {ARRIVAL}, not {shown(at)}")
    session = payload.get("session_id")
    if session is not None and (not session or not is_text(session, _MOST_NAME)):
        raise _Wrong(f"session_id must be a text, not {shown(session)}")
    blocks = _listed(payload, "block_hashes")
    pages = [block for block in blocks if isinstance(block, str) and _HASH.fullmatch(block)]
    if blocks and not pages:
        raise _Wrong("block_hashes are no page hashes of SGLang's (64 hexadecimal digits)")
    own = payload.get("include_current_request", session is None and not blocks)
    if not isinstance(own, bool):
        raise _Wrong(f"include_current_request is true or false, not {shown(own)}")
    if not own and session is None and not pages:
        raise _Wrong("it names no session and no block, and does not include its own request")
    lost = len(blocks) - len(pages)
    return Action(
        hint=hint,
        at=at,
        own=own,
        session=None if session is None else known_as(session),
        pages=tuple(PageKey(bytes.fromhex(block)) for block in pages),
        clipped="; ".join(
            filter(
                None, [clipped, f"{lost} of {len(blocks)} block_hashes are unknown" * bool(lost)]
            )
        ),
    )


def _retain(payload: Mapping[str, Any]) -> tuple[Hint, str]:
    directives = _listed(payload, "directives") or (payload,)
    if not all(isinstance(directive, Mapping) for directive in directives):
        raise _Wrong("directives must be objects")
    priorities = [_priority(directive) for directive in directives]
    lifetimes = [_seconds(directive, "duration", "ttl_seconds") for directive in directives]
    until = None if None in lifetimes else max(lifetimes)  # type: ignore[type-var]
    known = [priority for priority in priorities if priority is not None]
    if not known and until is None:
        raise _Wrong("it says neither a priority nor a time")
    hint = Hint(priority=max(known) if known else _UNSAID, ttl_s=until)
    parts = any(directive.get("start") or directive.get("end") for directive in directives)
    same = len(set(zip(priorities, lifetimes, strict=True))) == 1
    return hint, "" if same and not parts else "taken for the whole session"


def _evict(payload: Mapping[str, Any]) -> tuple[Hint, str]:
    del payload
    return Hint(priority=-_STEPS, ttl_s=0.0), ""


def _demote(payload: Mapping[str, Any]) -> tuple[Hint, str]:
    del payload
    return Hint(priority=-_STEPS), ""


def _prefetch(payload: Mapping[str, Any]) -> tuple[Hint, str]:
    return Hint(expected_delay_s=_seconds(payload, "expected_delay_s") or 0.0), ""


_KINDS: Final[Mapping[str, Callable[[Any], tuple[Hint, str]]]] = {
    "kv.retain": _retain,
    "kv.evict": _evict,
    "kv.demote": _demote,
    "kv.prefetch": _prefetch,
}


def _priority(payload: Mapping[str, Any]) -> int | None:
    value = payload.get("priority")
    if value is None:
        return None
    if not is_number(value, 0, _HIGHEST):
        raise _Wrong(f"priority must be a number from 0 to {_HIGHEST}, not {shown(value)}")
    return 1 + round(value / _HIGHEST * (_STEPS - 1))


def _seconds(payload: Mapping[str, Any], *names: str) -> float | None:
    for name in names:
        value = payload.get(name)
        if value is not None:
            if not is_number(value, 0, sys.float_info.max):
                raise _Wrong(f"{name} must be a number of seconds, not {shown(value)}")
            return float(value)
    return None


def _listed(payload: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = payload.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MOST_NAMED:
        raise _Wrong(f"{name} must be a list of at most {_MOST_NAMED}")
    return value
