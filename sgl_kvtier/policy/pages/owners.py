"""Owners: the requests and idle sessions that will use pages, each with the time of its next run.

Pages with exactly the same owners are in one group. So each page needs only one small number, and a
single assignment changes the next use of a hundred thousand pages. Group 0: no known owner.
"""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

NOWHERE: Final = 0
"""The slot that stands for pages for which the map has no room. No page ever uses it."""
UNOWNED: Final = 0
"""The group of pages without an owner."""


_SESSION: Final = "session "


def owner_of(session: str) -> str:
    """The owner name of an idle session."""
    return _SESSION + session


def session_of(owner: str) -> str | None:
    """The session of an owner name; None if the owner is a request."""
    return owner.removeprefix(_SESSION) if owner.startswith(_SESSION) else None


class Owners:
    """Owners by name and by small number, and the groups of pages that they share. Numbers are
    reused after `close`. One thread. Memory: about 8 bytes per page and owner, and a few hundred
    bytes per owner and group.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._free: list[int] = []
        self._turns = array("d")
        self.slots: list[tuple[int, ...]] = []
        """The pages of each owner by number, as slots of the map in prompt order."""
        self._groups_of: list[dict[int, None]] = []
        self._members: list[tuple[int, ...]] = [()]
        self._pages: list[int] = [0]
        self._group_of: dict[tuple[int, ...], int] = {(): UNOWNED}
        self._free_groups: list[int] = []
        self._order: list[int] = []
        self._farthest: _Begun | None = None
        self._aside: _Begun | None = None
        self.asked_aside = False
        """While true, reading keeps the order among equal next runs as the last step had it."""

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def number(self, name: str) -> int | None:
        """The owner's number, or None if it is not open."""
        return self._numbers.get(name)

    def name(self, number: int) -> str:
        """The name of a number in use."""
        return self._names[number]

    def open(self, name: str) -> int:
        """The owner's number. Opens a new owner, whose next run is unknown, if needed."""
        number = self._numbers.get(name)
        if number is not None:
            return number
        if self._free:
            number = self._free.pop()
            self._names[number] = name
        else:
            number = len(self._names)
            self._names.append(name)
            self._turns.append(math.inf)
            self.slots.append(())
            self._groups_of.append({})
        self._numbers[name] = number
        self._turns[number] = math.inf
        self._order.insert(0, number)
        return number

    def close(self, number: int) -> None:
        """Removes an owner. No page may be left in its groups."""
        assert not self._groups_of[number], f"owner {self._names[number]} still has pages"
        del self._numbers[self._names[number]]
        self._names[number] = ""
        self.slots[number] = ()
        self._free.append(number)
        self._order.remove(number)

    def expect(self, number: int, turn: float) -> None:
        """Sets its next run, in seconds of the executor's clock; infinity if unknown."""
        if self._turns[number] != turn:
            self._turns[number] = turn
            self._farthest = self._aside = None

    def turn(self, number: int) -> float:
        """The time of its next run."""
        return self._turns[number]

    def next_use(self, group: int) -> float:
        """The earliest next run of a group's owners; infinity for group 0."""
        return min(map(self._turns.__getitem__, self._members[group]), default=math.inf)

    def members(self, group: int) -> tuple[int, ...]:
        """The owners of a group, as ascending numbers."""
        return self._members[group]

    # --- groups: kept by the map, which knows the pages -------------------------------------------

    def with_owner(self, group: int, number: int) -> int:
        """The group of a page of `group` once this owner owns it too."""
        members = self._members[group]
        if number in members:
            return group
        wanted = list(members)
        insort(wanted, number)
        return self._group(tuple(wanted))

    def without_owner(self, group: int, number: int) -> int:
        """The group of a page of `group` once this owner no longer owns it."""
        members = self._members[group]
        if number not in members:
            return group
        return self._group(tuple(other for other in members if other != number))

    def moved(self, old: int, new: int, pages: int) -> None:
        """Moves a number of pages from one group to another. A group without pages is removed."""
        if new != UNOWNED:
            self._pages[new] += pages
        if old != UNOWNED:
            self._pages[old] -= pages
            if not self._pages[old]:
                self._end(old)

    def _group(self, members: tuple[int, ...]) -> int:
        group = self._group_of.get(members)
        if group is not None:
            return group
        if self._free_groups:
            group = self._free_groups.pop()
            self._members[group] = members
        else:
            group = len(self._members)
            self._members.append(members)
            self._pages.append(0)
        self._group_of[members] = group
        self._farthest = self._aside = None
        for number in members:
            self._groups_of[number][group] = None
        return group

    def _end(self, group: int) -> None:
        members = self._members[group]
        del self._group_of[members]
        self._farthest = self._aside = None
        for number in members:
            del self._groups_of[number][group]
        self._members[group] = ()
        self._free_groups.append(group)

    # --- order ------------------------------------------------------------------------------------

    def farthest_first(self) -> Iterable[tuple[int, float]]:
        """(group, next use) of every group with an owner, the latest next use first. Invalid after
        a change.

        Among equal times the group with fewer owners comes first: it holds the ends of prefixes,
        not their beginnings. Computed as far as it is read, and cached until a time or a group
        changes.
        """
        if self._farthest is None and self.asked_aside:
            if self._aside is None:
                self._aside = _Begun(
                    self._walk(sorted(self._order, key=self._turns.__getitem__, reverse=True))
                )
            return self._aside
        if self._farthest is None:
            # Nearly sorted already, for which list.sort is fastest. The sort is stable: equal times
            # keep their order.
            self._order.sort(key=self._turns.__getitem__, reverse=True)
            self._farthest = _Begun(self._walk(tuple(self._order)))
        return self._farthest

    def _walk(self, order: Sequence[int]) -> Iterator[tuple[int, float]]:
        seen: dict[int, int] = {}
        for number in order:
            turn = self._turns[number]
            shared = []
            for group in self._groups_of[number]:
                owners = len(self._members[group])
                if owners == 1:
                    yield group, turn
                    continue
                # A group's next use is that of the owner that runs first, the last one in this
                # order.
                seen[group] = count = seen.get(group, 0) + 1
                if count == owners:
                    shared.append((owners, group))
            for _, group in sorted(shared) if len(shared) > 1 else shared:
                yield group, turn


class _Begun:
    """The items of an iterator, read only as far as needed and kept for the next reader."""

    def __init__(self, rest: Iterator[tuple[int, float]]) -> None:
        self._rest = rest
        self._read: list[tuple[int, float]] = []

    def __iter__(self) -> Iterator[tuple[int, float]]:
        place = 0
        while True:
            while place < len(self._read):
                yield self._read[place]
                place += 1
            more = next(self._rest, None)
            if more is None:
                return
            self._read.append(more)


def common(old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """Number of leading slots that are the same page."""
    if new[: len(old)] == old and NOWHERE not in old:
        return len(old)
    return next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b or a == NOWHERE),
        min(len(old), len(new)),
    )
