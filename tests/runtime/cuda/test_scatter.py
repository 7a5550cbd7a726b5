"""The scatter kernel without a card: what it does, by Triton's interpreter, and what it is made of."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_pools import staged_room

from sgl_kvtier.runtime.cuda.flashinfer_scatter import FlashInferScatter
from sgl_kvtier.runtime.cuda.page_shape import PageShape
from sgl_kvtier.runtime.cuda.scatter import constants
from sgl_kvtier.runtime.cuda.staging import Room

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def output_of(script: str, **variables: str) -> Any:
    """What a script of this folder prints, in a process of its own: Triton looks at its environment
    once.
    """
    path = os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / script)],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@needs_triton
def test_on_a_hopper_card_it_moves_16_bytes_at_a_time_and_spills_nothing():
    for shape, made in output_of("compiled_scatter.py").items():
        assert all(".v4" in store for store in made["stores"]), (shape, made)
        # Addresses and slots are single numbers of 8 bytes.
        assert all(".v4" in load or load.endswith("b64") for load in made["loads"]), (shape, made)
        assert any(".v4" in load for load in made["loads"]), (shape, made)
        assert made["spilled"] and set(made["spilled"]) == {"0"}, (shape, made)


def appended(k: Any, v: Any, sequence: Any, at: Any, pools: Any, pages: Any, bounds: Any, last: Any, kv_layout: str) -> None:  # fmt: skip
    """As flashinfer.page.append_paged_kv_cache is documented, in torch."""
    assert kv_layout == "NHD" and len(k) == len(v) == len(sequence) == len(at)
    size = pools[0].shape[1]
    assert int(last[0]) == size and bounds.tolist() == [0, len(pages)]
    for rows, pool in zip((k, v), pools, strict=True):
        for row, number, position in zip(rows, sequence.tolist(), at.tolist(), strict=True):
            first = bounds.tolist()[number]
            pool[pages.tolist()[first + position // size], position % size] = row


def test_flashinfers_append_puts_the_same_rows_into_the_same_slots():
    shape = PageShape(tokens=4, layers=2, row_bytes=2 * 8 * 4, layer_major=False)
    room, slots, k, v, wanted = staged_room(shape, heads=2, dim=8, pages=2, of=3)
    FlashInferScatter(shape, 3, [*k, *v], append=appended).launch(room, slots)
    for buffer, rows in zip((*k, *v), wanted, strict=True):
        assert torch.equal(buffer[slots], rows)
        assert int(buffer.count_nonzero()) == int(rows.count_nonzero())


def test_flashinfers_append_is_given_the_bytes_of_an_fp8_pool_as_8_bit_floats():
    shape = PageShape(tokens=4, layers=2, row_bytes=2 * 8, layer_major=False)
    room = Room(
        torch.randint(0, 256, (2 * 3 * shape.half_bytes,), dtype=torch.uint8), 3, shape.half_bytes
    )
    k, v = ([torch.zeros(16, 2, 8, dtype=torch.uint8) for _ in range(2)] for _ in range(2))
    seen = set()

    def append(*arguments, **options):
        seen.update(tensor.dtype for tensor in (*arguments[:2], *arguments[4]))
        appended(*arguments, **options)

    slots = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3])
    FlashInferScatter(shape, 3, [*k, *v], append=append).launch(room, slots)
    assert seen == {torch.float8_e4m3fn}
    for half, layers in enumerate((k, v)):
        rows = room.piece(half, 0, 2).view(8, 2, 2, 8)
        for layer, buffer in enumerate(layers):
            assert torch.equal(buffer[slots], rows[:, layer])


def test_flashinfers_append_takes_no_pages_whose_layers_lie_one_after_the_other():
    shape = PageShape(tokens=4, layers=2, row_bytes=64, layer_major=True)
    with pytest.raises(ValueError, match="page_first"):
        FlashInferScatter(shape, 3, [], append=appended)


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
)
def test_flashinfers_append_still_has_the_arguments_that_are_given():
    import inspect

    from flashinfer.page import append_paged_kv_cache

    names = list(inspect.signature(append_paged_kv_cache).parameters)
    assert names == [
        "append_key", "append_value", "batch_indices", "positions", "paged_kv_cache", "kv_indices", "kv_indptr",
        "kv_last_page_len", "kv_layout",
    ]  # fmt: skip


def test_buffers_that_begin_elsewhere_than_at_16_bytes_are_not_written_16_at_a_time():
    shape = PageShape(tokens=4, layers=2, row_bytes=64, layer_major=False)
    assert constants(shape, 3, aligned=True)["WIDE"]
    assert not constants(shape, 3, aligned=False)["WIDE"]
