"""Access to SGLang's requests: what a match found of a prompt, and what is still to be computed.

All counts are tokens. Scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from sgl_kvtier.runtime.sglang.types import Req, Tree
from sgl_kvtier.types import Span

logger = logging.getLogger(__name__)

_CLIP = 4096
"""SGLang's own bound on the output reserved for a request (CLIP_MAX_NEW_TOKENS)."""

_TAKEN = "kvtier_took_hints"


class Found(NamedTuple):
    """Leading tokens of a prompt in memory: on the device, and after them in host memory."""

    device: int
    host: int

    @property
    def tokens(self) -> int:
        """Both."""
        return self.device + self.host


def match(req: Req, tree: Tree) -> Found:
    """Matches the prompt against the tree again, without a slot for its linear layers' state."""
    req.init_next_round_input(tree, cow_mamba=False)
    return found(req)


def found(req: Req) -> Found:
    """What the last match found."""
    return Found(req.prefix_len, req.host_hit_length)


def set_found(req: Req, there: Found) -> None:
    """Makes SGLang continue as if the match had found this."""
    req.prefix_len, req.host_hit_length = there


def read_from_storage(req: Req) -> Span:
    """The tokens of its prompt that SGLang has read from storage into host memory for it."""
    start = req.storage_hit_start or 0
    return Span(start, start + req.storage_hit_length)


def set_read_from_storage(req: Req, tokens: Span) -> None:
    """Makes SGLang count these tokens as read from storage."""
    req.storage_hit_length, req.storage_hit_start = len(tokens), tokens.start if tokens else None


def tokens_of(req: Req) -> Any:
    """All tokens to be in the cache before the next one: the prompt and, after a retraction, the
    output so far. This is SGLang's own array: copy it to keep it.
    """
    tokens = req.full_untruncated_fill_ids
    return tokens if len(tokens) else req.origin_input_ids  # it has not been matched yet


def prompt_tokens(req: Req) -> int:
    """Number of these tokens."""
    return len(tokens_of(req))


def missing_tokens(req: Req) -> int:
    """Tokens of a waiting request's prompt that are neither on the device nor in host memory."""
    return max(0, len(req.origin_input_ids) - found(req).tokens)


def rest_tokens(chunked: Req) -> int:
    """Tokens of a prompt after the chunk that is being computed."""
    return prompt_tokens(chunked) - max(chunked.extend_end or 0, chunked.prefix_len)


def whole_output_room(req: Req, page: int) -> int:
    """Slots that SGLang reserves at admission for a request's output. `page` in tokens."""
    return min(req.sampling_params.max_new_tokens, _CLIP) + page


def output_room(req: Req, page: int) -> int:
    """The same for a running request, for its remaining output."""
    return min(max(0, req.sampling_params.max_new_tokens - len(req.output_ids)), _CLIP) + page


def left_to_sglang(req: Req) -> str | None:
    """Why this request cannot skip tokens of its prompt, or None: it needs their outputs, or its
    prompt consists of more than tokens.
    """
    if req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids):
        return "input log-probs"
    if req.return_hidden_states:
        return "hidden states"
    if getattr(req, "return_routed_experts", False) or getattr(req, "return_indexer_topk", False):
        return "routed experts"
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return "input embeddings"
    if req.multimodal_inputs is not None:
        return "multimodal"
    if req.token_indices_to_pool is not None or req.is_prefill_only:
        return "no generation"
    if req.beam_group is not None:
        return "beam search"
    if req.session is not None and req.session.streaming:
        return "streaming session"
    return None


def take_kv_hints(req: Req) -> Any:
    """The `kv_hints` of a request (SGLang 0.5.23); None if it has none, or after the first call."""
    envelope = getattr(req, "kv_hints", None)
    if envelope is None or getattr(req, _TAKEN, False):
        return None
    setattr(req, _TAKEN, True)
    return envelope


def add_span(req: Req, name: str, seconds: float, facts: Mapping[str, Any]) -> None:
    """Adds an OpenTelemetry span that ends now to the trace of a request, with these attributes.
    Does nothing, and imports nothing, if SGLang does not trace (--enable-trace), has ended this
    request's trace, or traces in another way.
    """
    try:
        trace: Any = getattr(getattr(req, "time_stats", None), "trace_ctx", None)
        if trace is None or not trace.tracing_enable:
            return
        from sglang.srt.observability.trace import TraceSliceContext

        end = time.time_ns()
        start = end - int(seconds * 1e9)
        trace.trace_slice(TraceSliceContext(name, start, end, attrs=dict(facts)))
    except (AttributeError, ImportError, TypeError) as error:
        logger.debug("kvtier: a span is not in SGLang's trace: %s", error)
