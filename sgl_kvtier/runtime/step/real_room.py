"""Counts the device memory that can really be freed when pages are copied to host memory on
eviction.

With write-back, SGLang counts every page that no request uses as evictable. But a page without a
host copy can leave only if host memory has room for one, and if no page after it in the tree is
locked. Pages that are being stored or read are locked. A server that admits a request by SGLang's
count ends with "Prefill out of memory". Here pages are evicted before a request is admitted, and
only empty slots count. Scheduler's thread; the same on every rank.
"""

from __future__ import annotations

from sgl_kvtier.runtime.sglang import storage_ops
from sgl_kvtier.runtime.sglang.types import Tree
from sgl_kvtier.runtime.step.private_slots import PrivateSlots

_AGAIN = 1000
"""Calls after which eviction is tried again although no change is visible here."""


class RealRoom:
    """Empty slots of one tree's device."""

    def __init__(self, tree: Tree, slots: PrivateSlots) -> None:
        self._tree = tree
        self._slots = slots
        self._device, self._host = slots.device, slots.host
        self._stuck: tuple[int, ...] | None = None
        self._calls = 0
        self.is_short = False
        """Whether a call in this scheduler pass found too little."""

    @property
    def matters(self) -> bool:
        """Whether SGLang's count of evictable pages may be too high."""
        return self._host.write_back

    @property
    def transfers(self) -> int:
        """Storage reads and writes in flight: host pages are locked until they end."""
        return storage_ops.reads_waiting(self._tree) + storage_ops.writes_waiting(self._tree)

    def free_up(self, tokens: int) -> int:
        """Evicts until `tokens` slots are empty; returns how many are. No restoration gives up
        slots for it. Whatever a request is about to use must be locked.
        """
        free = self._device.available()
        if free < tokens and self._may_leave():
            free = self._slots.free_up_device(tokens)
            self._stuck = self._state() if free < tokens else None
        self.is_short |= free < tokens
        return free

    def _may_leave(self) -> bool:
        """False if eviction got stuck before and nothing has changed since: each try walks the tree
        and writes a line to SGLang's log.
        """
        self._calls += 1
        return self._state() != self._stuck or self._calls % _AGAIN == 0

    def _state(self) -> tuple[int, ...]:
        device, host = self._device, self._host
        return device.available(), device.claimable(), host.available(), self.transfers
