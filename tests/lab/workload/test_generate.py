"""Sessions made up from published statistics."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.workload.describe import describe
from sgl_kvtier.lab.workload.encoder import ByteEncoder
from sgl_kvtier.lab.workload.generate import (
    Condense,
    Percentiles,
    Rewrite,
    generate,
    load_preset,
    presets,
)
from sgl_kvtier.lab.workload.session import Append, Call, Context, Edit, Session
from sgl_kvtier.types import Span

NAMES = list(presets())
ENCODER = ByteEncoder(1 << 30)


@cache
def some(name: str, count: int) -> list[Session]:
    return [generate(load_preset(name), 0, i) for i in range(count)]


def test_the_same_seed_and_index_give_the_same_session_in_every_process() -> None:
    program = (
        "import hashlib, sys\n"
        "from sgl_kvtier.lab.workload.generate import generate, load_preset\n"
        "for name in sys.argv[1:]:\n"
        "    session = generate(load_preset(name), 7, 3)\n"
        "    print(name, hashlib.sha256(repr(session).encode()).hexdigest())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *NAMES],
        env={**os.environ, "PYTHONHASHSEED": "99"},
        capture_output=True,
        check=True,
        text=True,
    )
    sessions = {name: repr(generate(load_preset(name), 7, 3)) for name in NAMES}
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sessions.items()}
    assert dict(line.split() for line in done.stdout.splitlines()) == digests


def test_other_seeds_and_other_indices_give_other_sessions() -> None:
    places = [(seed, index) for seed in (0, 1) for index in (0, 1)]
    made = [generate(load_preset("swe-mini"), *place).events for place in places]
    assert len(set(map(repr, made))) == 4


@pytest.mark.parametrize("name", NAMES)
def test_the_statistics_of_many_sessions_are_those_of_the_table(name: str) -> None:
    preset = load_preset(name)
    sessions = some(name, 60)
    firsts = [next(prompt for _, prompt in Context(s).calls()) for s in sessions]
    drawn = [
        ([s.calls for s in sessions], preset.calls),
        (
            [sum(len(m.text or "") for m in prompt) / 4 for prompt in firsts],
            preset.first_prompt_tokens,
        ),
        (
            [e.output_tokens or 0 for s in sessions for e in s.events if isinstance(e, Call)],
            preset.output_tokens,
        ),
    ]
    for values, table in drawn:
        # Four standard deviations of how many of so many draws fall below a percentile.
        slack = 4 * (0.25 / len(values)) ** 0.5
        for share in (0.25, 0.5, 0.75):
            assert np.mean(np.array(values) <= table.at(share) + 0.5) >= share - slack
            assert np.mean(np.array(values) < table.at(share) - 0.5) <= share + slack


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("swe-mini", 0.9886),
        ("swe-openhands", 0.949),
        ("swe-openhands-sdk", 0.9635),
        ("swe-moatless", 0.8608),
        ("claude-code", 0.9626),
    ],
)
def test_prefix_reuse_comes_near_the_published_figure(name: str, published: float) -> None:
    stats = describe(some(name, 60), ByteEncoder(1 << 30, 8), page_tokens=64)
    assert stats.session_reuse == pytest.approx(published, abs=0.025)


def test_all_sessions_of_a_preset_share_its_prefix_and_no_more() -> None:
    preset = load_preset("swe-openhands-sdk")
    first, second = (next(p for _, p in Context(s).calls()) for s in some(preset.name, 2))
    assert first[0].text == second[0].text
    assert len(first[0].text or "") == 4 * preset.shared_prefix_tokens
    assert first[1].text and second[1].text
    assert first[1].text[:40] != second[1].text[:40]


def test_a_condensing_session_keeps_the_beginning_and_the_end_around_a_summary() -> None:
    preset = load_preset("swe-openhands-sdk")
    assert isinstance(preset.edit, Condense)
    edits = [e for s in some(preset.name, 10) for e in s.events if isinstance(e, Edit)]
    assert len(edits) >= 5
    for edit in edits:
        start, summary, end = edit.parts
        assert start == Span(0, 4)
        assert isinstance(end, Span) and len(end) == 34 and end.stop >= 82
        assert not isinstance(summary, Span)


def test_a_rewriting_session_edits_at_about_the_published_rate() -> None:
    preset = load_preset("swe-moatless")
    assert isinstance(preset.edit, Rewrite)
    sessions = some(preset.name, 200)
    chances = sum(s.calls - 1 for s in sessions)
    assert sum(s.edits for s in sessions) / chances == pytest.approx(preset.edit.per_call, rel=0.3)


@pytest.mark.parametrize("name", NAMES)
def test_sessions_begin_with_input_end_with_a_call_and_wait_no_negative_time(name: str) -> None:
    for session in some(name, 10):
        assert isinstance(session.events[0], Append)
        assert isinstance(session.events[-1], Call)
        assert all(
            e.gap_s >= 0 and (e.latency_s or 0) >= 0 for e in session.events if isinstance(e, Call)
        )


@given(
    st.lists(st.floats(0, 1e6), min_size=9, max_size=9).map(sorted),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_drawing_follows_the_table_and_never_leaves_it(
    values: list[float], a: float, b: float
) -> None:
    shares = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
    table = Percentiles(shares, tuple(values))
    low, high = table.at(min(a, b)), table.at(max(a, b))
    assert values[0] * (1 - 1e-9) <= low <= high * (1 + 1e-9) <= values[-1] * (1 + 1e-8)
    for share, value in zip(shares, values, strict=True):
        assert table.at(share) == pytest.approx(value)


def test_every_preset_names_its_source_and_licence() -> None:
    assert all(
        p.source.count("/") == 1 and p.licence in ("MIT", "Apache-2.0") for p in presets().values()
    )
    with pytest.raises(TraceError, match="there are swe-mini"):
        load_preset("nope")
