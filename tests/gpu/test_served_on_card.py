"""On a card: a served model with drawn weights restores prefixes and looks ahead, every loaded page
compared with the store's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import Served, config_file, flags, prompts, serving

from sgl_kvtier.lab.experiment.arms import attention_flags, greedy_flags
from sgl_kvtier.lab.outside.lab_model import write_named

pytestmark = [pytest.mark.gpu, pytest.mark.server]
LONG, PAGE = 6000, 64
WHOLE = (LONG - 1) // PAGE * PAGE
GBPS = 2.0
"""Of the throttled store: computing and loading take times of the same order."""


AHEAD = {"prefetch": "on", "eviction": "next-use"}


def card_flags(**more: Any) -> list[str]:
    """Launch arguments of a small server on a card."""
    return [
        *flags(dtype="bfloat16", model_path=str(write_named("lab-gpu-tiny")), page_size=PAGE, max_total_tokens=32768,
               context_length=None, chunked_prefill_size=1024, sleep_on_idle=None, **more),
        *attention_flags("cuda"),
        *greedy_flags("cuda"),
    ]  # fmt: skip


def settings(folder: Path, **policy: Any) -> Path:
    """Everything that is loaded is compared with what the store has."""
    return config_file(
        folder,
        store={"capacity_bytes": "2GiB", "segment_bytes": "64MiB"},
        throttle={"read_gbps": GBPS},
        policy={"restore": "both", "min_restore_tokens": 256, **policy},
        lab={"audit": True},
    )


def audited(served: Served) -> dict[str, float]:
    """Pages compared so far, by what was found."""
    found: dict[str, float] = {}
    for line in served.call("GET", "/metrics", raw=True).splitlines():
        if line.startswith("kvtier:restore_audited_pages_total{"):
            result = line.split('result="')[1].split('"')[0]
            found[result] = found.get(result, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("card")
    arguments = card_flags(disable_overlap_schedule=not request.param)
    with serving(folder, arguments, settings(folder)) as server:
        yield server


def test_restored_prefixes_are_the_stores_bit_by_bit(served):
    asked = prompts(3, LONG, seed=1)
    for ids in asked:
        served.ask(ids)
    served.flush()
    again = [served.ask(ids) for ids in asked]
    assert all(0 < one.storage <= WHOLE for one in again)
    served.settle()
    counted = audited(served)
    assert counted.get("equal", 0) > 0
    assert not counted.get("differs") and not counted.get("skipped")


def test_no_page_of_a_restoration_fails_on_its_way_to_the_device(served):
    ids = prompts(1, LONG, seed=2)[0]
    served.ask(ids)
    served.flush()
    served.ask(ids)
    served.settle()
    text = served.call("GET", "/metrics", raw=True)
    lost = [
        line for line in text.splitlines() if "lost_pages_total{" in line and '"failed"' in line
    ]
    assert not sum(float(line.rsplit(" ", 1)[1]) for line in lost)
    log = (served.server.folder / "server.log").read_text(errors="replace")
    assert "a copy to the device failed" not in log


def test_a_server_that_looks_ahead_on_a_card_answers_and_its_pages_are_the_stores(tmp_path):
    with serving(tmp_path, card_flags(), settings(tmp_path, **AHEAD)) as server:
        asked = prompts(6, LONG, seed=3)
        first = [server.ask(ids) for ids in asked]
        server.flush()
        again = [server.ask(ids) for ids in asked]
        assert [len(one.tokens) for one in again] == [len(one.tokens) for one in first]
        server.settle()
        assert not audited(server).get("differs")
        assert server.metric("kvtier:lookahead_failures_total") == 0
