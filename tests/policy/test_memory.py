"""What a planner takes of memory for each page that it knows."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

from named_parts import AHEAD

from sgl_kvtier.policy.messages import PagesPlaced, RequestArrived, RequestFinished
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import PageKey, Tier

PAGES, SESSION = 1 << 13, 1 << 9


def test_a_page_of_an_idle_session_takes_more_than_its_key_and_less_than_a_kilobyte() -> None:
    tracemalloc.start()
    planner = make_planner(replace(AHEAD, map_pages=2 * PAGES), EngineShape(64, 8 << 20, 2048))
    for number in range(PAGES // SESSION):
        rid = f"s{number}"
        keys = tuple(PageKey(f"{rid}/{page}".encode().ljust(32)) for page in range(SESSION))
        planner.observe(RequestArrived(rid, 0.0, SESSION * 64, keys, rid))
        planner.observe(PagesPlaced(keys, Tier.DEVICE, 0.0))
        planner.observe(PagesPlaced(keys, Tier.STORAGE, 0.0))
        planner.observe(RequestFinished(rid, 1.0, keys=keys))
    each = tracemalloc.get_traced_memory()[0] / PAGES
    tracemalloc.stop()
    print(f"{each:.0f} bytes for each page, its key of 32 included")
    assert 72 < each < 1024
