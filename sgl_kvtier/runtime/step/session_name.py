"""The session of a request, by the name its client gave in one of SGLang's fields:

    session_id          a field of /generate and of the OpenAI routes: "stable identity shared by
                        requests in the same session"; it has no other effect. The recommended one.
    session_params.id   of SGLang's own sessions, which build the prompt on the server
    routing_key         the header x-smg-routing-key of the OpenAI routes, for clients that can
                        only add a header

The first one present counts. A hint names its session by the same text.
"""

from __future__ import annotations

import hashlib
from typing import Any

MOST_CHARACTERS = 256
"""A longer name is replaced by its digest, so that little is kept per session."""


def session_of(req: Any) -> str | None:
    """The session's name of a scheduler's `Req`; None where its client gave none. Never raises."""
    own = getattr(req, "session", None)
    for name in (
        getattr(req, "session_id", None),
        getattr(own, "session_id", None),
        getattr(req, "routing_key", None),
    ):
        if name:
            return known_as(str(name))
    return None


def known_as(name: str) -> str:
    """The name that a session is kept under: the given one, or the digest of a long one."""
    if len(name) <= MOST_CHARACTERS:
        return name
    return "sha256:" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
