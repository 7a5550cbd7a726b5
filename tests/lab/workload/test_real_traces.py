"""The real trace files against the figures published with them. Skipped where the files are not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from sgl_kvtier.lab.workload.describe import WorkloadStats, describe
from sgl_kvtier.lab.workload.encoder import ByteEncoder
from sgl_kvtier.lab.workload.session import Call, Edit, Session
from sgl_kvtier.lab.workload.source import LoadResult, load_sessions

pytestmark = pytest.mark.slow
WIDE = (1 << 31) - 1


class Published(NamedTuple):
    """One column of the trace sets' table: counts are exact; tokens are cl100k's, ours an estimate
    at 4 characters each.
    """

    sessions: int
    calls: int
    edits: int
    calls_p50: float
    calls_p90: float
    prompt_p50: float
    reuse: float


SWE = {
    "swe_mini_deepseek": Published(145, 11_430, 0, 75, 114.6, 16_810, 0.9886),
    "swe_openhands_claude35": Published(53, 1_102, 0, 17, 37.2, 16_364, 0.949),
    "swe_openhands_sdk_claude4": Published(27, 1_732, 45, 64, 101.8, 23_135, 0.9635),
    "swe_moatless_claude35": Published(218, 2_041, 230, 7, 17, 7_910, 0.8608),
    "swe_lmcache_miniswe": Published(9, 201, 0, 30, 30, 5_066, 0.9597),
    "swe_smith_sweagent": Published(3, 76, 0, 22, 34, 7_886, 0.9428),
}


@pytest.fixture(scope="module", params=list(SWE))
def swe(
    request: pytest.FixtureRequest, traces_dir: Path
) -> tuple[Published, LoadResult, WorkloadStats]:
    loaded = load_sessions(request.param, traces_dir=traces_dir)
    return SWE[request.param], loaded, describe(loaded.sessions, ByteEncoder(WIDE), page_tokens=64)


def calls_of(sessions: tuple[Session, ...]) -> list[Call]:
    return [event for session in sessions for event in session.events if isinstance(event, Call)]


def test_agent_traces_have_the_published_counts_lengths_and_reuse(
    swe: tuple[Published, LoadResult, WorkloadStats],
) -> None:
    published, loaded, stats = swe
    assert (stats.sessions, stats.calls, stats.edits) == published[:3]
    assert loaded.bad_lines == ()
    rows = {row["quantity"]: row for row in stats.rows()}
    calls = rows["calls per session"]
    assert (calls["p50"], round(calls["p90"], 1)) == (published.calls_p50, published.calls_p90)
    assert rows["prompt per call"]["p50"] == pytest.approx(published.prompt_p50, rel=0.12)
    assert stats.session_reuse == pytest.approx(published.reuse, abs=0.002)
    assert {s.licence for s in loaded.sessions} <= {"MIT", "Apache-2.0"}
    assert all(c.gap_s >= 0 and (c.latency_s or 0) >= 0 for c in calls_of(loaded.sessions))


def test_server_times_are_the_published_ones(traces_dir: Path) -> None:
    stats = describe(
        load_sessions("swe_openhands_claude35", traces_dir=traces_dir).sessions,
        ByteEncoder(WIDE, 64),
    )
    rows = {row["quantity"]: row for row in stats.rows()}
    assert rows["recorded server time"]["p50"] == pytest.approx(7.524, abs=0.001)
    assert rows["recorded server time"]["p90"] == pytest.approx(14.924, abs=0.001)


def test_tool_schemas_stand_before_every_prompt_that_had_them(traces_dir: Path) -> None:
    for name, with_tools in (
        ("swe_openhands_claude35", True),
        ("swe_openhands_sdk_claude4", True),
        ("swe_moatless_claude35", False),
    ):
        loaded = load_sessions(name, traces_dir=traces_dir, limit=3)
        assert [s.tools is not None for s in loaded.sessions] == [with_tools] * 3


def test_claude_code_has_the_published_counts_lengths_and_reuse(traces_dir: Path) -> None:
    claude = load_sessions("claude_code_blocks64", traces_dir=traces_dir)
    owners = [s for s in claude.sessions if s.parent is None]
    helpers = [s for s in claude.sessions if s.parent is not None]
    assert (len(owners), len(helpers), claude.calls) == (710, 63, 49_334)
    assert sum(s.calls for s in helpers) == 676
    assert claude.bad_lines == ()
    dropped = [
        (s, e)
        for s in claude.sessions
        for e in s.events
        if isinstance(e, Edit) and e.why == "prefix dropped"
    ]
    assert len(dropped) == 1_350
    assert len({s.parent or s.session_id for s, _ in dropped}) == 397
    # One token a block. The published 6.04 G tokens include the up to 63 behind a prompt's last
    # whole block.
    stats = describe(claude.sessions, ByteEncoder(WIDE, 64), page_tokens=64)
    assert stats.session_reuse == pytest.approx(0.9626, abs=0.0005)
    missing = 6_037_445_403 - 64 * stats.prompt_tokens_total
    assert 0 <= missing <= 63 * 49_334
    outputs = sum(c.output_tokens or 0 for c in calls_of(claude.sessions))
    assert outputs / 49_334 == pytest.approx(440.06, abs=0.01)


@pytest.mark.parametrize(
    ("name", "requests", "tokens", "blocks", "block_hits"),
    [
        ("mooncake_conversation_trace", 12_031, 12_035.061, 182_790, 0.3664),
        ("mooncake_synthetic_trace", 3_993, 15_325.477, 43_924, 0.6396),
    ],
)
def test_mooncake_has_the_published_counts_and_hits(
    traces_dir: Path, name: str, requests: int, tokens: float, blocks: int, block_hits: float
) -> None:
    loaded = load_sessions(name, traces_dir=traces_dir)
    assert (len(loaded.sessions), loaded.calls, loaded.bad_lines) == (requests, requests, ())
    prompts = [s.events[0].message.blocks for s in loaded.sessions]  # type: ignore[union-attr]
    assert sum(p.tokens for p in prompts if p) / requests == pytest.approx(tokens, abs=0.001)
    assert len({i for p in prompts if p for i in p.ids().tolist()}) == blocks
    # One token a block, so pages of one token are blocks.
    stats = describe(loaded.sessions, ByteEncoder(WIDE, 512), page_tokens=1)
    assert stats.infinite_cache == pytest.approx(block_hits, abs=0.00006)


@pytest.mark.parametrize(
    ("name", "requests", "duration_s", "tokens", "output"),
    [
        ("azure_llm_2023_code", 8_819, 3_435.9, 2_047.848, 27.883),
        ("azure_llm_2023_conv", 19_366, 3_501.7, 1_154.697, 211.126),
    ],
)
def test_azure_has_the_published_counts(
    traces_dir: Path, name: str, requests: int, duration_s: float, tokens: float, output: float
) -> None:
    loaded = load_sessions(name, traces_dir=traces_dir)
    assert (len(loaded.sessions), loaded.bad_lines) == (requests, ())
    assert max(s.start_s for s in loaded.sessions) == pytest.approx(duration_s, abs=0.06)
    prompts = [s.events[0].message.blocks for s in loaded.sessions]  # type: ignore[union-attr]
    assert sum(p.tokens for p in prompts if p) / requests == pytest.approx(tokens, abs=0.001)
    assert sum(c.output_tokens or 0 for c in calls_of(loaded.sessions)) / requests == pytest.approx(
        output, abs=0.001
    )
