"""A restoring request that gave up SGLang's one slot for chunked prefill to a shorter one.

It keeps its row and its pages, and its loads go on. SGLang knows of it again when it has the slot
back: in the pass in which the other's last chunk was added. Scheduler's thread.
"""

from __future__ import annotations

from sgl_kvtier.runtime.sglang import step
from sgl_kvtier.runtime.sglang.types import Req, Scheduler


class Aside:
    """At most one request."""

    def __init__(self) -> None:
        self.asked: str | None = None
        """Whom the present plan wants to give up the slot."""
        self.behind = 0
        """How many of the waiting requests should run before it."""
        self._req: Req | None = None
        self._aborted = False

    @property
    def requests(self) -> tuple[Req, ...]:
        """It, if there is one."""
        return () if self._req is None else (self._req,)

    def takes(self, req: Req) -> bool:
        """Whether the slot's holder gives it up in this pass; it is here from then on."""
        if self.asked != req.rid or self._req is not None:
            return False
        self._req = req
        return True

    def come_back(self, scheduler: Scheduler) -> None:
        """Gives the slot back where it is free. One that was aborted leaves."""
        self.asked = None
        if self._req is None:
            return
        if self._aborted:
            step.end_between_chunks(scheduler, self._left())
        elif step.in_slot(scheduler) is None:
            step.put_in_slot(scheduler, self._left())

    def abort(self, rid: str, every: bool) -> None:
        """Requests whose ids begin so are aborted, or all."""
        if self._req is not None and (every or self._req.rid.startswith(rid)):
            self._aborted = True

    def retract(self, scheduler: Scheduler) -> None:
        """Puts it back into the queue, as SGLang does with all that run."""
        if self._req is not None:
            step.retract(scheduler, self._left())

    def _left(self) -> Req:
        req, self._req, self._aborted = self._req, None, False
        assert req is not None, "asked of one that is there"
        return req
