"""The engine that a plan has to fit."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Pages of a load far from the meeting where `load_tokens` are fewer: a copy of a few pages
    costs an accelerator's host as much as one of many.
    """
    accelerator: bool = False
    """Whether forwards and copies go on after the call that launches them."""
