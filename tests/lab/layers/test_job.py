"""What of a prefix has come, and what is worth waiting for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sgl_kvtier.lab.layers.job import Job, best_cut
from sgl_kvtier.store.base import PageRead, ReadOutcome
from sgl_kvtier.store.io.jobs import OrderedJob
from sgl_kvtier.types import PageKey, Span


class Storage:
    """Pages come when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[OrderedJob] = []
        self.order: list[Sequence[PageRead]] = []

    def begin_reads(
        self, pages: Sequence[PageRead], on_page: Callable[[int, ReadOutcome], None]
    ) -> OrderedJob:
        self.order.append(pages)
        self.jobs.append(OrderedJob(len(pages), None, on_page))
        return self.jobs[-1]

    def come(self, pages: int, outcome: ReadOutcome = ReadOutcome.OK, job: int = 0) -> None:
        for _ in range(pages):
            self.jobs[job].finish([(index, outcome) for index in self.jobs[job].begin()])


def reads(span: Span, parts: int) -> list[list[PageRead]]:
    return [
        [PageRead(PageKey(bytes([page])), [], str(part)) for part in range(parts)]
        for page in range(span.start, span.stop)
    ]


def begun(span: Span, parts: int, *blocks: Span) -> tuple[Job, Storage]:
    job, storage = Job("r", span, None, parts), Storage()
    for block in blocks or (span,):
        assert job.read(storage, block, reads(block, parts))
    return job, storage


def test_the_top_part_of_all_pages_is_read_first() -> None:
    span = Span(3, 6)
    job, storage = begun(span, 2)
    assert [(read.key[0], read.pool) for read in storage.order[0]] == [
        *((page, "1") for page in (3, 4, 5)),
        *((page, "0") for page in (3, 4, 5)),
    ]
    storage.come(3)
    assert job.all_there(span, 1)
    assert not job.all_there(span, 0)
    storage.come(3)
    assert job.all_there(span, 0)


def test_a_lost_part_matters_to_its_pages_and_to_cuts_below_it_alone() -> None:
    span = Span(0, 4)
    job, storage = begun(span, 2)
    storage.come(5)
    storage.come(1, ReadOutcome.CORRUPT)  # part 0 of page 1
    assert job.is_lost(span, 0)
    assert not job.is_lost(span, 1)
    assert not job.is_lost(Span(2, 4), 0)
    assert not job.wait(span, 0, 60), "nothing is waited for that will not come"


def test_waiting_ends_with_the_last_page() -> None:
    span = Span(0, 2)
    job, storage = begun(span, 2)
    threading.Timer(0.05, storage.come, [2]).start()
    assert job.wait(span, 1, 60)


def test_nothing_is_predicted_before_a_page_has_come() -> None:
    span = Span(0, 2)
    job, storage = begun(span, 2)
    assert job.wait_s(span, 1) == float("inf")
    storage.come(2)
    assert job.wait_s(span, 1) == 0.0
    assert 0 < job.wait_s(span, 0) < float("inf")


def test_blocks_below_the_front_are_not_read_any_further() -> None:
    job, storage = begun(Span(0, 4), 2, Span(0, 2), Span(2, 4))
    job.cancel(below=2)
    assert storage.jobs[0].done
    assert not storage.jobs[1].done
    assert not job.over
    job.cancel()
    assert job.over
    assert job.is_lost(Span(0, 4), 0)


class Copies:
    """An event that has not come yet."""

    come = False

    def query(self) -> bool:
        return self.come

    def synchronize(self) -> None:
        self.come = True


def test_host_pages_are_in_use_until_they_are_copied() -> None:
    job, storage = begun(Span(0, 1), 1)
    storage.come(1)
    copies: Any = Copies()
    job.copied = copies
    assert not job.over
    assert job.wait_over(1)


@pytest.mark.parametrize(
    ("waits_s", "part_s", "tail_share", "more"),
    [
        ([0.0, 0.0, 0.0], 1.0, 0.0, 0),  # all there
        ([8.0, 4.0, 0.0], 1.0, 0.0, 2),  # the link is slower than computing all
        ([1.0, 0.5, 0.0], 9.0, 0.0, 0),  # computing is slower
        ([4.0, 2.0, 0.0], 2.0, 0.0, 1),  # balanced
        ([2.1, 1.3, 0.0], 1.0, 0.9, 2),  # the suffix costs nearly as much: compute all
        ([2.1, 1.3, 0.0], 1.0, 0.0, 1),
        ([float("inf")] * 2 + [0.0], 1.0, 0.0, 2),  # nothing known
    ],
)
def test_the_cut_is_where_both_ends_meet(
    waits_s: list[float], part_s: float, tail_share: float, more: int
) -> None:
    assert best_cut(waits_s, part_s, tail_share) == more
