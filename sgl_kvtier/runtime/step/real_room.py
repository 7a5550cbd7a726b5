"""Room on the device that is really there, where pages are copied before they leave.

With write-back SGLang counts every page that no request uses as one that can leave the device. But
a page without a copy leaves only if host memory has room for one, or if no page behind it in the
tree is locked there. Pages that are being stored or read are locked, and a server that has admitted
a request by that count ends with "Prefill out of memory". Here pages leave before a request is
admitted, and only empty slots count. Scheduler's thread; alike on every rank.
"""

from __future__ import annotations

from sgl_kvtier.runtime.sglang import storage_ops
from sgl_kvtier.runtime.sglang.types import Tree
from sgl_kvtier.runtime.step.private_slots import PrivateSlots

_AGAIN = 1000
"""Calls after which it is tried again although nothing has changed that is seen here."""


class RealRoom:
    """Empty slots of one tree's device."""

    def __init__(self, tree: Tree, slots: PrivateSlots) -> None:
        self._tree = tree
        self._slots = slots
        self._device, self._host = slots.device, slots.host
        self._stuck: tuple[int, ...] | None = None
        self._calls = 0
        self.is_short = False
        """Whether a call of this pass found too little."""

    @property
    def matters(self) -> bool:
        """Whether SGLang's count of what can leave may be too high."""
        return self._host.write_back

    @property
    def transfers(self) -> int:
        """Reads and writes of storage in flight: host pages are locked until they end."""
        return storage_ops.reads_waiting(self._tree) + storage_ops.writes_waiting(self._tree)

    def free_up(self, tokens: int) -> int:
        """Has pages leave until `tokens` slots are empty; returns how many are. No restoration
        gives up slots for it. What a request is about to use has to be locked.
        """
        free = self._device.available()
        if free < tokens and self._may_leave():
            free = self._slots.free_up_device(tokens)
            self._stuck = self._state() if free < tokens else None
        self.is_short |= free < tokens
        return free

    def _may_leave(self) -> bool:
        """Not where nothing could leave before, and nothing has changed since: each try costs a
        walk over the tree, and a line in SGLang's log.
        """
        self._calls += 1
        return self._state() != self._stuck or self._calls % _AGAIN == 0

    def _state(self) -> tuple[int, ...]:
        device, host = self._device, self._host
        return device.available(), device.claimable(), host.available(), self.transfers
