"""When sessions are expected back: learned, hinted, given up."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.policy.messages import Hint
from sgl_kvtier.policy.sessions import Gaps, Return, Returns, Sessions, longer, quantile


def teach(
    sessions: Sessions, session: str, gaps: list[float], start: float = 0.0, tool: str | None = None
) -> float:
    now = start
    sessions.returned(session, now)
    for gap in gaps:
        now += 1.0
        sessions.left(session, now, tool)
        now += gap
        sessions.returned(session, now)
    return now + 1.0


def known(**limits: float) -> Sessions:
    """With one session, at time 0."""
    sessions = Sessions(**limits)  # type: ignore[arg-type]
    sessions.returned("a", 0.0)
    return sessions


def expected(sessions: Sessions, session: str, now: float) -> Return:
    found = sessions.expected(session, now)
    assert found is not None
    return found


def test_a_session_is_expected_after_its_usual_gap():
    sessions = Sessions()
    now = teach(sessions, "a", [5.0] * 8)
    said = sessions.left("a", now)
    assert 5.0 * 0.7 < said.at - now < 5.0 * 1.4
    assert said.early <= said.at == said.next_use


def test_what_others_did_stands_in_for_a_session_that_is_new():
    sessions = Sessions()
    for n in range(20):
        teach(sessions, f"old {n}", [2.0])
    assert 1.4 < sessions.left("new", 100.0).at - 100.0 < 2.8


def test_tools_differ():
    sessions = Sessions()
    for n in range(20):
        teach(sessions, f"t{n}", [60.0], tool="tests")
        teach(sessions, f"l{n}", [0.1], tool="ls")
    assert sessions.left("x", 0.0, "tests").at > 30.0
    assert sessions.left("y", 0.0, "ls").at < 1.0


def test_the_longer_a_session_is_away_the_later_it_is_expected_until_it_is_given_up():
    sessions = Sessions()
    for n in range(10):
        teach(sessions, f"o{n}", [1.0, 2.0, 4.0, 8.0])
    times = [sessions.left("a", 0.0).at]
    while times[-1] < math.inf:
        assert len(times) < 300
        changed = {item.session: item.at for item in sessions.changed(times[-1] + 1e-6)}
        times.append(changed.get("a", times[-1] + 0.5))
    assert times[0] < 6.0 and times == sorted(times)
    assert times[-2] < 60.0


def test_without_any_experience_nothing_is_expected():
    assert Sessions().left("a", 5.0).at == math.inf


def test_a_hint_is_believed_before_experience():
    sessions = Sessions()
    now = teach(sessions, "a", [5.0] * 4)
    assert sessions.hint("a", Hint(expected_delay_s=120.0), now).accepted
    assert sessions.left("a", now).at == pytest.approx(now + 120.0)
    sessions.hint("a", Hint(expected_delay_s=3.0), now + 10)
    assert expected(sessions, "a", now + 10).at == pytest.approx(now + 13.0)


def test_priority_moves_the_next_use_and_not_the_return():
    sessions = known()
    answer = sessions.hint("a", Hint(expected_delay_s=8.0, priority=9), 0.0)
    assert answer.accepted and "priority 9 taken as 3" in answer.reason
    said = sessions.left("a", 0.0)
    assert (said.at, said.next_use) == (8.0, 1.0)


def test_a_session_whose_time_is_up_is_not_expected():
    sessions = known()
    sessions.hint("a", Hint(expected_delay_s=50.0, ttl_s=10.0), 0.0)
    assert sessions.left("a", 0.0).at == 50.0
    assert [item.at for item in sessions.changed(10.0)] == [math.inf]
    sessions.returned("b", 0.0)
    sessions.hint("b", Hint(ttl_s=0.0), 0.0)
    assert sessions.left("b", 0.0).at == math.inf


@pytest.mark.parametrize(
    ("hint", "why"),
    [
        (Hint(expected_delay_s=-1.0), "expected_delay_s"),
        (Hint(expected_delay_s=math.nan), "expected_delay_s"),
        (Hint(ttl_s=math.inf), "ttl_s"),
    ],
)
def test_a_hint_that_makes_no_sense_is_refused_with_the_reason(hint, why):
    sessions = known()
    answer = sessions.hint("a", hint, 0.0)
    assert not answer.accepted and why in answer.reason


def test_a_hint_for_an_unknown_session_is_refused():
    answer = Sessions().hint("a", Hint(priority=1), 0.0)
    assert not answer.accepted and "first request" in answer.reason


def test_a_hint_beyond_the_limit_is_cut_and_says_so():
    sessions = known(hint_limit_s=60.0)
    answer = sessions.hint("a", Hint(expected_delay_s=1e6, ttl_s=100.0), 0.0)
    cut = "expected_delay_s 1e+06 cut to 60; ttl_s 100 cut to 60"
    assert answer.accepted and answer.reason == cut


def test_a_client_that_is_wrong_three_times_is_not_believed_any_more():
    sessions, now = known(), 0.0
    for _ in range(3):
        assert sessions.hint("a", Hint(expected_delay_s=1.0), now).accepted
        sessions.left("a", now)
        now += 100.0
        sessions.returned("a", now)
    answer = sessions.hint("a", Hint(expected_delay_s=1.0), now)
    assert not answer.accepted and "wrong" in answer.reason
    assert sessions.hint("a", Hint(priority=1), now).accepted
    assert not sessions.hint("a", Hint(expected_delay_s=99.0), now).accepted
    sessions.left("a", now)
    sessions.returned("a", now + 100.0)
    again = sessions.hint("a", Hint(expected_delay_s=1.0), now + 100.0)
    assert again.accepted, "the last one was right"


def test_who_says_at_once_and_comes_in_a_moment_was_right():
    sessions, now = known(), 0.0
    for _ in range(5):
        assert sessions.hint("a", Hint(expected_delay_s=0.0), now).accepted
        sessions.left("a", now)
        now += 0.05
        sessions.returned("a", now)


def test_a_priority_holds_until_another_one_is_said():
    sessions = known()
    sessions.hint("a", Hint(priority=2), 0.0)
    sessions.left("a", 0.0)
    sessions.hint("a", Hint(expected_delay_s=8.0), 0.0)
    assert expected(sessions, "a", 0.0).next_use == pytest.approx(2.0)


def test_a_hint_for_longer_than_sessions_are_waited_for_is_waited_for():
    sessions = known(idle_limit_s=900.0)
    sessions.left("a", 0.0)
    assert sessions.hint("a", Hint(expected_delay_s=1200.0), 0.0).accepted
    for now in (1000.0, 1205.0, 1900.0):
        assert expected(sessions, "a", now).at < math.inf
    assert expected(sessions, "a", 2101.0).at == math.inf


def test_a_session_kept_for_longer_than_sessions_are_waited_for_is_kept_until_then():
    sessions = known(idle_limit_s=900.0)
    sessions.left("a", 1.0)
    assert sessions.hint("a", Hint(priority=3, ttl_s=3600.0), 2.0).accepted
    for now in (3.0, 901.0, 3601.0):
        assert expected(sessions, "a", now).at == 3602.0
    assert expected(sessions, "a", 3602.0).at == math.inf


def test_whoever_is_forgotten_is_expected_no_more():
    sessions = Sessions(most=2)
    for name in "ab":
        sessions.returned(name, 0.0)
        sessions.hint(name, Hint(expected_delay_s=10.0), 0.0)
        sessions.left(name, 0.0)
    sessions.returned("c", 1.0)
    found = {one.session: one.at for one in sessions.changed(12.0)}
    assert found["a"] == math.inf > found["b"]


@pytest.mark.parametrize("seed", range(3))
def test_what_many_hints_of_one_session_clear_away_changes_nothing_for_others(seed: int):
    def run(noise: int) -> list[object]:
        rng, sessions, seen, now = random.Random(seed), Sessions(), [], 0.0
        for _ in range(400):
            now += rng.random()
            name, what = f"s{rng.randrange(20)}", rng.randrange(4)
            if what == 0:
                sessions.returned(name, now)
            elif what == 1:
                seen.append(sessions.left(name, now, rng.choice([None, "tool"])))
            elif what == 2:
                delay_s, priority = rng.choice([None, 5.0, 50.0]), rng.randrange(3)
                hint = Hint(delay_s, priority, rng.choice([None, 9.0]))
                seen.append(sessions.hint(name, hint, now))
            else:
                seen.append([one for one in sessions.changed(now) if one.session != "noise"])
            sessions.returned("noise", now)
            sessions.left("noise", now)
            for _ in range(noise):
                sessions.hint("noise", Hint(expected_delay_s=3000.0), now)
        return seen

    assert run(30) == run(1)


def test_sessions_idle_the_longest_are_forgotten_beyond_the_limit():
    sessions = Sessions(most=3)
    for n in range(5):
        sessions.returned(str(n), float(n))
    assert len(sessions) == 3
    assert not sessions.hint("1", Hint(), 9.0).accepted and sessions.hint("2", Hint(), 9.0).accepted


samples = st.lists(st.floats(0.0, 1e4), min_size=1, max_size=40)


@given(samples, st.floats(0.01, 0.99), st.floats(0.0, 1e4))
def test_a_quantile_is_the_sorted_lists_to_within_a_third(seen, share, elapsed):
    gaps = Gaps(keep=1.0)
    for seconds in seen:
        gaps.saw(seconds)
    found = quantile([(gaps, 1.0)], share)
    exact = sorted(seen)[min(len(seen) - 1, max(0, math.ceil(share * len(seen) - 1e-6) - 1))]
    assert found is not None
    assert max(exact, 1e-3) / 1.34 <= max(found, 1e-3) <= max(exact, 1e-3) * 1.34
    later = quantile([(gaps, 1.0)], share, elapsed)
    assert later is None or later >= elapsed * (1 - 1e-9)
    assert elapsed > 0 or later == found


def test_sessions_that_never_come_back_lower_the_chance_of_those_like_them_alone():
    sessions = Sessions()
    now = teach(sessions, "agent", [1.0] * 12)
    for n in range(40):
        now += 1.0
        sessions.returned(f"once {n}", now)
        sessions.left(f"once {n}", now + 0.1)
        sessions.changed(now + 60.0 * (n + 1))
        now += 60.0 * (n + 1)
    sessions.returned("new", now)
    assert sessions.left("new", now).chance < 0.3
    assert sessions.left("agent", now).chance > 0.6


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_a_chance_is_a_share_and_follows_what_happened(came: list[bool]):
    returns = Returns()
    before = returns.chance(1)
    for one in came:
        if one:
            returns.came_back(1, was_gone=False)
        else:
            returns.gone(1)
        after = returns.chance(1)
        assert 0 < after < 1
        assert after > before if one else after < before
        before = after


def test_one_that_was_given_up_and_comes_back_was_not_gone():
    first, second = Returns(), Returns()
    first.came_back(3, was_gone=False)
    second.gone(3)
    second.came_back(3, was_gone=True)
    assert second.chance(3) == pytest.approx(first.chance(3), abs=0.02)


def test_the_longer_a_session_stays_away_the_less_likely_it_is_to_come():
    sessions = Sessions()
    for n in range(10):
        teach(sessions, f"o{n}", [1.0, 2.0, 4.0, 8.0])
    sessions.left("a", 0.0)
    chances = [expected(sessions, "a", at).chance for at in (0.0, 1.0, 3.0, 6.0, 20.0)]
    assert chances == sorted(chances, reverse=True) and chances[0] > chances[-1]


@given(
    st.lists(st.floats(2e-3, 1e4), min_size=1, max_size=40),
    st.floats(2e-3, 1e4),
    st.floats(0.01, 0.99),
)
def test_what_lasts_longer_is_what_a_quantile_leaves(
    samples: list[float], elapsed: float, share: float
):
    gaps = Gaps()
    for sample in samples:
        gaps.saw(sample)
    parts = [(gaps, 1.0)]
    assert 0.0 <= longer(parts, 2 * elapsed) <= longer(parts, elapsed) + 1e-9 <= 1.0 + 2e-9
    at = quantile(parts, share)
    assert at is not None
    assert longer(parts, at) <= 1 - share + 1e-4
