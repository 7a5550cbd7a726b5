"""A prompt whose first half is on a server's disk and whose second half others share: the disk and
the network are read at the same time. With two ranks, one of which has lost its disk, too.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from patience import until
from restore_lab import CHUNK, LONG, counts
from serving import Served, config_file, flags, prompts, serving

from sgl_kvtier.policy.decision_log import decode
from sgl_kvtier.policy.messages import RestoreOffered, TransferDone
from sgl_kvtier.types import Link, Span, Tier

pytestmark = [pytest.mark.server, pytest.mark.slow]

PAGE = 16
WHOLE, HALF = (LONG - 1) // PAGE, LONG // 2 // PAGE
GBPS = 0.02
"""Of the disk and of the network."""
CHECKED = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}


def settings(folder: Path, engine: Path, **more: Any) -> Path:
    engine.mkdir(exist_ok=True)
    remote = {"engine": "memory", "master": str(engine)}
    return config_file(folder, remote=remote, **more)


def launched(**more: Any) -> list[str]:
    return flags("tiny-llama", chunked_prefill_size=CHUNK, page_size=PAGE, **more)


def shared_by(server: Served, asked: list[list[int]]) -> list[list[int]]:
    """The answers of a server, once it has sent what it wrote."""
    until(lambda: server.metric("kvtier:remote_up") >= 1)
    first = [server.ask(ids).tokens for ids in asked]
    server.settle()
    until(lambda: server.metric("kvtier:remote_names_waiting") == 0)
    until(lambda: server.metric("kvtier:remote_pages_sent_total") >= len(asked) * WHOLE)
    return first


def test_the_disk_and_the_network_are_read_at_the_same_time(tmp_path):
    asked = prompts(2, tokens=LONG, seed=5)
    engine, log = tmp_path / "engine", tmp_path / "decisions"
    with serving(tmp_path / "a", launched(), settings(tmp_path / "a", engine)) as server:
        first = shared_by(server, asked)
    limit = {"read_gbps": GBPS}
    policy = {"restore": "load", "min_restore_tokens": 64, "decision_log": str(log)}
    config = settings(
        tmp_path / "b", engine, throttle=limit, lab={"remote_throttle": limit}, policy=policy
    )
    with serving(tmp_path / "b", launched(), config) as server:
        until(lambda: server.metric("kvtier:remote_up") == 1)
        for ids in asked:
            server.ask(ids[: HALF * PAGE + 1])
        until(lambda: server.metric("kvtier:remote_pages_kept_total") >= len(asked) * HALF)
        for mode, ids, tokens in zip(("load", "both"), asked, first, strict=True):
            server.flush()
            server.restore(mode)
            again = server.ask(ids)
            assert again.tokens == tokens
            assert again.storage > (HALF * PAGE if mode == "load" else 0)
        time.sleep(1.2)  # counters are published twice a second
        found = counts(server)
    assert found["ended_total met"] == 4
    assert found["loaded_tokens_total storage"] > 0 < found["loaded_tokens_total remote"]
    assert found["planner_failures_total"] == 0
    offers, order = read_of(log)
    half = ((Span(0, HALF), Tier.STORAGE), (Span(HALF, WHOLE), Tier.REMOTE))
    assert offers[-2:] == [half, half]
    for links in order[-2:]:
        first_disk = links.index(Link.STORAGE_TO_DEVICE)
        last_disk = len(links) - 1 - links[::-1].index(Link.STORAGE_TO_DEVICE)
        assert Link.REMOTE_TO_DEVICE in links[first_disk:last_disk], "they take turns in ending"


def read_of(log: Path) -> tuple[list[Any], list[list[Link]]]:
    """Of each restoration: the sources that were offered, and the links of its loads as these
    ended.
    """
    offers: dict[str, Any] = {}
    order: dict[str, list[Link]] = {}
    for line in log.read_text().splitlines()[1:]:
        fact = decode(line)
        if isinstance(fact, RestoreOffered):
            offers[fact.rid] = fact.sources
        elif isinstance(fact, TransferDone) and fact.rid:
            order.setdefault(fact.rid, []).append(fact.link)
    return list(offers.values()), [order.get(rid, []) for rid in offers]


def test_ranks_agree_where_pages_are_after_one_has_lost_its_disk(tmp_path):
    asked = prompts(3, tokens=LONG, seed=6)
    engine = tmp_path / "engine"
    policy = {"restore": "both", "min_restore_tokens": 64}
    arguments = launched(max_total_tokens=8192, tp_size=2)
    with serving(tmp_path / "a", arguments, settings(tmp_path / "a", engine)) as server:
        first = shared_by(server, asked)
    (rank,) = (tmp_path / "a" / "store").glob("*/tp1*")
    shutil.rmtree(rank)
    config = settings(tmp_path / "a", engine, policy=policy)
    with serving(tmp_path / "a", arguments, config, **CHECKED) as server:
        until(lambda: server.metric("kvtier:remote_up") == 2)
        again = [server.ask(ids) for ids in asked]
        server.flush()
        last = [server.ask(ids) for ids in asked]
        time.sleep(1.2)
        found = counts(server)
        read = server.metric("kvtier:remote_pages_read_total")
    assert [one.tokens for one in again] == [one.tokens for one in last] == first
    assert min(one.storage for one in again) > 0
    assert found["loaded_tokens_total remote"] > 0, "what one rank lacks counts as shared for both"
    assert 0 < read <= len(asked) * (WHOLE + 2), "the other rank reads its own disk"
    assert found["planner_failures_total"] == 0
