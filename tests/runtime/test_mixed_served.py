"""Chunks that are mixed with decoding (--enable-mixed-chunk), on a real server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import until
from restore_lab import BOTH_ENDS, CHECKED, CHUNK, LONG, SLOW_DISK, settled, since
from serving import Served, config_file, flags, prompts, serving
from shared import Shared

from sgl_kvtier.policy.decision_log import Reader
from sgl_kvtier.policy.messages import StepView

pytestmark = pytest.mark.server
DECODED = 500


def tokens_of(server: Served, ids: Sequence[int], count: int = 6) -> list[int]:
    """The output tokens, asked for without log-probs: SGLang mixes no others."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    answer = server.call("POST", "/generate", {"input_ids": ids, "sampling_params": sampling})
    found: list[int] = answer["output_ids"]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_decode_in_the_steps_that_restore_and_answers_are_equal(
    servers: Shared, ranks: int
) -> None:
    pools = {"chunked_prefill_size": CHUNK, "page_size": 16, "max_total_tokens": 8192}
    launch = flags("tiny-llama", tp_size=ranks, enable_mixed_chunk=True, **pools)
    sections = {"throttle": SLOW_DISK, "policy": BOTH_ENDS}
    server = servers.get(launch, sections, CHECKED)
    short, *stored = prompts(4, tokens=LONG, seed=5)
    short = short[:40]
    alone = [tokens_of(server, ids) for ids in stored], tokens_of(server, short, DECODED)
    server.flush()
    before = settled(server)
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(tokens_of, server, short, DECODED)
        until(lambda: server.metric("sglang:num_running_reqs") > 0)
        again = [tokens_of(server, ids) for ids in stored]
        assert not decoding.done()
        assert (again, decoding.result()) == alone
    grown = since(before, settled(server))
    assert grown["ended_total met"] == len(stored)
    assert grown["computed_tokens_total"] > 0 < grown["loaded_tokens_total storage"]
    log = (server.server.folder / "decisions.jsonl").read_text().splitlines()
    views = [one for one in map(Reader().decode, log[1:]) if isinstance(one, StepView)]
    restoring = [view for view in views if view.slot and view.mixed]
    assert restoring and {view.decoding for view in restoring} == {1}


def test_with_pipeline_stages_a_server_restores_and_keeps_chunks_apart(tmp_path: Path) -> None:
    launch = flags("tiny-llama", enable_mixed_chunk=True, pp_size=2, chunked_prefill_size=CHUNK)
    config = config_file(tmp_path, throttle=SLOW_DISK, policy={"restore": "both"})
    with serving(tmp_path, launch, config) as server:
        (stored,) = prompts(1, tokens=LONG, seed=6)
        first = tokens_of(server, stored)
        server.flush()
        assert tokens_of(server, stored) == first
        said = (tmp_path / "server.log").read_text()
    assert "chunks are not mixed with decoding" in said and "pipeline stages" in said
