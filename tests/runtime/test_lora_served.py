"""LoRA adapters: pages have SGLang's `lora_id`, which is the same after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from explained import CauseOf
from safetensors.torch import save_file
from serving import TOKENS, Served, changed, config_file, flags, prompts, serving

from sgl_kvtier.lab.outside.lab_model import write_model

pytestmark = pytest.mark.server
PAGE = 16
RANK = 4
MODEL = "tiny-qwen3"
WHOLE = (TOKENS - 1) // PAGE * PAGE


def adapter(folder: Path, seed: int) -> Path:
    """An adapter of the attention in PEFT's format, with weights that change every answer."""
    folder.mkdir()
    model = json.loads(Path(write_model(MODEL), "config.json").read_text())
    heads = {"q": model["num_attention_heads"], "k": model["num_key_value_heads"]}
    widths = {name: count * model["head_dim"] for name, count in heads.items()}
    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(model["num_hidden_layers"]):
        for name, wide in (("q", widths["q"]), ("k", widths["k"]), ("v", widths["k"])):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            a = torch.randn(RANK, model["hidden_size"], generator=chance)
            b = torch.randn(wide, RANK, generator=chance)
            weights |= {f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b}
    save_file(weights, folder / "adapter_model.safetensors")
    about: dict[str, Any] = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "base_model_name_or_path": MODEL,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def launch(folder: Path) -> list[str]:
    """A server with both adapters."""
    given = [f"{name}={folder / name}" for name in ("one", "two")]
    more = ["--enable-lora", "--lora-paths", *given, "--lora-backend", "torch_native"]
    return [*flags(MODEL, disable_overlap_schedule=True), *more, "--max-loras-per-batch", "2"]


def test_an_adapters_pages_are_its_own_and_come_back_after_a_restart(
    cause_of: CauseOf, tmp_path: Path
) -> None:
    for seed, name in enumerate(("one", "two")):
        adapter(tmp_path / name, seed)
    config, env = config_file(tmp_path), changed(ADAPTERS=tmp_path)
    (ids,) = prompts(1, seed=421)
    names: tuple[str | None, ...] = (None, "one", "two")

    def ask(server: Served, name: str | None):
        return server.ask(ids, **({} if name is None else {"lora_path": name}))

    with serving(tmp_path / "first", launch(tmp_path), config, **env) as server:
        cold = {None: ask(server, None)}
        server.flush()
        says = "another cache salt or LoRA adapter"
        cause_of(server, lambda: cold.update(one=ask(server, "one")), "new prompts", says)
        cold["two"] = ask(server, "two")
        assert [cold[name].cached for name in names] == [0, 0, 0]
        tokens = {tuple(cold[name].tokens) for name in names}
        assert len(tokens) == 3, "each adapter changes the answer"
        server.flush()
        again = {name: ask(server, name) for name in names}
        assert [again[name].storage for name in names] == [WHOLE] * 3
        server.settle()
    with serving(tmp_path / "second", launch(tmp_path), config, **env) as server:
        after = {name: ask(server, name) for name in names}
        assert [after[name].storage for name in names] == [WHOLE] * 3
        server.settle()
        assert server.metric("kvtier:restore_started_total") == 3
    for found in (again, after):
        for name in names:
            assert found[name].tokens == cold[name].tokens
            # SGLang's layers for adapters round few rows in another way than many.
            assert found[name].logprobs == pytest.approx(cold[name].logprobs, rel=0, abs=1e-5)
