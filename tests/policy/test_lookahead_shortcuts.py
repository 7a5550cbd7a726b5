"""What looking ahead keeps instead of looking it up anew is what looking it up would give, after
every fact and every step.
"""

from __future__ import annotations

import random
from dataclasses import replace

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from named_parts import AHEAD
from random_hands import ENGINE, PROFILE, RandomHands
from test_planner_machine import configs
from test_planner_machine import rules as many_rules

from sgl_kvtier.policy.messages import StepView
from sgl_kvtier.policy.planner import make_planner


def check(planner) -> int:
    """Compares everything that is kept of owners' pages with the map; returns how many owners lack
    some.
    """
    prefetcher, known = planner._ahead.prefetcher, planner._ahead.map
    wanting = prefetcher.refresh()
    for owner in list(prefetcher.known):
        assert prefetcher.missing(owner) == known.missing(owner)
    lacking = [owner for owner in prefetcher._watched if known.missing(owner).runs]
    assert all(owner in wanting for owner in lacking), "who lacks pages is looked at"
    for tier, unused in prefetcher.prefetched.unused.items():
        for key in unused:
            page = known.page(key)
            assert key in prefetcher._in_flight or (page is not None and tier in page.tiers), (
                "brought, or on its way"
            )
    return len(lacking)


def relive(log, config, profile, rules=None) -> int:
    """Lets a planner live through a log, and checks it after every entry; how often an owner lacked
    pages.
    """
    planner, lacking = make_planner(config, ENGINE, profile, rules), 0
    for entry in log:
        if isinstance(entry, StepView):
            planner.step(entry)
        else:
            planner.observe(entry)
        lacking += check(planner)
    return lacking


@settings(max_examples=examples(30), deadline=None)
@given(st.randoms(use_true_random=False), configs, many_rules, st.booleans(), st.integers(10, 120))
def test_in_any_hands(chance, config, rules, profiled, actions):
    hands = RandomHands(chance, config, profiled, rules)
    for _ in range(actions):
        hands.act()
    hands.drain()
    relive(hands.log, config, PROFILE if profiled else None, rules)


def test_it_is_looked_for_owners_that_lack_pages_at_all():
    """The check above has something to check: in one long run owners lack pages again and again."""
    config = replace(AHEAD, load_deadline_s=600.0)
    hands = RandomHands(random.Random(3), config, profiled=True)
    for _ in range(300):
        hands.act()
    assert relive(hands.log, config, PROFILE) > 50
