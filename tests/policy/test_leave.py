"""What is not worth a restoration is left to an engine that can load by itself."""

from dataclasses import replace

import pytest
from named_parts import named, parts
from virtual_hands import COST, ENGINE, balance, profile_of, stored

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.rules import CacheFlow, Cake
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import (
    Hint,
    Hinted,
    LeftToEngine,
    Mode,
    PagesLost,
    PagesPlaced,
    RequestArrived,
    RequestFinished,
    RestoreOffered,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.types import Link, Span, Tier

VIEW = StepView(0.0, ("a",), prefill_tokens=512)


def offer(rid: str = "a", *, host: int = 0, storage: int = 0) -> RestoreOffered:
    """A prompt whose first pages lie in host memory and whose others lie in storage."""
    sources = ((Span(0, host), Tier.HOST), (Span(host, host + storage), Tier.STORAGE))
    return stored(rid, host + storage, *((span, tier) for span, tier in sources if span))


def planner(
    *, storage: float | None = None, host: float | None = None, **settings: object
) -> Planner:
    """A planner that knows the cost of computing and these links, or nothing."""
    profile = None
    if storage or host:
        rates = {Link.STORAGE_TO_DEVICE: storage, Link.HOST_TO_DEVICE: host}
        profile = profile_of(COST, 1.0)
        profile["links"] = {link.value: rate for link, rate in rates.items() if rate}
    config, rules = parts(**settings)
    return make_planner(config, ENGINE, profile, rules)


def why(one: Planner, view: StepView = VIEW, **pages: int) -> str | None:
    """Why a prompt of these pages is left to the engine."""
    return one.query(LeftToEngine(offer(**(pages or {"storage": 256})), view))


EVEN = balance(4096)
SAVED = COST.range_seconds(0, 4096, 512) / 2
"""Seconds that a restoration saves where loading takes as long as computing."""


@pytest.mark.parametrize(
    ("known", "pages", "said"),
    [
        ({"host": 100 * EVEN}, {"host": 256}, "host memory"),
        ({"storage": 1e6}, {"host": 256}, "host memory"),
        ({"host": EVEN}, {"host": 256}, None),
        ({"host": EVEN, "split_gain_s": SAVED / 2}, {"host": 256}, None),
        ({"host": EVEN, "split_gain_s": SAVED * 2}, {"host": 256}, "host memory"),
        ({"storage": 500 * EVEN}, {"storage": 256}, "loading is faster"),
        ({"storage": 4 * EVEN}, {"storage": 256}, None),
        ({"storage": EVEN}, {"storage": 256}, None),
        ({"storage": EVEN / 4}, {"storage": 256}, None),
        ({"storage": EVEN / 500}, {"storage": 256}, None),
        (
            {"storage": 500 * EVEN, "host": 20 * EVEN},
            {"host": 200, "storage": 4},
            "loading is faster",
        ),
        ({}, {"storage": 256}, "not measured yet"),
        ({"host": 50 * EVEN}, {"host": 16, "storage": 256}, "not measured yet"),
        ({"storage": EVEN}, {"host": 16, "storage": 240}, None),
    ],
    ids=[
        "host memory is copied at once",
        "host memory, although its link was not measured",
        "a host link so slow that computing helps",
        "more is gained than a restoration costs",
        "less is gained than a restoration costs",
        "storage so fast that all of it would be loaded",
        "storage that computing can help",
        "storage as fast as computing",
        "storage that computing beats",
        "storage that is hardly used",
        "mostly copied, which computing does not help",
        "storage that was never measured is measured by a read of the engine",
        "storage behind host memory was never measured",
        "a host link that was never measured is restored over, as copies are not timed",
    ],
)
def test_what_is_left_to_the_engine(known, pages, said):
    assert why(planner(**known), **pages) == said


@pytest.mark.parametrize(
    ("ratio", "decoding", "settings", "said"),
    [
        (6, 0, {}, None),
        (6, 1, {}, "loading is faster"),  # it saves a sixth of what it computes
        (6, 1, {"stall_weight": 0.0}, None),
        (2, 1, {}, None),  # and here half
        (2, 2, {}, "loading is faster"),  # but takes it from two
        (1, 2, {}, None),
        (1, 8, {}, "loading is faster"),
        (1, 8, {"stall_weight": 0.0}, None),
        (1 / 2, 2, {}, None),  # computing alone is faster than loading alone
        (1 / 2, 8, {}, "loading is faster"),  # and takes more from eight that decode
        (1 / 8, 8, {}, None),
        (1 / 8, 800, {}, None),  # no more than eight are counted
    ],
)
def test_what_a_restoration_computes_counts_against_each_request_that_decodes(
    ratio, decoding, settings, said
):
    one = planner(storage=balance(4096, ratio), **settings)
    assert why(one, replace(VIEW, decoding=decoding)) == said


@pytest.mark.parametrize(("decoding", "mode"), [(0, Mode.BOTH), (8, Mode.LOAD)])
def test_what_is_only_loaded_is_computed_too_once_fewer_decode(decoding, mode):
    one = planner(storage=EVEN, restore="fastest")
    one.observe(offer(storage=256))
    (start,) = one.step(replace(VIEW, decoding=8)).starts
    assert start.mode is Mode.LOAD
    computes = one.step(replace(VIEW, decoding=decoding)).computes
    assert any(one.rid == "a" for one in computes) is (mode is Mode.BOTH)


@pytest.mark.parametrize(("decoding", "mode"), [(0, Mode.BOTH), (1, Mode.LOAD)])
def test_a_restoration_that_begins_beside_decodes_computes_where_that_is_worth_it(decoding, mode):
    one = planner(storage=balance(4096, 8), restore="fastest")
    one.observe(offer(storage=256))
    (start,) = one.step(replace(VIEW, decoding=decoding)).starts
    assert start.mode is mode


def test_while_device_memory_is_short_for_what_waits_nothing_is_loaded_into_it():
    one = planner(storage=EVEN)  # 256 pages and 64 tokens more: 260 pages
    rooms = {pages: replace(VIEW, free_pages={Tier.DEVICE: pages}) for pages in (259, 260)}
    assert [why(one, view) for view in rooms.values()] == ["no room", None]
    beside = replace(rooms[260], wanted_tokens=1)
    assert why(one, beside) == "no room"
    asked = LeftToEngine(offer(storage=256), beside)
    assert planner(storage=EVEN, restore="both").query(asked) is None


def test_what_restorations_under_way_have_not_claimed_yet_is_not_room_for_another():
    one = planner(storage=EVEN)
    one.observe(offer("b", storage=256))
    plan = one.step(replace(VIEW, waiting=("b",), free_pages={Tier.DEVICE: 1000}))
    claimed = sum(len(load.span) for load in plan.loads)
    assert 0 < claimed < 256
    least = 260 + 260 - claimed
    views = [replace(VIEW, free_pages={Tier.DEVICE: pages}) for pages in (least - 1, least)]
    assert [why(one, view) for view in views] == ["no room", None]


def test_what_the_holder_of_the_slot_will_claim_is_not_among_the_free_pages():
    one = planner(storage=EVEN)
    one.observe(offer("b", storage=256))
    one.step(replace(VIEW, waiting=("b",), free_pages={Tier.DEVICE: 1000}))
    assert why(one, replace(VIEW, slot="b", free_pages={Tier.DEVICE: 260})) is None


KEYS = named(300)


def looking_ahead(returns_after_s: float) -> Planner:
    """A planner that expects a session with all 300 pages of the device so long from time 0 on."""
    one = planner(storage=EVEN, prefetch="on", eviction="next-use")
    one.observe(RequestArrived("b", 0.0, 300 * 16, KEYS, "s"))
    one.observe(PagesPlaced(KEYS, Tier.DEVICE, 0.0))
    one.observe(RequestFinished("b", 0.0, keys=KEYS))
    said = one.query(Hinted("s", Hint(expected_delay_s=returns_after_s), 0.0))
    assert said.accepted
    return one


def test_no_page_that_is_needed_before_it_would_be_restored_is_taken_for_a_restoration():
    """Restoring takes about a second and a half."""
    full = replace(VIEW, free_pages={Tier.DEVICE: 300}, empty_pages={Tier.DEVICE: 0})
    assert why(looking_ahead(0.2), full) == "no room"
    assert why(looking_ahead(60.0), full) is None


def test_empty_pages_are_room_whoever_is_expected():
    half = replace(VIEW, free_pages={Tier.DEVICE: 300}, empty_pages={Tier.DEVICE: 260})
    assert why(looking_ahead(0.2), half) is None


def test_asking_for_room_leaves_no_trace_in_the_order_of_evictions():
    orders = []
    for asked in (0, 2):
        one = looking_ahead(60.0)
        for _ in range(asked):
            why(one, replace(VIEW, free_pages={Tier.DEVICE: 300}, empty_pages={Tier.DEVICE: 0}))
        orders.append(one.pages.victims_aside(Tier.DEVICE, 300))
    assert orders[0] == orders[1]


def test_one_read_measures_storage():
    one = planner(host=balance(4096, 50))
    nbytes = 256 * ENGINE.page_bytes
    measured = TransferDone("", Link.STORAGE_TO_DEVICE, Span(0, 0), nbytes, nbytes / EVEN, 0.0)
    one.observe(measured)
    assert why(one, host=16, storage=256) is None


def test_links_alone_do_not_tell_what_computing_costs():
    config, rules = parts()
    links = {Link.STORAGE_TO_DEVICE.value: 500 * EVEN}
    assert why(make_planner(config, ENGINE, {"links": links}, rules)) == "not measured yet"


@pytest.mark.parametrize(
    "settings",
    [
        {"restore": "both"},
        {"restore": "load"},
        {"restore": "compute"},
        {"rules": Cake},
        {"rules": CacheFlow},
    ],
)
def test_what_was_asked_for_by_name_is_done(settings):
    fast = planner(storage=balance(4096, 500), host=balance(4096, 500), **settings)
    assert why(fast, host=128, storage=128) is None


def test_asking_changes_nothing():
    plans = []
    for asked in (0, 3):
        one = planner(storage=EVEN, host=balance(4096, 50))
        for _ in range(asked):
            one.query(LeftToEngine(offer(storage=256), VIEW))
        one.observe(offer(storage=256))
        plans.append(one.step(VIEW))
    assert plans[0] == plans[1]
    assert plans[0].loads


def two_tiers(ssd_ratio: float = 1 / 8, dram_ratio: float = 100) -> Planner:
    """A planner with the offer of a prefix of which 64 pages lie in host memory and 192 behind them
    in storage.
    """
    one = planner(storage=balance(4096, ssd_ratio), host=balance(4096, dram_ratio))
    assert why(one, host=64, storage=192) is None
    one.observe(offer(host=64, storage=192))
    return one


def test_pages_in_host_memory_before_others_in_storage_are_copied_and_computing_begins_behind_them():
    one = two_tiers()
    plan = one.step(VIEW)
    assert plan.starts[0].mode is Mode.BOTH
    assert sum(len(load.span) for load in plan.loads if load.source is Tier.HOST) == 64
    assert plan.computes == ()
    for load in plan.loads:
        if load.source is Tier.HOST:
            nbytes = len(load.span) * ENGINE.page_bytes
            one.observe(TransferDone("a", load.link, load.span, nbytes, 1e-4, 0.01))
    (compute,) = one.step(StepView(0.01, ("a",), prefill_tokens=512)).computes
    assert compute.splice == Span(0, 64)
    assert compute.tokens


def test_of_pages_in_host_memory_only_those_that_are_lost_are_computed():
    one = two_tiers()
    loads = [load for load in one.step(VIEW).loads if load.source is Tier.HOST]
    lowest = min(loads, key=lambda load: load.span.start).span
    one.observe(PagesLost("a", Span(lowest.start, lowest.start + 2), "failed", 0.01))
    (compute,) = one.step(StepView(0.01, ("a",), prefill_tokens=512)).computes
    assert (compute.splice, compute.tokens) == (Span(0, 0), 2 * ENGINE.page_tokens)


def test_pages_in_host_memory_that_are_slower_to_copy_than_to_compute_are_computed():
    one = two_tiers(dram_ratio=1 / 8)
    (compute,) = one.step(VIEW).computes
    assert (compute.splice, bool(compute.tokens)) == (Span(0, 0), True)


def test_a_link_taken_for_slow_is_measured_again_now_and_then():
    one = planner(storage=balance(4096, 1 / 500))
    modes = []
    for number in range(33):
        one.observe(offer(rid := f"r{number}", storage=256))
        modes += [start.mode for start in one.step(replace(VIEW, waiting=(rid,))).starts]
        one.observe(RequestFinished(rid, 0.0))
    assert modes.count(Mode.BOTH) == 2
    assert modes.count(Mode.COMPUTE) == 31


def test_also_by_a_prompt_so_short_that_none_of_it_would_be_loaded():
    one = planner(storage=balance(4096, 1 / 500))
    loads = []
    for number in range(16):
        one.observe(offer(rid := f"r{number}", storage=20))
        loads += one.step(replace(VIEW, waiting=(rid,))).loads
        one.observe(RequestFinished(rid, 0.0))
    assert [load.span for load in loads] == [Span(19, 20)]
    predicted_s = ENGINE.page_bytes / balance(4096, 1 / 500)
    assert loads[0].deadline_s == pytest.approx(2 * predicted_s + PolicyConfig().load_deadline_s), (
        "nobody waits for it longer than for others"
    )


def test_what_the_engine_reads_by_itself_is_learned_from():
    one = planner(storage=balance(4096, 500))
    assert why(one) == "loading is faster"
    nbytes = 1 << 25
    for _ in range(3):
        one.observe(
            TransferDone("", Link.STORAGE_TO_DEVICE, Span(0, 0), nbytes, nbytes / EVEN, 0.0)
        )
    assert why(one) is None


def test_a_prompt_of_one_chunk_is_computed_where_the_chunk_behind_loaded_pages_costs_more() -> None:
    """Large fixed costs of a chunk, as of a mixture of experts: loading and computing together
    leave the rest of the prompt to a second one.
    """
    costly = PrefillCost(0.022, 1e-5)
    tokens = 28 * ENGINE.page_tokens  # with the rest: 512 tokens, one chunk
    profile = profile_of(costly, 1.0)
    seconds = costly.range_seconds(0, tokens, ENGINE.chunk_tokens)
    profile["links"] = {Link.STORAGE_TO_DEVICE.value: 28 * ENGINE.page_bytes / seconds}
    asked = LeftToEngine(offer(storage=28), VIEW)
    config, rules = parts(min_restore_tokens=64)
    made = make_planner(config, ENGINE, profile, rules)
    assert made.query(asked) is None, "not left to be loaded"
    made.observe(asked.offer)
    (start,) = made.step(VIEW).starts
    assert (start.mode, start.reason) == (Mode.COMPUTE, "computing is faster")
