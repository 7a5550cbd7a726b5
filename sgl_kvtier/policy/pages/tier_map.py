"""Where every page is: the tiers that hold it, the tier it is in flight to, its owners and their
next runs, and which page is evicted first.

It is a side table by page hash, built from facts; it permits or forbids nothing. A stale entry
costs time, not correctness.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Final, NamedTuple

from sgl_kvtier.policy.pages.eviction import LRU, Rule, Shelves
from sgl_kvtier.policy.pages.owners import NOWHERE, UNOWNED, Owners, common
from sgl_kvtier.policy.pages.page_state import (
    COLD,
    IN_HOST,
    LISTING,
    MOVING,
    ON_DEVICE,
    RESIDENT,
    SHELVED,
    TIERS,
    Missing,
    PageInfo,
    missing_of,
)
from sgl_kvtier.types import PLACES, PageKey, Span, Tier

_COLD_SHELF: Final = -1
_NO_KEY: Final = PageKey(b"")
_GROW: Final = 4096
_TICKS_PER_S: Final = 100.0


class EvictionClass(NamedTuple):
    """The evictable pages of a tier that the eviction rule keeps on one shelf."""

    shelf: int
    """Number of the shelf."""
    next_use: float
    """When the pages are needed next, in seconds of the executor's clock; infinity: unknown."""
    pages: int
    """Number of pages."""


class TierMap:
    """PageKey -> PageInfo for up to `capacity` pages. Unknown keys never raise; every update takes
    O(1) per page.

    A page is cold if it has no copy in device or host, no owner and no pin, and is not in flight.
    When the map is full, a new page replaces the page that has been cold the longest, or is not
    recorded if there is none. One thread. 200 bytes per page with its 32-byte key at 1e6 pages (the
    allocator may hold up to a sixth more while it grows), 8 more per page and owner.

    A fact may arrive at any time and never contradicts the map: from then on it holds.
    """

    def __init__(
        self,
        capacity: int = 1_000_000,
        device_rule: Rule | None = None,
        host_rule: Rule | None = None,
    ) -> None:
        self._capacity = capacity
        self._slot_of: dict[PageKey, int] = {}
        self._keys: list[PageKey] = [_NO_KEY]
        self._free: list[int] = []
        self._state = bytearray(1)
        self._pins = array("H", [0])
        self._pinned = 0
        """Total number of pins. It is mostly 0, and then the pins of single pages are not read."""
        self._used = array("I", [0])
        self._group = array("I", [0])
        self._base: float | None = None
        self._device = Shelves()
        self._low = Shelves()
        """Shelves of host pages; shelf -1 has cold pages."""
        self._device_rule = device_rule or LRU()
        self._host_rule = host_rule or LRU()
        self._resident = [0, 0, 0, 0]
        self._changed: dict[int, None] = {}
        self._claimed: dict[str, None] = {}
        self._device.grow(1)
        self._low.grow(1)
        self.owners = Owners()

    # --- questions --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._slot_of

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._slot_of)

    def page(self, key: PageKey) -> PageInfo | None:
        """Everything known of a page; None if it is unknown."""
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        state, group = self._state[slot], self._group[slot]
        return PageInfo(
            tiers=tuple(tier for tier in TIERS if state >> tier & 1),
            in_flight=tuple(tier for tier in TIERS if state >> (4 + tier) & 1),
            pins=self._pins[slot],
            last_use=(self._base or 0.0) + self._used[slot] / _TICKS_PER_S,
            next_use=self.owners.next_use(group),
            owners=tuple(self.owners.name(number) for number in self.owners.members(group)),
        )

    def count(self, tier: Tier) -> int:
        """Number of known pages that are resident in a tier."""
        return self._resident[tier]

    def evictable(self, tier: Tier) -> int:
        """Number of pages of device or host that are neither pinned nor in flight."""
        shelves, _ = self._shelves(tier)
        return shelves.total - (shelves.pages(_COLD_SHELF) if shelves is self._low else 0)

    def missing(self, owner: str) -> Missing:
        """The pages of this owner that are not on the device. O(pages), 10 ns each."""
        number = self.owners.number(owner)
        slots = () if number is None else self.owners.slots[number]
        if len(slots) < 2:
            return missing_of(bytes([self._state[slot] for slot in slots]))
        states: tuple[int, ...] = itemgetter(*slots)(self._state)
        return missing_of(bytes(states))

    def keys_of(self, owner: str, span: Span) -> tuple[PageKey, ...]:
        """Keys of a range of an owner's pages, without pages that are not recorded."""
        number = self.owners.number(owner)
        slots = () if number is None else self.owners.slots[number][span.start : span.stop]
        return tuple(self._keys[slot] for slot in slots if slot != NOWHERE)

    def without_copy(self, owner: str, source: Tier, target: Tier) -> tuple[PageKey, ...]:
        """An owner's pages in `source`, not in flight, with no copy in `target` or below it."""
        number = self.owners.number(owner)
        below = (RESIDENT << target) & RESIDENT | MOVING
        slots = () if number is None else self.owners.slots[number]
        return tuple(
            self._keys[slot]
            for slot in slots
            if self._state[slot] >> source & 1 and not self._state[slot] & below
        )

    @property
    def has_changed(self) -> bool:
        """Whether `take_changed` would return any owner."""
        return bool(self._changed or self._claimed)

    def take_changed(self) -> tuple[str, ...]:
        """Owners whose pages were added, dropped or put in flight since the last call."""
        numbers: dict[int, None] = {}
        for group in self._changed:
            numbers.update(dict.fromkeys(self.owners.members(group)))
        names = self._claimed | dict.fromkeys(map(self.owners.name, numbers))
        self._changed, self._claimed = {}, {}
        return tuple(names)

    def classes(self, tier: Tier) -> Iterator[EvictionClass]:
        """A tier's classes of evictable pages, in order of eviction."""
        shelves, rule = self._shelves(tier)
        for shelf, turn in rule.order(shelves.names, self.owners):
            if shelf >= 0:
                yield EvictionClass(shelf, turn, shelves.pages(shelf))

    def victims(self, tier: Tier, count: int, after: float = -math.inf) -> tuple[PageKey, ...]:
        """Up to `count` pages of device or host needed later than `after`, in order of eviction."""
        if count <= 0:
            return ()
        return self.victims_of(
            tier, (shelf for shelf, turn, _ in self.classes(tier) if turn > after), count
        )

    def victims_aside(self, tier: Tier, count: int) -> tuple[PageKey, ...]:
        """The same, for an executor that needs memory between two steps. It leaves later decisions
        unchanged, so a replayed run decides alike.
        """
        self.owners.asked_aside = True
        try:
            return self.victims(tier, count)
        finally:
            self.owners.asked_aside = False

    def victims_of(self, tier: Tier, classes: Iterable[int], count: int) -> tuple[PageKey, ...]:
        """The same, from these classes only."""
        shelves, _ = self._shelves(tier)
        slots: list[int] = []
        for shelf in classes:
            slots += shelves.walk(shelf, count - len(slots))
            if len(slots) >= count:
                break
        return tuple([self._keys[slot] for slot in slots])

    def turn_of(self, owner: str) -> float | None:
        """When an owner should run next, in seconds; infinity: unknown. None: unknown owner."""
        number = self.owners.number(owner)
        return None if number is None else self.owners.turn(number)

    def resident(self, tier: Tier) -> Iterator[PageKey]:
        """The keys of all pages in a tier, as reported by facts. O(known pages)."""
        bit = 1 << tier
        return (key for key, slot in self._slot_of.items() if self._state[slot] & bit)

    def resident_part(
        self, tier: Tier, place: int, count: int
    ) -> tuple[tuple[PageKey, ...], int | None]:
        """The same in parts: the keys among `count` places from `place` on (0 first), and the place
        of the next part; None after the last one. A page that is added or dropped between two parts
        may be missing or not. O(count).
        """
        bit, stop = 1 << tier, min(place + count, len(self._state))
        keys = tuple([self._keys[slot] for slot in range(place, stop) if self._state[slot] & bit])
        return keys, stop if stop < len(self._state) else None

    # --- facts ------------------------------------------------------------------------------------

    def placed(self, keys: Sequence[PageKey], tier: Tier, now: float) -> None:
        """Pages are in a tier from now on. If they were in flight to it, they have arrived."""
        stamp = self._stamp(now)
        bit, landed = 1 << tier, ~(16 << tier) & 255
        slots, state, used = self._slot_of, self._state, self._used
        came = 0
        for key in reversed(keys):
            slot = slots.get(key) or self._add(key)
            if slot != NOWHERE:
                used[slot] = stamp
                old = state[slot]
                new = (old | bit) & landed
                if new != old:
                    came += not old & bit
                    self._set(slot, old, new)
        self._resident[tier] += came

    def dropped(self, keys: Sequence[PageKey], tier: Tier) -> None:
        """Pages are no longer in a tier, nor in flight to it."""
        bit, keep = 1 << tier, ~(17 << tier) & 255
        slots, state = self._slot_of, self._state
        left = 0
        for key in reversed(keys):
            slot = slots.get(key, NOWHERE)
            old = state[slot]
            new = old & keep
            if new != old:
                left += old & bit != 0
                self._set(slot, old, new)
        self._resident[tier] -= left

    def moving(self, keys: Iterable[PageKey], tier: Tier) -> None:
        """Pages are in flight to a tier until `placed` or `dropped`. Skips unknown keys."""
        bit = 16 << tier
        state = self._state
        for key in keys:
            slot = self._slot_of.get(key)
            if slot is None:
                continue
            old, group = state[slot], self._group[slot]
            if old & bit:
                continue
            before = 0 if self._pinned and self._pins[slot] else LISTING[old]
            if before & ON_DEVICE:
                self._device.take(slot)
            if before & IN_HOST or (before == COLD and group == UNOWNED):
                self._low.take(slot)
            state[slot] = old | bit
            if group != UNOWNED:
                self._changed[group] = None

    def used(self, keys: Sequence[PageKey], now: float) -> None:
        """A request ran on these pages, in prompt order. The last ones are evicted first."""
        stamp = self._stamp(now)
        for key in reversed(keys):
            slot = self._slot_of.get(key)
            if slot is None:
                continue
            self._used[slot] = stamp
            state = self._state[slot]
            listing = 0 if self._pinned and self._pins[slot] else LISTING[state]
            if state & ON_DEVICE:
                shelf = self._device_rule.used(self._device.shelf[slot], self._group[slot])
                self._device.move(slot, shelf) if listing & ON_DEVICE else self._device.assign(
                    slot, shelf
                )
            if state & IN_HOST:
                shelf = self._host_rule.used(self._low.shelf[slot], self._group[slot])
                self._low.move(slot, shelf) if listing & IN_HOST else self._low.assign(slot, shelf)
            elif listing & COLD and self._group[slot] == UNOWNED:
                self._low.move(slot, _COLD_SHELF)

    def pin(self, keys: Iterable[PageKey]) -> None:
        """Protects pages from eviction until they are unpinned as often. Skips unknown keys."""
        for key in keys:
            slot = self._slot_of.get(key)
            if slot is not None and self._pins[slot] < 65535:
                before = self._listing(slot)
                self._pins[slot] += 1
                self._pinned += 1
                self._relist(slot, before, 0)

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """Removes one pin from each page that has one. With none left it counts as just used."""
        for key in reversed(keys):
            slot = self._slot_of.get(key)
            if slot is not None and self._pins[slot]:
                self._pins[slot] -= 1
                self._pinned -= 1
                self._relist(slot, 0, self._listing(slot))
                self._forget_if_empty(slot)

    # --- owners -----------------------------------------------------------------------------------

    def claim(self, owner: str, keys: Iterable[PageKey], next_use: float = math.inf) -> None:
        """Sets an owner's pages, in prompt order, in place of its earlier ones.

        Pages that it keeps cost next to nothing, so a session's next turn costs only its new pages.
        """
        keys = tuple(dict.fromkeys(keys))
        number = self.owners.open(owner)
        old = self.owners.slots[number]
        found = tuple(map(self._slot_of.get, keys, repeat(NOWHERE)))
        same = common(old, found)
        self._leave(number, old[same:])
        fresh = self._join(number, keys[same:])
        self.owners.slots[number] = old[:same] + fresh
        self.owners.expect(number, next_use)
        if fresh or len(old) > same:
            self._claimed[owner] = None

    def expect(self, owner: str, next_use: float) -> None:
        """Sets the time of an owner's next run; infinity if unknown. Skips unknown owners."""
        number = self.owners.number(owner)
        if number is not None:
            self.owners.expect(number, next_use)

    def release(self, owner: str) -> None:
        """Removes an owner from the map."""
        number = self.owners.number(owner)
        if number is not None:
            self._leave(number, self.owners.slots[number])
            self.owners.close(number)

    # --- inside -----------------------------------------------------------------------------------

    def _join(self, number: int, keys: Sequence[PageKey]) -> tuple[int, ...]:
        into: dict[int, int] = {}
        pages: dict[int, int] = {}
        slots = []
        for key in reversed(keys):
            slot = self._slot_of.get(key) or self._add(key)
            slots.append(slot)
            if slot == NOWHERE:
                continue
            old = self._group[slot]
            if old not in into:
                into[old] = self.owners.with_owner(old, number)
            pages[old] = pages.get(old, 0) + 1
            if into[old] != old:
                self._regroup(slot, old, into[old])
        for old, count in pages.items():
            if old != into[old]:
                self.owners.moved(old, into[old], count)
        slots.reverse()
        return tuple(slots)

    def _leave(self, number: int, slots: Sequence[int]) -> None:
        into: dict[int, int] = {}
        pages: dict[int, int] = {}
        for slot in reversed(slots):
            old = self._group[slot]
            if slot == NOWHERE or (old in into and into[old] == old):
                continue
            if old not in into:
                into[old] = self.owners.without_owner(old, number)
            pages[old] = pages.get(old, 0) + 1
            if into[old] != old:
                self._regroup(slot, old, into[old])
            if into[old] == UNOWNED:
                self._forget_if_empty(slot)
        for old, count in pages.items():
            if old != into[old]:
                self.owners.moved(old, into[old], count)

    def _regroup(self, slot: int, old: int, new: int) -> None:
        state = self._state[slot]
        self._group[slot] = new
        if state:
            listing = 0 if self._pinned and self._pins[slot] else LISTING[state]
            if state & ON_DEVICE:
                shelf = self._device_rule.regrouped(self._device.shelf[slot], new)
                self._device.move(slot, shelf) if listing & ON_DEVICE else self._device.assign(
                    slot, shelf
                )
            if state & IN_HOST:
                shelf = self._host_rule.regrouped(self._low.shelf[slot], new)
                self._low.move(slot, shelf) if listing & IN_HOST else self._low.assign(slot, shelf)
            if listing == COLD and UNOWNED in (old, new):
                self._relist(slot, 0 if new == UNOWNED else COLD, listing if new == UNOWNED else 0)
        if old in self._changed:
            self._changed[new] = None

    def _set(self, slot: int, old: int, new: int) -> None:
        """Changes a page's state and shelves, and records that. The caller updates the counts."""
        group = self._group[slot]
        if group != UNOWNED:
            self._changed[group] = None
        self._state[slot] = new
        entered = new & ~old & SHELVED
        before, after = LISTING[old], LISTING[new]
        if group != UNOWNED:
            before, after = before & SHELVED, after & SHELVED
        if entered or before != after:
            if self._pinned and self._pins[slot]:
                before = after = 0
            self._relist(slot, before, after, entered)
        if not new:
            self._forget_if_empty(slot)

    def _listing(self, slot: int) -> int:
        """The shelves that a page is on: bits of device and host, or COLD."""
        if self._pins[slot]:
            return 0
        bits = LISTING[self._state[slot]]
        return 0 if bits == COLD and self._group[slot] != UNOWNED else bits

    def _relist(self, slot: int, before: int, after: int, entered: int = 0) -> None:
        """Takes a page off shelves and puts it on others. Shelves in both stay as they are."""
        gone, came = before & ~after, after & ~before
        if gone & ON_DEVICE:
            self._device.take(slot)
        if gone & (IN_HOST | COLD):
            self._low.take(slot)
        if entered & ON_DEVICE:
            self._device.assign(slot, self._device_rule.entered(self._group[slot]))
        if entered & IN_HOST:
            self._low.assign(slot, self._host_rule.entered(self._group[slot]))
        if came & ON_DEVICE:
            self._device.put(slot)
        if came & COLD:
            self._low.assign(slot, _COLD_SHELF)
        if came & (IN_HOST | COLD):
            self._low.put(slot)

    def _stamp(self, now: float) -> int:
        if self._base is None:
            self._base = now
        return max(0, min(int((now - self._base) * _TICKS_PER_S), 0xFFFFFFFF))

    def _add(self, key: PageKey) -> int:
        if len(self._slot_of) >= self._capacity:
            coldest = self._low.oldest(_COLD_SHELF)
            if coldest is None:
                return NOWHERE
            old = self._state[coldest]
            for tier in TIERS:
                self._resident[tier] -= old >> tier & 1
            self._set(coldest, old, 0)
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slot_of[key] = slot
        self._keys[slot] = key
        return slot

    def _grow(self) -> None:
        known = len(self._keys)
        more = min(max(_GROW, known // 8), self._capacity + 1 - known)
        self._keys.extend([_NO_KEY] * more)
        self._state.extend(bytes(more))
        self._pins.extend([0] * more)
        self._used.extend([0] * more)
        self._group.extend([0] * more)
        self._device.grow(more)
        self._low.grow(more)
        self._free.extend(range(known + more - 1, known - 1, -1))

    def _forget_if_empty(self, slot: int) -> None:
        if not self._state[slot] and self._group[slot] == UNOWNED and not self._pins[slot]:
            del self._slot_of[self._keys[slot]]
            self._keys[slot] = _NO_KEY
            self._free.append(slot)

    def _shelves(self, tier: Tier) -> tuple[Shelves, Rule]:
        if tier is Tier.DEVICE:
            return self._device, self._device_rule
        if tier is Tier.HOST:
            return self._low, self._host_rule
        raise ValueError(
            f"the map orders victims of device and host, not of {PLACES[tier]}: what holds "
            "those pages does that itself"
        )
