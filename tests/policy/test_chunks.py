"""The compute end of one restoration between two steps."""

from __future__ import annotations

from virtual_hands import COST, ENGINE, profile_of

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import ChunkStarted, Compute, RestoreOffered, StepView, TransferDone
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.restore.ends import Chunks
from sgl_kvtier.policy.restore.forecast import Outlook
from sgl_kvtier.policy.restore.restorations import Restoration, Restorations
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link, Span, Tier

PAGES, PAGE = 256, ENGINE.page_tokens
SOURCES = ((Span(0, PAGES), Tier.STORAGE),)
TOKENS = PAGES * PAGE
VIEW = StepView(0.0, ("a",), prefill_tokens=512)


def test_compute_that_waits_goes_on_only_when_nothing_is_in_flight() -> None:
    known = Restorations(PolicyConfig(), ENGINE, profile_of(COST, 1e9), Rules())
    chunks = Chunks(known, Outlook(known))
    item = Restoration("a", 1, TOKENS + 64, TwoPointer(0, PAGES), SOURCES)
    known.begin(item)
    waits = Compute("a", Span(0, 0), 0)
    loading = item.pointer.take_back(4)
    assert chunks.unstuck(waits, VIEW) == waits
    item.pointer.lose(loading)
    assert chunks.unstuck(waits, VIEW).tokens == 512


def test_loads_are_taken_back_once_and_not_in_every_step_until_it_is_told() -> None:
    """The link is a hundred times slower than was known when its loads were handed out."""
    rate = PAGES * ENGINE.page_bytes / COST.range_seconds(0, TOKENS, ENGINE.chunk_tokens)
    one = make_planner(PolicyConfig(restore="both"), ENGINE, profile_of(COST, 20 * rate))
    one.observe(RestoreOffered("a", 0.0, TOKENS + 64, 0, PAGES, SOURCES))
    plan = one.step(VIEW)
    loads = sorted((load.span for load in plan.loads), key=lambda span: span.start)
    (compute,) = plan.computes or (Compute("a", Span(0, 0), 0),)
    now, low = 1.0, loads[0].start
    if low:
        one.observe(ChunkStarted("a", Span(0, low * PAGE), 0.0))
    for span in loads[-3:]:
        nbytes = len(span) * ENGINE.page_bytes
        one.observe(TransferDone("a", Link.STORAGE_TO_DEVICE, span, nbytes, nbytes / rate * 5, now))
    view = StepView(now, ("b", "a"), prefill_tokens=512, slot="a" if low else None)
    first = one.step(view)
    assert first.cancels, (compute, loads)
    assert one.step(view).cancels == ()
