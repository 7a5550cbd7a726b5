"""Classes of one's own in a server's kvtier.json: resolved as a server does, before a model loads."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_restore_control import lab, told

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.rules import FixedSplit
from sgl_kvtier.lab.sim.replay import replay
from sgl_kvtier.policy.decision_log import Header, encode, encode_header
from sgl_kvtier.policy.messages import RulesTuned
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.runtime.records.decision_file import Recorded
from sgl_kvtier.runtime.settings import from_extra_config, looks_ahead

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINE = EngineShape(page_tokens=16, page_bytes=4096, chunk_tokens=256)
FIXED = "sgl_kvtier.lab.rules:FixedSplit"


def policy(**settings: object) -> PolicyConfig:
    """Checked as a server checks them."""
    return from_extra_config({"store": {"path": "/nowhere"}, "policy": settings}).policy


def test_the_lines_at_the_end_of_the_eviction_example_are_what_a_server_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_a_class_that_cannot_be_had_is_refused_before_a_model_loads(key: str) -> None:
    with pytest.raises(ConfigError, match=f'policy.{key} = "no_such_module:Rule"'):
        policy(**{key: "no_such_module:Rule"})


def test_a_number_of_the_rules_is_changed_in_a_running_server() -> None:
    scheduler = lab(policy(rules=FIXED, restore="both"))
    assert told(scheduler, **{"rules.share": 0.25})
    assert scheduler.planner.rules.computed_share() == 0.25


@pytest.mark.parametrize(
    ("rules", "name", "value"),
    [
        (FIXED, "share", 2.0),
        (FIXED, "share", float("nan")),
        (FIXED, "share", "half"),
        (FIXED, "load_patience", 1.0),
        (FIXED, "", 1.0),
        (FIXED, "__class__", 1.0),
        ("", "share", 0.5),
    ],
)
def test_a_change_that_the_rules_do_not_take_is_refused_and_nothing_raises(
    rules: str, name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = lab(policy(rules=rules, restore="both"))
    assert not told(scheduler, **{f"rules.{name}": value})
    assert scheduler.planner.rules.computed_share() is None
    assert "was refused" in caplog.text and "Traceback" not in caplog.text


def test_a_server_that_cannot_restore_refuses_to_change_its_rules() -> None:
    assert not told(SimpleNamespace(tree_cache=SimpleNamespace()), **{"rules.share": 0.5})


def test_a_change_of_the_rules_is_written_down_and_followed_by_a_replay() -> None:
    config, written = policy(rules=FIXED, restore="both"), []
    recorded = Recorded(make_planner(config, ENGINE), written.append)
    assert recorded.query(RulesTuned("share", 0.5)) is None
    seen: list[FixedSplit] = []

    def make(header: Header):
        planner = make_planner(header.config, header.engine, header.profile)
        seen.append(planner.rules)
        return planner

    log = [encode_header(Header(config, ENGINE)), *map(encode, written)]
    replayed = replay(log, make)
    assert (replayed.questions, replayed.difference) == (1, None)
    assert seen[0].computed_share() == 0.5
