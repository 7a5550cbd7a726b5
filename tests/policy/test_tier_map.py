"""The map against a plain model of it, and the properties it promises."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from named_parts import named

from sgl_kvtier.lab.rules import LFU
from sgl_kvtier.policy.pages.eviction import LRU, NextUse
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.types import PageKey, Span, Tier

KEYS = tuple(PageKey(bytes([n]) * 32) for n in range(12))
NAMES = ("a", "b", "c", "d")

keys = st.lists(st.sampled_from(KEYS), max_size=6).map(tuple)
prompts = st.lists(st.sampled_from(KEYS), max_size=8, unique=True).map(tuple)
tiers = st.sampled_from(list(Tier))
turns = st.sampled_from([1.0, 2.0, 3.0, math.inf])


@dataclass
class Page:
    tiers: set = field(default_factory=set)
    moving: set = field(default_factory=set)
    pins: int = 0
    last_use: float = 0.0
    uses: dict = field(default_factory=dict)
    touched: dict = field(default_factory=dict)
    """When it was last put at the young end of each tier's order."""


class PlainMap:
    """The same, without any thought of speed."""

    def __init__(self):
        self.pages = {}
        self.claims = {}
        self.turn = {}
        self.clock = 0

    def owners(self, key):
        return sorted(name for name, claimed in self.claims.items() if key in claimed)

    def listed(self, key, tier):
        page = self.pages[key]
        return tier in page.tiers and not page.pins and not page.moving

    def touch(self, key, tier):
        self.clock += 1
        self.pages[key].touched[tier] = self.clock

    def change(self, key, action, touch=False, create=False):
        """Runs `action` on a page; it becomes the youngest wherever it was not listed before and is
        now.
        """
        if key not in self.pages:
            if not create:
                return
            self.pages[key] = Page()
        page = self.pages[key]
        before = {tier for tier in (Tier.DEVICE, Tier.HOST) if self.listed(key, tier)}
        had = set(page.tiers)
        action(page)
        for tier in page.tiers - had:
            page.uses[tier] = 1
        for tier in (Tier.DEVICE, Tier.HOST):
            if self.listed(key, tier) and (touch or tier not in before):
                self.touch(key, tier)
        if not page.tiers and not page.moving and not page.pins and not self.owners(key):
            del self.pages[key]

    def place(self, key, tier, now):
        def action(page):
            page.tiers.add(tier)
            page.moving.discard(tier)
            page.last_use = now

        self.change(key, action, create=True)

    def drop(self, key, tier):
        self.change(key, lambda page: (page.tiers.discard(tier), page.moving.discard(tier)))

    def use(self, key, now):
        def action(page):
            page.last_use = now
            for tier in page.tiers:
                page.uses[tier] += 1

        self.change(key, action, touch=True)

    def pin(self, key, by):
        def action(page):
            page.pins = max(0, page.pins + by)

        self.change(key, action)

    def claim(self, name, wanted):
        before = {key: self.owners(key) for key in self.pages}
        old = self.claims.get(name, ())
        same = 0
        while same < min(len(old), len(wanted)) and old[same] == wanted[same]:
            same += 1
        for left in (True, False):
            for key in reversed(old[same:] if left else wanted[same:]):
                claimed = self.claims.get(name, ())
                self.claims[name] = tuple(k for k in claimed if k != key) + (() if left else (key,))
                regrouped = self.owners(key) != before.get(key, [])
                before[key] = self.owners(key)
                self.change(key, lambda page: None, touch=regrouped, create=not left)
        self.claims[name] = wanted

    def next_use(self, key):
        return min((self.turn[name] for name in self.owners(key)), default=math.inf)


class MapMachine(RuleBasedStateMachine):
    RULE = LRU

    def __init__(self):
        super().__init__()
        self.map = TierMap(1000, self.RULE(), self.RULE())
        self.plain = PlainMap()
        self.now = 0.0

    @rule(keys=keys, tier=tiers, dt=st.sampled_from([0.0, 0.5]))
    def place(self, keys, tier, dt):
        self.now += dt
        self.map.placed(keys, tier, self.now)
        for key in reversed(keys):
            self.plain.place(key, tier, self.now)

    @rule(keys=keys, tier=tiers)
    def drop(self, keys, tier):
        self.map.dropped(keys, tier)
        for key in reversed(keys):
            self.plain.drop(key, tier)

    @rule(keys=keys, tier=tiers)
    def move(self, keys, tier):
        self.map.moving(keys, tier)
        for key in keys:
            self.plain.change(key, lambda page: page.moving.add(tier))

    @rule(keys=keys)
    def use(self, keys):
        self.map.used(keys, self.now)
        for key in reversed(keys):
            self.plain.use(key, self.now)

    @rule(keys=keys)
    def pin(self, keys):
        self.map.pin(keys)
        for key in keys:
            self.plain.pin(key, 1)

    @rule(keys=keys)
    def unpin(self, keys):
        self.map.unpin(keys)
        for key in reversed(keys):
            if key in self.plain.pages and self.plain.pages[key].pins:
                self.plain.pin(key, -1)

    @rule(name=st.sampled_from(NAMES), keys=prompts, turn=turns)
    def claim(self, name, keys, turn):
        self.map.claim(name, keys, turn)
        self.plain.claim(name, keys)
        self.plain.turn[name] = turn

    @rule(name=st.sampled_from(NAMES), turn=turns)
    def expect(self, name, turn):
        self.map.expect(name, turn)
        if name in self.plain.turn:
            self.plain.turn[name] = turn

    @rule(name=st.sampled_from(NAMES))
    def release(self, name):
        self.map.release(name)
        self.plain.claim(name, ())
        del self.plain.claims[name]
        self.plain.turn.pop(name, None)

    @rule(tier=tiers)
    def flush(self, tier):
        wanted = [key for key in self.map if tier in self.plain.pages[key].tiers]
        self.map.dropped(tuple(self.map.resident(tier)), tier)
        for key in reversed(wanted):
            self.plain.drop(key, tier)

    @invariant()
    def pages_agree(self):
        assert sorted(self.map) == sorted(self.plain.pages)
        for key, page in self.plain.pages.items():
            info = self.map.page(key)
            assert set(info.tiers) == page.tiers
            assert set(info.in_flight) == page.moving
            assert info.pins == page.pins
            assert sorted(info.owners) == self.plain.owners(key)
            assert info.next_use == self.plain.next_use(key)

    @invariant()
    def counts_agree(self):
        for tier in Tier:
            there = [key for key, page in self.plain.pages.items() if tier in page.tiers]
            assert self.map.count(tier) == len(there)
            assert sorted(self.map.resident(tier)) == sorted(there)

    @invariant()
    def missing_agrees(self):
        for name, claimed in self.plain.claims.items():
            missing = self.map.missing(name)
            reach = next(
                (i for i, key in enumerate(claimed) if not self.reachable(self.plain.pages[key])),
                len(claimed),
            )
            assert missing.reach == reach
            assert missing.pages == len(claimed)
            found = {n: tier for span, tier in missing.runs for n in range(span.start, span.stop)}
            for n, key in enumerate(claimed[:reach]):
                page = self.plain.pages[key]
                if Tier.DEVICE in page.tiers | page.moving:
                    assert n not in found
                elif Tier.HOST in page.tiers:
                    assert found[n] is Tier.HOST
                elif Tier.HOST in page.moving:
                    assert found[n] is None
                else:
                    assert found[n] is min(page.tiers)
            assert all(n < reach for n in found)

    @staticmethod
    def reachable(page):
        return page.tiers or page.moving & {Tier.DEVICE, Tier.HOST}

    @invariant()
    def victims_come_in_the_rules_order(self):
        for tier in (Tier.DEVICE, Tier.HOST):
            listed = [key for key in self.plain.pages if self.plain.listed(key, tier)]
            assert self.map.evictable(tier) == len(listed)
            victims = self.map.victims(tier, 1000)
            assert sorted(victims) == sorted(listed)
            self.check_order(tier, victims)
            assert self.map.victims(tier, 3) == victims[:3]
            assert sum(pages for _, _, pages in self.map.classes(tier)) == len(listed)

    def check_order(self, tier, victims):
        touched = [self.plain.pages[key].touched[tier] for key in victims]
        assert touched == sorted(touched)


class LfuMachine(MapMachine):
    RULE = LFU

    def check_order(self, tier, victims):
        rank = [
            (self.plain.pages[key].uses[tier], self.plain.pages[key].touched[tier])
            for key in victims
        ]
        assert rank == sorted(rank)


class NextUseMachine(MapMachine):
    RULE = NextUse

    def check_order(self, tier, victims):
        rank = [
            -self.plain.next_use(key) if self.plain.owners(key) else -math.inf for key in victims
        ]
        unowned = [not self.plain.owners(key) for key in victims]
        assert rank == sorted(rank)
        assert unowned == sorted(unowned, reverse=True)
        by_owners = {}
        for key in victims:
            by_owners.setdefault(tuple(self.plain.owners(key)), []).append(
                self.plain.pages[key].touched[tier]
            )
        assert all(touched == sorted(touched) for touched in by_owners.values())
        later = self.map.victims(tier, 1000, after=2.0)
        assert later == tuple(key for key in victims if self.plain.next_use(key) > 2.0)


TestMapWithLRU = MapMachine.TestCase
TestMapWithLFU = LfuMachine.TestCase
TestMapWithNextUse = NextUseMachine.TestCase
for case in (TestMapWithLRU, TestMapWithLFU, TestMapWithNextUse):
    case.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
del case  # or it is a test of its own


def test_a_full_map_forgets_the_page_that_was_cold_the_longest():
    small = TierMap(4)
    first, second, third, fourth, fifth, sixth = named(6)
    small.placed((first,), Tier.STORAGE, 0.0)
    small.placed((second,), Tier.HOST, 0.0)
    small.placed((third, fourth), Tier.STORAGE, 1.0)
    small.claim("r", (fourth,))
    small.placed((fifth,), Tier.STORAGE, 2.0)
    assert first not in small and third in small
    small.placed((sixth,), Tier.DEVICE, 3.0)
    assert third not in small
    assert sorted(small) == sorted((second, fourth, fifth, sixth))


def test_a_map_without_a_cold_page_records_no_more():
    small = TierMap(2)
    known, new = named(2), named(2, 10)
    small.placed(known, Tier.HOST, 0.0)
    small.placed(new, Tier.STORAGE, 0.0)
    small.claim("r", known + new)
    assert len(small) == 2
    assert small.missing("r").reach == 2
    assert small.keys_of("r", Span(0, 4)) == known
    small.dropped(known[:1], Tier.HOST)
    small.release("r")
    assert list(small) == [known[1]]


def test_owners_are_told_when_their_pages_come_go_or_start_to_move():
    m = TierMap(100)
    prompt = named(4)
    m.claim("r", prompt)
    m.claim("s", prompt[:2])
    assert sorted(m.take_changed()) == ["r", "s"]
    assert m.take_changed() == ()
    m.placed(prompt[2:], Tier.STORAGE, 0.0)
    assert m.take_changed() == ("r",)
    m.moving(prompt[2:], Tier.HOST)
    assert m.take_changed() == ("r",)
    m.placed(prompt[:1], Tier.DEVICE, 0.0)
    assert sorted(m.take_changed()) == ["r", "s"]
    m.placed(prompt[:1], Tier.DEVICE, 1.0)
    assert m.take_changed() == ()


def test_the_next_turn_of_a_session_costs_its_new_pages_only():
    m = TierMap(10_000)
    prompt = named(1000)
    m.claim("session", prompt[:900])
    moved = m.owners.moved
    pages = []
    m.owners.moved = lambda old, new, count: pages.append(count) or moved(old, new, count)
    m.claim("session", prompt)
    assert sum(pages) == 100


def test_a_shared_beginning_outlives_the_ends_of_whoever_shares_it():
    m = TierMap(100, NextUse(), NextUse())
    shared, mine, yours = named(2), named(2, 10), named(2, 20)
    m.placed(shared + mine + yours, Tier.DEVICE, 0.0)
    m.claim("mine", shared + mine, 5.0)
    m.claim("yours", shared + yours, 9.0)
    assert m.victims(Tier.DEVICE, 9) == (yours[1], yours[0], mine[1], mine[0], shared[1], shared[0])


def test_victims_asked_for_aside_are_the_same_and_leave_no_trace():
    def run(ask: bool) -> tuple[tuple[PageKey, ...], ...]:
        known, seen = TierMap(100, NextUse(), NextUse()), []
        for number in range(6):
            key = PageKey(bytes([number]) * 32)
            known.placed((key,), Tier.DEVICE, 0.0)
            known.claim(f"owner {number}", (key,), float(number % 2))
        for number in range(6):
            known.expect(f"owner {number}", 5.0 - number % 3)
            if ask:
                aside = known.victims_aside(Tier.DEVICE, 6)
                assert len(aside) == 6
            known.expect(f"owner {5 - number}", 1.0)
            if number % 2:
                seen.append(known.victims(Tier.DEVICE, 6))
                assert known.victims_aside(Tier.DEVICE, 6) == seen[-1]
        return tuple(seen)

    assert run(ask=True) == run(ask=False)


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from((Tier.HOST, Tier.STORAGE)), st.booleans()),
        max_size=300,
    ),
    st.integers(1, 200),
)
def test_pages_of_a_tier_are_found_a_part_at_a_time(
    changes: list[tuple[int, Tier, bool]], count: int
) -> None:
    known = TierMap(300)
    for number, tier, placed in changes:
        keys = (PageKey(number.to_bytes(32, "big")),)
        known.placed(keys, tier, 0.0) if placed else known.dropped(keys, tier)
    found: list[PageKey] = []
    place: int | None = 0
    while place is not None:
        part, place = known.resident_part(Tier.STORAGE, place, count)
        assert len(part) <= count
        found += part
    assert sorted(found) == sorted(known.resident(Tier.STORAGE))


def test_a_page_that_is_forgotten_counts_in_no_tier():
    tier_map = TierMap(capacity=2)
    tier_map.placed(KEYS[:2], Tier.STORAGE, 0.0)
    tier_map.placed(KEYS[2:3], Tier.DEVICE, 1.0)
    assert (tier_map.count(Tier.STORAGE), tier_map.count(Tier.DEVICE)) == (1, 1)
    assert len(tier_map) == 2


def test_owners_are_told_of_a_change_although_their_pages_were_claimed_by_others_since():
    m = TierMap(100)
    prompt = named(4)
    m.claim("r", prompt)
    m.take_changed()
    m.placed(prompt, Tier.HOST, 0.0)
    m.claim("s", prompt)  # from now on all of them are of both
    assert sorted(m.take_changed()) == ["r", "s"]
