"""What a paced device answers where nothing is wrong, computed without a server."""

from __future__ import annotations

from sgl_kvtier.lab.experiment.load import Load
from sgl_kvtier.lab.experiment.measures import Reference
from sgl_kvtier.lab.outside.replay import ReplayOptions
from sgl_kvtier.lab.paced.signatures import answer_of
from sgl_kvtier.lab.workload.encoder import PromptTokens, output_tokens
from sgl_kvtier.lab.workload.session import Context


def answers_of(load: Load, options: ReplayOptions) -> Reference | None:
    """Every request's answer by session and turn. None where prompts follow from a server's
    answers, or where answers are text.
    """
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
