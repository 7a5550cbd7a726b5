"""An event loop whose clock jumps to the next thing that waits, and a client that answers on it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_kvtier.lab.outside.client import Completion


class _Jumping(selectors.DefaultSelector):
    """Never sleeps: what it was to wait is added to `now`."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which waits for nothing but the clock."""
    loop = _Loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


@dataclass
class TimedClient:
    """A client whose every request takes `answer_s`; keeps when each was sent and what it asked."""

    answer_s: float = 1.0
    dilation: float = 1.0
    sent: list[tuple[float, list[int]]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def generate(
        self, input_ids: Sequence[int], count: int, *, session_id: str | None = None
    ) -> Completion:
        sent_s = asyncio.get_running_loop().time()
        self.sent.append((sent_s, list(input_ids)))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.answer_s * self.dilation)
        self.running -= 1
        return Completion(sent_s, self.answer_s, tuple(range(count)), (self.answer_s,) * count)
