"""Sizes of the engine for which plans are made."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE_LOAD_BYTES = 128 << 20
"""Bytes of a load whose pages are far from the meeting page, on an accelerator. Planning and
tracking a load takes the scheduler thread about as long for one page as for many. The emulated
H100, whose pages are smaller, sets a smaller value.
"""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Sizes of the engine that do not change while it runs.

    `chunk_tokens`: upper bound of tokens in one prefill step. `staged`: loads from tiers below host
    memory occupy a host page for each page in flight.
    """

    page_tokens: int
    page_bytes: int
    chunk_tokens: int
    layers: int = 1
    staged: bool = False
    whole_load_pages: int = 1
    """Lower bound, in pages, of a load far from the meeting page (see `load_tokens`)."""
    accelerator: bool = False
    """Whether forward passes and copies run asynchronously, after the call that launches them."""
