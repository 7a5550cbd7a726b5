"""Small random-weight models with a byte-level tokenizer, and larger ones for an accelerator.

The small ones are written from numpy so that nothing has to be downloaded. A lab model is a
complete Hugging Face folder: config, generation config, float32 safetensors, tokenizer with a
ChatML template. Its answers mean nothing; its attention, KV cache and cost per token are those of a
real Qwen3 or Llama. Token id n below 256 is the byte n. The ids from 256 on are special tokens, and
no lab model ever generates one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sgl_kvtier.errors import BenchError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.lab.outside import smollm2
from sgl_kvtier.lab.outside.model_shapes import (
    BYTES,
    DRAWN,
    SHAPES,
    UNWEIGHTED,
    VOCABULARY,
    Shape,
    stream_of,
    weights_of,
)
from sgl_kvtier.lab.workload.catalogue import cache_folder

WRITER_VERSION = 1
"""Part of every model's digest: a change of weights or files makes a new folder instead of a stale
one.
"""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHARED_MEMORY = Path("/dev/shm")


def models_dir() -> Path:
    """The folder lab models are kept in."""
    return cache_folder("models")


def drawn_dir(nbytes: int) -> Path:
    """The folder where a drawn model of `nbytes` bytes is kept.

    That is in /dev/shm where it has twice the room, since such hosts have memory and often a slow
    disk. Else it is with the others.
    """
    try:
        if shutil.disk_usage(_SHARED_MEMORY).free >= 2 * nbytes:
            return _SHARED_MEMORY / "kvtier" / "models"
    except OSError:
        pass
    return models_dir()


def write_drawn(name: str, *, seed: int = 0, folder: Path | None = None) -> Path:
    """The folder of a model of `DRAWN`, written if it is not there yet: on the card where there is
    one. The device that drew the weights is part of its name, since their generators differ.

    Raises BenchError for an unknown name, without torch, or for a folder that cannot be written.
    """
    if name not in DRAWN:
        raise BenchError(f"no drawn model named {name!r}. There are: {', '.join(DRAWN)}")
    try:
        from sgl_kvtier.lab import drawn  # imports torch, which nothing else here needs
    except ImportError as error:
        raise BenchError(
            f"{name} is drawn by torch, which is not installed: {how_to_install('sglang')}"
        ) from error
    shape = DRAWN[name]
    parent = folder if folder is not None else drawn_dir(2 * shape.parameters)
    device = drawn.device()
    target = parent / f"{name}-{device}-{model_digest(shape, seed)}"

    def write(draft: Path) -> None:
        weights = ((weight, stream_of(seed, weight)) for weight in weights_of(shape))
        drawn.save(draft / "model.safetensors", weights, device)
        _finish(draft, shape, seed, "bfloat16")

    return write_once(target, write)


def model_path(name: str, *, seed: int = 0, folder: Path | None = None) -> Path:
    """Where `write_model` puts lab model `name`. Raises BenchError for an unknown name."""
    if name not in SHAPES:
        raise BenchError(f"no lab model named {name!r}. There are: {', '.join(SHAPES)}")
    return (
        folder if folder is not None else models_dir()
    ) / f"{name}-{model_digest(SHAPES[name], seed)}"


def write_model(name: str, *, seed: int = 0, folder: Path | None = None) -> Path:
    """The folder of lab model `name`, written if it is not there yet. Equal name and seed give
    equal bytes.

    Written beside its place and renamed, so a killed writer leaves no half model and two writers do
    no harm. Raises BenchError for an unknown name or a folder that cannot be written.
    """
    target = model_path(name, seed=seed, folder=folder)
    return write_once(target, lambda draft: _write_files(draft, SHAPES[name], seed))


def write_once(
    target: Path, write: Callable[[Path], None], mark: str = "kvtier_model.json"
) -> Path:
    """Writes a folder beside its place and renames it. `mark`: a file that a whole one has."""
    if (target / mark).exists():
        return target
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=parent))
    except OSError as error:
        raise BenchError(
            f"cannot write a model in {parent}: {error.strerror}. Set XDG_CACHE_HOME or name "
            "another folder"
        ) from error
    try:
        draft.chmod(0o755)
        write(draft)
        _publish(draft, target, mark)
    except OSError as error:
        raise BenchError(f"cannot write the model {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def write_unweighted(name: str, *, folder: Path | None = None) -> Path:
    """The folder of a model of `UNWEIGHTED`: everything but the weights. Raises BenchError when it
    cannot be written.
    """
    shape = UNWEIGHTED[name]
    target = (folder if folder is not None else models_dir()) / f"{name}-{model_digest(shape, 0)}"
    return write_once(
        target, lambda draft: _write_settings(draft, shape, "bfloat16"), "config.json"
    )


NAMES = (*SHAPES, *DRAWN, smollm2.NAME)
"""Models that `write_named` writes and a server can compute with."""


def write_named(name: str, *, seed: int = 0, folder: Path | None = None) -> Path:
    """The folder of any model that is written here, by its name. Raises BenchError."""
    if name in UNWEIGHTED:
        return write_unweighted(name, folder=folder)
    if name == smollm2.NAME:
        parent = folder if folder is not None else models_dir()
        return write_once(parent / f"{name}-135m-instruct", smollm2.write, "config.json")
    write = write_drawn if name in DRAWN else write_model
    return write(name, seed=seed, folder=folder)


def model_digest(shape: Shape, seed: int) -> str:
    """Twelve hexadecimal digits that name the content of a model: its shape, seed and the writer's
    version.
    """
    facts = {"shape": asdict(shape), "seed": seed, "writer": WRITER_VERSION}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _publish(draft: Path, target: Path, mark: str) -> None:
    try:
        draft.rename(target)
    except OSError:
        if (target / mark).exists():
            return  # another process was faster; its files are the same
        shutil.rmtree(target)  # no completion mark: left by something else
        draft.rename(target)


def _write_files(folder: Path, shape: Shape, seed: int) -> None:
    save_file(dict(_tensors(shape, seed)), folder / "model.safetensors", metadata={"format": "pt"})
    _finish(folder, shape, seed, "float32")


def _finish(folder: Path, shape: Shape, seed: int, dtype: str) -> None:
    _write_settings(folder, shape, dtype)
    # Last: its presence says that the folder is complete.
    write_json(
        folder / "kvtier_model.json",
        {**asdict(shape), "seed": seed, "parameters": shape.parameters},
    )


def _write_settings(folder: Path, shape: Shape, dtype: str) -> None:
    write_json(folder / "config.json", _config(shape, dtype))
    write_json(
        folder / "generation_config.json", {"eos_token_id": BYTES, "pad_token_id": BYTES + 3}
    )
    write_json(folder / "tokenizer.json", _tokenizer())
    write_json(folder / "tokenizer_config.json", _tokenizer_config(shape))


def write_json(path: Path, data: dict[str, Any]) -> None:
    """A file of a model's folder."""
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(shape: Shape, dtype: str) -> dict[str, Any]:
    family = {"qwen3": ("Qwen3ForCausalLM", "qwen3"), "llama": ("LlamaForCausalLM", "llama")}
    architecture, model_type = family[shape.family]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": shape.context,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "torch_dtype": dtype,
        "eos_token_id": BYTES,
        "bos_token_id": None,
        "pad_token_id": BYTES + 3,
    }


def _tensors(shape: Shape, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    for weight in weights_of(shape):
        if weight.columns is None:
            yield weight.name, np.full(weight.rows, weight.scale, dtype=np.float32)
            continue
        # RandomState's stream is frozen by numpy's policy, unlike default_rng's.
        stream = np.random.RandomState(stream_of(seed, weight))
        values = stream.standard_normal((weight.rows, weight.columns)) * (
            weight.scale / weight.columns**0.5
        )
        drawn = values.astype(np.float32)
        if weight.zero_from is not None:
            drawn[weight.zero_from :] = 0.0
        yield weight.name, drawn


def _tokenizer() -> dict[str, Any]:
    added = [
        {
            "id": BYTES + index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(_special_tokens())
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[3],
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _special_tokens() -> list[str]:
    reserved = VOCABULARY - BYTES - len(SPECIAL_TOKENS)
    return [*SPECIAL_TOKENS, *(f"<|reserved_{index}|>" for index in range(reserved))]


def _byte_characters() -> list[str]:
    # The byte-level alphabet of the tokenizers library: printable Latin-1 bytes stand for
    # themselves, the others follow from U+0100 on (Radford et al. 2019, GPT-2).
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, spare = [], 0
    for byte in range(BYTES):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + spare))
            spare += 1
    return characters
