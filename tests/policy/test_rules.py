"""Rules of one's own: named in the settings, made once, refused when they do not fit, and asked for
what they decide otherwise.
"""

from __future__ import annotations

import re

import pytest
from virtual_hands import COST, ENGINE, planner_of, profile_of, stored

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.rules import ByLayers, Cake, FixedSplit
from sgl_kvtier.policy.messages import Mode, RulesTuned, StepView
from sgl_kvtier.policy.pages.eviction import LRU, eviction_of
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.rules import Rules, rules_of

OWN = """
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.messages import Mode

class AlwaysLoad(Rules):
    def mode(self, ways):
        return Mode.LOAD, "own"

class Youngest(Rules):
    def load_order(self, waiting):
        return waiting[::-1]

class Breaks(Rules):
    def mode(self, ways):
        raise RuntimeError("own rule")

class NoRules:
    pass

class Fits(Rules):
    split_margin = 1
    tuned = ("split_margin",)

    def mode(self, ways, *more, why=""):
        return Mode.LOAD, why

    @staticmethod
    def prefetch(desk, turns):
        return False

class HalfEviction:
    def entered(self, group): return 0
    def used(self, shelf): return 0

made = 3
"""
WRONG = {
    "NotMade": ("def __init__(self, what): pass", "cannot be made: TypeError"),
    "TextForNumber": ("split_margin = '0.02'", '.split_margin = "0.02": must be a finite number'),
    "NotANumber": (
        "load_horizon_s = float('nan')",
        ".load_horizon_s = NaN: must be a finite number",
    ),
    "HalfAToken": ("min_chunk_tokens = 0.5", ".min_chunk_tokens = 0.5: must be a whole number"),
    "NumberForTruth": ("shares_links = 2", ".shares_links = 2: must be True or False"),
    "LateText": (
        "def __init__(self):\n        super().__init__()\n        self.queue_charge = None",
        ".queue_charge = null: must be a finite number",
    ),
    "OneName": ("tuned = 'split_margin'", '.tuned = "split_margin": must be a tuple of names'),
    "TunesNothing": (
        "tuned = ('no_such_number',)",
        '.tuned names "no_such_number", which is no number of',
    ),
    "OwnArity": (
        "def load_order(self, waiting, now): return waiting",
        " has no method load_order that takes 1 argument, ",
    ),
    "NoMethod": ("mode = 'both'", " has no method mode that takes 1 argument, "),
}
"""Rules with one line that does not fit, and what is said about it."""
OWN += "".join(f"\nclass {name}(Rules):\n    {line}\n" for name, (line, _) in WRONG.items())


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_rules_for_a_test.py").write_text(OWN)
    (tmp_path / "broken_for_a_test.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def named(name: str) -> str:
    return f"own_rules_for_a_test:{name}"


def offered(planner: Planner, *rids: str) -> None:
    for rid in rids:
        planner.observe(stored(rid))


def modes(planner: Planner, rid: str) -> list[tuple[Mode, str]]:
    offered(planner, rid)
    plan = planner.step(StepView(0.0, (rid,), None, prefill_tokens=512))
    return [(start.mode, start.reason) for start in plan.starts]


def test_a_planner_asks_the_class_that_the_settings_name():
    config = PolicyConfig(rules=named("AlwaysLoad"))
    own = make_planner(config, ENGINE, profile_of(COST, 1e9))
    assert modes(own, "a") == [(Mode.LOAD, "own")]
    assert modes(planner_of(1e9), "a") != [(Mode.LOAD, "own")]


def test_rules_say_for_whom_links_load_first():
    firsts = []
    for name in ("", named("Youngest")):
        config = PolicyConfig(rules=name, restore="load")
        planner = make_planner(config, ENGINE, profile_of(COST, 1e6))
        offered(planner, "a", "b", "c")
        plan = planner.step(StepView(0.0, ("a", "b", "c"), None, prefill_tokens=512))
        firsts.append(plan.loads[0].rid)
    assert firsts == ["a", "c"]


def test_a_rule_that_raises_ends_what_is_restored_and_the_step_says_so():
    planner = make_planner(PolicyConfig(rules=named("Breaks")), ENGINE, profile_of(COST, 1e9))
    with pytest.raises(RuntimeError, match="own rule"):
        modes(planner, "a")
    assert planner.restoring == ()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module_here:Rule", "cannot be imported: ModuleNotFoundError: .*PYTHONPATH"),
        ("broken_for_a_test:Rule", "cannot be imported: ZeroDivisionError"),
        (named("Missing"), "has no class Missing"),
        (named("made"), "has no class made"),
        (named("NoRules"), "NoRules is no subclass of sgl_kvtier.policy.rules.Rules"),
        *((named(name), why) for name, (_, why) in WRONG.items()),
    ],
)
def test_rules_that_cannot_be_had_are_refused_in_one_line(name, why):
    with pytest.raises(ConfigError, match=f'policy.rules = "{name}": .*{why}') as found:
        rules_of(name)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "name",
    [named("Fits"), *(f"sgl_kvtier.lab.rules:{own}" for own in ("Cake", "TierKV", "FixedSplit"))],
)
def test_rules_with_numbers_and_methods_of_their_own_are_taken(name):
    assert isinstance(rules_of(name), Rules)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module_here:Rule", "cannot be imported: ModuleNotFoundError: .*PYTHONPATH"),
        (named("NoRules"), "NoRules has no method entered that takes 1 argument, "),
        (named("HalfEviction"), "HalfEviction has no method used that takes 2 arguments, "),
    ],
)
def test_an_eviction_rule_that_does_not_fit_is_refused_in_one_line(name, why):
    with pytest.raises(ConfigError, match=f'policy.eviction = "{name}": .*{why}') as found:
        eviction_of(name)
    assert "\n" not in str(found.value)


def test_each_tier_gets_an_eviction_rule_of_its_own():
    make = eviction_of("sgl_kvtier.lab.rules:LFU")
    assert make() is not make()
    assert eviction_of("lru") is LRU


def test_a_number_that_rules_do_not_have_is_refused():
    with pytest.raises(TypeError, match="Cake has no no_such_number"):
        Cake(no_such_number=1)


def test_only_numbers_that_rules_offer_are_changed_while_a_planner_runs():
    planner = make_planner(PolicyConfig(restore="both"), ENGINE, None, FixedSplit())
    assert planner.query(RulesTuned("share", 0.5)) is None
    assert planner.rules.computed_share() == 0.5
    for name, value in (("share", 1.5), ("share", -0.5), ("load_horizon_s", 1.0), ("no", 1.0)):
        assert re.search(r"share|Split", str(planner.query(RulesTuned(name, value))))
    assert planner.rules.computed_share() == 0.5
    assert planner.query(RulesTuned("share", -1)) is None
    assert planner.rules.computed_share() is None
    assert planner.rules.load_horizon_s == Rules.load_horizon_s
    plain = make_planner(PolicyConfig(), ENGINE)
    assert "Rules has no" in str(plain.query(RulesTuned("share", 0.5)))


def test_an_offer_that_is_restored_by_layers_is_the_executors_alone() -> None:
    made = planner_of(1e6, ByLayers(), restore="auto")
    made.observe(stored("r"))
    view = StepView(0.0, ("r",), prefill_tokens=4096)
    plan = made.step(view)
    assert [(start.rid, start.mode) for start in plan.starts] == [("r", Mode.LAYERS)]
    assert (plan.loads, plan.computes) == ((), ())
    assert made.step(view).starts == ()
