"""The rules in figures, and that the order costs what is asked for and not what is there."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from named_parts import named

from sgl_kvtier.lab.rules import LFU, KeptWhileExpected, QuickDemotion
from sgl_kvtier.policy.pages.eviction import LRU, NextUse, Shelves, eviction_of
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.types import Tier

ROOT = Path(__file__).parents[2]


def test_every_rule_of_the_settings_is_there():
    for name, rule in (("lru", LRU), ("next-use", NextUse), ("sgl_kvtier.lab.rules:LFU", LFU)):
        assert type(eviction_of(name)()) is rule


@pytest.mark.parametrize("rule", [LRU, LFU, NextUse, QuickDemotion, KeptWhileExpected])
def test_naming_ten_victims_looks_at_ten_pages_of_a_hundred_thousand(rule, monkeypatch):
    tier_map = TierMap(200_000, rule(), rule())
    keys = named(100_000)
    tier_map.placed(keys, Tier.DEVICE, 0.0)
    looked_at = []
    walk = Shelves.walk

    def counted(self, shelf, most):
        slots = walk(self, shelf, most)
        looked_at.extend(slots)
        return slots

    monkeypatch.setattr(Shelves, "walk", counted)
    assert tier_map.victims(Tier.DEVICE, 10) == tuple(reversed(keys))[:10]
    assert len(looked_at) <= 11


def test_device_and_host_have_orders_of_their_own():
    tier_map = TierMap(100, LRU(), LFU())
    a, b = named(2)
    for key in (a, b):
        for tier in (Tier.DEVICE, Tier.HOST):
            tier_map.placed((key,), tier, 0.0)
    tier_map.used((b, b, b), 1.0)
    tier_map.used((a,), 2.0)
    assert tier_map.victims(Tier.DEVICE, 2) == (b, a)
    assert tier_map.victims(Tier.HOST, 2) == (a, b)
    with pytest.raises(ValueError, match="storage"):
        tier_map.victims(Tier.STORAGE, 1)


def test_pages_of_one_request_leave_before_those_of_several() -> None:
    tier_map = TierMap(100, QuickDemotion())
    old, new = named(2)
    tier_map.placed((old,), Tier.DEVICE, 0.0)
    tier_map.used((old,), 1.0)  # the request that computed it ends
    tier_map.used((old,), 2.0)  # another one starts
    tier_map.placed((new,), Tier.DEVICE, 3.0)
    tier_map.used((new,), 4.0)
    assert tier_map.victims(Tier.DEVICE, 2) == (new, old)


def test_what_a_session_is_expected_to_use_leaves_last() -> None:
    tier_map = TierMap(100, KeptWhileExpected())
    soon, later, given_up, nobodys = named(4)
    turns = {soon: 10.0, later: 20.0, given_up: math.inf}
    for now, (key, turn) in enumerate(turns.items()):
        tier_map.placed((key,), Tier.DEVICE, float(now))
        tier_map.claim(str(now), (key,), turn)
    tier_map.placed((nobodys,), Tier.DEVICE, 9.0)
    assert tier_map.victims(Tier.DEVICE, 4) == (nobodys, given_up, soon, later)


def test_the_example_of_an_own_rule_runs_and_its_rule_pays():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "own_eviction.py")],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shares = {name: float(share) for name, share in re.findall(r"(\w+) +([\d.]+)%", done.stdout)}
    assert shares["SegmentedLRU"] > shares["LRU"] + 20


def test_the_order_does_not_depend_on_the_hash_seed():
    code = (
        "from sgl_kvtier.policy.pages.tier_map import TierMap\n"
        "from sgl_kvtier.policy.pages.eviction import NextUse\n"
        "from sgl_kvtier.types import Tier\n"
        "import hashlib\n"
        "m = TierMap(500, NextUse(), NextUse())\n"
        "keys = [hashlib.sha256(b'%d' % n).digest() for n in range(600)]\n"
        "m.placed(keys, Tier.DEVICE, 0.0)\n"
        "for n in range(40): m.claim(f'owner {n}', keys[n * 5:n * 11], n % 7)\n"
        "for n in range(0, 40, 3): m.release(f'owner {n}')\n"
        "print(hashlib.sha256(b''.join(m.victims(Tier.DEVICE, 1000)) + repr(m.take_changed()).encode()).hexdigest())\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "7", "99")
    ]  # fmt: skip
    assert len(set(printed)) == 1 and len(printed[0]) == 65
