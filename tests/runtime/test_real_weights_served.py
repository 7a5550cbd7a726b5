"""SmolLM2-135M-Instruct, a model with real weights, on the real server: it answers what transformers
answers, and the same again from restored pages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import config_file, flags, serving

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.outside.lab_model import write_named

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
QUESTION = "What is the capital of France?"


def test_a_restored_document_is_answered_as_before(tmp_path):
    from transformers import AutoTokenizer

    try:
        model = write_named("smollm2")
    except BenchError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(model)

    def ids_of(text):
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer.encode(rendered, add_special_tokens=False))

    document = ids_of(f"{(ROOT / 'README.md').read_text()}\n\nWhat is sgl_kvtier?")
    pools = {"model_path": str(model), "max_total_tokens": 8192, "context_length": 8192}
    with serving(
        tmp_path, flags(**pools), config_file(tmp_path, policy={"restore": "both"})
    ) as server:
        short = server.ask(ids_of(QUESTION), 7)
        assert tokenizer.decode(short.tokens) == "The capital of France is Paris."
        first = server.ask(document, 24)
        server.flush()
        again = server.ask(document, 24)
        assert again.storage > 0
        assert again.tokens == first.tokens
        assert again.logprobs == pytest.approx(first.logprobs, abs=1e-3)
