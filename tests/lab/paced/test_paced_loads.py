"""What a paced device sees of the server: loads of SGLang's own and of restorations, and our tick."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import cache_controller

from sgl_kvtier.lab.paced import clock, pace
from sgl_kvtier.lab.paced.watching import Loads, Ticks
from sgl_kvtier.runtime.proof.record import Proof
from sgl_kvtier.runtime.restore import engine
from sgl_kvtier.runtime.scheduler.tick import RestoreTick
from sgl_kvtier.runtime.step.polls import LANDED, Poll
from sgl_kvtier.runtime.step.restoration import Load
from sgl_kvtier.types import Link, Span


def test_a_read_of_sglangs_is_written_with_its_request_and_one_of_nothing_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller: Any = cache_controller.HiCacheController
    moments = iter([1.0, 1.5, 2.0])
    monkeypatch.setattr(controller, "_page_transfer", lambda this, operation: 3)
    monkeypatch.setattr(clock, "now", lambda: next(moments))
    Loads(pace.PaceLog(tmp_path / "log")).watch_reads()
    read = SimpleNamespace(request_id="a", hash_value=["k"])
    assert controller._page_transfer(object(), read) == 3
    controller._page_transfer(object(), SimpleNamespace(request_id="b", hash_value=[]))
    assert pace.read(tmp_path / "log") == [
        {"load": "storage-host", "at": 1.0, "end": 1.5, "rid": "a"}
    ]


def test_a_load_of_a_restoration_lasts_until_its_last_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.RestoreEngine, "_ended", engine.RestoreEngine._ended)
    loads = Loads(pace.PaceLog(tmp_path / "log"))
    loads.watch()
    loads.watch()  # once is enough
    none, poll = torch.zeros(0), Poll(1, 2)
    restoration: Any = SimpleNamespace(rid="a", closed=False)
    link = Link.STORAGE_TO_DEVICE
    load = Load(restoration, Span(4, 6), link, none, none, False, 3.0, 9.0, poll)
    poll.mark(1, LANDED, 3.5)
    poll.mark(0, LANDED, 4.0)
    own: Any = SimpleNamespace(proof=Proof(), context=SimpleNamespace(agreed_page_bytes=1))
    engine.RestoreEngine._ended(own, load)
    loads.watch()  # the next step
    assert pace.read(tmp_path / "log") == [
        {"load": "storage-device", "at": 3.0, "end": 4.0, "rid": "a"}
    ]


def test_after_a_tick_the_device_knows_who_may_lack_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = {"a": object()}
    monkeypatch.setattr(RestoreTick, "run", lambda tick, scheduler: under_way.update(b=object()))
    ticks, tick = Ticks(), RestoreTick.__new__(RestoreTick)
    tick.engine = SimpleNamespace(restorations=under_way)  # type: ignore[assignment]
    ticks.watch()
    ticks.watch()  # once is enough
    assert ticks.last_s is None
    tick.run(object())  # type: ignore[arg-type]
    assert ticks.restoring == {"a", "b"} and ticks.last_s is not None
    under_way.clear()
    tick.run(object())  # type: ignore[arg-type]
    assert ticks.restoring == {"b"}
