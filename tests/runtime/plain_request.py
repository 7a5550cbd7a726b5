"""A request for text alone, as far as restoration asks what it wants."""

from __future__ import annotations

PLAIN: dict[str, None] = dict.fromkeys(
    (
        "return_logprob",
        "return_hidden_states",
        "input_embeds",
        "positional_embed_overrides",
        "multimodal_inputs",
        "token_indices_to_pool",
        "is_prefill_only",
        "beam_group",
        "session",
    )
)
"""Attributes of what it does not ask for."""
