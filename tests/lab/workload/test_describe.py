"""A workload in numbers."""

from __future__ import annotations

from sgl_kvtier.lab.workload.describe import describe
from sgl_kvtier.lab.workload.encoder import ByteEncoder
from sgl_kvtier.lab.workload.session import Append, Call, Edit, Event, Message, Session
from sgl_kvtier.types import Span

ENCODER = ByteEncoder(1 << 30)


def text(tokens: int, letter: str) -> Message:
    """A message of exactly so many tokens, other from its second token on for another letter."""
    return Message("user", letter * 4 * (tokens - 1))


def session(*events: Event, name: str = "s") -> Session:
    return Session(name, "test", tuple(events))


def test_totals_of_a_session_worked_out_by_hand() -> None:
    # Prompts of 10, 10+5+5 and (edit: first 10 kept, 20 new) 30 tokens: 15 and 10 of them stood
    # before.
    events = (
        Append(text(10, "a")),
        Call(text(5, "b"), gap_s=0.0, latency_s=1.0),
        Append(text(5, "c")),
        Call(text(5, "d"), gap_s=2.0, latency_s=3.0),
        Edit((Span(0, 1), Message("summary", "e" * 76))),
        Call(text(5, "f"), gap_s=4.0),
    )
    stats = describe([session(*events)], ENCODER, page_tokens=1)
    assert stats.prompt_tokens == [10, 20, 30]
    assert stats.new_tokens == [5, 20]
    assert stats.output_tokens == [5, 5, 5]
    assert (stats.first_prompt_tokens, stats.final_context_tokens) == ([10], [35])
    assert (stats.gap_s, stats.latency_s) == ([2.0, 4.0], [1.0, 3.0])
    assert (stats.calls, stats.edits, stats.sessions) == (3, 1, 1)
    assert stats.session_reuse == stats.infinite_cache == 25 / 60


def test_an_infinite_cache_holds_what_other_sessions_sent_in_whole_pages() -> None:
    sessions = [
        session(Append(text(10, "a")), Append(text(7, letter)), Call(), name=letter)
        for letter in "xyx"
    ]
    one, four = (describe(sessions, ENCODER, page_tokens=n) for n in (1, 4))
    assert one.session_reuse == 0
    # The second shares ten tokens and its role's; the third is the first again.
    assert one.infinite_cache == (11 + 17) / 51
    assert four.infinite_cache == (8 + 16) / 51


def test_outputs_are_held_by_the_infinite_cache_too() -> None:
    a, out = text(8, "a"), text(8, "o")
    again = session(Append(a), Append(out), Append(text(4, "b")), Call())
    assert (
        describe([session(Append(a), Call(out)), again], ENCODER, page_tokens=4).cached_tokens_total
        == 16
    )


def test_a_context_that_returns_to_an_earlier_state_is_still_cached() -> None:
    a, b = text(8, "a"), text(8, "b")
    events = (
        Append(a),
        Append(b),
        Call(),
        Edit((Span(0, 1), Message("tool", "c" * 40))),
        Call(),
        Edit((Span(0, 1), b)),
        Call(),
    )
    stats = describe([session(*events)], ENCODER, page_tokens=4)
    assert stats.cached_tokens_total == 8 + 16


def test_rows_leave_out_what_was_not_recorded() -> None:
    rows = describe([session(Append(text(3, "a")), Call(text(2, "b")))], ENCODER).rows()
    assert "recorded server time" not in [row["quantity"] for row in rows]
    (prompt,) = [row for row in rows if row["quantity"] == "prompt per call"]
    assert (prompt["min"], prompt["p50"], prompt["max"], prompt["mean"], prompt["n"]) == (
        3,
        3,
        3,
        3,
        1,
    )


def test_sub_agents_clipped_results_and_truncated_sessions_are_counted() -> None:
    call = (Append(text(3, "a")), Call())
    owner = Session("s", "t", call, truncated=True, clipped_messages=2)
    totals = describe([owner, Session("s/a", "t", call, parent="s")], ENCODER).totals()
    assert (totals["sessions"], totals["sub_agents"], totals["calls"]) == (1, 1, 2)
    assert (totals["truncated_sessions"], totals["clipped_messages"]) == (1, 2)


def test_no_sessions_are_no_division_by_zero() -> None:
    stats = describe([], ENCODER)
    assert (stats.session_reuse, stats.infinite_cache, stats.rows()) == (0, 0, [])
