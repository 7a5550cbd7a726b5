"""Speculative decoding on a real server that computes: restored prefixes bring the draft's KV along.

The draft is the target itself, or sees all tokens but the first as the target does, so whether a
drafted token is accepted depends on the draft's KV alone. A row of it that is not there, or another
one, shows in the number of verifications; the answer never shows it, because the target verifies
every token.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from draft_models import write_pair
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
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    answer = served.call("POST", "/generate", {"input_ids": ids, "sampling_params": sampling})
    return Spoken(answer["output_ids"], answer["meta_info"]["spec_verify_ct"])


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, loads leave out the rows of the draft."""
    return tmp_path_factory.mktemp("drafts") / "leave the draft out"


def say_without_draft(served: Served, dropping: Path, asked: list[list[int]]) -> list[Spoken]:
    dropping.touch()
    try:
        return [say(served, ids) for ids in asked]
    finally:
        dropping.unlink()


KINDS = ("STANDALONE", "EAGLE", "MTP")
"""Drafts: the target itself, in a pool of its own; an EAGLE draft in a pool of its own; the same in
the target's host pages.
"""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def serve(servers: Shared, dropping: Path, kind: str, models: Path, proof: str) -> Served:
    """A server with such a draft, which restores from both ends and looks ahead."""
    target = draft = str(write_model("tiny-llama"))
    if kind != "STANDALONE":
        target, draft = write_pair(models, mtp=kind == "MTP")
    sections = {
        "throttle": {"read_gbps": GBPS},
        "policy": {
            "restore": "both", "min_restore_tokens": 64, "prefetch": "on", "eviction": "next-use", "proof": proof
        },
    }  # fmt: skip
    arguments = flags(
        "tiny-llama",
        page_size=PAGE,
        max_total_tokens=6144,
        speculative_algorithm="STANDALONE" if kind == "STANDALONE" else "EAGLE",
        speculative_draft_model_path=draft,
        **CHAIN,
    )
    arguments[arguments.index("--model-path") + 1] = target
    env = {**changed(DRAFTS=dropping), "TORCHDYNAMO_DISABLE": "1"}
    return servers.get(arguments, sections, env)


@pytest.fixture(scope="module")
def served(
    servers: Shared, dropping: Path, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """A server whose pages nothing compares."""
    return serve(servers, dropping, kind, tmp_path_factory.mktemp("models"), "off")


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
    assert served.metric("kvtier:lookahead_map_pages") > 0, "it looks ahead"
    assert served.metric("kvtier:lookahead_failures_total") == 0
    assert served.metric("kvtier:lookahead_drift_total") == 0, "pages have SGLang's names"
    served.flush()
    without = say_without_draft(served, dropping, asked)
    assert [one.tokens for one in without] == [one.tokens for one in cold]
    assert sum(one.verifications for one in without) > sum(one.verifications for one in cold) + 3, (
        "a draft without its rows guesses worse: the test sees what it is for"
    )


@pytest.mark.parametrize("kind", ["EAGLE", "MTP"])
def test_a_draft_whose_rows_do_not_come_is_found_by_the_page_check_before_it_is_used(
    servers: Shared, dropping: Path, kind: str, tmp_path: Path
) -> None:
    served = serve(servers, dropping, kind, tmp_path, "all")
    asked = prompts(3, LONG, seed=9)
    cold = [say(served, ids) for ids in asked]
    served.flush()
    assert [say(served, ids) for ids in asked] == cold
    right = settled(served)
    assert right["proof_pages_total equal"] > 0 and "proof_pages_total differs" not in right
    assert right["proof_attaches_total equal"] > 0
    assert right.get("proof_attaches_total differs", 0) == 0
    served.flush()
    without = say_without_draft(served, dropping, asked)
    assert without == cold, "what was compared and differs is computed"
    assert settled(served)["proof_pages_total differs"] > 0
