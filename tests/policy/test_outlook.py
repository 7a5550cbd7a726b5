"""What a waiting request is predicted to take, behind the restorations before it in the queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from virtual_hands import COST, ENGINE, profile_of

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import ChunkStarted, RequestFinished, RestoreOffered, StepView
from sgl_kvtier.policy.restore.forecast import Outlook
from sgl_kvtier.policy.restore.offers import Offers
from sgl_kvtier.policy.restore.planner import free
from sgl_kvtier.policy.restore.restorations import Restoration, Restorations
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Span, Tier

PAGES, SUFFIX = 256, 64
SOURCES = ((Span(0, PAGES), Tier.STORAGE),)
TOKENS = PAGES * ENGINE.page_tokens
COMPUTE_S = COST.range_seconds(0, TOKENS, ENGINE.chunk_tokens)
VIEW = StepView(0.0, ("a",), prefill_tokens=512)


def outlook(*restoring: str) -> Outlook:
    """Of a planner that restores these, each as much to compute as to load."""
    profile = profile_of(COST, TOKENS / ENGINE.page_tokens * ENGINE.page_bytes / COMPUTE_S)
    known = Restorations(PolicyConfig(), ENGINE, profile, Rules())
    made = Outlook(known)
    offers = Offers(known, made, free)
    for rid in restoring:
        offers.add(RestoreOffered(rid, 0.0, TOKENS + SUFFIX, 0, PAGES, SOURCES))
        offers.answer(replace(VIEW, waiting=(rid,)))
    return made


def asked(made: Outlook, *waiting: str, **view: object) -> tuple[float, float]:
    """Seconds until request a is computed, and until it is loaded."""
    item = Restoration("a", 9, TOKENS + SUFFIX, TwoPointer(0, PAGES), SOURCES)
    forecast = made.forecast_in_queue(replace(VIEW, waiting=waiting, **view), "a")  # type: ignore[arg-type]
    return forecast.compute_only(item), forecast.load_only(item)


def test_one_that_is_first_has_compute_and_links_to_itself() -> None:
    assert asked(outlook(), "a") == pytest.approx((COMPUTE_S, COMPUTE_S))


def test_one_behind_a_restoration_gets_compute_and_links_when_that_is_done_with_them() -> None:
    compute_s, load_s = asked(outlook("b"), "b", "a")
    suffix_s = COST.range_seconds(TOKENS, SUFFIX, ENGINE.chunk_tokens)
    assert compute_s == pytest.approx(1.5 * COMPUTE_S + suffix_s, rel=0.1), "half and its suffix"
    assert load_s == pytest.approx(1.5 * COMPUTE_S, rel=0.1), "half of it is loaded"


def test_every_restoration_before_it_counts() -> None:
    compute_s, load_s = asked(outlook("b", "c"), "b", "c", "a")
    assert compute_s > asked(outlook("b"), "b", "a")[0] + 0.3 * COMPUTE_S
    assert load_s > asked(outlook("b"), "b", "a")[1] + 0.3 * COMPUTE_S


def test_restorations_behind_it_in_the_queue_do_not_count() -> None:
    assert asked(outlook("b"), "a", "b") == asked(outlook(), "a", "b")


def test_the_slots_holder_counts_wherever_it_stands() -> None:
    assert asked(outlook("b"), "a", slot="b")[0] > 1.4 * COMPUTE_S


def test_one_that_is_not_in_the_queue_yet_is_behind_all() -> None:
    assert asked(outlook("b"), "b") == asked(outlook("b"), "b", "a")


def test_fresh_prefill_before_it_takes_compute_alone() -> None:
    compute_s, load_s = asked(outlook(), "a", fresh_tokens=512)
    fresh_s = COST.range_seconds(0, 512, ENGINE.chunk_tokens)
    assert (compute_s, load_s) == pytest.approx((COMPUTE_S + fresh_s, COMPUTE_S))


def test_fresh_prefill_behind_it_in_the_queue_does_not_count() -> None:
    behind = {"fresh_tokens": 512, "fresh": (0, 512)}
    assert asked(outlook(), "a", "f", **behind) == asked(outlook(), "a")
    assert asked(outlook(), "f", "a", fresh_tokens=512, fresh=(512, 0))[0] > COMPUTE_S


def test_offers_of_one_step_are_answered_in_the_order_of_the_queue() -> None:
    profile = profile_of(COST, TOKENS / ENGINE.page_tokens * ENGINE.page_bytes / COMPUTE_S)
    known = Restorations(PolicyConfig(), ENGINE, profile, Rules())
    offers = Offers(known, Outlook(known), free)
    for rid in ("late", "early"):
        offers.add(RestoreOffered(rid, 0.0, TOKENS + SUFFIX, 0, PAGES, SOURCES))
    starts = offers.answer(replace(VIEW, waiting=("early", "late")))
    assert [start.rid for start in starts] == ["early", "late"]


@pytest.mark.parametrize(("tokens", "pages"), [(1.0, 1), (1.5, 2), (2.0, 2)])
def test_a_page_that_a_chunk_ends_in_belongs_to_compute(tokens: float, pages: int) -> None:
    known = Restorations(PolicyConfig(), ENGINE, profile_of(COST, 1e9), Rules())
    item = Restoration("a", 1, TOKENS + SUFFIX, TwoPointer(0, PAGES), SOURCES)
    known.begin(item)
    known.observe(ChunkStarted("a", Span(0, int(tokens * ENGINE.page_tokens)), 0.0))
    assert item.pointer.front == pages


def test_a_link_has_no_reader_left_when_its_restorations_have_ended() -> None:
    known = Restorations(PolicyConfig(), ENGINE, profile_of(COST, 1e9), Rules())
    for rid in "ab":
        known.begin(Restoration(rid, 1, TOKENS + SUFFIX, TwoPointer(0, PAGES), SOURCES))
    assert sum(known.readers.values()) == 2
    known.observe(RequestFinished("a", 0.0))
    assert sum(known.readers.values()) == 1
    known.observe(RequestFinished("b", 0.0))
    assert sum(known.readers.values()) == 0
