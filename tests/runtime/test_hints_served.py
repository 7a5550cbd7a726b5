"""POST /kvtier/hint of the real server: who may ask, what is answered, and what it changes."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ahead_lab import AHEAD, POOLS, counts, shared_server
from hostile import HOSTILE, SETTINGS
from restore_lab import restoring
from serving import ADMIN, Record, Served, config_file, flags, prompts, serving
from shared import Shared

from sgl_kvtier.cli import main

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def served(servers: Shared) -> Served:
    return shared_server(servers)


def status(call: Any) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as found:
        call()
    return found.value.code, json.loads(found.value.read())["error"]


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer wrong"}, {"X-None": ""}])
def test_only_the_admin_key_opens_it(served: Served, headers: dict[str, str]) -> None:
    before = served.metric("kvtier:lookahead_hints_total")
    assert status(lambda: served.hint(headers, session="a", ttl_s=1)) == (401, "Unauthorized")
    assert served.metric("kvtier:lookahead_hints_total") == before


def test_a_request_in_flight_is_shown_with_all_that_is_known_of_it(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(lambda: served.call("GET", "/kvtier/requests", None, {}))[0] == 401
    (ids,) = prompts(1, seed=35)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.ask, ids)
        found: list[dict[str, Any]] = []
        while not found and not answer.done():
            found = served.call("GET", "/kvtier/requests", None, ADMIN)["requests"]
        answer.result()
    assert found, "the request ended before it was shown"
    assert found[0]["runtime"].startswith(f"request {found[0]['rid']}: ")
    assert f"prompt of {len(ids)} tokens" in found[0]["planner"]["lookahead"]
    key = ADMIN["Authorization"].split()[1]
    assert main(["explain", served.server.url, "--requests", "--api-key", key]) == 0
    assert "No request waits or runs." in capsys.readouterr().out


def test_bad_input_is_a_400_that_says_what_to_send(served: Served) -> None:
    code, text = status(lambda: served.hint(expected_delay_s=3))
    assert code == 400
    assert 'Send {"session": "agent-7", "expected_delay_s": 12.5}' in text
    code, text = status(lambda: served.hint(tokens=[1, 2, 3], ttl_s=1))
    assert code == 400
    assert "less than one page" in text


def test_a_session_nobody_has_seen_is_refused_and_counted(served: Served) -> None:
    before = served.metric("kvtier:lookahead_hints_total")
    answer = served.hint(session="nobody", expected_delay_s=3)
    assert answer["result"] == "refused"
    assert "send the hint after its first request" in answer["reason"]
    assert served.metric("kvtier:lookahead_hints_total") == before + 1


def test_the_internal_state_is_still_sglangs(served: Served) -> None:
    text = served.call("GET", "/server_info", None, ADMIN, raw=True)
    assert "kvtier.hint" not in text
    assert json.loads(text)["internal_states"][0]["page_size"] == 16


def test_a_session_that_ran_is_known_by_name_and_its_delay_is_taken_or_cut(served: Served) -> None:
    ids = prompts(1, seed=31)[0]
    served.ask(ids, session_id="agent-1")
    answer = served.hint(session="agent-1", expected_delay_s=20)
    assert (answer["result"], answer["reason"], answer["sessions"]) == ("accepted", "", 1)
    assert 15 < answer["expected_in_s"] <= 20
    answer = served.hint(session="agent-1", expected_delay_s=5000, priority=9)
    assert answer["result"] == "clipped"
    assert answer["reason"] == "priority 9 taken as 3; expected_delay_s 5000 cut to 60"


def test_a_session_is_known_by_the_tokens_and_the_text_its_prompts_begin_with(
    served: Served,
) -> None:
    text = "".join(chr(97 + n * n % 26) for n in range(400))
    asked = {"text": text, "session_id": "agent-2", "sampling_params": {"max_new_tokens": 2}}
    served.call("POST", "/generate", asked)
    answer = served.hint(text=text[:320], expected_delay_s=5)
    assert (answer["result"], answer["sessions"]) == ("accepted", 1)
    ids = prompts(1, seed=32)[0]
    served.ask(ids, session_id="agent-3", extra_key="tenant")
    assert served.hint(tokens=ids[:64], expected_delay_s=5)["result"] == "refused"
    answer = served.hint(tokens=ids[:64], extra_key="tenant", expected_delay_s=5)
    assert answer["result"] == "accepted"


def post(served: Served, path: str, body: str) -> tuple[int, str]:
    """Status and text of an answer to bytes that no JSON writer of ours would make."""
    request = urllib.request.Request(
        served.server.url + path, body.encode(), {"Content-Type": "application/json", **ADMIN}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def test_no_hostile_number_or_text_changes_a_setting_or_ends_the_server(served: Served) -> None:
    ids = prompts(1, seed=34)[0]
    before = served.ask(ids)
    names = [*SETTINGS, "lookahead.check", "nothing", "policy.\\ud800"]
    texts = {kind: json.dumps(value) for kind, value in HOSTILE.items()}
    texts |= {"1e999": "1e999", "digits": "9" * 5000}
    texts.pop("true")  # SGLang's message of numbers makes 1 of it, which is in many a range
    taken = set()
    for name in names:
        for kind, text in texts.items():
            asked = f'{{"server_args": {{"kvtier.{name}": {text}}}}}'
            code, answer = post(served, "/set_internal_state", asked)
            assert code in (200, 400, 422), (name, kind, code, answer[:200])
            if code == 200 and "true" in answer:
                taken.add((name, kind))
    # A setting that is none: nothing has another value than before.
    assert taken <= {("lookahead.check", "-1")}
    keys = ("expected_delay_s", "priority", "ttl_s", "tool", "session", "tokens", "cache_salt")
    for text in texts.values():
        for key in (*keys, "\\ud800"):
            fields = {"session": '"agent-9"', key: text}
            asked = ", ".join(f'"{name}": {value}' for name, value in fields.items())
            code, answer = post(served, "/kvtier/hint", f"{{{asked}}}")
            assert code in (200, 400), (key, text[:20], code, answer[:200])
    assert post(served, "/kvtier/hint", "[" * 9_000_000)[0] == 400
    after = served.ask(ids)
    assert after.tokens == before.tokens
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-3)
    assert served.hint(session="nobody", expected_delay_s=3)["result"] == "refused"


def kv_hints(*actions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """The envelope of a request, as a router sends it."""
    listed = [
        {"action_id": str(n), "action_type": kind, "action_version": "1.0", "payload": payload}
        for n, (kind, payload) in enumerate(actions)
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": listed}


def test_retained_sessions_stay_on_the_device_and_evicted_ones_leave_it(
    served: Served, record_property: Record
) -> None:
    served.flush()
    kept, dropped, *others = prompts(6, 400, seed=36)
    retain = kv_hints(("kv.retain", {"priority": 100, "ttl_seconds": 60}))
    evict = kv_hints(("kv.evict", {}))
    served.ask(kept, session_id="kept", kv_hints=retain)
    served.ask(dropped, session_id="dropped", kv_hints=evict)
    for place, ids in enumerate(others):
        served.ask(ids, session_id=f"other {place}")
    on_device = [
        served.ask([*ids, 5], session_id=name).device
        for name, ids in (("kept", kept), ("dropped", dropped))
    ]
    assert on_device[0] >= 384 > on_device[1]
    record_property("retained", json.dumps({"tier": "device", "retained and not": on_device}))


def test_retained_sessions_stay_on_disk_while_others_make_room(
    tmp_path: Path, record_property: Record
) -> None:
    """A store of some forty prompts: three times as many are stored after both sessions."""
    told = {**AHEAD, "sessions": True, "hint_limit_s": 600.0}
    small = config_file(tmp_path, policy=told, store={"capacity_bytes": 32 << 20})
    retain = kv_hints(("kv.retain", {"priority": 100, "ttl_seconds": 600}))
    with serving(tmp_path, flags(**POOLS), small) as served:
        kept, plain, *others = prompts(120, 384, seed=38)
        served.ask(kept, session_id="kept", kv_hints=retain)
        served.ask(plain, session_id="plain")
        for ids in others:
            served.ask(ids, 1)
        served.settle()
        assert served.metric("kvtier:pages_evicted_total") > 0
        assert served.metric("kvtier:store_pages_retained") >= 384 // 16 - 1
        served.flush()
        on_disk = [
            served.ask([*ids, 5], session_id=name).storage
            for name, ids in (("kept", kept), ("plain", plain))
        ]
        assert on_disk[0] >= 320 and on_disk[1] == 0
        record_property("retained", json.dumps({"tier": "storage", "retained and not": on_disk}))
        again = kv_hints(("kv.evict", {}))
        served.ask([*kept, 6], session_id="kept", kv_hints=again)
        served.settle()
        assert served.metric("kvtier:store_pages_retained") == 0


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_envelope_fails_a_request(served: Served, count: int, record_property: Record) -> None:
    """Valid actions and hostile ones, in one envelope: what is valid is carried out."""
    chance = random.Random(count)
    before, counted = served.metric("kvtier:lookahead_hints_total"), counts(served)
    kinds = ["kv.retain", "kv.evict", "kv.demote", "kv.prefetch", "kv.fetch", "", "kv.retain\x00"]
    fields = ["priority", "ttl_seconds", "duration", "directives", "block_hashes", "session_id"]
    fields += ["execute_at", "include_current_request", "expected_delay_s"]
    no_json = ("inf", "nan", "-inf", "10**400", "10 MB text")
    values = [value for name, value in HOSTILE.items() if name not in no_json]
    values += ["9" * 100_000, 50, 1.5, "request_arrival", ["ab" * 32], [{"priority": 3}], {}]

    def envelope() -> dict[str, Any]:
        hostile = [
            (chance.choice(kinds), {chance.choice(fields): chance.choice(values) for _ in range(3)})
            for _ in range(chance.randrange(4))
        ]
        return kv_hints(*hostile, ("kv.retain", {"priority": chance.randrange(101)}))

    asked = prompts(count, 24, seed=37)
    envelopes = [envelope() for _ in asked]
    with ThreadPoolExecutor(8) as pool:
        ask = lambda ids, one: served.ask(ids, 1, kv_hints=one)  # noqa: E731
        answers = list(pool.map(ask, asked, envelopes))
    assert [len(answer.tokens) for answer in answers] == [1] * count
    served.settle()
    assert served.metric("kvtier:lookahead_hints_total") - before >= count
    now = counts(served)
    names = [name for name in now if name.startswith("hints_total")]
    told = {name: now[name] - counted.get(name, 0.0) for name in names}
    record_property("hints", json.dumps({"envelopes": count, "answered": len(answers), **told}))
    assert not served.metric("kvtier:lookahead_failures_total")
    assert served.ask(asked[0], 1).tokens == answers[0].tokens


def test_a_server_that_does_not_look_ahead_counts_each_action_as_refused(servers: Shared) -> None:
    server = restoring(servers)
    (ids,) = prompts(1, seed=38)
    refused = "hints_total refused"
    before = counts(server).get(refused, 0.0)
    sent = kv_hints(("kv.retain", {"priority": 50}), ("kv.evict", {}), ("kv.fetch", {}))
    server.ask(ids, kv_hints=sent)
    assert counts(server)[refused] - before == 2
    assert "kv_hints of requests are refused: this server does not look ahead" in (
        server.server.log_path.read_text(errors="replace")
    )


@pytest.mark.slow
def test_a_server_without_our_backend_says_so(tmp_path) -> None:
    with serving(tmp_path, flags(backend=None)) as plain:
        answer = plain.hint(session="a", ttl_s=1)
        assert answer["result"] == "refused"
        assert "--hicache-storage-backend kvtier" in answer["reason"]
