"""Clients' hints in the scheduler: passed to the planner between two steps, and answered with their
effect.

Every rank gets the same message, with the same time in it, in the same step, so all planners treat
it alike. policy/sessions.py decides whether a hint is accepted, clipped or refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from sgl_kvtier.policy.messages import Consulted, HintAnswer, Hinted, SessionsWith
from sgl_kvtier.runtime import metrics
from sgl_kvtier.runtime.hints import actions, requests, settings
from sgl_kvtier.runtime.hints.message import MARK, Sent, unpack
from sgl_kvtier.runtime.hints.route import ANSWER
from sgl_kvtier.runtime.sglang import step
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.requests import take_kv_hints

MOST_SESSIONS = 16
"""Most sessions that may share a prefix and all receive its hint."""

logger = logging.getLogger(__name__)


def get_internal_state(
    original: Callable[..., Any], controller: Any, message: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook around SGLang's own: answers hints, and queries about requests and settings."""
    text = message.rid or ""
    if not text.startswith((MARK, requests.MARK, settings.MARK)):
        return original(controller, message, *args, **kwargs)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    if text.startswith(requests.MARK):
        found = _known(controller.scheduler, text[len(requests.MARK) :])
        return GetInternalStateReqOutput(internal_state={requests.ANSWER: found})
    if text.startswith(settings.MARK):
        told = settings.answer(controller.scheduler, text)
        return GetInternalStateReqOutput(internal_state={settings.ANSWER: told})
    answer = take(controller.scheduler, unpack(text))
    count(controller.scheduler, answer["result"])
    return GetInternalStateReqOutput(internal_state={ANSWER: answer})


def _known(scheduler: Any, rid: str) -> dict[str, Any]:
    """What is known of requests. A failing query must not end the server."""
    try:
        return requests.known(scheduler, rid)
    except Exception:
        logger.exception("kvtier: what is known of requests cannot be said")
        return {"requests": [], "omitted": 0}


def take(scheduler: Any, sent: Sent) -> dict[str, Any]:
    """Passes a hint on and returns its effect: `result` (accepted, clipped, refused), `reason`, the
    number of `sessions` it applies to, and `expected_in_s`, the seconds until the first idle one of
    them is expected. Scheduler's thread.
    """
    parts: Any = getattr(scheduler.tree_cache, "kvtier", None)
    why = unable(scheduler.tree_cache, parts)
    if why is not None:
        return _answer([HintAnswer(False, why)], 0, None)
    now = max(sent.at, parts.context.now) if _one_host(scheduler) else parts.context.now
    sessions = _meant(parts.planner, sent)
    if isinstance(sessions, str):
        return _answer([HintAnswer(False, sessions)], 0, None)
    answers = [parts.planner.query(Hinted(session, sent.hint, now)) for session in sessions]
    returns = [answer.returns_at for answer in answers if answer.returns_at is not None]
    return _answer(answers, len(sessions), max(0.0, min(returns) - now) if returns else None)


def unable(tree: Any, parts: Any) -> str | None:
    """Why this server cannot follow any hint, or None."""
    if parts is None:
        if store_of(getattr(tree, "cache_controller", None)) is None:
            return (
                "this server has no kvtier backend: start it with --hicache-storage-backend kvtier"
            )
        return (
            "this server restores prefixes SGLang's own way, so nothing is planned ahead: see "
            "policy.restore and its log"
        )
    if parts.ahead is None:
        return (
            "this server does not look ahead: name policy.prefetch or policy.eviction in "
            "kvtier.json, or see its log for why not"
        )
    if not parts.notes.config.sessions:
        return "policy.sessions is off, so no session is known: set it to true in kvtier.json"
    return None


def refuse_kv_hints(scheduler: Any, parts: Any) -> None:
    """On a server that cannot follow hints: counts the actions in the `kv_hints` of waiting
    requests as refused, each once. Once per step.
    """
    why = unable(scheduler.tree_cache, parts)
    if why is None:
        return  # lookahead handles them as requests arrive and end
    for req in step.waiting(scheduler):
        envelope = take_kv_hints(req)
        if envelope is not None:
            _say_refused(why)
            for answer in actions.refused(envelope, why):
                count(scheduler, result_of(answer))


@cache
def _say_refused(why: str) -> None:
    logger.warning("kvtier: kv_hints of requests are refused: %s", why)


def _meant(planner: Consulted, sent: Sent) -> tuple[str, ...] | str:
    """The sessions that a hint is for, or why there are none."""
    if sent.session is not None:
        return (sent.session,)
    assert sent.page is not None, "a hint names a session or a page"
    sessions = planner.query(SessionsWith(sent.page))
    if not sessions:
        return "no session is known whose prompts have the whole pages of this prefix"
    if len(sessions) > MOST_SESSIONS:
        return (
            f"{len(sessions)} sessions begin so, more than {MOST_SESSIONS}: send more of the "
            "prompt, or the session's name"
        )
    return sessions


def _answer(
    answers: list[HintAnswer], sessions: int, expected_in_s: float | None
) -> dict[str, Any]:
    taken = [answer for answer in answers if answer.accepted]
    result = result_of(HintAnswer(bool(taken), "".join(answer.reason for answer in answers)))
    reasons = list(dict.fromkeys(answer.reason for answer in answers if answer.reason))
    return {
        "result": result,
        "reason": "; ".join(reasons),
        "sessions": sessions,
        "expected_in_s": expected_in_s,
    }


def result_of(answer: HintAnswer) -> str:
    """The effect of a hint in one word, for clients and /metrics."""
    if not answer.accepted:
        return "refused"
    return "clipped" if answer.reason else "accepted"


def _one_host(scheduler: Any) -> bool:
    """Whether the HTTP server's clock is that of facts; otherwise the last step's time is used."""
    args = getattr(scheduler, "server_args", None)
    return getattr(args, "nnodes", 1) == 1 or getattr(args, "dp_size", 1) == 1


def count(scheduler: Any, result: str) -> None:
    """Counts kvtier:lookahead_hints_total{result} on one rank of a replica: all get the same."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    first = parallel.pp_rank == 0 and parallel.attn_tp_rank == 0
    if not first or not scheduler.metrics_reporter.enable_metrics:
        return
    metrics.count("lookahead_hints", result=result)
