"""The kernel of `TritonScatter`. In a module of its own, because importing Triton takes a second,
and a CPU host has none.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def scatter_rows(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    room,  # bytes: K of its pages, then V
    tables,  # addresses of the layers' buffers, K then V
    slots,
    tokens,
    WORD_BYTES: tl.constexpr,
    LAYERS: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    LAYER_STEP: tl.constexpr,
    TOKEN_STEP: tl.constexpr,
    PAGE_STEP: tl.constexpr,
    HALF_STEP: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`ROWS` tokens of one layer's K or V per program: grid (tokens / ROWS, layers, 2)."""
    half = tl.program_id(2)
    layer = tl.program_id(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    base = tl.load(tables + half * LAYERS + layer)
    if WORD_BYTES == 4:
        staged, target = room.to(tl.pointer_type(tl.int32)), base.to(tl.pointer_type(tl.int32))
    elif WORD_BYTES == 2:
        staged, target = room.to(tl.pointer_type(tl.int16)), base.to(tl.pointer_type(tl.int16))
    else:
        staged, target = room.to(tl.pointer_type(tl.int8)), base.to(tl.pointer_type(tl.int8))
    half_start = half.to(tl.int64) * HALF_STEP + layer * LAYER_STEP
    start = half_start + (token // PAGE).to(tl.int64) * PAGE_STEP + (token % PAGE) * TOKEN_STEP
    for first in range(0, WORDS, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (column < WORDS)[None, :]
        source = staged + start[:, None] + column[None, :]
        place = target + slot[:, None] * WORDS + column[None, :]
        if WIDE:
            # Triton knows nothing about an address from a table. Without these hints it accesses 4
            # bytes at a time.
            source = tl.multiple_of(tl.max_contiguous(source, (1, 4)), (1, 16))
            place = tl.multiple_of(tl.max_contiguous(place, (1, 4)), (1, 16))
        tl.store(place, tl.load(source, mask=mask), mask=mask)
