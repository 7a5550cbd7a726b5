"""One class per architecture, without layers: what SGLang asks of a model before and beside its
forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recipe_device import device


class _Stub(nn.Module):
    """A model whose forward is the device's."""

    shared_experts_config = None
    draft = False
    """Whether it guesses for another: its rows are of the token one further."""
    hot_token_id = None
    capture_aux_hidden_states = False

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "", **_: Any) -> None:
        super().__init__()
        del quant_config, prefix
        device.watch()
        self.config = getattr(config, "text_config", config)
        self.quant_config = None
        self.vocabulary, self.width = self.config.vocab_size, self.config.hidden_size
        # Chunked attention (Llama 4) keeps a chunk, and sees what of it stands before a token.
        chunk = getattr(self.config, "attention_chunk_size", None)
        self.window = chunk or (getattr(self.config, "sliding_window", None) or 1) - 1
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(8, 8)
        self.lm_head = nn.Embedding(8, 8)

    def forward(
        self, input_ids: Any, positions: Any, forward_batch: Any, *_: Any, **__: Any
    ) -> Any:
        """The next tokens of a batch, after what the device takes for it."""
        return device.of_process().forward(self, input_ids, positions, forward_batch)

    def load_weights(self, weights: Any) -> set[str]:
        """There are none."""
        del weights
        return set()

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For a draft to share."""
        return self.model.embed_tokens.weight, self.lm_head.weight

    def set_embed_and_head(self, embed: Any, head: Any) -> None:
        """Nothing is looked up."""

    def get_embed(self) -> torch.Tensor:
        """For a draft to share."""
        return self.model.embed_tokens.weight

    def set_embed(self, embed: Any) -> None:
        """Nothing is looked up."""

    def set_eagle3_layers_to_capture(self, layer_ids: Any = None) -> None:
        """Nothing is captured."""


class _Windowed(_Stub):
    """Some layers see a window only."""

    def get_attention_sliding_window_size(self) -> int:
        """In SGLang's way: without the token itself."""
        return self.window


class _Draft(_Stub):
    """It guesses the next tokens from the same chains."""

    draft = True


def _named(names: str, base: type) -> list[type]:
    return [type(name, (base,), {"__module__": __name__}) for name in names.split()]


EntryClass = [
    *_named(
        "LlamaForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM DeepseekV3ForCausalLM "
        "DeepseekV32ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM "
        "MiniMaxM2ForCausalLM Qwen3NextForCausalLM Qwen3_5MoeForCausalLM Qwen3_5ForCausalLM "
        "Llama4ForConditionalGeneration NemotronHForCausalLM KimiLinearForCausalLM",
        _Stub,
    ),
    *_named(
        "GptOssForCausalLM Gemma3ForCausalLM Gemma4ForCausalLM DeepseekV4ForCausalLM "
        "MiMoV2FlashForCausalLM",
        _Windowed,
    ),
    *_named(
        "DeepseekV3ForCausalLMNextN GlmMoeDsaForCausalLMNextN Glm4MoeForCausalLMNextN "
        "Glm4MoeLiteForCausalLMNextN Qwen3NextForCausalLMMTP Qwen3_5ForCausalLMMTP "
        "DeepseekV4ForCausalLMNextN LlamaForCausalLMEagle LlamaForCausalLMEagle3",
        _Draft,
    ),
]
