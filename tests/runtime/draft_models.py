"""A target and an EAGLE draft that guesses nearly all of its tokens, if it sees all of its KV."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from sgl_kvtier.lab.outside.lab_model import write_model


def write_pair(folder: Path, *, mtp: bool) -> tuple[str, str]:
    """Folders of a target of one layer and of a draft. The draft is the target one token on: its
    input is the embedding of the next token (`fc` is [1 | 0] over embedding and hidden state), and
    its layer, embedding and head are the target's. So it sees all tokens but the first. `mtp`: its
    configuration says that it predicts the next tokens, and SGLang keeps its KV in the target's
    host pages.
    """
    small = Path(write_model("tiny-llama"))
    config = json.loads((small / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "torch_dtype": "float32"}
    found = load_file(small / "model.safetensors")
    target = {
        name: np.ones_like(weight) if "norm" in name else weight
        for name, weight in found.items()
        if ".layers." not in name or ".layers.0." in name
    }
    # The draft has no norm before its layer, which does nothing to rows of unit size.
    embedding = target["model.embed_tokens.weight"]
    embedding = embedding / np.sqrt((embedding**2).mean(axis=-1, keepdims=True))
    target["model.embed_tokens.weight"] = embedding
    head = np.random.default_rng(3).standard_normal(embedding.shape) * 0.05
    target["lm_head.weight"] = head.astype(np.float32)
    width = embedding.shape[1]
    draft = {
        name.removeprefix("model."): weight
        for name, weight in target.items()
        if name not in ("lm_head.weight", "model.norm.weight") and "input_layernorm" not in name
    }
    both = np.concatenate([np.eye(width), np.zeros((width, width))], axis=1)
    draft["fc.weight"] = both.astype(np.float32)
    draft["fc.bias"] = np.zeros(width, np.float32)
    of_draft = config | ({"num_nextn_predict_layers": 1} if mtp else {})
    return (
        _write(folder / "target", small, target, config, "LlamaForCausalLM"),
        _write(folder / "draft", small, draft, of_draft, "LlamaForCausalLMEagle"),
    )


def _write(
    folder: Path, like: Path, weights: dict[str, np.ndarray], config: dict, architecture: str
) -> str:
    shutil.copytree(like, folder)
    contiguous = {name: np.ascontiguousarray(weight) for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return str(folder)
