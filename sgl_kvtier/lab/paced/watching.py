"""What a paced device sees of the server that it is in: its own tick, and loads of requests.
Classes of SGLang and of the runtime are changed in place. The scheduler's thread, but for reads.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from typing import TYPE_CHECKING, Any

from sgl_kvtier.lab.paced import clock
from sgl_kvtier.lab.paced.pace import PaceLog
from sgl_kvtier.types import Link

if TYPE_CHECKING:
    from sgl_kvtier.runtime.restore.engine import RestoreEngine
    from sgl_kvtier.runtime.scheduler.tick import RestoreTick
    from sgl_kvtier.runtime.step.restoration import Load

_CONTROLLER = "sglang.srt.managers.cache_controller"
_ENGINE = "sgl_kvtier.runtime.restore.engine"
_TICK = "sgl_kvtier.runtime.scheduler.tick"


class Ticks:
    """Our own tick right before a step, which asks the planner and carries out its plan: its
    processor time, and the restorations it leaves. Ticks while nothing could run delay none.
    """

    def __init__(self) -> None:
        self.last_s: float | None = None
        """Seconds of the last one; None in a server without a tick."""
        self.restoring: set[str] = set()
        """Requests of which pages may be missing: what they wait for is no gap."""
        self._watched = False

    def watch(self) -> None:
        """Times the tick from now on, in a server that has one."""
        module = sys.modules.get(_TICK)
        if self._watched or module is None:
            return
        self._watched = True
        real = module.RestoreTick.run

        def run(tick: RestoreTick, scheduler: Any) -> None:
            began_s = time.thread_time()
            try:
                real(tick, scheduler)
            finally:
                self.last_s = time.thread_time() - began_s
                self.restoring = set(tick.engine.restorations)

        module.RestoreTick.run = run


class Loads:
    """When loads of requests were under way, for the log: SGLang's own reads, and restorations'."""

    def __init__(self, log: PaceLog) -> None:
        self._log = log
        self._watched = False
        self._ended: dict[tuple[str, str], list[float]] = {}
        """Of loads of restorations since the last step, by link and request: from when to when."""

    def watch(self) -> None:
        """Once a step: writes down what ended since the last one, in a server that restores. A line
        for each of many pieces would take the step's time.
        """
        for (link, rid), (begin, end) in self._ended.items():
            self._log.loaded(link, rid, begin, end)
        self._ended.clear()
        module = sys.modules.get(_ENGINE)
        if self._watched or module is None:
            return
        self._watched = True
        real = module.RestoreEngine._ended

        def ended(engine: RestoreEngine, load: Load) -> None:
            real(engine, load)
            begin, end = load.begun_at, max(load.poll.ended_at)
            span = self._ended.setdefault((load.link.value, load.restoration.rid), [begin, end])
            span[:] = min(span[0], begin), max(span[1], end)

        module.RestoreEngine._ended = ended

    def watch_reads(self) -> None:
        """Writes SGLang's own reads down from now on. No hook: this may have one already."""
        controller: Any = importlib.import_module(_CONTROLLER).HiCacheController
        real = controller._page_transfer

        @functools.wraps(real)
        def transfer(this: Any, operation: Any) -> Any:
            began = clock.now()
            pages = real(this, operation)
            if operation.hash_value:
                link = Link.STORAGE_TO_HOST.value
                self._log.loaded(link, operation.request_id, began, clock.now())
            return pages

        controller._page_transfer = transfer
