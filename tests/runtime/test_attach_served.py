"""A real server that looks at every attach, and finds loaded pages that are attached wrongly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from restore_lab import CHUNK, GBPS, LONG, results
from serving import Served, changed, config_file, flags, prompts, serving

from sgl_kvtier.runtime.proof.attach import FLOOR_32

pytestmark = pytest.mark.server
PAGE = 16


@pytest.fixture(scope="module")
def mistake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attaches") / "mistake"


@pytest.fixture(scope="module")
def served(mistake: Path) -> Iterator[Served]:
    settings = config_file(
        mistake.parent,
        policy={"restore": "both", "min_restore_tokens": 64, "proof": "all"},
        throttle={"read_gbps": GBPS},
    )
    arguments = flags(chunked_prefill_size=CHUNK, page_size=PAGE)
    with serving(mistake.parent, arguments, settings, **changed(MISTAKE=mistake)) as server:
        yield server


def attaches(served: Served) -> dict[str, float]:
    """Pages compared so far, by what was found."""
    return results(served, "proof_attaches_total")


def seen(mistake: Path) -> list[tuple[str, float, float | None]]:
    """What was judged: the mistake of that time, the distance, and the noise."""
    lines = Path(f"{mistake}.seen").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


def restored(served: Served, seed: int, mistake: Path | None = None, word: str = "") -> bool:
    """Asks twice, with a mistake the second time; whether the tokens are the same."""
    [ids] = prompts(1, LONG, seed=seed)
    first = served.ask(ids)
    served.flush()
    if mistake is None:
        return served.ask(ids).tokens == first.tokens
    mistake.write_text(word)
    try:
        again = served.ask(ids)
        served.settle()  # what is compared has been
    finally:
        mistake.unlink()
    return again.tokens == first.tokens


def test_right_attaches_are_equal_and_change_no_answer(served: Served, mistake: Path) -> None:
    assert all(restored(served, seed) for seed in (1, 2, 3))
    assert attaches(served) == {"equal": 3}
    far = [max(last, noise or 0.0) for _, last, noise in seen(mistake)]
    assert len(far) == 3 and max(far) < FLOOR_32 / 100


MISTAKES = ["row", "span", "two exchanged", "positions", "all zero", "a zero page"]


@pytest.mark.parametrize("word", MISTAKES)
def test_loaded_pages_that_are_attached_wrongly_are_found(
    served: Served, mistake: Path, word: str
) -> None:
    before = attaches(served)
    restored(served, 100 + MISTAKES.index(word), mistake, word)
    found = attaches(served)
    assert found["differs"] == before.get("differs", 0) + 1
    assert found["equal"] == before["equal"]


def test_what_no_later_page_depends_on_is_not_found(served: Served, mistake: Path) -> None:
    """Values of the last layer go into no KV: pages are compared for them when they were copied."""
    before = attaches(served)
    restored(served, 200, mistake, "a zero page in a layer")
    assert attaches(served) == {**before, "equal": before["equal"] + 1}
    word, last, noise = seen(mistake)[-1]
    assert word == "a zero page in a layer" and max(last, noise or 0.0) < FLOOR_32 / 100
