"""One class per architecture, for SGLang's variable SGLANG_EXTERNAL_MODEL_PACKAGE. Pools are made
from the model's configuration alone.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool
from torch import nn

from sgl_kvtier.lab.paced import device


class _Stub(nn.Module):
    """Computes nothing. Its forward is the paced device's."""

    shared_experts_config = None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "", **_: Any) -> None:
        super().__init__()
        del quant_config, prefix
        self.config = config
        self.nothing = nn.Parameter(torch.zeros(1), requires_grad=False)
        device.watch_batches()

    def forward(
        self, input_ids: Any, positions: Any, forward_batch: Any, **_: Any
    ) -> LogitsProcessorOutput:
        """The next tokens of a batch, after what the device takes for it."""
        del input_ids, positions
        pool, rows = get_token_to_kv_pool(), get_req_to_token_pool().req_to_token
        tokens = device.of_process().forward(pool, rows, forward_batch)
        return device.logits_of(tokens, self.config.vocab_size)

    def load_weights(self, weights: Any) -> set[str]:
        """There are none."""
        del weights
        return set()


class LlamaForCausalLM(_Stub):
    """Keys and values of every layer."""


class DeepseekV3ForCausalLM(_Stub):
    """A latent of every layer."""


EntryClass = [LlamaForCausalLM, DeepseekV3ForCausalLM]
