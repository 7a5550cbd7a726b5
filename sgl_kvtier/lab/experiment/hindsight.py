"""What could have been, beside what was measured: the bound of an arm's rounds (the least time for
the requests that were sent, in their order), whether offers were declined rightly, and what a paced
device answers where nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_kvtier.lab.experiment.arms import Setup
from sgl_kvtier.lab.experiment.load import Load
from sgl_kvtier.lab.experiment.measures import Reference, Round
from sgl_kvtier.lab.outside.replay import ReplayOptions
from sgl_kvtier.lab.paced.bound import Asked, Machine, bound
from sgl_kvtier.lab.pages.timeline import whole_lines
from sgl_kvtier.lab.sim.declined import by_reason, declined
from sgl_kvtier.lab.workload.encoder import PromptTokens, output_tokens
from sgl_kvtier.lab.workload.session import Context

Requests = Mapping[tuple[str, int], Asked]


def requests_of(load: Load, options: ReplayOptions, page: int) -> Requests:
    """All requests of a load by session and turn, with the names of their pages."""
    found: dict[tuple[str, int], Asked] = {}
    for session in load.sessions:
        tokens = PromptTokens(load.encoder)
        names: list[int] = []
        for turn, (call, prompt) in enumerate(Context(session).calls(), 1):
            same = tokens.show(prompt)
            ids = tokens.ids
            del names[same // page :]
            for start in range(len(names) * page, len(ids) - page + 1, page):
                before = names[-1] if names else 0
                names.append(hash((before, ids[start : start + page].tobytes())))
            found[session.session_id, turn] = Asked(
                session=session.session_id,
                turn=turn,
                tokens=len(ids),
                pages=tuple(names),
                output_tokens=output_tokens(call, load.encoder, options.most_output_tokens),
                wait_s=options.wait_s(turn, call.gap_s),
            )
    return found


def bound_of(
    arm: str, rounds: Sequence[Round], requests: Requests, setup: Setup, options: ReplayOptions
) -> dict[str, Any]:
    """Under `bound`: an arm's figures of `paced.bound`, means over its complete rounds, beside
    `wall_s`, what these took. Nothing where nothing is paced or measured, where prompts follow from
    a server's answers, or where storage is not empty at first.
    """
    mine = [one for one in rounds if one.arm == arm and one.complete and one.samples]
    machine = _machine(arm, setup, options, len({session for session, _ in requests}))
    if machine is None or not mine or options.feedback != "recorded" or options.returning:
        return {}
    each = [bound(_order(one, requests), machine) for one in mine]
    each = [{**found, "wall_s": one.wall_s} for found, one in zip(each, mine, strict=True)]
    return {"bound": {name: _mean([one[name] for one in each]) for name in each[0]}}


def declined_of(log: Path, setup: Setup) -> dict[str, Any]:
    """Under `declined`: `by_reason` of a server's log, without dilation. Nothing where no log was
    asked for or written. Raises TraceError on a damaged one.
    """
    if not setup.decisions or not log.exists():
        return {}
    with log.open(encoding="utf-8") as lines:
        return {"declined": by_reason(declined(whole_lines(lines)), setup.dilation)}


def answers_of(load: Load, options: ReplayOptions) -> Reference | None:
    """Every request's answer by session and turn. None where prompts follow from a server's
    answers, or where answers are text.
    """
    # Imports torch, which only this end of a run needs.
    from sgl_kvtier.lab.paced.signatures import answer_of

    if options.feedback != "recorded" or options.route != "generate":
        return None
    found: Reference = {}
    for session in load.sessions:
        tokens = PromptTokens(load.encoder)
        for turn, (call, prompt) in enumerate(Context(session).calls(), 1):
            tokens.show(prompt)
            count = output_tokens(call, load.encoder, options.most_output_tokens)
            found[session.session_id, turn] = answer_of(tokens.ids, count)
    return found


def _order(one: Round, requests: Requests) -> list[Asked]:
    sent = sorted(one.samples, key=lambda sample: sample.completion.sent_s)
    return [requests[sample.session, sample.turn] for sample in sent]


def _machine(arm: str, setup: Setup, options: ReplayOptions, sessions: int) -> Machine | None:
    paced, variant = setup.paced, setup.variants.get(arm)
    device_tokens = setup.device_tokens if variant is None else variant.device_tokens
    if paced is None or device_tokens is None:
        return None
    return Machine(
        profile=paced.profile,
        page=setup.page_size,
        chunk=setup.chunk_tokens,
        device_tokens=device_tokens,
        memory_tokens=device_tokens + (setup.host_tokens or 0),
        disk_gbytes_per_s=paced.disk_read_gbytes_per_s,
        at_a_time=min(options.concurrency or sessions, sessions),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
