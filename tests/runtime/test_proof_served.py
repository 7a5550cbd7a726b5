"""A real server that compares the pages it restores: one that a copy damaged is computed, restoring
ends, and the server serves on by SGLang's own way. The next server begins that way.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from restore_lab import CHUNK, LONG, change, counts, settled
from serving import Answer, Served, changed, config_file, flags, prompts, serving

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]
PAGE = 16
WHOLE = (LONG - 1) // PAGE * PAGE
AHEAD = {"prefetch": "on", "eviction": "next-use"}
ROUNDS, EACH = 5, 20


def settings(folder: Path, **policy: str) -> Path:
    return config_file(
        folder, policy={"restore": "load", "min_restore_tokens": 64, **AHEAD, **policy}
    )


def lines(served: Served) -> str:
    return served.server.last_lines(5000)


def test_a_damaged_page_is_computed_and_the_server_serves_on_by_sglangs_own_way(tmp_path):
    spoil = tmp_path / "spoil"
    arguments = flags(chunked_prefill_size=CHUNK, page_size=PAGE)
    long, *short = prompts(1, LONG, seed=1) + prompts(EACH, 400, seed=2)
    with serving(
        tmp_path, arguments, settings(tmp_path, proof="all"), **changed(SPOIL=spoil)
    ) as served:
        first = served.ask(long)
        wanted = [served.ask(ids).tokens for ids in short]
        served.flush()
        again = served.ask(long)
        loaded = WHOLE - PAGE  # the last page is computed, which proves the attach
        assert (again.storage, again.tokens) == (loaded, first.tokens)
        found = settled(served)
        assert found["proof_pages_total equal"] == loaded // PAGE
        assert found["proof"] == 1 and "proof_pages_total differs" not in found

        spoil.touch()
        served.flush()
        damaged = served.ask(long)
        assert damaged.tokens == first.tokens and damaged.storage < loaded
        found = settled(served)
        assert found["proof"] == 0 and found["proof_pages_total differs"] > 0
        assert found["lost_pages_total differs"] > 0
        assert "restoration is not right on this device" in lines(served)
        assert "not looking ahead any more" in lines(served)

        restored = found["loaded_bytes_total storage-device"]
        answers: list[Answer] = []
        for _ in range(ROUNDS):
            served.flush()
            answers += [served.ask(ids) for ids in short]
        assert [one.tokens for one in answers] == wanted * ROUNDS
        assert sum(one.storage for one in answers) > 0, "SGLang reads them itself"
        assert served.ask(long).tokens == first.tokens
        assert not change(served, policy__restore=1)
        found = settled(served)
        assert found["loaded_bytes_total storage-device"] == restored
        assert found["proof"] == 0

    with serving(tmp_path, arguments, settings(tmp_path)) as served:
        assert "restoring is off: it was not right on cpu" in lines(served)
        assert [served.ask(ids).tokens for ids in short] == wanted
        assert served.ask(long).tokens == first.tokens
        found = counts(served)
        assert found["proof"] == 0
        assert not found.get("loaded_bytes_total storage-device")


def test_every_page_is_compared_twice_where_that_is_asked_for(tmp_path):
    """Requests of several lengths, restored at once: nothing differs at the second look either."""
    arguments = flags(chunked_prefill_size=CHUNK, page_size=PAGE)
    asked = prompts(4, LONG, seed=3)
    with serving(tmp_path, arguments, settings(tmp_path, proof="all", restore="both")) as served:
        wanted = [served.ask(ids).tokens for ids in asked]
        for tokens in (6, 1):
            served.flush()
            for ids, right in zip(asked, wanted, strict=True):
                assert served.ask(ids, tokens=tokens).tokens == right[:tokens]
        found = settled(served)
        assert found["proof_pages_total equal"] > 0 and found["proof"] == 1
        assert "proof_pages_total differs" not in found
        assert "proof_pages_total skipped" not in found
        assert "a page could not be looked at" not in lines(served)
