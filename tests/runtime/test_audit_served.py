"""A real server that audits what it restores, and answers although a copy spoiled a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from restore_lab import CHUNK, LONG, results
from serving import Served, changed, config_file, flags, prompts, serving

pytestmark = pytest.mark.server
PAGE = 16
WHOLE = (LONG - 1) // PAGE * PAGE


@pytest.fixture(scope="module")
def spoil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audited") / "spoil"


@pytest.fixture(scope="module")
def served(spoil: Path) -> Iterator[Served]:
    settings = config_file(
        spoil.parent, policy={"restore": "load", "min_restore_tokens": 64}, lab={"audit": True}
    )
    arguments = flags(chunked_prefill_size=CHUNK, page_size=PAGE)
    with serving(spoil.parent, arguments, settings, **changed(SPOIL=spoil)) as server:
        yield server


def audited(served: Served) -> dict[str, float]:
    """Pages compared so far, by what was found."""
    return results(served, "audited_pages_total")


def test_a_spoiled_page_of_a_served_model_is_counted_and_every_other_is_the_stores(
    served: Served, spoil: Path
) -> None:
    ids = prompts(1, LONG, seed=1)[0]
    first = served.ask(ids)
    served.flush()
    again = served.ask(ids)
    assert (again.storage, again.tokens) == (WHOLE, first.tokens)
    assert audited(served) == {"equal": WHOLE // PAGE}

    spoil.touch()
    served.flush()
    spoiled = served.ask(ids)
    spoil.unlink()
    assert (spoiled.storage, len(spoiled.tokens)) == (WHOLE, len(first.tokens))
    found = audited(served)
    assert 0 < found["differs"] < WHOLE // PAGE
    assert found["equal"] + found["differs"] == 2 * WHOLE // PAGE
    assert "is not the page it was loaded from" in served.server.last_lines(2000)

    served.flush()
    after = served.ask(ids)
    assert (after.storage, after.tokens) == (WHOLE, first.tokens)
    assert audited(served)["differs"] == found["differs"]
