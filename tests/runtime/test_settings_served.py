"""POST /kvtier/settings of the real server: who may send it, what it changes, and on which ranks."""

from __future__ import annotations

import json
import re
import urllib.error
from typing import Any

import pytest
from restore_lab import LONG, restoring, settled, since, two_ranks
from serving import ADMIN, Served, prompts

pytestmark = pytest.mark.server
PATH = "/kvtier/settings"


def send(served: Served, **policy: Any) -> dict[str, Any]:
    return served.call("POST", PATH, {"policy": policy}, ADMIN)


def refused(call: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(urllib.error.HTTPError) as found:
        call()
    return found.value.code, json.loads(found.value.read())


def declined(served: Served, reason: str) -> dict[str, float]:
    """Rejected restore candidates of a reason, by the rank that counted them."""
    settled(served)
    text = served.call("GET", "/metrics", None, raw=True)
    lines = re.findall(
        rf'^kvtier:restore_declined_total{{(.*reason="{reason}".*)}} (.*)$', text, re.M
    )
    return {re.findall('tp_rank="(.*?)"', labels)[0]: float(value) for labels, value in lines}


def test_only_the_admin_key_reads_and_changes_settings(servers):
    served = restoring(servers)
    assert refused(lambda: served.call("GET", PATH, None, {}))[0] == 401
    assert refused(lambda: served.call("POST", PATH, {"policy": {"restore": "off"}}, {}))[0] == 401
    found = served.call("GET", PATH, None, ADMIN)
    assert found["settings"]["policy"]["restore"] == "both"
    assert found["settings"]["policy"]["min_restore_tokens"] == 64
    assert found["fixed"]["policy"]["decision_log"].endswith("decisions.jsonl")


def test_a_named_setting_is_in_force_from_the_next_request_on(servers):
    served = restoring(servers)
    (ids,) = prompts(1, LONG, seed=61)
    first = served.ask(ids)
    served.flush()
    before = settled(served)
    assert send(served, restore="off")["result"] == "accepted"
    assert served.call("GET", PATH, None, ADMIN)["settings"]["policy"]["restore"] == "off"
    assert served.ask(ids).tokens == first.tokens
    off = settled(served)
    assert since(before, off).get("declined_total switched off") == 1
    served.flush()
    assert send(served, restore="both")["result"] == "accepted"
    assert served.ask(ids).tokens == first.tokens
    assert since(off, settled(served))["started_total both configured"] == 1


def test_a_refusal_says_why_and_changes_nothing(servers):
    served = restoring(servers)
    before = served.call("GET", PATH, None, ADMIN)
    for policy, reason in (
        ({"min_restore_tokens": 1000, "restore": 4}, "policy.restore = 4: must be one of"),
        ({"min_restore_tokens": 1000, "eviction": "lru"}, "fixed when the server starts"),
        ({"min_restore_token": 1000}, "policy.min_restore_token"),
    ):
        status, told = refused(lambda policy=policy: send(served, **policy))
        assert (status, told["result"]) == (400, "refused")
        assert reason in told["reason"]
    assert served.call("GET", PATH, None, ADMIN) == before


def test_every_rank_changes(servers):
    """Ranks with different settings would decide differently, which SGLang's checker ends."""
    served = two_ranks(servers)
    (ids,) = prompts(1, LONG, seed=62)
    first = served.ask(ids)
    served.flush()
    before = declined(served, "short")
    assert send(served, min_restore_tokens=10_000)["result"] == "accepted"
    try:
        assert served.ask(ids).tokens == first.tokens
        grown = {
            rank: count - before.get(rank, 0) for rank, count in declined(served, "short").items()
        }
        assert grown == {"0": 1, "1": 1}
    finally:
        send(served, min_restore_tokens=64)
