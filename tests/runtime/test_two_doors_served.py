"""One folder, two doors, with real servers: a server with HiCache and a server with SGLang's
external linker answer from each other's pages.

No feature of ours: it tells, at SGLang's next release, whether names of pages, their bytes or the
linker's interface have changed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from serving import ADMIN, TOKENS, config_file, flags, prompts, serving

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1200)]
PAGE = 16
PAGES = (TOKENS - 1) // PAGE
"""Pages of a prompt that can come from a cache: at least one token is always computed."""


def linker_flags(config: Path, events: Path) -> list[str]:
    """Of a server without HiCache, whose device pages go to the store by the test double."""
    linker = {
        "linker": "StoreLinker",
        "linker_module_path": "store_linker",
        "linker_extra_config": {"kvtier": json.loads(config.read_text()), "events": str(events)},
    }
    return flags(
        backend=None,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config=json.dumps(linker),
    )


def counted(events: Path, event: str) -> int:
    """Pages that the linker told of."""
    told = [json.loads(line) for line in events.read_text().splitlines()]
    return sum(entry["pages"] for entry in told if entry["event"] == event)


def attach(server: Any, config: Path) -> None:
    server.call(
        "PUT", "/hicache/storage-backend",
        {
            "hicache_storage_backend": "kvtier",
            "hicache_storage_backend_extra_config_json": config.read_text(),
            "hicache_storage_prefetch_policy": "wait_complete",
        },
        ADMIN,
    )  # fmt: skip


def test_hicache_and_a_linker_answer_from_each_others_pages(tmp_path):
    (first, second), config = prompts(2, seed=71), config_file(tmp_path)
    events = tmp_path / "events.jsonl"
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    with serving(tmp_path / "hicache", flags(), config) as hicache:
        computed = hicache.ask(first)
        hicache.settle()
        written = int(hicache.metric("kvtier:store_pages"))
        hicache.call("DELETE", "/hicache/storage-backend", None, ADMIN)
        computed_second = hicache.ask(second)
        assert computed.cached == computed_second.cached == 0

        with serving(tmp_path / "linker", linker_flags(config, events), PYTHONPATH=path) as linker:
            opened = json.loads(events.read_text().splitlines()[0])
            warm = counted(events, "loaded")  # by SGLang's own request at the start
            loaded = linker.ask(first)
            assert counted(events, "loaded") - warm == PAGES
            own = linker.ask(second)
            assert counted(events, "loaded") - warm == PAGES
        (folder,) = (tmp_path / "store").glob("*/config.json")
        assert opened == {"event": "opened", "folder": folder.parent.name, "pages": written}
        assert written >= PAGES and counted(events, "stored") >= PAGES

        hicache.call("POST", "/flush_cache", {}, ADMIN)
        attach(hicache, config)
        read = hicache.metric("kvtier:pages_read_total")
        back = hicache.ask(second)
        hicache.settle()  # metrics are published from time to time
        read = hicache.metric("kvtier:pages_read_total") - read

    assert (loaded.cached, own.cached) == (PAGES * PAGE, 0)
    assert back.storage == back.cached == PAGES * PAGE and read >= PAGES
    assert loaded.tokens == computed.tokens
    assert own.tokens == back.tokens == computed_second.tokens
    for a, b in ((loaded, computed), (own, computed_second), (back, computed_second)):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
