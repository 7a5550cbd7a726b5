"""Owners of one folder whose disk takes no new byte: what siblings cannot learn of is not stored."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

import pytest
from store_pages import content, found, key, put

from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.engine import DiskStore

NBYTES = 5000
PAGES = {key(i): content(i, NBYTES) for i in range(5)}
MORE = {key(i): content(i, NBYTES) for i in range(5, 10)}
Open = Callable[..., DiskStore]
pytestmark = pytest.mark.usefixtures("only_when_told")


class FullDisk(Env):
    """No file grows while `full`. The clock of the host is `ahead_s` off, and `seconds` have
    passed.
    """

    native = True

    def __init__(self) -> None:
        self.full = False
        self.ahead_s = 0
        self.seconds = 0.0

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.full and offset + sum(map(len, buffers)) > self.size(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, buffers, offset)

    def wall_ns(self) -> int:
        return super().wall_ns() + self.ahead_s * 10**9

    def now(self) -> float:
        return super().now() + self.seconds


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


def test_a_store_without_siblings_stores_pages_that_its_log_does_not_take(owner: Open) -> None:
    env = FullDisk()
    alone = owner(env=env, alike="")
    put(alone, PAGES)
    env.full = True
    assert set(put(alone, MORE)) == {PutOutcome.STORED}
    assert found(alone, MORE) == 5


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
