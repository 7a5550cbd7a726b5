"""The dimensions of the models that are written here (`lab_model.py`), and their weights as numbers
to draw.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sgl_kvtier.errors import BenchError

VOCABULARY = 512
BYTES = 256

# Why these scales: attention scores with a standard deviation of about 4 pick out a few positions,
# so every generated token depends on the whole context and a wrong KV page shows; with flat
# attention the output would be a function of the last token only. Logits with a standard deviation
# of about 6 keep the best two far apart for float32.
_SCORE_SCALE = 4.0
_LOGIT_SCALE = 6.0


@dataclass(frozen=True)
class Shape:
    """The dimensions of one lab model. KV bytes per token in float32: 2 * 4 * layers * kv_heads *
    head_dim.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 keys and values that one token occupies."""
        return 2 * 4 * self.layers * self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Numbers in all its weights."""
        return sum(weight.rows * (weight.columns or 1) for weight in weights_of(self))


@dataclass(frozen=True)
class Weight:
    """One tensor of a model: drawn from a normal distribution of standard deviation `scale /
    columns ** 0.5`. Where `columns` is None it is `rows` numbers that are all `scale`.
    """

    name: str
    rows: int
    columns: int | None
    scale: float = 1.0
    zero_from: int | None = None
    """Rows from here on are zero."""


def _shapes(*rows: tuple[str, str, int, int, int, int, int, int, int]) -> dict[str, Shape]:
    return {row[0]: Shape(*row) for row in rows}


_LONG = 131072
"""Tokens of context of the models for an accelerator: 64k and an answer have room."""

# name, family, layers, hidden, heads, KV heads, numbers of a head, intermediate, context
SHAPES = _shapes(
    ("lab-mha", "qwen3", 4, 512, 8, 8, 64, 1536, 65536),
    ("lab-gqa", "qwen3", 8, 512, 8, 2, 64, 1536, 65536),
    ("tiny-qwen3", "qwen3", 2, 128, 4, 2, 32, 256, 65536),
    ("tiny-llama", "llama", 2, 128, 4, 2, 32, 256, 65536),
)
"""lab-mha has a large KV cache for its compute, lab-gqa a small one; the tiny ones are for tests.
"""

UNWEIGHTED = _shapes(
    ("shape-8b", "llama", 32, 4096, 32, 8, 128, 14336, _LONG),
    ("shape-1b", "llama", 16, 2048, 32, 8, 64, 8192, _LONG),
)
"""Models of real sizes (those of Llama 3) for an accelerator: a folder without weights, served with
--load-format dummy. What they answer means nothing, not even that two caches agree.
"""

DRAWN = _shapes(
    ("lab-gpu-1b", "llama", 16, 2048, 16, 8, 128, 8192, _LONG),
    ("lab-gpu-tiny", "llama", 2, 512, 4, 2, 128, 1024, _LONG),
)
"""Models for an accelerator whose answers show a wrong KV page.

Their bfloat16 weights have the same scales as the lab models' and are drawn by torch
(`lab/drawn.py`). The tiny one has the same heads.
"""

_FLASHINFER_HEADS = (64, 128, 256)
"""Sizes of heads FlashInfer has kernels for."""


def is_ours(name: str) -> bool:
    """Whether this names a model that is written here, and no folder or checkpoint."""
    return name in SHAPES or name in UNWEIGHTED or name in DRAWN


def shape_of(name: str) -> Shape | None:
    """The dimensions of a model that is written here; None of any other."""
    return {**SHAPES, **UNWEIGHTED, **DRAWN}.get(name)


def serving_dtype(device: str, model: str) -> str:
    """The --dtype a server of `model` gets where none was asked for. "auto" would make float16 of
    float32 weights on an accelerator.
    """
    if device == "cpu":
        return "float32"
    return "bfloat16" if is_ours(model) else "auto"


def check_heads(device: str, model: str, arguments: Sequence[str] = ()) -> None:
    """Raises BenchError for a model of ours that FlashInfer has no kernels for, unless a server's
    `arguments` name another attention backend.
    """
    shape = shape_of(model)
    if device == "cpu" or shape is None or names_attention(arguments):
        return
    if shape.head_dim not in _FLASHINFER_HEADS:
        raise BenchError(
            f"{model} has heads of {shape.head_dim}, and FlashInfer has kernels for "
            f"{_FLASHINFER_HEADS}. On an accelerator take one of {', '.join([*DRAWN, *UNWEIGHTED])}"
        )


def names_attention(arguments: Sequence[str]) -> bool:
    """Whether a server's arguments name its attention backend."""
    return any(word.partition("=")[0] == "--attention-backend" for word in arguments)


def kv_bytes(model: str, dtype: str) -> int | None:
    """Bytes of keys and values of one token in this --dtype; None where the model is not ours."""
    shape = shape_of(model)
    if shape is None:
        return None
    return shape.kv_bytes_per_token // (1 if dtype == "float32" else 2)


def weights_of(shape: Shape) -> Iterator[Weight]:
    """Every tensor of a model, in the order in which they are written."""
    hidden, inner = shape.hidden, shape.intermediate
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Qwen3 normalises queries and keys, so there the norm's weight sets the scale of the scores;
    # Llama's comes from the projections themselves.
    sharp = 1.0 if shape.family == "qwen3" else _SCORE_SCALE**0.5
    yield Weight("model.embed_tokens.weight", VOCABULARY, hidden, hidden**0.5)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield Weight(prefix + "input_layernorm.weight", hidden, None)
        yield Weight(prefix + "self_attn.q_proj.weight", query, hidden, sharp)
        yield Weight(prefix + "self_attn.k_proj.weight", key_value, hidden, sharp)
        yield Weight(prefix + "self_attn.v_proj.weight", key_value, hidden)
        yield Weight(prefix + "self_attn.o_proj.weight", hidden, query)
        if shape.family == "qwen3":
            for norm in ("q_norm", "k_norm"):
                yield Weight(
                    f"{prefix}self_attn.{norm}.weight", shape.head_dim, None, _SCORE_SCALE**0.5
                )
        yield Weight(prefix + "post_attention_layernorm.weight", hidden, None)
        yield Weight(prefix + "mlp.gate_proj.weight", inner, hidden)
        yield Weight(prefix + "mlp.up_proj.weight", inner, hidden)
        yield Weight(prefix + "mlp.down_proj.weight", hidden, inner)
    yield Weight("model.norm.weight", hidden, None)
    # A special token's logit is 0 and the best of 256 others is far above: outputs are plain bytes,
    # never an end.
    yield Weight("lm_head.weight", VOCABULARY, hidden, _LOGIT_SCALE, zero_from=BYTES)


def stream_of(seed: int, weight: Weight) -> int:
    """The seed of one tensor's numbers: a stream each makes the content independent of the order of
    writing.
    """
    return zlib.crc32(f"{seed}:{weight.name}".encode())
