"""Settings of a running server: which can be changed, and what that changes."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hostile import HOSTILE

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.rules import FixedSplit
from sgl_kvtier.lab.sim.replay import replay
from sgl_kvtier.policy.decision_log import Header, encode, encode_header
from sgl_kvtier.policy.messages import Mode, RestoreOffered, RulesTuned, StepView
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.runtime.control import HANDLERS, PREFIX, set_internal_state
from sgl_kvtier.runtime.proof.record import Proof
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.records.cost_profile import Learning, Profile
from sgl_kvtier.runtime.records.decision_file import Recorded
from sgl_kvtier.runtime.scheduler.notes import RestoreNotes
from sgl_kvtier.runtime.settings import FIXED, from_extra_config, looks_ahead
from sgl_kvtier.types import Span, Tier

ENGINE = EngineShape(page_tokens=16, page_bytes=4096, chunk_tokens=256)
NAMES = [f.name for f in dataclasses.fields(PolicyConfig)]


def lab(config: PolicyConfig) -> SimpleNamespace:
    """A scheduler with notes, an engine that only has what is changed, and a real planner."""
    engine = SimpleNamespace(
        offers=SimpleNamespace(is_on=True, min_tokens=0),
        context=SimpleNamespace(now=1.0),
        proof=Proof(),
    )
    planner = make_planner(config, ENGINE)
    learning = Learning(planner, planner.profile, None, Profile({}, {}, {}, 0, {}), ENGINE)
    notes = RestoreNotes(config, engine, learning, SimpleNamespace(reductions=0), None)
    tree = SimpleNamespace(kvtier=SimpleNamespace(notes=notes, ahead=None))
    return SimpleNamespace(tree_cache=tree, engine=engine, notes=notes, planner=planner)


def test_a_setting_is_in_force_for_the_next_offer():
    scheduler = lab(PolicyConfig(restore="both"))

    def mode(rid):
        scheduler.planner.observe(
            RestoreOffered(rid, 1.0, 1024, 0, 60, ((Span(0, 60), Tier.STORAGE),))
        )
        return (
            scheduler.planner.step(
                StepView(1.0, (rid,), free_pages={Tier.DEVICE: 500, Tier.HOST: 500})
            )
            .starts[0]
            .mode
        )

    assert mode("a") is Mode.BOTH
    HANDLERS["policy.restore"](scheduler, 2)
    assert mode("b") is Mode.LOAD
    assert scheduler.notes.config.restore == "load"


def test_off_closes_the_engine_to_hits_and_on_opens_it():
    scheduler = lab(PolicyConfig())
    HANDLERS["policy.restore"](scheduler, 4)
    assert not scheduler.engine.offers.is_on
    HANDLERS["policy.restore"](scheduler, 0)
    assert scheduler.engine.offers.is_on


def test_what_was_refuted_is_not_turned_on_again():
    scheduler = lab(PolicyConfig(restore="both"))
    scheduler.engine.proof.refute()
    scheduler.engine.offers.is_on = False
    for value in (0, 1, 2, 3):
        with pytest.raises(ValueError, match="stays off"):
            HANDLERS["policy.restore"](scheduler, value)
    HANDLERS["policy.min_restore_tokens"](scheduler, 100)
    assert scheduler.notes.config.min_restore_tokens == 100
    HANDLERS["policy.restore"](scheduler, 4)
    assert not scheduler.engine.offers.is_on


def test_what_was_not_checked_at_the_start_is_not_turned_on():
    scheduler = lab(PolicyConfig(restore="off", prefetch="on"))
    scheduler.notes.is_unproven = True
    for value in (0, 1, 2, 3):
        with pytest.raises(ValueError, match="restart the server"):
            HANDLERS["policy.restore"](scheduler, value)
        assert not scheduler.engine.offers.is_on
    HANDLERS["policy.load_tokens"](scheduler, 64)
    HANDLERS["policy.restore"](scheduler, 4)
    assert scheduler.notes.config.load_tokens == 64
    assert not scheduler.engine.offers.is_on


def test_what_the_engine_itself_acts_on_is_in_force_from_the_start():
    scheduler = lab(PolicyConfig(restore="off", min_restore_tokens=512))
    assert not scheduler.engine.offers.is_on
    assert scheduler.engine.offers.min_tokens == 512


@pytest.mark.parametrize("name", FIXED)
def test_what_is_fixed_at_the_start_is_refused(name):
    scheduler = lab(PolicyConfig())
    with pytest.raises(ValueError, match="fixed when the server starts"):
        HANDLERS[f"policy.{name}"](scheduler, 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FIXED])
def test_what_is_not_fixed_is_taken_at_its_default(name):
    scheduler = lab(PolicyConfig())
    default = getattr(PolicyConfig(), name)
    choices = {f.name: f.metadata["choices"] for f in dataclasses.fields(PolicyConfig)}[name]
    HANDLERS[f"policy.{name}"](scheduler, choices.index(default) if choices else float(default))
    assert scheduler.notes.config == PolicyConfig()


def test_a_server_that_cannot_restore_can_be_told_off_but_not_on():
    stock = SimpleNamespace(tree_cache=SimpleNamespace())
    HANDLERS["policy.restore"](stock, 4)
    for name, value in (("restore", 0), ("load_tokens", 64)):
        with pytest.raises(ValueError, match="SGLang's own way since it started"):
            HANDLERS[f"policy.{name}"](stock, value)


def told(scheduler: SimpleNamespace, **values: Any) -> bool:
    """Whether the handler in SGLang's loop took a message of these settings, names without their
    prefix.
    """
    message = SimpleNamespace(server_args={PREFIX + name: value for name, value in values.items()})
    return bool(
        set_internal_state(lambda *_: None, SimpleNamespace(scheduler=scheduler), message).updated
    )


class Throttled:
    """A backend whose store imitates a slower device."""

    def __init__(self) -> None:
        self.read_gbps = 1.0

    def throttle(self, read_gbps: float) -> None:
        self.read_gbps = read_gbps

    def begin_read(self) -> None:
        """What tells our backend from others."""


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", HANDLERS)
def test_no_running_setting_takes_a_hostile_value_or_raises(name, kind, caplog):
    scheduler, backend = lab(PolicyConfig()), Throttled()
    scheduler.tree_cache.cache_controller = SimpleNamespace(storage_backend=backend)
    setting = {f"policy.{f.name}": f for f in dataclasses.fields(PolicyConfig)}.get(name)
    if (
        kind == "-1"
        and setting is not None
        and name[7:] not in FIXED
        and setting.metadata["low"] == -1
    ):
        assert told(scheduler, **{name: HOSTILE[kind]})
        return
    assert not told(scheduler, **{name: HOSTILE[kind]})
    assert scheduler.notes.config == PolicyConfig()
    assert backend.read_gbps == 1.0
    assert "was refused" in caplog.text
    assert "Traceback" not in caplog.text
    assert len(caplog.text) < 1000


def test_a_bandwidth_in_its_range_reaches_the_store():
    scheduler, backend = lab(PolicyConfig()), Throttled()
    scheduler.tree_cache.cache_controller = SimpleNamespace(storage_backend=backend)
    assert told(scheduler, **{"throttle.read_gbps": 2})
    assert backend.read_gbps == 2.0


def test_a_defect_while_a_setting_is_changed_is_a_refusal_and_not_the_end_of_the_server(caplog):
    assert not told(SimpleNamespace(), **{"policy.load_tokens": 64})
    assert "AttributeError" in caplog.text


@pytest.mark.parametrize(
    "values",
    [{"nothing": 1}, {"x" * 1_000_000: 1}, {"policy.restore": 0, "\ud800": 1}],
    ids=[0, 1, 2],
)
def test_names_that_nobody_handles_are_refused_shortly(values, caplog):
    assert not told(lab(PolicyConfig()), **values)
    assert "cannot change" in caplog.text
    assert len(caplog.text) < 500


class Joined:
    """The reduction of two ranks that come one after the other: the second gets the minimum of
    both.
    """

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None

    def _all_reduce(self, data: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        if self.first is None:
            self.first = data.clone()
        else:
            torch.minimum(data, self.first, out=data)


@pytest.mark.parametrize("own", [[0.0, 0.0, 0.0], [9.0, 1e-30, 1e30]])
def test_all_ranks_begin_with_the_first_ranks_costs_to_the_bit(own):
    tree, said = Joined(), [1.0, 0.1 + 0.2, 3.3e-9]
    assert Agreement(tree, 2, first=True).first_says(said) == said
    assert Agreement(tree, 2, first=False).first_says(own) == said


def test_a_rank_alone_asks_nobody():
    assert Agreement(None, 1, first=True).first_says([1.5, 0.0]) == [1.5, 0.0]


# Classes of one's own in a server's kvtier.json: resolved as a server does, before a model loads.


EXAMPLES = Path(__file__).parents[2] / "examples"
SPLIT = "sgl_kvtier.lab.rules:FixedSplit"


def policy(**settings: object) -> PolicyConfig:
    """Checked as a server checks them."""
    return from_extra_config({"store": {"path": "/nowhere"}, "policy": settings}).policy


def test_the_lines_at_the_end_of_the_eviction_example_are_what_a_server_takes(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    text = (EXAMPLES / "own_eviction.py").read_text()
    comment = text[text.index("# In a server") :]
    lines = re.sub(r"^# ?", "", comment, flags=re.M)
    given = json.loads("{" + lines[lines.index('"policy"') :] + "}")
    config = from_extra_config({"store": {"path": "/nowhere"}, **given}).policy
    assert looks_ahead(config)
    planner = make_planner(config, ENGINE)
    rules = {type(planner.pages._device_rule), type(planner.pages._host_rule)}
    assert rules == {sys.modules["own_eviction"].SegmentedLRU}


@pytest.mark.parametrize("key", ["rules", "eviction"])
def test_a_class_that_cannot_be_had_is_refused_before_a_model_loads(key):
    with pytest.raises(ConfigError, match=f'policy.{key} = "no_such_module:Rule"'):
        policy(**{key: "no_such_module:Rule"})


def test_a_number_of_the_rules_is_changed_in_a_running_server():
    scheduler = lab(policy(rules=SPLIT, restore="both"))
    assert told(scheduler, **{"rules.share": 0.25})
    assert scheduler.planner.rules.computed_share() == 0.25


@pytest.mark.parametrize(
    ("rules", "name", "value"),
    [
        (SPLIT, "share", 2.0),
        (SPLIT, "share", float("nan")),
        (SPLIT, "share", "half"),
        (SPLIT, "load_patience", 1.0),
        (SPLIT, "", 1.0),
        (SPLIT, "__class__", 1.0),
        ("", "share", 0.5),
    ],
)
def test_a_change_that_the_rules_do_not_take_is_refused_and_nothing_raises(
    rules, name, value, caplog
):
    scheduler = lab(policy(rules=rules, restore="both"))
    assert not told(scheduler, **{f"rules.{name}": value})
    assert scheduler.planner.rules.computed_share() is None
    assert "was refused" in caplog.text and "Traceback" not in caplog.text


def test_a_server_that_cannot_restore_refuses_to_change_its_rules():
    assert not told(SimpleNamespace(tree_cache=SimpleNamespace()), **{"rules.share": 0.5})


def test_a_change_of_the_rules_is_written_down_and_followed_by_a_replay():
    config, written = policy(rules=SPLIT, restore="both"), []
    recorded = Recorded(make_planner(config, ENGINE), written.append)
    assert recorded.query(RulesTuned("share", 0.5)) is None
    seen: list[FixedSplit] = []

    def make(header):
        planner = make_planner(header.config, header.engine, header.profile)
        seen.append(planner.rules)
        return planner

    log = [encode_header(Header(config, ENGINE)), *map(encode, written)]
    replayed = replay(log, make)
    assert (replayed.questions, replayed.difference) == (1, None)
    assert seen[0].computed_share() == 0.5
