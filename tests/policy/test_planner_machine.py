"""The whole planner in random hands: every page once, compute causal, nobody stuck, nothing beyond
what is free.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from named_parts import AHEAD
from random_hands import ENGINE, PROFILE, RandomHands

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.rules import CacheFlow, Cake, FixedSplit, ShortestFirst, TierKV
from sgl_kvtier.policy.messages import StepView
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.rules import Rules

LONG = replace(AHEAD, load_tokens=32, load_deadline_s=600.0)
RULES = (Rules, Cake, CacheFlow, ShortestFirst, TierKV)
configs = st.builds(
    PolicyConfig,
    restore=st.sampled_from(["auto", "both", "load", "compute"]),
    prefetch=st.sampled_from(["on", "on", "off"]),
    eviction=st.sampled_from(["next-use", "lru", "sgl_kvtier.lab.rules:LFU"]),
    sessions=st.booleans(),
    load_tokens=st.sampled_from([16, 64]),
    load_deadline_s=st.just(600.0),
)
rules = st.one_of(
    st.builds(FixedSplit, st.sampled_from([-1.0, 0.0, 0.4, 1.0])),
    *(
        st.builds(
            rule,
            lookahead=st.sampled_from([-1, 1, 4]),
            min_chunk_tokens=st.sampled_from([16, 48]),
            yields_to_fresh=st.booleans(),
            load_horizon_s=st.sampled_from([0.01, 10.0]),
        )
        for rule in RULES
    ),
)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.randoms(use_true_random=False),
    configs,
    rules,
    st.booleans(),
    st.integers(10, 120),
    st.booleans(),
)
def test_in_any_hands_every_request_comes_through_and_the_run_replays(
    chance, config, rules, profiled, actions, anchors
):
    hands = RandomHands(chance, config, profiled, rules, anchors=anchors)
    for _ in range(actions):
        hands.act()
    hands.drain()
    assert hands.replay() == hands.plans
    relive(hands.log, config, PROFILE if profiled else None, rules)


@pytest.mark.parametrize("anchors", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_long_runs_come_through(rule, anchors):
    for seed in range(3):
        hands = RandomHands(random.Random(seed), LONG, seed % 2 == 0, rule(), anchors)
        for _ in range(400):
            hands.act()
        hands.drain()
        assert len(hands.finished) == hands.arrived > 10


def digest(seed: int) -> str:
    """All plans of one run, as a hash."""
    hands = RandomHands(random.Random(seed), LONG, profiled=True)
    for _ in range(200):
        hands.act()
    hands.drain()
    assert any(plan.moves for plan in hands.plans) and any(plan.loads for plan in hands.plans)
    return hashlib.sha256(repr(hands.plans).encode()).hexdigest()


def test_the_plans_do_not_depend_on_the_hash_seed():
    code = "import test_planner_machine as t; print(t.digest(2), t.digest(4))"
    printed = []
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split())
    assert printed[0] == printed[1] == printed[2]
    assert len(set(printed[0])) == 2


# What looking ahead keeps instead of looking it up anew is what looking it up would give, after
# every fact and every step.


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


def test_it_is_looked_for_owners_that_lack_pages_at_all():
    """The check above has something to check: in one long run owners lack pages again and again."""
    hands = RandomHands(random.Random(3), LONG, profiled=True)
    for _ in range(300):
        hands.act()
    assert relive(hands.log, LONG, PROFILE) > 50
