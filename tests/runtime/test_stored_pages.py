"""What storage has behind a missing page: looked up on every rank, agreed on with SGLang's own
reduction, and offered with its holes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from plain_request import PLAIN

from sgl_kvtier.policy.messages import RestoreOffered
from sgl_kvtier.runtime.restore import offers as offers_room
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.restore.offers import Offers
from sgl_kvtier.runtime.restore.offers import stored_of as found
from sgl_kvtier.runtime.sglang.stored_pages import StoredPages
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.runtime.step.tracked import Requests, Stored
from sgl_kvtier.types import PageKey, Span, Tier

PAGE = 4
NAMES = [f"{number:064x}" for number in range(10)]
KEYS = [PageKey(bytes.fromhex(name)) for name in NAMES]


class Handle(NamedTuple):
    """SGLang's name of a request."""

    rid: str


R = Handle("r")


class Backend:
    """A store with these pages of `NAMES`; it notes what it is asked."""

    begin_read = None

    def __init__(self, pages: Sequence[int], shared: Sequence[int] = ()) -> None:
        self.pages = pages
        self.shared = shared
        self.asked: list[list[str]] = []

    @property
    def shares(self) -> bool:
        return len(self.shared) > 0

    def stored(self, names: list[str]) -> list[Tier | None]:
        self.asked.append(names)
        return [self._tier(NAMES.index(name)) for name in names]

    def _tier(self, page: int) -> Tier | None:
        if page in self.pages:
            return Tier.STORAGE
        return Tier.REMOTE if page in self.shared else None


class Controller:
    """SGLang's, as far as it queries storage: another rank gives `other` into each reduction."""

    page_size = PAGE

    def __init__(self, backend: Any, other: Sequence[int] | None = None) -> None:
        self.storage_backend = SimpleNamespace(_backend=backend)
        self.prefetch_hits_sync_groups: list[Any] = []
        self.other_groups: list[Any] = []
        self.other = other
        self.reduced: list[list[int]] = []

    def _sync_prefetch_hit_query(self, operation: Any, hit_tokens: int) -> int:
        packed = torch.tensor([hit_tokens, 99], dtype=torch.int)
        self._all_reduce(packed, "min", self.prefetch_hits_sync_groups)
        return int(packed[0])

    def _all_reduce(self, data: torch.Tensor, op: Any, groups: Any) -> None:
        self.reduced.append(data.tolist())
        if self.other is not None and groups is self.prefetch_hits_sync_groups:
            data.copy_(torch.minimum(data, torch.tensor(self.other, dtype=data.dtype)))


def operation(names: Sequence[str] | None = NAMES, start: int = 0) -> Any:
    """A question for all pages of `NAMES`, before the answer."""
    return SimpleNamespace(
        token_ids=range(len(NAMES) * PAGE + 3),
        all_hash_values=names,
        hash_value=[],
        pool_transfers=None,
        storage_start=start * PAGE,
        storage_hit_count=0,
        handle=R,
        is_terminated=lambda: False,
    )


def ask(controller: Controller, one: Any, hit: int, alone: bool = True) -> int:
    """What SGLang's thread does with a hit of so many pages; the agreed hit in pages."""
    if controller._sync_prefetch_hit_query.__func__ is Controller._sync_prefetch_hit_query:
        StoredPages(controller, alone)
    one.storage_hit_count = controller._sync_prefetch_hit_query(one, hit * PAGE)
    one.hash_value = NAMES[: one.storage_hit_count // PAGE]
    return int(one.storage_hit_count) // PAGE


def on_disk(start: int, pages: int, *runs: tuple[int, int]) -> Stored:
    sources = tuple((Span(*run), Tier.STORAGE) for run in runs)
    return Stored(start, tuple(KEYS[:pages]), sources)


@pytest.mark.parametrize(
    ("stored", "hit", "asked", "expected"),
    [
        pytest.param(
            [0, 1, 4, 5, 7], 2, [NAMES[2:]], (8, (0, 2), (4, 6), (7, 8)), id="behind a gap, known ones not asked for"
        ),
        pytest.param(range(10), 10, [], (10, (0, 10)), id="no gap: what SGLang found"),
        pytest.param([0, 1], 2, [NAMES[2:]], (2, (0, 2)), id="nothing behind the gap"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sides", [[], ["draft"]], ids=["KV alone", "side pools at their slots"])
def test_pages_behind_the_first_missing_one_are_found(stored, hit, asked, expected, sides):
    backend, one = Backend(stored), operation()
    one.pool_transfers = [SimpleNamespace(name=name) for name in sides] or None
    assert ask(Controller(backend), one, hit) == hit
    assert backend.asked == asked
    assert found(one, hit * PAGE, PAGE) == on_disk(0, *expected)


def test_pages_that_the_tree_has_are_counted_before_those_that_are_asked_for():
    one = operation(start=3)
    assert ask(Controller(Backend([0, 1, 4, 5, 7])), one, 2) == 2
    assert found(one, 2 * PAGE, PAGE) == on_disk(3, 8, (3, 5), (7, 9), (10, 11))


def test_ranks_agree_on_the_pages_that_all_of_them_have():
    other = [1 * PAGE, 99, 2, 0, 0, 2, 2, 2, 2, 2, 2, 0]
    controller, one = Controller(Backend([0, 1, 4, 5, 7, 9]), other), operation()
    assert ask(controller, one, 2, alone=False) == 1
    assert controller.reduced == [[2 * PAGE, 99, 2, 2, 0, 0, 2, 2, 0, 2, 0, 2]]
    assert found(one, PAGE, PAGE) == on_disk(0, 8, (0, 1), (4, 6), (7, 8))


def test_ranks_agree_on_the_pages_that_all_of_them_have_on_their_own_disk(monkeypatch):
    """Other servers share all of them; the other rank has the last ones on its disk alone."""
    monkeypatch.setattr(offers_room, "_SHORT", 1)
    other = [10 * PAGE, 99, 2, 2, 2, 1, 1, 1, 1, 2, 2, 2]
    backend, one = Backend(range(5), range(10)), operation()
    controller = Controller(backend, other)
    assert ask(controller, one, 10, alone=False) == 10
    assert backend.asked == [NAMES], "those of the hit may be elsewhere"
    assert controller.reduced == [[10 * PAGE, 99, *[2] * 5, *[1] * 5]]
    assert found(one, 10 * PAGE, PAGE).sources == (
        (Span(0, 3), Tier.STORAGE),
        (Span(3, 10), Tier.REMOTE),
    )


def test_a_page_that_went_after_it_was_found_is_in_the_hit_all_the_same():
    backend, one = Backend([0], [0]), operation()
    assert ask(Controller(backend), one, 2) == 2
    assert found(one, 2 * PAGE, PAGE).sources == ((Span(0, 2), Tier.STORAGE),)


def test_a_few_pages_of_one_tier_are_no_source_of_their_own():
    backend, one = Backend([0, 1, 2, 5, 8], range(10)), operation()
    assert ask(Controller(backend), one, 10) == 10
    assert found(one, 10 * PAGE, PAGE).sources == ((Span(0, 10), Tier.STORAGE),)


def test_a_rank_that_did_not_look_gives_as_many_numbers():
    """It was told to give up before it had asked, or has another backend, or failed."""
    cases = [
        (Backend(range(10)), operation(None)),
        (SimpleNamespace(), operation()),
        (SimpleNamespace(begin_read=None), operation()),
    ]
    for backend, one in cases:
        controller = Controller(backend, [0, 99, *[1] * 10])
        assert ask(controller, one, 0, alone=False) == 0
        assert controller.reduced == [[0, 99, *[0] * 10]]
        assert found(one, 0, PAGE) == Stored(0, (), ())


def test_other_reductions_stay_as_they_are():
    controller = Controller(Backend([1]), [0, 99, *[1] * 10])
    ask(controller, operation(), 0, alone=False)
    controller._all_reduce(torch.tensor([5]), "min", controller.other_groups)
    assert controller.reduced[-1] == [5]


# --- what is offered of it ------------------------------------------------------------------------


def request(device: int, host: int) -> Any:
    """A waiting request with so many pages of its prompt in memory."""
    return SimpleNamespace(
        rid="r",
        cache_request_handle=R,
        prefix_len=device * PAGE,
        host_hit_length=host * PAGE,
        init_next_round_input=lambda tree, cow_mamba: None,
        full_untruncated_fill_ids=range(len(NAMES) * PAGE + 3),
        best_match_node=1,
        last_node=1,
        **PLAIN,
    )


def offers_for(
    req: Any, why_left: str | None = None, min_tokens: int = 0, anchors: Any = None
) -> tuple[Offers, Any]:
    """The offers of a process in which this request waits, and what hangs on them."""
    restorations: dict[str, Restoration] = {}
    records = Requests()

    def begin(r: Restoration) -> None:
        restorations[r.rid] = records.record(r.rid).restoration = r

    backend = SimpleNamespace(_backend=SimpleNamespace(begin_read=None))
    context: Any = SimpleNamespace(
        page=PAGE,
        alone=True,
        anchors=anchors,
        device=SimpleNamespace(claimable=lambda: 0),
        facts=[],
        requests=records,
        waiting=lambda handle: req,
        moment=lambda: 0.0,
        tree=SimpleNamespace(
            cache_controller=SimpleNamespace(storage_backend=backend),
            lock=lambda node: None,
            ongoing_prefetch={},
        ),
        host=SimpleNamespace(
            slots_below=lambda node: torch.arange(req.host_hit_length),
            write_back=False,
            pin=lambda node: None,
        ),
    )
    counters = RestoreCounters()
    offers = Offers(context, begin, [], counters, min_tokens, lambda offer: why_left)
    return offers, SimpleNamespace(
        facts=context.facts, restorations=restorations, counters=counters, records=records
    )


def looked_up(pages: Sequence[int], hit: int, start: int = 0) -> Any:
    one = operation(start=start)
    ask(Controller(Backend(pages)), one, hit)
    return one


def test_a_hit_is_offered_with_what_lies_behind_its_end():
    offers, there = offers_for(request(0, 0))
    assert offers.hit(looked_up([0, 1, 2, 5, 6], 3), 3 * PAGE)
    (offer,) = there.facts
    sources = ((Span(0, 3), Tier.STORAGE), (Span(5, 7), Tier.STORAGE))
    assert offer == RestoreOffered("r", 0.0, len(NAMES) * PAGE + 3, 0, 7, sources)
    assert offer.unbroken == 3
    assert there.restorations["r"].keys_of(Span(5, 7)) == [KEYS[6], KEYS[5]]


def test_without_its_first_page_a_prefix_is_offered_in_the_next_tick():
    offers, there = offers_for(request(0, 0))
    offers.look_at(R, looked_up(range(1, 10), 0))
    offers.make()
    (offer,) = there.facts
    assert offer.sources == ((Span(1, 10), Tier.STORAGE),)
    assert (offer.resident, offer.pages, offer.unbroken) == (0, 10, 0)


def test_holes_that_the_tree_has_by_now_are_none():
    offers, there = offers_for(request(2, 2))
    offers.look_at(R, looked_up([1, 2, 5, 6], 0, start=1))
    offers.make()
    (offer,) = there.facts
    # the tree has pages 0 to 3, storage 2, 3, 6 and 7
    assert offer.sources == ((Span(2, 4), Tier.HOST), (Span(6, 8), Tier.STORAGE))
    assert there.restorations["r"].keys == tuple(KEYS[3:7])


def test_what_was_offered_can_be_offered_again():
    offers, there = offers_for(request(0, 0))
    offers.hit(looked_up([0, 3, 4, 7], 1), PAGE)
    first = there.facts.pop()
    there.records.record("r").restoration = None
    offers.again(there.restorations.pop("r"))
    assert there.facts == [first]


@pytest.mark.parametrize("min_tokens, offered", [(3 * PAGE, 1), (3 * PAGE + 1, 0)])
def test_what_is_loaded_of_a_prefix_has_to_be_worth_it(min_tokens, offered):
    offers, there = offers_for(request(0, 0), min_tokens=min_tokens)
    offers.look_at(R, looked_up([4, 5, 9], 0))
    offers.make()
    assert len(there.facts) == offered


def test_host_pages_are_offered_where_what_lies_behind_a_hole_is_not_worth_it():
    offers, there = offers_for(request(0, 4), min_tokens=3 * PAGE)
    offers.look_at(R, looked_up([5], 0))
    offers.make()
    (offer,) = there.facts
    assert offer.sources == ((Span(0, 4), Tier.HOST), (Span(5, 6), Tier.STORAGE))
    offers, there = offers_for(request(0, 4), "computing is faster")
    offers.look_at(R, looked_up([9], 0))
    offers.make()
    assert there.facts == []
    assert there.counters.declined == {"computing is faster": 2}, "with the stored page and without"


def test_a_question_that_was_given_up_is_not_offered():
    offers, there = offers_for(request(0, 0), min_tokens=1)
    one = looked_up(range(1, 10), 0)
    one.is_terminated = lambda: True
    offers.look_at(R, one)
    offers.make()
    assert there.facts == [] and there.counters.declined == {}


# --- models with sliding windows --------------------------------------------------------------------------------------

WINDOWS = SimpleNamespace(one="window", pages=2, page_slots=PAGE, page_bytes=PAGE * 4)


def with_window(one: Any, ends: Sequence[int], name: str = "swa") -> Any:
    """A lookup for which storage has windows at the ends of so many pages too."""
    one.pool_transfers = [SimpleNamespace(name=name)]
    one.pool_storage_result = SimpleNamespace(restorable_prefix_pages=[*ends])
    return one


def test_a_hit_that_ends_at_a_window_is_offered_with_it_and_its_lower_ends_are_kept():
    offers, there = offers_for(request(1, 0), anchors=WINDOWS)
    assert offers.hit(with_window(looked_up(range(5), 5, start=1), [2, 4, 5]), 5 * PAGE)
    (offer,) = there.facts
    assert (offer.pages, offer.anchor_pages, offer.anchor_bytes) == (6, 2, 2 * PAGE * 4)
    r = there.restorations["r"]
    assert (r.anchor, r.stored.ends) == (Span(4, 6), (3, 5))
    assert r.shorter(4).sources == ((Span(1, 3), Tier.STORAGE),)
    assert r.shorter(2) is None


@pytest.mark.parametrize(
    ("device", "host", "in_host", "hit", "pool", "why"),
    [
        (0, 0, 0, 5, "kv draft", "window not stored"),
        (0, 4, 4, 5, "swa", "window in host memory"),
        (0, 5, 4, 0, "swa", "window in host memory"),
        (1, 0, 4, 5, "swa", "window in host memory"),  # the front would begin without it
        (1, 1, 0, 5, "swa", "window in host memory"),
    ],
)
def test_a_prefix_whose_window_cannot_come_with_it_is_left_to_sglang(
    device, host, in_host, hit, pool, why
):
    req = request(device, host)
    req.swa_host_hit_length = in_host
    offers, there = offers_for(req, anchors=WINDOWS)
    looked = looked_up(range(5), hit, start=device)
    assert not offers.hit(with_window(looked, [hit], pool), hit * PAGE)
    assert there.facts == [] and there.counters.declined[why] == 1


def test_a_front_that_begins_with_the_prompt_needs_no_window():
    req = request(0, 1)
    req.swa_host_hit_length = 1
    offers, there = offers_for(req, anchors=WINDOWS)
    assert offers.hit(with_window(looked_up(range(1, 6), 5, start=1), [5]), 5 * PAGE)
    assert there.facts[0].sources[0] == (Span(0, 1), Tier.HOST)
