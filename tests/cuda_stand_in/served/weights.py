"""Random weights of the small models that are served here."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sgl_kvtier.lab.outside.lab_model import write_model
from sgl_kvtier.lab.outside.model_shapes import BYTES


def save_with_weights(model: Any, folder: Path, scales: Mapping[str, float]) -> None:
    """Draws all weights but vectors, scaled as those of the lab models (`model_shapes.py`), so that
    every token depends on the whole context, and saves the model with their tokenizer. `scales` are
    others than 1, by a part of a weight's name.
    """
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                scale = next((one for part, one in scales.items() if part in name), 1.0)
                weight.normal_(std=scale / weight.shape[-1] ** 0.5, generator=numbers)
        model.lm_head.weight[BYTES:] = 0.0  # it generates plain bytes
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(write_model("tiny-llama") / name, folder)
