"""SGLang's own command line with this package's hooks in it, resolved as a launch does."""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from sgl_kvtier.lab.outside.lab_model import write_model
from sgl_kvtier.runtime import plugin
from sgl_kvtier.runtime.sglang.hooks import HOOKS, Where

KVTIER = (
    "--enable-hierarchical-cache", "--hicache-storage-backend", "kvtier",
    "--hicache-storage-backend-extra-config", '{"store": {"path": "unused"}}',
)  # fmt: skip
PLAIN = ("--page-size", "16", "--chunked-prefill-size", "256")


def mla_model(folder: Path) -> str:
    """The configuration of a model whose KV is one latent per token."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
        "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    }  # fmt: skip
    return _written(folder, config)


def window_model(folder: Path) -> str:
    """A model every other layer of which looks at its last 128 tokens only."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 4096, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_local_experts": 8, "num_experts_per_tok": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return _written(folder, config)


def _written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@contextmanager
def launching() -> Iterator[Callable[..., Any]]:
    """A function from flags to resolved arguments. What hooks leave here is taken back."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.server_args import prepare_server_args

    def launch(*flags: str) -> Any:
        args = prepare_server_args(["--model-path", str(write_model("tiny-qwen3")), *flags])
        args.resolve_once()
        return resolving_view(args)

    environment = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging, "basicConfig", lambda **how: None)
        patch.setattr(HookRegistry, "_hooks", defaultdict(list))
        patch.setattr(HookRegistry, "_patched", set())
        patch.delitem(
            sys.modules, "sglang.srt.managers.scheduler", raising=False
        )  # as in a launching process
        for target in [hook.target for hook in HOOKS if hook.where is not Where.SCHEDULER]:
            owner, name = target.rsplit(".", 1)
            found = pkgutil.resolve_name(owner)
            patch.setattr(found, name, vars(found)[name])
        plugin.register()
        HookRegistry.apply_hooks()
        try:
            yield launch
        finally:
            os.environ.clear()
            os.environ.update(environment)
