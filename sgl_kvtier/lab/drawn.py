"""The weights of a drawn model, made by torch on the card where there is one. A billion numbers
take a second there, and most of a minute in numpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file


class Weight(Protocol):
    """One tensor of a model: a vector of `scale` where it has no columns, else drawn. Rows from
    `zero_from` on are 0.
    """

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int | None: ...
    @property
    def scale(self) -> float: ...
    @property
    def zero_from(self) -> int | None: ...


def device() -> str:
    """Which device draws here: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def save(path: Path, weights: Iterable[tuple[Weight, int]], device: str) -> None:
    """Writes weights, each with its own seed, as bfloat16 safetensors. Equal arguments on one kind
    of device give equal bytes. Raises OSError.
    """
    tensors = {weight.name: _drawn(weight, seed, device) for weight, seed in weights}
    save_file(tensors, path, metadata={"format": "pt"})


def _drawn(weight: Weight, seed: int, device: str) -> torch.Tensor:
    if weight.columns is None:
        return torch.full((weight.rows,), weight.scale, dtype=torch.bfloat16)
    stream = torch.Generator(device).manual_seed(seed)
    # In float32: the tails of a distribution drawn in bfloat16 are coarse.
    values = torch.randn(weight.rows, weight.columns, generator=stream, device=device)
    values *= weight.scale / weight.columns**0.5
    if weight.zero_from is not None:
        values[weight.zero_from :] = 0.0
    return values.to(torch.bfloat16).cpu()
