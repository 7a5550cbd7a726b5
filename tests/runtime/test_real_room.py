"""Pages leave the device before a request is admitted, where they are copied first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sgl_kvtier.runtime.step.real_room import RealRoom


class Lab:
    """Pools of which `leaves` tokens leave the device when they are asked to; the rest of what
    SGLang counts as evictable does not.
    """

    def __init__(self, free: int, leaves: int, policy: str = "write_back") -> None:
        self.free, self.leaves, self.host_free, self.evictable = free, leaves, 0, 1024
        self.tries = 0
        self.writes: dict[int, Any] = {}
        host = SimpleNamespace(write_back=policy == "write_back", available=lambda: self.host_free)
        device = SimpleNamespace(
            available=lambda: self.free, claimable=lambda: self.free + self.evictable
        )
        slots: Any = SimpleNamespace(device=device, host=host, free_up_device=self.evict)
        tree: Any = SimpleNamespace(ongoing_prefetch={}, ongoing_backup=self.writes)
        self.room = RealRoom(tree, slots)

    def evict(self, tokens: int) -> int:
        self.tries += 1
        left = min(self.leaves, max(0, tokens - self.free))
        self.leaves, self.free, self.evictable = (
            self.leaves - left,
            self.free + left,
            self.evictable - left,
        )
        return self.free


def test_nothing_leaves_for_slots_that_are_empty():
    lab = Lab(free=512, leaves=512)
    assert lab.room.free_up(512) == 512 and lab.tries == 0 and not lab.room.is_short


def test_what_can_leave_does_and_the_rest_does_not_count():
    lab = Lab(free=128, leaves=256)
    assert lab.room.free_up(256) == 256 and not lab.room.is_short
    assert lab.room.free_up(1024) == 384 and lab.room.is_short


def test_where_nothing_could_leave_it_is_tried_again_when_something_has_changed():
    lab = Lab(free=128, leaves=0)
    lab.writes[1] = None
    for _ in range(5):
        assert lab.room.free_up(256) == 128
    assert lab.tries == 1
    del lab.writes[1]  # its pages are unlocked
    lab.leaves = 512
    assert lab.room.free_up(256) == 256 and lab.tries == 2


def test_a_change_that_is_not_seen_is_found_all_the_same():
    lab = Lab(free=128, leaves=0)
    assert lab.room.free_up(256) == 128
    lab.leaves = 512
    tries = 0
    while lab.room.free_up(256) < 256:
        tries += 1
        assert tries < 2000
    assert lab.tries == 2


def test_it_matters_where_pages_are_copied_when_they_leave():
    assert Lab(0, 0).room.matters
    assert not Lab(0, 0, "write_through").room.matters
