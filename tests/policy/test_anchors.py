"""Restorations whose end needs windows or a state that come with the last pages: what has landed is
attached up to that end only.
"""

from __future__ import annotations

import pytest
from virtual_hands import COST, ENGINE, best_seconds, profile_of, restore

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.types import Span

PREFIX, PAGES = 4096, 256
RATE = 65e6
"""Bytes per second at which loading the prefix takes about as long as computing it."""
BOTH = PolicyConfig(restore="both", load_tokens=16)
PROFILE = profile_of(COST, RATE)


def run(**how):
    return restore(PREFIX, RATE, config=BOTH, profile=PROFILE, **how)


def landed(pointer, span):
    while pointer.free_in(span):
        pointer.land(pointer.take_back(len(span), span))


def test_nothing_is_attached_before_all_up_to_the_end_has_landed():
    pointer = TwoPointer(0, 10, anchor=2)
    landed(pointer, Span(0, 4))
    assert not pointer.landed_run()
    assert pointer.barrier() == 0
    landed(pointer, Span(4, 10))
    assert pointer.landed_run() == Span(0, 10)


def test_a_front_within_the_anchor_attaches_what_has_landed():
    pointer = TwoPointer(0, 10, anchor=4)
    landed(pointer, Span(6, 8))
    pointer.take_front(6)
    assert pointer.landed_run() == Span(6, 8)
    pointer.attach(Span(6, 8))
    assert pointer.front == 8


def test_pages_before_a_lost_one_are_computed_whether_they_landed_or_not():
    pointer = TwoPointer(0, 10, anchor=2)
    pointer.take_back(1)
    landed(pointer, Span(3, 9))
    pointer.take_back(1, Span(2, 3))
    assert pointer.lose(Span(9, 10)) == 1
    assert pointer.lost_in(Span(0, 10)) == 10
    assert pointer.land(Span(2, 3)) == 0
    assert pointer.barrier() == 10


def test_pages_after_a_lost_one_are_attached_once_it_is_computed():
    pointer = TwoPointer(0, 10, anchor=3)
    landed(pointer, Span(8, 10))
    pointer.take_back(1)
    pointer.lose(Span(7, 8))
    assert pointer.take_front(10) == Span(0, 8)
    assert pointer.landed_run() == Span(8, 10)


def test_without_an_anchor_a_lost_page_is_lost_alone():
    pointer = TwoPointer(0, 4)
    landed(pointer, Span(0, 3))
    pointer.take_back(1)
    pointer.lose(Span(3, 4))
    assert pointer.landed_run() == Span(0, 3)


def test_both_ends_meet_in_one_jump_to_the_end():
    out = run(anchor_pages=8, anchor_bytes=8 * ENGINE.page_bytes)
    assert out.spliced == [Span(out.spliced[0].start, PAGES)]
    assert 0 < out.spliced[0].start < PAGES
    assert out.seconds < 1.15 * best_seconds(PREFIX, 64, RATE)


def test_a_larger_anchor_leaves_more_to_compute():
    starts = [
        run(anchor_pages=1, anchor_bytes=pages * ENGINE.page_bytes).spliced[0].start
        for pages in (0, 64, 128)
    ]
    assert starts == sorted(starts)
    assert starts[0] + 16 < starts[-1]


@pytest.mark.parametrize("lost", [255, 250, 128, 40])
def test_a_prefix_with_a_lost_page_comes_through(lost):
    out = run(anchor_pages=8, anchor_bytes=ENGINE.page_bytes, failing=frozenset({lost}))
    assert all(span.stop == PAGES or span.start >= PAGES - 8 for span in out.spliced)
    covered = [(chunk.start, chunk.stop) for chunk in out.chunks]
    covered += [(span.start * 16, span.stop * 16) for span in out.spliced]
    starts, stops = zip(*sorted(covered), strict=True)
    assert (*starts, PREFIX + 64) == (0, *stops)


def test_what_lies_before_a_hole_is_not_loaded():
    out = run(anchor_pages=8, anchor_bytes=1, holes=frozenset({100}))
    assert all(span.start > 100 for span in out.loads)
    assert len(out.spliced) == 1
