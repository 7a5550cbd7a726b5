"""Requests for a simulation: sessions of a trace with a key per page, so that reuse is real."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sgl_kvtier.lab.sim.requests import SimRequest
from sgl_kvtier.lab.workload.encoder import Encoder, Ids, PromptTokens, output_tokens, wide_encoder
from sgl_kvtier.lab.workload.session import Context, Session
from sgl_kvtier.types import PageKey


@dataclass(frozen=True, slots=True)
class Pace:
    """When sessions start and how long their clients wait. `mean_start_s`: mean time between two
    sessions' starts, drawn from an exponential distribution (0: as the trace has them).
    `most_gap_s` cuts recorded waits between two calls. `gap_s` takes their place: a wait is that
    long, give or take a fifth.
    """

    mean_start_s: float = 0.0
    most_gap_s: float = 600.0
    most_output_tokens: int = 512
    gap_s: float | None = None


def from_sessions(
    sessions: Sequence[Session],
    page_tokens: int,
    pace: Pace,
    seed: int = 0,
    encoder: Encoder | None = None,
) -> list[SimRequest]:
    """Every call of every session. A session's next call arrives its recorded gap after the one
    before has ended.
    """
    encoder = encoder or wide_encoder()
    rng = random.Random(seed)
    requests: list[SimRequest] = []
    start_s = 0.0
    for number, session in enumerate(sessions):
        if pace.mean_start_s > 0:
            start_s += rng.expovariate(1 / pace.mean_start_s)
        requests += _of_session(
            session, f"s{number}", start_s or session.start_s, page_tokens, pace, encoder
        )
    if pace.gap_s is not None:
        requests = [
            replace(one, arrival_s=pace.gap_s * rng.uniform(0.8, 1.2)) if one.after else one
            for one in requests
        ]
    return requests


def _of_session(
    session: Session, name: str, start_s: float, page_tokens: int, pace: Pace, encoder: Encoder
) -> list[SimRequest]:
    tokens, keys = PromptTokens(encoder), list[PageKey]()
    requests: list[SimRequest] = []
    for number, (call, prompt) in enumerate(Context(session).calls()):
        same = tokens.show(prompt)
        del keys[same // page_tokens :]
        _extend(keys, tokens.ids, page_tokens)
        if requests:
            requests[-1] = _kept(requests[-1], tuple(keys), page_tokens)
        requests.append(
            SimRequest(
                rid=f"{name}.{number}",
                arrival_s=min(call.gap_s, pace.most_gap_s) if number else start_s,
                prompt_tokens=len(tokens),
                output_tokens=output_tokens(call, encoder, pace.most_output_tokens),
                keys=tuple(keys),
                session=name,
                after=f"{name}.{number - 1}" if number else None,
            )
        )
    return requests


def _kept(request: SimRequest, following: tuple[PageKey, ...], page_tokens: int) -> SimRequest:
    """The request with what is worth keeping of its output: what the next prompt repeats of prompt
    and output.
    """
    keys = request.keys
    if following[: len(keys)] != keys:
        return request
    whole = (request.prompt_tokens + request.output_tokens) // page_tokens
    return replace(request, final_keys=following[: max(len(keys), whole)])


def _extend(keys: list[PageKey], ids: Ids, page_tokens: int) -> None:
    """Appends chained hashes of the whole pages behind those `keys` names already. A key stands for
    all tokens up to it.
    """
    last = keys[-1] if keys else PageKey(b"")
    whole = len(ids) // page_tokens * page_tokens
    for page in np.split(
        ids[len(keys) * page_tokens : whole], whole // page_tokens - len(keys) or 1
    ):
        if len(page):
            last = PageKey(hashlib.blake2b(page.tobytes(), key=last, digest_size=32).digest())
            keys.append(last)
