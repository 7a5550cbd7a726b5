"""Speculative decoding on a real server that computes: restored prefixes bring the draft's KV along.

The draft is the target itself, so a drafted token is accepted if and only if the draft sees the
same KV as the target. A row of the draft that is not there, or another one, shows in the number of
verifications; the answer never shows it, because the target verifies every token.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from restore_lab import GBPS, settled, since
from serving import Served, changed, flags, prompts
from shared import Shared

from sgl_kvtier.lab.outside.lab_model import write_model

pytestmark = [pytest.mark.server, pytest.mark.slow]

LONG, NEW, PAGE = 1500, 24, 16
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


class Spoken(NamedTuple):
    """An answer, and how many verifications by the target it took."""

    tokens: list[int]
    verifications: int


def say(served: Served, ids: list[int]) -> Spoken:
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
    }
    answer = served.call("POST", "/generate", body)
    return Spoken(answer["output_ids"], answer["meta_info"]["spec_verify_ct"])


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, loads leave out the pools beside the KV pages'."""
    return tmp_path_factory.mktemp("drafts") / "leave the draft out"


@pytest.fixture(scope="module")
def served(servers: Shared, dropping: Path) -> Served:
    """A server whose draft is its target."""
    model = str(write_model("tiny-llama"))
    sections = {
        "throttle": {"read_gbps": GBPS},
        "policy": {"restore": "both", "min_restore_tokens": 64, "prefetch": "on"},
    }
    arguments = flags(
        "tiny-llama", page_size=PAGE, speculative_algorithm="STANDALONE", speculative_draft_model_path=model, **CHAIN
    )  # fmt: skip
    env = {**changed(DRAFTS=dropping), "TORCHDYNAMO_DISABLE": "1"}
    return servers.get(arguments, sections, env)


def test_restored_prefixes_keep_the_accept_length_verification_by_verification(
    served: Served, dropping: Path
) -> None:
    asked = prompts(3, LONG, seed=7)
    cold = [say(served, ids) for ids in asked]
    turns = [ids + first.tokens for ids, first in zip(asked, cold, strict=True)]
    turns = [ids + more for ids, more in zip(turns, prompts(3, 300, seed=8), strict=True)]
    cold_turns = [say(served, ids) for ids in turns]
    served.flush()
    before = settled(served)
    assert [say(served, ids) for ids in asked] == cold
    grown = since(before, settled(served))
    assert grown["ended_total met"] == len(asked)
    assert grown["loaded_tokens_total storage"] > 0 and grown["computed_tokens_total"] > 0, (
        f"from both ends: {grown}"
    )
    served.flush()
    assert [say(served, ids) for ids in turns] == cold_turns
    assert [say(served, ids) for ids in turns] == cold_turns, "pages that the tree has now"
    served.flush()
    dropping.touch()
    try:
        without = [say(served, ids) for ids in asked]
    finally:
        dropping.unlink()
    assert [one.tokens for one in without] == [one.tokens for one in cold]
    assert sum(one.verifications for one in without) > sum(one.verifications for one in cold) + 3, (
        "a draft without its rows guesses worse: the test sees what it is for"
    )
