"""Facts in, moves out: requests that wait and sessions that will return, in front of small hands."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from named_parts import named, parts

from sgl_kvtier.policy.ahead.idle import Deferral
from sgl_kvtier.policy.ahead.planner import Lookahead
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.messages import (
    ChunkStarted,
    Hint,
    Hinted,
    PagesDropped,
    PagesPlaced,
    RequestArrived,
    RequestFinished,
    StepDone,
    StepView,
)
from sgl_kvtier.policy.pages.eviction import NextUse
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

ENGINE = EngineShape(page_tokens=16, page_bytes=1000, chunk_tokens=512)
FREE = {Tier.DEVICE: 1000, Tier.HOST: 1000}


def look(**config) -> Lookahead:
    speeds = {
        Link.HOST_TO_DEVICE: 1e6,
        Link.STORAGE_TO_HOST: 1e5,
        Link.DEVICE_TO_HOST: 1e6,
        Link.HOST_TO_STORAGE: 1e5,
    }
    settings, rules = parts(**{"prefetch_share": 1.0, **config})
    ahead = Lookahead(settings, ENGINE, Bandwidth(speeds), rules)
    ahead.observe(StepDone(0.1, 512, 0, 0.0))
    return ahead


def arrive(ahead, rid, keys, now=0.0, session=None):
    ahead.observe(RequestArrived(rid, now, len(keys) * 16 + 8, keys, session))


def run(ahead, rid, keys, now):
    """The request runs from beginning to end; its pages are in HBM and DRAM afterwards."""
    ahead.observe(ChunkStarted(rid, Span(0, len(keys) * 16), now))
    ahead.observe(PagesPlaced(keys, Tier.DEVICE, now))
    ahead.observe(PagesPlaced(keys, Tier.HOST, now))
    ahead.observe(RequestFinished(rid, now, keys=keys))


def drop(ahead, keys, tier, now):
    ahead.observe(PagesDropped(keys, tier, now))


def view(now, *waiting, free=FREE, **more):
    return StepView(now, waiting, prefill_tokens=512, free_pages=free, **more)


def moves(ahead, now, *waiting, free=FREE):
    _, found = ahead.step(view(now, *waiting, free=free))
    return [(move.rid, move.keys, move.source, move.target) for move in found]


def test_the_second_in_line_is_brought_up_while_the_first_runs():
    ahead = look()
    first, second = named(64), named(20, 100)
    ahead.observe(PagesPlaced(second, Tier.HOST, 0.0))
    arrive(ahead, "1", first)
    arrive(ahead, "2", second)
    assert moves(ahead, 0.0, "1", "2") == [("2", second, Tier.HOST, Tier.DEVICE)]
    assert moves(ahead, 0.05, "1", "2") == []


def test_a_request_that_is_being_restored_is_left_alone():
    ahead = look()
    keys = named(20)
    ahead.observe(PagesPlaced(keys, Tier.HOST, 0.0))
    arrive(ahead, "1", named(64, 100))
    arrive(ahead, "2", keys)
    assert ahead.step(view(0.0, "1", "2"), restoring=("2",)) == ((), ())


def test_pages_of_who_waits_outlive_those_of_who_left():
    ahead = look()
    waits, left = named(10), named(10, 100)
    arrive(ahead, "left", left)
    run(ahead, "left", left, 0.5)
    ahead.observe(PagesPlaced(waits, Tier.DEVICE, 0.0))
    arrive(ahead, "waits", waits, now=1.0)
    assert set(ahead.map.victims(Tier.DEVICE, 10)) == set(left)
    assert ahead.map.victims(Tier.DEVICE, 20)[-1] == waits[0]


def test_a_sessions_pages_are_its_own_between_turns_and_come_back_before_it_does():
    ahead = look(demote_after_s=1000.0)
    keys, now = named(20), 0.0
    for turn in range(6):
        arrive(ahead, f"t{turn}", keys, now, session="s")
        run(ahead, f"t{turn}", keys, now + 0.5)
        # Without any experience nobody is expected.
        assert ahead.map.page(keys[0]).owners == (("session s",) if turn else ())
        now += 10.0
    left_at = now - 9.5
    assert left_at + 6 < ahead.map.page(keys[0]).next_use < left_at + 14
    drop(ahead, keys, Tier.DEVICE, left_at + 0.1)
    seen = {}
    for tick in range(1, 95):
        at = left_at + 0.1 * tick
        for found in moves(ahead, at):
            seen[at - left_at] = found
            ahead.observe(PagesPlaced(found[1], found[3], at))
    assert list(seen.values()) == [(None, keys, Tier.HOST, Tier.DEVICE)]
    assert 4.0 < next(iter(seen)) < 9.5
    arrive(ahead, "last", keys, now, session="s")
    assert ahead.prefetcher.missing("session s").runs == ()


def test_who_will_idle_long_leaves_a_copy_below():
    ahead = look(demote_after_s=5.0)
    keys = named(10)
    arrive(ahead, "1", keys, session="s")
    ahead.hint(Hinted("s", Hint(expected_delay_s=60.0), 0.0))
    ahead.observe(ChunkStarted("1", Span(0, 160), 0.0))
    ahead.observe(PagesPlaced(keys, Tier.DEVICE, 0.1))
    ahead.observe(RequestFinished("1", 0.2, keys=keys))
    assert moves(ahead, 0.3) == [(None, keys, Tier.DEVICE, Tier.HOST)]
    assert moves(ahead, 0.4) == []


def test_a_hint_reaches_the_order_of_eviction():
    ahead = look()
    for name, start in (("a", 0), ("b", 100)):
        arrive(ahead, name, named(5, start), session=name)
        run(ahead, name, named(5, start), 0.5)
        assert ahead.map.page(named(1, start)[0]) is not None
    assert ahead.map.page(named(1)[0]).owners == ()
    for name, start, delay in (("a", 0, 50.0), ("b", 100, 5.0)):
        arrive(ahead, name + "2", named(5, start), 1.0, session=name)
        assert ahead.hint(Hinted(name, Hint(expected_delay_s=delay), 1.0)).accepted
        run(ahead, name + "2", named(5, start), 1.5)
    assert set(ahead.map.victims(Tier.DEVICE, 5)) == set(named(5))
    ahead.hint(Hinted("a", Hint(expected_delay_s=1.0), 2.0))
    assert set(ahead.map.victims(Tier.DEVICE, 5)) == set(named(5, 100))


def test_hints_without_end_for_one_session_take_no_more_memory_than_a_thousand():
    ahead = look(hint_limit_s=1e6)
    arrive(ahead, "1", named(4), session="a")
    run(ahead, "1", named(4), 1.0)
    tracemalloc.start()
    try:
        for n in range(4_000):
            assert ahead.hint(Hinted("a", Hint(expected_delay_s=1e5 + n), 2.0 + n * 1e-3)).accepted
        assert tracemalloc.get_traced_memory()[0] < 250_000
    finally:
        tracemalloc.stop()
    expected = ahead.sessions.expected("a", 30.0)
    assert expected is not None and expected.at == pytest.approx(2.0 + 3.999 + 1e5 + 3_999)


def test_a_session_that_is_given_up_owns_nothing():
    ahead = look(session_idle_s=20.0)
    keys = named(5)
    arrive(ahead, "1", keys, session="s")
    ahead.hint(Hinted("s", Hint(expected_delay_s=15.0), 0.0))
    run(ahead, "1", keys, 0.5)
    assert ahead.map.page(keys[0]).owners == ("session s",)
    for at in range(1, 200):
        moves(ahead, float(at))
    assert ahead.map.page(keys[0]).owners == () and ahead.map.page(keys[0]).next_use == math.inf


def test_two_requests_of_one_session_at_once_do_not_mix_their_pages():
    ahead = look()
    arrive(ahead, "1", named(5), session="s")
    arrive(ahead, "2", named(5, 100), session="s")
    assert ahead.map.page(named(1)[0]).owners == ("session s",)
    assert ahead.map.page(named(1, 100)[0]).owners == ("request 2",)
    ahead.observe(RequestFinished("2", 1.0))
    assert ahead.map.page(named(1, 100)[0]) is None


def test_victims_are_named_for_what_prefill_will_claim():
    ahead = look()
    old = named(200, 1000)
    ahead.observe(PagesPlaced(old, Tier.DEVICE, 0.0))
    arrive(ahead, "1", named(64))
    named_now = []
    for tick in range(4):
        evictions, _ = ahead.step(view(float(tick), "1", free={Tier.DEVICE: 200}))
        named_now += [key for evict in evictions for key in evict.keys]
    assert named_now == list(reversed(old))[: len(named_now)] and len(named_now) == 128


def test_victims_are_named_without_prefetching_too():
    ahead = look(prefetch="off")
    soon, old = named(8), named(200, 1000)
    ahead.observe(PagesPlaced(old + soon, Tier.DEVICE, 0.0))
    arrive(ahead, "1", soon)
    plans = [ahead.step(view(float(n), "1", free={Tier.DEVICE: 208})) for n in range(4)]
    evicted = [key for evictions, _ in plans for evict in evictions for key in evict.keys]
    assert evicted == list(reversed(old))[:128] and not any(moved for _, moved in plans)


def test_learning_can_be_switched_off():
    ahead = look(sessions=False)
    arrive(ahead, "1", named(5), session="s")
    run(ahead, "1", named(5), 0.5)
    assert ahead.map.page(named(1)[0]).owners == () and len(ahead.sessions) == 0


def test_unknown_ids_change_nothing():
    ahead = look()
    ahead.observe(RequestFinished("?", 0.0))
    ahead.observe(ChunkStarted("?", Span(0, 16), 0.0))
    assert moves(ahead, 0.0, "?", "!") == []
    assert len(ahead.map) == 0


def teach(ahead, session, keys, turns, gap_s, now=0.0):
    """A session that comes back as often, each time after the same gap; when it left last. Its
    pages are in DRAM alone.
    """
    for turn in range(turns):
        arrive(ahead, f"{session} {turn}", keys, now, session=session)
        run(ahead, f"{session} {turn}", keys, now + 0.5)
        now += 0.5 + gap_s
    drop(ahead, keys, Tier.DEVICE, now - gap_s)
    return now - gap_s


def test_a_session_that_is_still_to_come_gets_what_those_who_wait_leave():
    for waiting, wanted in ((0, 20), (30, 12)):
        ahead = look(demote_after_s=1000.0)
        keys = named(20)
        left_at = teach(ahead, "s", keys, 6, 9.5)
        queue = ()
        if waiting:
            # It is in no tier, so nothing can be moved for it; but it will take its pages when it
            # runs.
            arrive(ahead, "w", named(waiting, 500), left_at + 8.9)
            queue = ("w",)
        prefill = 32 if waiting else 0  # pages the step itself claims
        free = {Tier.DEVICE: prefill + waiting + 12 if waiting else 20, Tier.HOST: 1000}
        found = moves(ahead, left_at + 9.0, *queue, free=free)
        brought = [(rid, len(moved), target) for rid, moved, _, target in found]
        assert brought == [(None, wanted, Tier.DEVICE)]


QUEUE = ("w", *(f"other {number}" for number in range(9)))


def session_and_request_on_device(gap_s, before_s=3.0):
    """An idle session that usually returns after `gap_s`, all its pages in HBM, and a request that
    waits, with its own there, so long before it returns.
    """
    ahead = look(demote_after_s=1000.0)
    theirs, mine = named(20), named(20, 500)
    left_at = teach(ahead, "s", theirs, 6, gap_s)
    ahead.observe(PagesPlaced(theirs, Tier.DEVICE, left_at))
    ahead.observe(PagesPlaced(mine, Tier.DEVICE, left_at))
    arrive(ahead, "w", mine, left_at + gap_s - before_s - 0.1)
    return ahead, left_at + gap_s - before_s, set(theirs), set(mine)


def first_to_leave(ahead):
    return set(ahead.map.victims(Tier.DEVICE, 20))


def test_who_waits_runs_before_a_session_that_comes_in_the_meantime():
    ahead, now, theirs, mine = session_and_request_on_device(9.5)
    # A long queue: the request's turn is predicted for a second after the session's return.
    ahead.map.expect("request w", now + 4.0)
    assert first_to_leave(ahead) == mine
    for tick in range(4):
        ahead.step(view(now + tick / 100, *QUEUE, fresh_tokens=512 * 45))
    assert first_to_leave(ahead) == theirs


@pytest.mark.parametrize(
    ("rules", "config", "stays"),
    [
        ({"holding": 2.0}, {}, True),
        ({"holding": 0.0}, {}, False),
        ({"holding": 2.0, "overtaking": 0.0}, {}, False),
        ({"holding": 2.0}, {"queue": "arrival"}, False),
    ],
)
def test_a_session_that_comes_in_a_moment_runs_before_who_waits(rules, config, stays):
    ahead = look(**rules, **config)
    keys = named(20)
    left_at = teach(ahead, "s", keys, 6, 0.2)
    ahead.observe(PagesPlaced(keys, Tier.DEVICE, left_at))
    before = ahead.map.page(keys[0]).next_use
    fresh = (512 * 15, *(0 for _ in QUEUE[1:]))
    ahead.step(view(left_at, *QUEUE, fresh_tokens=sum(fresh), fresh=fresh))
    after = ahead.map.page(keys[0]).next_use
    assert after == before if stays else after > left_at + 1.5


def test_a_session_that_more_probably_stays_away_runs_behind_the_queue():
    tier_map = TierMap(100, NextUse(), NextUse())
    behind, told = Deferral(tier_map), {}
    for name, likely in (("likely", True), ("not", False)):
        tier_map.claim(f"session {name}", named(1, len(name)))
        behind.expect(name, 0.5, likely)
        behind.queue(0.0, 10.0, 1.0)
        told[name] = tier_map.page(named(1, len(name))[0]).next_use
    assert told["likely"] == 0.5 and told["not"] > 10.0


def test_a_prompt_under_way_is_part_of_the_queue():
    ahead, now, theirs, _ = session_and_request_on_device(9.5)
    ahead.map.expect("request w", now + 4.0)
    ahead.step(view(now, *QUEUE, fresh_tokens=16, owed_pages=32 * 45))
    assert first_to_leave(ahead) == theirs


def test_when_nobody_waits_any_more_a_session_is_expected_when_it_was_before():
    ahead, now, _, _ = session_and_request_on_device(9.5)
    ahead.step(view(now))
    before = ahead.map.page(named(1)[0]).next_use
    ahead.step(view(now, *QUEUE, fresh_tokens=512 * 45))
    assert ahead.map.page(named(1)[0]).next_use > now + 4.5
    ahead.observe(RequestFinished("w", now + 0.01))
    ahead.step(view(now + 0.01))
    assert ahead.map.page(named(1)[0]).next_use == before


def test_a_session_that_is_put_off_runs_first_once_it_comes_soon():
    tier_map = TierMap(100, NextUse(), NextUse())
    behind, (key,) = Deferral(tier_map), named(1)
    tier_map.claim("session s", (key,))
    behind.expect("s", 5.0, likely=True)
    behind.queue(0.0, 10.0, 2.0)
    assert tier_map.page(key).next_use > 12.0
    behind.queue(3.5, 10.0, 2.0)
    assert tier_map.page(key).next_use == 5.0
    behind.queue(4.0, 10.0, 0.5)
    assert tier_map.page(key).next_use > 12.0, "others have become shorter"
    behind.queue(4.8, 0.0)
    assert tier_map.page(key).next_use == 5.0


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_sessions_behind_the_queue_keep_their_order_and_stay_close_together(data):
    tier_map = TierMap(1000, NextUse(), NextUse())
    behind, expected, now = Deferral(tier_map), {}, 0.0
    seconds = st.floats(0.0, 10.0, allow_nan=False, width=16)
    for _ in range(data.draw(st.integers(1, 30))):
        now += data.draw(seconds) / 10
        number = data.draw(st.integers(0, 5))
        match data.draw(st.sampled_from(["expect", "expect", "gone", "look"])):
            case "expect":
                expected[number] = now + data.draw(seconds)
                tier_map.claim(f"session {number}", named(1, number))
                behind.expect(str(number), expected[number])
            case "gone":
                expected.pop(number, None)
                behind.gone(str(number))
        queue_s = data.draw(seconds)
        behind.queue(now, queue_s)
        told = {number: tier_map.page(named(1, number)[0]).next_use for number in expected}
        for number, use in told.items():
            assert use >= max(expected[number], now + queue_s if queue_s else 0.0) - 1e-4
            if queue_s == 0 or expected[number] >= now + 2 * queue_s:
                assert use == expected[number], "no farther than need be"
            for other, use_of_other in told.items():
                if expected[number] < expected[other]:
                    assert use < use_of_other
                    assert use_of_other - use <= max(expected[other] - expected[number], 1e-4)


@pytest.mark.parametrize(("owed", "brought"), [(0, 20), (40, 8), (48, 0)])
def test_what_a_running_prompt_will_claim_is_not_given_to_who_is_still_to_come(owed, brought):
    ahead = look(demote_after_s=1000.0)
    left_at = teach(ahead, "s", named(20), 6, 9.5)
    # 48 pages of nobody may leave. Of those the prompt takes 32 in this step and the rest later.
    ahead.observe(PagesPlaced(named(48, 1000), Tier.DEVICE, left_at))
    free = {Tier.DEVICE: 32 * (owed > 0) + 20, Tier.HOST: 1000}
    seen = view(left_at + 9.0, free=free, empty_pages={Tier.DEVICE: 0}, owed_pages=owed)
    _, found = ahead.step(seen)
    assert sum(len(move.keys) for move in found if move.target is Tier.DEVICE) == brought


def test_of_two_sessions_the_first_to_come_has_its_room_first():
    ahead = look(demote_after_s=1000.0, prefetch_waste=1.0)
    early, late = named(30), named(30, 100)
    first = teach(ahead, "early", early, 6, 9.5)
    teach(ahead, "late", late, 6, 9.5, now=0.3)
    found = moves(ahead, first + 9.2, free={Tier.DEVICE: 40, Tier.HOST: 1000})
    assert [(moved[0], len(moved)) for _, moved, _, _ in found] == [(early[0], 30), (late[0], 10)]


def test_nothing_is_brought_for_sessions_that_use_not_to_come_back():
    ahead = look(demote_after_s=1000.0, prefetch_waste=1.0)
    agent, now = named(20), 0.0
    teach(ahead, "agent", agent, 12, 9.5)
    brought = []
    for n in range(30):
        now = 200.0 + 60.0 * n
        keys = named(10, 1000 + 100 * n)
        arrive(ahead, f"once {n}", keys, now, session=f"once {n}")
        run(ahead, f"once {n}", keys, now + 0.5)
        drop(ahead, keys, Tier.DEVICE, now + 0.6)
        pages = 0
        for tick in range(100):
            for _, moved, _, target in moves(ahead, now + 1 + 0.5 * tick):
                pages += len(moved)
                ahead.observe(PagesPlaced(moved, target, now + 1 + 0.5 * tick))
        brought.append(pages)
    assert brought[0] == 10
    assert brought[-10:] == [0] * 10
    left_at = teach(ahead, "agent", agent, 3, 9.5, now=now + 100)
    assert [len(moved) for _, moved, _, _ in moves(ahead, left_at + 9.0)] == [20]


def test_what_was_wasted_stops_guesses_and_not_those_who_wait():
    ahead = look(demote_after_s=1000.0)
    keys, free = named(20), {Tier.DEVICE: 50, Tier.HOST: 1000}
    left_at = teach(ahead, "s", keys, 6, 9.5)
    stopped = False
    for _ in range(8):
        found = moves(ahead, left_at + 9.0, free=free)
        stopped = stopped or not found
        for _, moved, _, target in found:
            ahead.observe(PagesPlaced(moved, target, left_at + 9.0))
            drop(ahead, moved, target, left_at + 9.1)
        arrive(ahead, "next", keys[:1], left_at + 9.5, session="s")
        left_at += 10.0
        run(ahead, "next", keys, left_at)
        drop(ahead, keys, Tier.DEVICE, left_at)
    assert stopped
    waits = named(8, 700)
    ahead.observe(PagesPlaced(waits, Tier.HOST, left_at))
    arrive(ahead, "first", named(64, 900), left_at + 0.1)
    arrive(ahead, "w", waits, left_at + 0.1)
    found = moves(ahead, left_at + 0.1, "first", "w")
    assert [(rid, moved) for rid, moved, _, _ in found] == [("w", waits)]
