"""Owners of one folder whose disk takes no new byte: what siblings cannot learn of is not stored."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import pytest
from scripted import Scripted
from store_pages import Open, found, named, put

from sgl_kvtier.store.base import PutOutcome

PAGES, MORE = named(range(5)), named(range(5, 10))
pytestmark = pytest.mark.usefixtures("only_when_told")


class FullDisk(Scripted):
    """No file grows while `full`."""

    full = False

    def __init__(self) -> None:
        super().__init__(native=True)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.full and offset + sum(map(len, buffers)) > self.size(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, buffers, offset)


def test_pages_that_the_log_does_not_take_are_refused_and_not_found_until_it_does(
    owner: Open,
) -> None:
    env = FullDisk()
    first, second = owner(env=env), owner()
    put(first, PAGES)
    env.full = True
    for _ in range(2):  # as the log is lost, and once it is
        assert set(put(first, MORE)) == {PutOutcome.REFUSED}
        assert set(put(first, PAGES)) == {PutOutcome.KEPT}
    second.follow()
    assert (found(first, PAGES), found(first, MORE)) == (5, 0)
    assert (found(second, PAGES), found(second, MORE)) == (5, 0)
    env.full, env.seconds = False, 60
    assert set(put(first, MORE)) == {PutOutcome.STORED}
    second.follow()
    assert (found(first, MORE), found(second, MORE)) == (5, 5)


def test_what_was_put_on_a_full_disk_does_not_come_back_after_a_sibling_deleted_it(
    owner: Open,
) -> None:
    env, clock = FullDisk(), FullDisk()
    first, second = owner(env=env), owner(env=clock)
    env.ahead_s = clock.ahead_s = 3600
    put(first, PAGES)
    second.follow()
    env.ahead_s = clock.ahead_s = 0  # the numbers of its pages are ahead of the clock from now on
    env.full = True
    put(first, MORE)
    second.delete(list(MORE))
    first.follow()
    assert found(first, MORE) == found(second, MORE) == 0
    first.close()
    assert found(owner(), MORE) == 0
