"""A step of a paced device in which a prefix ends at a layer: its time, and its rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kvtier.lab.layers.restore import Share
from sgl_kvtier.lab.paced import clock
from sgl_kvtier.lab.paced.copies import Pages
from sgl_kvtier.lab.paced.device import Device, Settings, _buffers
from sgl_kvtier.lab.paced.signatures import Extend, Signer

LAYERS, PAGE, TOKENS, CUT, FIRST = 4, 4, 10, 8, 3
IDS = list(range(20, 20 + TOKENS))


class Run:
    """The upper layers of a prefix come before part 3, from a copy of its rows."""

    parts = layers = LAYERS

    def __init__(self, pool: Any, kept: list[torch.Tensor], comes: bool) -> None:
        self._pool, self._kept, self._comes = pool, kept, comes
        self.shares = [Share(TOKENS, 0, "r", object(), slots=torch.arange(CUT))]  # type: ignore[arg-type]
        self.ended = False

    def at(self, part: int) -> list[int]:
        if part < FIRST:
            return [0]
        share = self.shares[0]
        share.taken, share.first_loaded = True, FIRST
        buffers = (*self._pool.k_buffer, *self._pool.v_buffer)
        for number, (buffer, kept) in enumerate(zip(buffers, self._kept, strict=True)):
            if self._comes and number % LAYERS >= FIRST:
                buffer[:CUT] = kept[:CUT]
        return [CUT]

    def end(self) -> None:
        self.ended = True


def stepped(tmp_path: Path, comes: bool) -> tuple[Device, Signer, Run, tuple[float, float, float]]:
    device = Device(
        Settings("h100-qwen30b-a3b", 2.0, 1.0, PAGE, 1.0, 1.0, str(tmp_path / "pace.jsonl"))
    )
    each = [[torch.zeros(64, 1, 8) for _ in range(LAYERS)] for _ in "kv"]
    pool = SimpleNamespace(k_buffer=each[0], v_buffer=each[1])
    signer = Signer(_buffers(pool), PAGE, Pages(PAGE))
    nothing = torch.zeros(0, dtype=torch.int64)
    signer.extend([Extend("r", nothing, torch.arange(TOKENS), torch.tensor(IDS), None)])
    run = Run(pool, [buffer.clone() for buffer in (*each[0], *each[1])], comes)
    req = SimpleNamespace(rid="r", origin_input_ids=IDS, output_ids=[])
    took = device._launch_by_layers(signer, [req], run, clock.now())
    return device, signer, run, took


def test_each_part_takes_its_share_of_a_step_with_the_tokens_that_are_left(tmp_path: Path) -> None:
    device, signer, run, (begin, end, waited_s) = stepped(tmp_path, comes=True)
    whole = device._profile.prefill_seconds([(TOKENS, 0)])
    suffix = device._profile.prefill_seconds([(TOKENS - CUT, CUT)])
    share = FIRST / LAYERS
    assert end - begin - waited_s == pytest.approx(2.0 * (share * whole + (1 - share) * suffix))
    assert run.ended
    assert signer.mismatches == []


def test_rows_that_were_not_loaded_are_found(tmp_path: Path) -> None:
    _, signer, _, _ = stepped(tmp_path, comes=False)
    assert [(one.first, one.tokens, one.buffers) for one in signer.mismatches] == [
        (0, CUT, ("layer 3, keys", "layer 3, values"))
    ]
