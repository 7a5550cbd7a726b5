"""The engine that a plan has to fit."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE_LOAD_BYTES = 128 << 20
"""Of a load far from the meeting on an accelerator: planning, claiming and counting one takes the
scheduler's thread about as long for a page as for many. Smaller where pages are those of a real
device at scale.
"""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Sizes of the engine that do not change while it runs.

    `chunk_tokens` is the most tokens of one prefill step. `staged` says that loads from below host
    memory need a host page each while they are in flight.
    """

    page_tokens: int
    page_bytes: int
    chunk_tokens: int
    layers: int = 1
    staged: bool = False
    whole_load_pages: int = 1
    """Pages of a load far from the meeting where `load_tokens` are fewer."""
    accelerator: bool = False
    """Whether forwards and copies go on after the call that launches them."""
