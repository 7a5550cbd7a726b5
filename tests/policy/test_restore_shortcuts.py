"""A planner that looks everything up anew, each time it is asked, decides as the one that keeps
what it has looked up.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from named_parts import AHEAD
from random_hands import ENGINE, PROFILE, RandomHands
from test_planner_machine import configs
from test_planner_machine import rules as many_rules

from sgl_kvtier.lab.papers.step_time import Scene
from sgl_kvtier.policy.messages import Compute, RequestFinished, RestoreOffered, StepPlan, StepView
from sgl_kvtier.policy.restore.chunks import Chunks
from sgl_kvtier.policy.restore.loads import Loads
from sgl_kvtier.policy.restore.meeting import Pace, Split, best_split
from sgl_kvtier.policy.restore.offers import Offers
from sgl_kvtier.policy.restore.outlook import Outlook
from sgl_kvtier.policy.restore.planner import free
from sgl_kvtier.policy.restore.under_way import UnderWay
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link


class PlainOutlook(Outlook):
    """No search begins where the last one ended, none is put off, and none uses what another has
    looked up.
    """

    def __init__(self, under_way):
        super().__init__(under_way)
        self.known = under_way
        self.splits: dict[str, Split] = {}

    def begin(self):
        self.splits.clear()

    def search(self, item, view, compute_at_s, front, own=None, charge=1.0):
        known, engine = self.known, self.known.engine
        backlogs = {
            link: known.links.backlog_seconds(link, view.now)
            for link in Link
            if known.links.transfers(link)
        }
        pace = Pace(
            engine.page_tokens,
            engine.page_bytes,
            engine.chunk_tokens,
            known.cost.cost,
            known.bandwidth,
            backlogs,
        )
        front, copied_s = item.behind_copies(front, known.bandwidth, engine)
        left = item.left(pace, front, own is not None)
        return best_split(pace, compute_at_s + copied_s, left, front, -1, charge)

    def meeting(self, item, view, compute_at_s, front):
        return self.search(item, view, compute_at_s, front)

    def hold(self, item, view, compute_at_s, front):
        self.splits[item.rid] = self.search(item, view, compute_at_s, front)

    def held(self, item):
        return self.splits.get(item.rid)

    def charged(self, item, view, compute_at_s, front, charge):
        return self.search(item, view, compute_at_s, front, charge=charge)

    def meeting_if_taken_back(self, item, view, compute_at_s, front):
        return self.search(item, view, compute_at_s, front, item.in_flight, self.charge(view))


class PlainPlanner:
    """The parts of a RestorePlanner around that outlook. Who is complete is looked at anew in every
    step.
    """

    def __init__(self, config, profile, engine=ENGINE, rules=None):
        self.known = UnderWay(config, engine, profile or {}, rules or Rules())
        self.outlook = PlainOutlook(self.known)
        self.offers = Offers(self.known, self.outlook, free)
        self.chunks = Chunks(self.known, self.outlook)
        self.loads = Loads(self.known, self.outlook, self.chunks)

    def observe(self, fact):
        self.known.observe(fact)
        if isinstance(fact, RestoreOffered):
            self.offers.add(fact)
        elif isinstance(fact, RequestFinished):
            self.offers.withdraw(fact.rid)

    def step(self, view):
        self.known.next_step(view)
        self.outlook.begin()
        starts = self.offers.answer(view)
        for rid, compute in self.known.complete.items():
            pointer = self.known.items[rid].pointer
            assert (
                compute == Compute(rid, pointer.landed_run(), None)
                and compute.splice.stop == pointer.units
            )
        computes, cancels = self.chunks.decide(view)
        loads = self.loads.decide(view, computes)
        late = [
            compute.rid == view.slot or (self.chunks.waited_long(compute, view) and not loads)
            for compute in computes
        ]
        granted = tuple(
            self.chunks.beside_decodes(self.chunks.unstuck(c, view) if goes_on else c, view)
            for c, goes_on in zip(computes, late, strict=True)
        )
        return StepPlan(
            starts,
            cancels,
            loads,
            tuple(one for one in granted if one.tokens != 0 or one.rid == view.slot),
        )


class Watched:
    """Passes everything on to a planner, and keeps it."""

    def __init__(self, planner):
        self.planner, self.log, self.plans = planner, [], []

    def observe(self, fact):
        self.log.append(fact)
        self.planner.observe(fact)

    def step(self, view):
        self.log.append(view)
        self.plans.append(self.planner.step(view))
        return self.plans[-1]


def same(log, plans, plain):
    """Lets the plain planner live through a log, and compares what it answers to each view."""
    answers = iter(plans)
    for entry in log:
        if not isinstance(entry, StepView):
            plain.observe(entry)
            continue
        plan = next(answers)
        assert plain.step(entry) == StepPlan(plan.starts, plan.cancels, plan.loads, plan.computes)


@settings(max_examples=examples(80), deadline=None)
@given(st.randoms(use_true_random=False), configs, many_rules, st.booleans(), st.integers(10, 150))
def test_in_any_hands(chance, config, rules, profiled, actions):
    hands = RandomHands(chance, config, profiled, rules)
    for _ in range(actions):
        hands.act()
    hands.drain()
    same(hands.log, hands.plans, PlainPlanner(config, PROFILE if profiled else None, rules=rules))


@pytest.mark.parametrize("seed", range(4))
def test_over_long_runs(seed):
    config = replace(AHEAD, load_tokens=(16, 32, 64, 128)[seed], load_deadline_s=600.0)
    hands = RandomHands(random.Random(seed), config, profiled=True)
    for _ in range(600):
        hands.act()
    hands.drain()
    assert sum(len(plan.loads) for plan in hands.plans) > 5
    same(hands.log, hands.plans, PlainPlanner(config, PROFILE))


@pytest.mark.parametrize(("requests", "pages"), [(3, 200), (40, 30)])
def test_with_a_long_queue_and_long_prompts(requests, pages):
    scene = Scene(requests, pages, requests * pages)
    scene.planner = watched = Watched(scene.planner)
    for _ in range(250):
        scene.step()
    assert sum(len(plan.loads) for plan in watched.plans) > 400
    same(watched.log, watched.plans, PlainPlanner(scene.config, scene.profile, scene.engine))
