"""Which page of a tier is evicted first: the rules LRU and NextUse, and the shelves that keep the
order.

A shelf is a numbered LRU list. A rule puts each page on a shelf and orders the shelves; within a
shelf the least recently used page is evicted first. Nothing is sorted or searched per page, so
finding a victim costs the same among a thousand pages and a million.

    LRU       one shelf
    NextUse   one shelf per group of owners; the shelf whose owners run latest is evicted first
              (TierKV section 3.4; CachedAttention and KVFlow evict in the same order)

How to write your own, and use it in a server: examples/own_eviction.py.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from typing import Final, Protocol, cast

from sgl_kvtier.named_class import lacking_method, load_class
from sgl_kvtier.policy.pages.owners import UNOWNED, Owners


class Rule(Protocol):
    """The order in which pages are evicted. Methods are pure: `group` names the owners of a page
    (see Owners), and shelves are whole numbers >= 0.
    """

    def entered(self, group: int) -> int:
        """The shelf for a page that was added to the tier."""

    def used(self, shelf: int, group: int) -> int:
        """The new shelf for a page on `shelf` that was used."""

    def regrouped(self, shelf: int, group: int) -> int:
        """The new shelf for a page on `shelf` whose owners are now `group`."""

    def order(self, shelves: KeysView[int], owners: Owners) -> Iterable[tuple[int, float]]:
        """(shelf, next use of its pages) of the shelves that hold pages, in order of eviction;
        infinity if the rule does not know the next use.

        Shelves that it omits are never emptied. Most callers read only the first few. Pages may
        move while the result is read, so it must iterate over a copy of `shelves`. Shelf -1 is the
        map's.
        """


class LRU:
    """Least recently used first."""

    def entered(self, group: int) -> int:
        return 0

    def used(self, shelf: int, group: int) -> int:
        return shelf

    def regrouped(self, shelf: int, group: int) -> int:
        return shelf

    def order(self, shelves: KeysView[int], owners: Owners) -> Iterable[tuple[int, float]]:
        return [(0, math.inf)] if 0 in shelves else []


class NextUse:
    """The farthest next run first: pages without a known owner, then those that run latest."""

    def entered(self, group: int) -> int:
        return group

    def used(self, shelf: int, group: int) -> int:
        return group

    def regrouped(self, shelf: int, group: int) -> int:
        return group

    def order(self, shelves: KeysView[int], owners: Owners) -> Iterator[tuple[int, float]]:
        if UNOWNED in shelves:
            yield UNOWNED, math.inf
        for group, turn in owners.farthest_first():
            if group in shelves:
                yield group, turn


_NAMED: Final[Mapping[str, Callable[[], Rule]]] = {
    "auto": LRU,  # a server chooses a rule before; without one, LRU as in SGLang
    "lru": LRU,
    "next-use": NextUse,
}
_ASKED: Final[Mapping[str, int]] = {"entered": 1, "used": 2, "regrouped": 2, "order": 2}
"""The methods of a Rule, each with its number of arguments."""


def eviction_of(name: str) -> Callable[[], Rule]:
    """The constructor of the rule that `policy.eviction` names; each tier has its own rule. Raises
    ConfigError if there is no such class, or if it does not fit.
    """
    if name in _NAMED:
        return _NAMED[name]
    return load_class("policy.eviction", name, _unfit)


def _unfit(made: object) -> str | None:
    return lacking_method(made, _ASKED, Rule)


class _Row(Protocol):
    """An integer array with objects as items: compiled code would box an int at each access."""

    def __getitem__(self, slot: object, /) -> object: ...
    def __setitem__(self, slot: object, value: object, /) -> None: ...


class Shelves:
    """Pages (slots of the map) on numbered shelves. Each shelf is a ring from the least to the most
    recently used page. 12 bytes per slot; every operation takes constant time. A slot that is taken
    off keeps its shelf number.
    """

    def __init__(self) -> None:
        self.shelf = array("i")
        self._rings = array("I"), array("I")
        self._shelf = cast(_Row, self.shelf)
        self._before, self._after = cast(_Row, self._rings[0]), cast(_Row, self._rings[1])
        self._oldest: dict[object, object] = {}
        self._pages: dict[object, int] = {}
        self.total = 0

    def grow(self, slots: int) -> None:
        """Makes room for `slots` more slots."""
        for row in (self.shelf, *self._rings):
            row.extend([0] * slots)

    @property
    def names(self) -> KeysView[int]:
        """Numbers of the shelves that hold pages."""
        return cast(KeysView[int], self._oldest.keys())

    def pages(self, shelf: int) -> int:
        """Number of pages on a shelf."""
        return self._pages.get(shelf, 0)

    def oldest(self, shelf: int) -> int | None:
        """The least recently used slot of a shelf, or None."""
        return cast("int | None", self._oldest.get(shelf))

    def put(self, slot: int) -> None:
        """Puts a slot on its shelf, as the most recently used one. It must be on no shelf."""
        this: object = slot
        shelf, before, after = self._shelf[this], self._before, self._after
        self.total += 1
        first = self._oldest.get(shelf)
        if first is None:
            self._oldest[shelf] = before[this] = after[this] = this
            self._pages[shelf] = 1
            return
        last = before[first]
        after[last] = before[first] = this
        before[this] = last
        after[this] = first
        self._pages[shelf] += 1

    def take(self, slot: int) -> None:
        """Takes a slot off its shelf."""
        this: object = slot
        shelf, after = self._shelf[this], self._after[this]
        self.total -= 1
        if after == this:
            del self._oldest[shelf], self._pages[shelf]
            return
        before = self._before[this]
        self._after[before] = after
        self._before[after] = before
        self._pages[shelf] -= 1
        if self._oldest[shelf] == this:
            self._oldest[shelf] = after

    def assign(self, slot: int, shelf: int) -> None:
        """Sets the shelf of a slot that is on no shelf, for a later `put`."""
        self.shelf[slot] = shelf

    def move(self, slot: int, shelf: int) -> None:
        """Moves a slot to another shelf, as the most recently used one."""
        if self.shelf[slot] == shelf and self._oldest[shelf] == slot:
            # A ring starts at its oldest slot. Starting at the next one makes this slot the newest.
            self._oldest[shelf] = self._after[slot]
            return
        self.take(slot)
        self.shelf[slot] = shelf
        self.put(slot)

    def walk(self, shelf: int, most: int) -> list[int]:
        """Up to `most` slots of a shelf, the least recently used first."""
        first = self._oldest.get(shelf)
        if first is None or most <= 0:
            return []
        slots, after = [first], self._after
        slot = after[first]
        while slot != first and len(slots) < most:
            slots.append(slot)
            slot = after[slot]
        return cast(list[int], slots)
