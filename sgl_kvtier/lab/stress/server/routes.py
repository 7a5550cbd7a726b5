"""Requests that no sane client sends, to the routes of kvtier and to those of SGLang that reach
it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time

import aiohttp

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.stress.server.chaos import Chaos
from sgl_kvtier.lab.stress.server.stage import GBPS, Stage
from sgl_kvtier.lab.stress.trouble import Finding, chance

_HINT, _STATE, _STORAGE = "/kvtier/hint", "/set_internal_state", "/hicache/storage-backend"
_SETTINGS = "/kvtier/settings"
_ANSWER_S = 20.0
_AGAIN_S = 0.05
_LONG = 3000
_TRIES = 20


@dataclasses.dataclass(frozen=True)
class Request:
    """One request: method, path, body as it is sent, and whether with the admin key."""

    method: str
    path: str
    body: bytes
    with_key: bool = True


def hint_requests() -> list[Request]:
    """Hints that are no hints, or hints of no request."""
    tokens = json.dumps([20 + i % 200 for i in range(600)])
    bodies = [
        "",
        "null",
        "[]",
        '"x"',
        "[" * _LONG,
        '{"a":' * _LONG,
        "{" * _LONG,
        '{"session":1}',
        '{"session":"fuzz-1"}',
        '{"session":"fuzz-1","expected_delay_s":NaN}',
        '{"session":"fuzz-1","expected_delay_s":1e999}',
        '{"session":"fuzz-1","expected_delay_s":-1}',
        '{"session":"fuzz-1","expected_delay_s":true}',
        '{"session":"fuzz-1","expected_delay_s":' + "9" * _LONG + "}",
        '{"session":"fuzz-1","priority":1' + "0" * 30 + "}",
        '{"session":"\\ud800","priority":1}',
        '{"\\ud800":1,"session":"fuzz-1","priority":1}',
        '{"session":"fuzz-1","tool":"\\udfff"}',
        '{"text":"\\ud800 hello","priority":1}',
        '{"tokens":' + tokens + ',"cache_salt":"\\ud800","priority":1}',
        '{"tokens":[2147483648,-1],"priority":1}',
        '{"tokens":' + tokens + ',"priority":3,"ttl_s":0}',
        '{"tokens":[' + "1," * 200_000 + '1],"priority":1}',
        '{"session":"' + "s" * 100_000 + '","priority":1}',
        '{"session":"fuzz-1","session":"fuzz-2","ttl_s":0}',
    ]
    raw = [b"\xff\xfe\x00", b"\x00" * 64, *(body.encode() for body in bodies)]
    return [Request("POST", _HINT, body) for body in raw] + [
        Request("POST", _HINT, b'{"session":"a","ttl_s":1}', with_key=False)
    ]


def state_requests() -> list[Request]:
    """Settings that there are not, or not so."""
    values = [
        "1e999",
        "-1e999",
        "NaN",
        "-1",
        '"3"',
        "null",
        "true",
        "[]",
        "{}",
        "1e308",
        "1" + "0" * 400,
        "0.5",
    ]
    names = [
        "policy.restore",
        "policy.load_deadline_s",
        "policy.load_tokens",
        "policy.prefetch",
        "rules.share",
        "rules.",
        "throttle.read_gbps",
        "lookahead.check",
        "requests.log",
        "policy.",
        "",
        "policy.restore.x",
        "store.path",
        "lab.faults.stall_ms",
    ]
    bodies = [
        f'{{"server_args":{{"kvtier.{name}":{value}}}}}' for name in names for value in values
    ]
    bodies += [
        "",
        "{}",
        "[]",
        "null",
        '{"server_args":null}',
        '{"server_args":[1]}',
        '{"server_args":{"kvtier.policy.restore":1,"pp_max_micro_batch_size":1}}',
    ]
    bodies.append('{"server_args":{' + ",".join(f'"kvtier.x{i}":1' for i in range(5000)) + "}}")
    by_name = [
        f'{{"policy":{{"{name.removeprefix("policy.")}":{value}}}}}'
        for name in names
        for value in values
    ]
    by_name += ["", "{}", "null", "[" * _LONG, '{"policy":' * _LONG, '{"store":{"path":"/"}}']
    return [
        *(Request("POST", _STATE, body.encode()) for body in bodies),
        *(Request("POST", _SETTINGS, body.encode()) for body in by_name),
        Request("POST", _STATE, bodies[0].encode(), with_key=False),
        Request("POST", _SETTINGS, by_name[0].encode(), with_key=False),
    ]


def storage_requests() -> list[Request]:
    """Attaching what is attached or cannot be, detaching and clearing while requests run."""
    bodies = [
        {},
        {"hicache_storage_backend": "nobody"},
        {"hicache_storage_backend": "kvtier"},
        {"hicache_storage_backend": "kvtier", "hicache_storage_backend_extra_config_json": "{"},
        {
            "hicache_storage_backend": "kvtier",
            "hicache_storage_backend_extra_config_json": '{"store": {"path": "/proc/1/mem"}}',
        },
        {
            "hicache_storage_backend": "kvtier",
            "hicache_storage_backend_extra_config_json": '{"store": {"path": 7}, "nothing": 1}',
        },
        {"hicache_storage_backend": "file"},
        {"hicache_storage_backend": ["kvtier"]},
        {"hicache_storage_backend": "kvtier", "hicache_storage_prefetch_policy": "never"},
    ]
    puts = [Request("PUT", _STORAGE, json.dumps(body).encode()) for body in bodies]
    return [
        *puts,
        Request("PUT", _STORAGE, b"{"),
        Request("DELETE", _STORAGE, b""),
        Request("POST", _STORAGE + "/clear", b""),
        Request("DELETE", _STORAGE, b"", with_key=False),
        Request("GET", _STORAGE, b""),
    ]


def extreme_setting(rng: random.Random) -> dict[str, float]:
    """One setting of the policy at the end of its range, which is allowed."""
    fields = [
        f
        for f in dataclasses.fields(PolicyConfig)
        if f.metadata["low"] is not None and f.metadata["high"] is not None
    ]
    chosen = rng.choice([f for f in fields if f.name != "map_pages"])
    return {chosen.name: rng.choice((chosen.metadata["low"], chosen.metadata["high"]))}


async def hostile_requests(stage: Stage, seconds: float) -> int:
    """All of them at least once, then on until the time is over. A 5xx, no answer, or a closed
    connection is a finding; the settings are at the end as they were. Returns how many were sent.
    """
    rng = chance(stage.options.chaos.seed, "routes")
    async with stage.client() as client:
        before = await client.policy()
    requests = [*hint_requests(), *state_requests(), *storage_requests()]
    rng.shuffle(requests)
    until, sent = time.monotonic() + seconds, 0
    # What refuses a request before it has read it may close the connection: each has one of its
    # own.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=_ANSWER_S)
    ) as session:
        while sent < len(requests) or time.monotonic() < until:
            request = requests[sent % len(requests)]
            await _send(stage, session, request)
            sent += 1
            if sent % 5 == 0:
                extreme = json.dumps({"policy": extreme_setting(rng)}).encode()
                await _send(stage, session, Request("POST", _SETTINGS, extreme))
            await asyncio.sleep(_AGAIN_S)
    async with stage.client() as client:
        await client.set_policy(**before)
        await client.set_state({"kvtier.throttle.read_gbps": GBPS})
    return sent


async def detach_and_attach(stage: Stage) -> None:
    """Detaches the store, sends requests that are answered without it, and attaches it again.
    SGLang agrees to both on an idle server only.
    """
    settings = stage.server.settings.read_text()
    body = {
        "hicache_storage_backend": "kvtier",
        "hicache_storage_backend_extra_config_json": settings,
    }
    await _agreed(stage, "DELETE", {})
    # Without a store there is no bandwidth to set, and pages have no names by which they could be
    # on the map.
    async with stage.load(Chaos(kinds=("abort", "disconnect"), start=("auto", None)), ahead=False):
        await stage.pause()
    await _agreed(stage, "PUT", body)


async def _agreed(stage: Stage, method: str, body: dict[str, str]) -> None:
    headers, text = {"Authorization": f"Bearer {stage.server.admin_key}"}, ""
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=_ANSWER_S), headers=headers
    ) as session:
        for _ in range(_TRIES):
            async with session.request(method, stage.server.url + _STORAGE, json=body) as answer:
                text = await answer.text()
                if answer.status == 200:
                    return
            await asyncio.sleep(1)
    stage.log.find(Finding.SCENE, f"routes: {method} {_STORAGE} was never agreed to: {text[:150]}")


async def _send(stage: Stage, session: aiohttp.ClientSession, request: Request) -> None:
    headers = {"Content-Type": "application/json"}
    if request.with_key:
        headers["Authorization"] = f"Bearer {stage.server.admin_key}"
    what = f"{request.method} {request.path} {request.body[:60]!r}"
    try:
        async with session.request(
            request.method, stage.server.url + request.path, data=request.body, headers=headers
        ) as answer:
            text = await answer.text()
            stage.log.note(f"{request.path} {answer.status}")
            if answer.status >= 500 and stage.server.alive:
                stage.log.find(
                    Finding.SCENE, f"routes: {what} was answered {answer.status}: {text[:150]}"
                )
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        stage.log.find(Finding.SCENE, f"routes: {what} had no answer: {type(error).__name__}")
