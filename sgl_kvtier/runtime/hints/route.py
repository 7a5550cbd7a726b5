"""Routes in SGLang's HTTP server. POST /kvtier/hint: clients announce when their sessions return.
GET /kvtier/requests: what is known of each request (`requests.py`). GET and POST /kvtier/settings:
settings of the running server (`settings.py`).

The routes are added to SGLang's own when the tokenizer manager creates its channels to the
schedulers, and have the same protection as its admin routes (docs/manual/lookahead.md). A hint
travels as SGLang's own query of the internal state, which goes to every scheduler process between
two steps. With several tokenizer workers there are no routes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.runtime.hints import requests, settings
from sgl_kvtier.runtime.hints.message import MOST_BYTES, Asked, HintError, Sent, pack, read
from sgl_kvtier.runtime.sglang import features
from sgl_kvtier.runtime.step.page_names import PageNames

PATH = "/kvtier/hint"
REQUESTS_PATH = "/kvtier/requests"
SETTINGS_PATH = "/kvtier/settings"
ANSWER = "kvtier.hint"
"""The key of a scheduler's answer in the state it returns."""
_MOST_PASSED_OVER = 8 * MOST_BYTES
_SERVER = "sglang.srt.entrypoints.http_server"

logger = logging.getLogger(__name__)


def add_route(result: None, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after the tokenizer manager's channels were created, in a process that serves HTTP."""
    del result, args, kwargs
    app = getattr(sys.modules.get(_SERVER), "app", None)
    if app is None or features.moved("hints"):
        return  # an engine without HTTP, or an SGLang that a hint could not reach
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    async def kvtier_hint(request: Any) -> Any:
        try:
            answer = await ask(manager, await _body(request))
        except HintError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return JSONResponse(answer)

    async def kvtier_requests(request: Any) -> Any:
        return JSONResponse(await known_requests(manager, request.query_params.get("rid", "")))

    async def kvtier_settings(request: Any) -> Any:
        if request.method == "GET":
            return JSONResponse(await _told(manager, {}, change=False))
        status, answer = await change(manager, await _body(request))
        return JSONResponse(answer, status_code=status)

    for path, methods, answer in (
        (PATH, ["POST"], kvtier_hint),
        (REQUESTS_PATH, ["GET"], kvtier_requests),
        (SETTINGS_PATH, ["GET", "POST"], kvtier_settings),
    ):
        # The framework reads annotations to choose arguments; it could not resolve text here.
        answer.__annotations__ = {"request": Request}
        app.add_api_route(
            path, auth_level(AuthLevel.ADMIN_OPTIONAL)(answer), methods=methods, response_model=None
        )


async def ask(manager: Any, body: bytes) -> dict[str, Any]:
    """Sends a hint to the schedulers and returns their answer. Raises HintError."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    sent = await asyncio.to_thread(lambda: _address(manager, read(body)))
    manager.auto_create_handle_loop()
    states = await manager.get_internal_state_communicator(GetInternalStateReq(rid=pack(sent)))
    return best([state.internal_state.get(ANSWER) or NOT_ANSWERED for state in states])


async def known_requests(manager: Any, rid: str) -> dict[str, Any]:
    """What the schedulers know of one request, or of all with an empty `rid`."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager.auto_create_handle_loop()
    states = await manager.get_internal_state_communicator(
        GetInternalStateReq(rid=requests.MARK + rid)
    )
    return requests.together([state.internal_state.get(requests.ANSWER) for state in states])


async def change(manager: Any, body: bytes) -> tuple[int, dict[str, Any]]:
    """Changes settings on all ranks or on none: HTTP status and answer."""
    try:
        values = settings.read(body)
    except ConfigError as error:
        return 400, {"result": "refused", "reason": str(error)}
    for really in (False, True):
        answer = await _told(manager, values, change=really)
        if answer["reason"]:
            return 409, {"result": "refused", "reason": answer["reason"]}
    return 200, {"result": "accepted", "reason": "", "settings": answer["settings"]}


async def _told(manager: Any, values: dict[str, Any], *, change: bool) -> dict[str, Any]:
    """The schedulers' answer about settings (`settings.answer`)."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager.auto_create_handle_loop()
    states = await manager.get_internal_state_communicator(
        GetInternalStateReq(rid=settings.pack(values, change))
    )
    return settings.together([state.internal_state.get(settings.ANSWER) for state in states])


NOT_ANSWERED = {
    "result": "refused",
    "reason": "this server's schedulers have no kvtier plugin: see kvtier doctor",
    "sessions": 0,
    "expected_in_s": None,
}


def best(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answer of the replica that accepted the hint: a session is known only where it ran."""
    return next((answer for answer in answers if answer["result"] != "refused"), answers[0])


async def _body(request: Any) -> bytes:
    """The body, kept only up to the maximal length of a hint. The rest of a longer one is read and
    dropped so that the client gets an answer, up to a length that no client sends by mistake.
    """
    parts, size = [], 0
    async for part in request.stream():
        if size <= MOST_BYTES:
            parts.append(part)
        size += len(part)
        if size > _MOST_PASSED_OVER:
            break
    return b"".join(parts)


def _address(manager: Any, asked: Asked) -> Sent:
    """Addresses a hint: by the session's name, or by the last whole page of the prefix, hashed as
    SGLang hashes pages.
    """
    now = time.monotonic()
    if asked.session is not None:
        return Sent(asked.hint, now, session=asked.session)
    tokens = asked.tokens
    if tokens is None:
        if manager.tokenizer is None:
            raise HintError(
                "this server has no tokenizer (--skip-tokenizer-init): send tokens instead of text"
            )
        tokens = tuple(manager.tokenizer.encode(asked.text))
    page = int(manager.config_value("page_size"))
    pairs = _named_by_pairs(manager.config_value("speculative_algorithm"))
    names = PageNames(page, pairs=pairs)
    keys = names.keys_of(array("q", tokens), asked)
    if not keys:
        raise HintError(
            f"the prefix has {len(tokens)} tokens, less than one page, which "
            f"{names.tokens_naming(1)} tokens name: send more of the prompt, or the session"
        )
    return Sent(asked.hint, now, page=keys[-1])


def _named_by_pairs(algorithm: str | None) -> bool:
    """Whether SGLang names pages by pairs of tokens with this kind of draft."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return bool(SpeculativeAlgorithm.from_string(algorithm).is_eagle())
