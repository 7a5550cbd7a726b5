"""`--device paced:PROFILE`: flags and settings that start a server on a paced device.

The pools at hand are small: a few hundred bytes a token. All bandwidths of the storage are scaled
down by as much, so that ratios stay and memory does not matter. Tokens are one for one. All times
are dilated by the same factor. Imports neither SGLang nor torch.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab import profile
from sgl_kvtier.lab.outside.lab_model import models_dir, write_json, write_model, write_once
from sgl_kvtier.lab.outside.model_shapes import VOCABULARY
from sgl_kvtier.launch import MIXED
from sgl_kvtier.types import PACED

PAGE_TOKENS = 64
CHUNK_TOKENS = 8192
MOST_CONTEXT = 1 << 20
DEVICE_TOKENS, MOST_RUNNING = 131072 * 3, 32
"""Sizes of `kvtier serve`: the tokens of keys and values that 80 GB leave an 8B model in bf16, and
requests at a time.
"""
SERVE_LOG_BYTES = 64 << 20
"""Most bytes of a log of `kvtier serve`, which may run for weeks. The file before it is kept."""
LOG = "pace.jsonl"
"""In a server's folder, or in that of a user's store, which passes it over: `pace.PaceLog`."""
DISK_READ_GBYTES_PER_S, DISK_WRITE_GBYTES_PER_S = 6.4, 4.0
"""One PCIe 4.0 x4 drive, as they are sold: 6.4 to 7 GB/s read, 4 to 5 written."""

MOONCAKE_WAITS = "KVTIER_PACED_MOONCAKE"
"""Set where SGLang's Mooncake backend waits for the modelled disk."""
METRIC = "kvtier:paced_dilation"
"""The gauge in which a server on a paced device says its dilation, and in a label its profile."""

_VARIABLE = "KVTIER_PACED"
_INSTALL = "sgl_kvtier.lab.paced.device:install"
_STUBS = "sgl_kvtier.lab.paced.stub"
_DTYPE = "float32"
_SINGLE = (
    *("--tp-size", "--tensor-parallel-size", "--pp-size", "--pipeline-parallel-size"),
    *("--dp-size", "--data-parallel-size", "--threads"),
)
_KV_DTYPE = "--kv-cache-dtype"
_KV_DTYPES = {"auto": profile.BF16, profile.FP8: profile.FP8}
"""Number types of keys and values, by the argument that asks for them."""
_NUMBER_BYTES = {profile.BF16: 4, profile.FP8: 1}
"""Of keys and values at hand, where float32 stands for bf16."""
_OWN: Mapping[str, tuple[str, ...]] = {
    "--dtype": (_DTYPE,),
    _KV_DTYPE: tuple(_KV_DTYPES),
    "--page-size": (str(PAGE_TOKENS),),
    **dict.fromkeys(_SINGLE, ("1",)),
}
"""What every paced device has, by the arguments of commands and servers that ask for it."""
_PREFETCH_BASE_S, _PREFETCH_PER_KI_TOKEN_S = 1.0, 0.25
"""SGLang's own time-outs of a storage prefetch (0.5.23, HiCacheController)."""
_WRITER = 1
"""Version of model folders: another content is another folder."""

_BASE = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MOST_CONTEXT,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": 259,
    "rope_theta": 1e6,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
}
LAYERS = 4
"""Layers at hand, which stand for those of the model."""
_KINDS: Mapping[str, tuple[dict[str, Any], int]] = {
    "mha": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_key_value_heads": 1,
            "head_dim": 8,
        },
        2 * 8,
    ),
    "mla": (
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "moe_layer_freq": 1,
        },
        8 + 8,
    ),
}
"""The model configuration of each kind of cache, and the numbers a token has there in a layer."""


@dataclass(frozen=True)
class Paced:
    """One paced device. Bandwidths of the disk are those of the machine that is modelled."""

    profile: profile.Profile
    dilation: float = 1.0
    disk_read_gbytes_per_s: float = DISK_READ_GBYTES_PER_S
    disk_write_gbytes_per_s: float = DISK_WRITE_GBYTES_PER_S
    damage: str = ""
    damage_at: int = 1
    layers: int = LAYERS

    @property
    def bytes_scale(self) -> float:
        """Bytes of the model for each byte that is kept and moved here."""
        kept = _KINDS[self.profile.kind][1] * _NUMBER_BYTES[self.profile.kv_dtype] * self.layers
        return self.profile.kv_bytes_per_token / kept

    @property
    def slower(self) -> float:
        """By how much a bandwidth is lower here: there are fewer bytes, and times are longer."""
        return self.bytes_scale * self.dilation

    @property
    def modelled(self) -> str:
        """What takes the time that it takes here, in the notes of results."""
        database, numbers = self.profile.source["database"], self.profile.kv_dtype
        return f"profile {self.profile.name} ({database}), keys and values in {numbers}"

    def document(self) -> dict[str, Any]:
        """The device as results describe it, under `device.paced`."""
        return {
            "profile": self.profile.name,
            "source": self.profile.source,
            "kv_cache_dtype": self.profile.kv_dtype,
            "dilation": self.dilation,
            "bytes_scale": self.bytes_scale,
            "disk_gbytes_per_s": [self.disk_read_gbytes_per_s, self.disk_write_gbytes_per_s],
        }

    def refuse_others(self, words: Sequence[str]) -> None:
        """Raises BenchError where arguments ask for something that this device has otherwise."""
        for name, flag, given in _own_words(words):
            if given not in _OWN[name]:
                raise BenchError(
                    f"{flag} {given}: {PACED}{self.profile.name} has {' or '.join(_OWN[name])}. A "
                    "server that computes takes others: --device cpu or cuda"
                )

    def env(self, log: Path, most_log_bytes: int = 0) -> dict[str, str]:
        """Variables of the server's process. `most_log_bytes` is `PaceLog`'s `most_bytes`."""
        told = {
            "profile": self.profile.name,
            "kv_dtype": self.profile.kv_dtype,
            "dilation": self.dilation,
            "bytes_scale": self.bytes_scale,
            "page_size": PAGE_TOKENS,
            "disk_read_gbytes_per_s": self.disk_read_gbytes_per_s,
            "disk_write_gbytes_per_s": self.disk_write_gbytes_per_s,
            "log": str(log),
            "most_log_bytes": most_log_bytes,
            "damage": self.damage,
            "damage_at": self.damage_at,
        }
        return {
            _VARIABLE: json.dumps(told),
            "KVTIER_CPU_DEVICE": _INSTALL,
            "SGLANG_PLATFORM": "kvtier_cpu",
            "SGLANG_EXTERNAL_MODEL_PACKAGE": _STUBS,
            "SGLANG_ENABLE_WAR_BARRIER": "1",  # as on CUDA
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "1",
        }

    def serve_env(self, store: Path) -> dict[str, str]:
        """The same for a user's own server, whose log is in the folder of its pages."""
        return self.env(store / LOG, SERVE_LOG_BYTES)

    def flags(self) -> tuple[str, ...]:
        """Arguments of a comparison's server beside those of a CPU."""
        return ("--load-format", "dummy", "--skip-server-warmup")

    def serve_flags(self) -> tuple[str, ...]:
        """Those of a user's own server, with pages and chunks of a GPU's. Its device pool has
        the size that such a card would have left. The seed of dummy weights is in the fingerprint,
        and SGLang draws another one at each start: a fixed one lets the next start find the pages.
        """
        tokens = DEVICE_TOKENS * (2 if self.profile.kv_dtype == profile.FP8 else 1)
        sizes = {
            "--page-size": PAGE_TOKENS,
            "--chunked-prefill-size": CHUNK_TOKENS,
            "--dtype": _DTYPE,
            "--max-total-tokens": tokens,
            "--context-length": tokens,
            "--max-running-requests": MOST_RUNNING,
            "--load-format": "dummy",
            "--random-seed": 0,
        }
        return (*(str(word) for pair in sizes.items() for word in pair), MIXED)

    def settings(self) -> dict[str, Any]:
        """SGLang's time-outs, for any backend's file behind
        --hicache-storage-backend-extra-config.
        """
        return {
            "prefetch_timeout_base": _PREFETCH_BASE_S * self.dilation,
            "prefetch_timeout_per_ki_token": _PREFETCH_PER_KI_TOKEN_S * self.dilation,
        }

    def sections(self) -> dict[str, dict[str, Any]]:
        """Sections of kvtier.json beside the store: the disk at the scale of bytes and
        times here.
        """
        throttle = {
            "read_gbps": self.disk_read_gbytes_per_s * 8 / self.slower,
            "write_gbps": self.disk_write_gbytes_per_s * 8 / self.slower,
        }
        default = PolicyConfig()
        times = {
            "load_deadline_s": default.load_deadline_s * self.dilation,
            "max_stall_ms": default.max_stall_ms * self.dilation,
        }
        return {"lab": {"throttle": throttle}, "policy": times}

    def model(self) -> Path:
        """The folder of a model with this kind of cache, written if it is not there yet."""
        return _write_model(self.profile.kind, self.layers)


def is_paced(device: str | None) -> bool:
    """Whether a --device names a paced one."""
    return device is not None and device.startswith(PACED)


def parse(
    device: str, dilation: float = 1.0, words: Sequence[str] = (), layers: int = LAYERS
) -> Paced:
    """A --device of the form paced:PROFILE, or paced:PROFILE@R with a disk that reads R GB/s and
    writes in proportion. `words` are the server's further arguments: they may ask for keys and
    values in FP8. Raises BenchError, with the profiles there are.
    """
    if not is_paced(device):
        raise BenchError(f"--device {device}: not of the form {PACED}PROFILE")
    if not 0.1 <= dilation <= 100:
        raise BenchError(f"--dilation {dilation:g}: must be from 0.1 to 100")
    modelled, at, disk = device.removeprefix(PACED).partition("@")
    try:
        read = float(disk) if at else DISK_READ_GBYTES_PER_S
    except ValueError:
        read = math.nan
    if not 0.01 <= read <= 1000:
        raise BenchError(f"--device {device}: {disk!r} is no GB/s of a disk, from 0.01 to 1000")
    write = read * DISK_WRITE_GBYTES_PER_S / DISK_READ_GBYTES_PER_S
    asked = [given for name, _, given in _own_words(words) if name == _KV_DTYPE]
    kv_dtype = _KV_DTYPES.get(asked[-1] if asked else "auto", profile.BF16)
    return Paced(profile.read(modelled, kv_dtype), dilation, read, write, layers=layers)


def of_server(metrics: Iterable[Sequence[Any]]) -> Paced | None:
    """The paced device that a running server says it is on, in its /metrics as `Metrics.to_json`
    has them; None where it computes. Raises BenchError for a profile that is not known here.
    """
    for name, labels, value in metrics:
        if name == METRIC:
            asked = f"{_KV_DTYPE}={labels.get('kv_dtype', '')}"
            return parse(f"{PACED}{labels.get('profile', '')}", value, (asked,))
    return None


def _own_words(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Of a server's arguments those of `_OWN`: name, as it was written, and value."""
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        given = value or next(iter(words[place + 1 :]), "")
        for name in _OWN:
            # argparse takes the beginning of a name for it, as --tp for --tp-size.
            if len(flag) > len("--") + 1 and name.startswith(flag):
                yield name, flag, given


def _write_model(kind: str, layers: int) -> Path:
    name = f"paced-{kind}" if layers == LAYERS else f"paced-{kind}-{layers}-layers"

    def write(draft: Path) -> None:
        small = write_model("tiny-llama")  # for its tokenizer
        for file in ("tokenizer.json", "generation_config.json"):
            shutil.copy(small / file, draft)
        tokenizer = json.loads((small / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer["model_max_length"] = MOST_CONTEXT
        write_json(draft / "tokenizer_config.json", tokenizer)
        config = {**_BASE, **_KINDS[kind][0], "num_hidden_layers": layers}
        write_json(draft / "config.json", config)
        write_json(draft / "kvtier_model.json", {"name": name, "paced": True})

    return write_once(models_dir() / f"{name}-{_WRITER}", write)
