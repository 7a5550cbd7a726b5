"""Tenants on a real server: a cache salt's pages keep its share beside a noisy tenant, are counted
by name, and are deleted by salt while the server runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest
from serving import TOKENS, Served, flags, prompts

from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.tools import commands
from sgl_kvtier.store.tools.offline import count_by_tenant, namespaces
from sgl_kvtier.tenants import digest_of

pytestmark = pytest.mark.server
PAGE = 16
WHOLE = (TOKENS - 1) // PAGE * PAGE
SALTS = ("the salt of acme", "the salt of beta", "a noisy salt")
ACME, BETA, NOISY = map(digest_of, SALTS)


@pytest.fixture(scope="module")
def served(servers):
    tenants = f"acme={ACME}:40%, beta={BETA}:10%"
    store = {"tenants": tenants, "capacity_bytes": "8MiB", "segment_bytes": "1MiB"}
    return servers.get(flags(), {"store": store})


def root(served: Served) -> Path:
    return Path(served.server.folder) / "store"


def held(served: Served) -> dict[str, int]:
    (namespace,) = namespaces(Env(), str(root(served)))
    return {one.digest: one.pages for one in count_by_tenant(Env(), namespace)}


def figure(served: Served, name: str, tenant: str) -> float:
    text = served.call("GET", "/metrics", None, raw=True)
    lines = [line for line in text.splitlines() if line.startswith(f"kvtier:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'tenant="{tenant}"' in line)


def test_pages_name_the_tenant_of_their_salt_or_extra_key(served):
    ids = prompts(4, seed=801)
    served.ask(ids[0], cache_salt=SALTS[0])
    served.ask(ids[1], extra_key=SALTS[1])
    served.ask(ids[2], extra_key="a class of requests", cache_salt=SALTS[0])
    served.ask(ids[3])
    served.flush()
    # Its last token is computed, so that the last page is whole only with the answer.
    assert held(served)[ACME] >= 2 * (WHOLE // PAGE)
    assert held(served)[BETA] >= WHOLE // PAGE
    assert held(served)[""] >= WHOLE // PAGE
    assert served.ask(ids[0], cache_salt=SALTS[0]).storage == WHOLE
    assert served.ask(ids[1], extra_key=SALTS[1]).storage == WHOLE


def test_a_long_prompt_of_several_writes_is_one_tenants(served):
    (ids,) = prompts(1, 200 * PAGE, seed=802)
    before = held(served).get(BETA, 0)
    served.ask(ids, cache_salt=SALTS[1])
    served.flush()
    assert held(served)[BETA] + served.metric("kvtier:pages_refused_total") >= before
    assert set(held(served)) <= {ACME, BETA, NOISY, ""}


def test_a_noisy_tenant_evicts_its_own_pages_and_leaves_the_others_their_share(served):
    mine = prompts(3, seed=803)
    first = [served.ask(ids, cache_salt=SALTS[0]) for ids in mine]
    served.flush()
    for ids in prompts(60, 400, seed=804):
        served.ask(ids, 1, cache_salt=SALTS[2])
    served.flush()
    time.sleep(1.2)  # metrics are published twice a second
    assert figure(served, "tenant_pages_evicted_total", "other") > 100
    assert figure(served, "tenant_bytes", "acme") <= figure(served, "tenant_share_bytes", "acme")
    again = [served.ask(ids, cache_salt=SALTS[0]) for ids in mine]
    assert [a.storage for a in again] == [WHOLE] * 3
    assert [a.tokens for a in again] == [a.tokens for a in first]


def test_metrics_show_names_and_never_a_salt_or_a_digest(served):
    text = served.call("GET", "/metrics", None, raw=True)
    assert 'tenant="acme"' in text and 'tenant="other"' in text
    for secret in (*SALTS, ACME, BETA, NOISY):
        assert secret not in text
    for path in root(served).rglob("*"):
        if path.is_file():
            assert not any(salt.encode() in path.read_bytes() for salt in SALTS)


def test_a_tenant_is_purged_by_its_salt_while_the_server_runs(served):
    (mine,) = prompts(1, seed=805)
    (others,) = prompts(1, seed=806)
    served.ask(mine, cache_salt=SALTS[0])
    served.ask(others, cache_salt=SALTS[1])
    served.flush()
    parser = argparse.ArgumentParser()
    commands.purge.add_arguments(parser)
    out = root(served).parent / "purged.json"
    told = [str(root(served)), "--salt", SALTS[0], "--json", str(out)]
    assert commands.purge.run(parser.parse_args(told)) == 0
    data = json.loads(out.read_text())
    assert [row["removed"] for row in data["namespaces"]] == ["yes"]
    assert ACME not in held(served)
    served.flush()
    assert served.ask(mine, cache_salt=SALTS[0]).storage == 0
    assert served.ask(others, cache_salt=SALTS[1]).storage == WHOLE
    # It goes on as a tenant, and what it stores from now on is found.
    served.flush()
    assert served.ask(mine, cache_salt=SALTS[0]).storage == WHOLE
