"""What is published in /metrics: names, differences of what only grows, and the thread's life."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from sgl_kvtier.runtime import metrics
from sgl_kvtier.runtime.ahead.counters import LookaheadCounters
from sgl_kvtier.runtime.metrics import METRICS, Kind, Publisher, Sample
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.store.base import StoreStats
from sgl_kvtier.types import Link, Tier

RANK = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}


@pytest.fixture(autouse=True)
def own_instruments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is registered here is taken back; what other tests of this process registered stands
    aside meanwhile.
    """
    others = metrics._instruments
    for instrument in others.values():
        REGISTRY.unregister(instrument)
    monkeypatch.setattr(metrics, "_instruments", {})
    monkeypatch.setattr(metrics, "PERIOD_S", 60.0)
    yield
    for instrument in metrics._instruments.values():
        REGISTRY.unregister(instrument)
    for instrument in others.values():
        REGISTRY.register(instrument)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"kvtier:{name}", {**RANK, **labels})


def restored() -> RestoreCounters:
    counters = RestoreCounters()
    counters.starts["both: faster"] += 1
    for counter in (counters.declined, counters.ended, counters.lost_pages, counters.turn_reads):
        counter["why"] += 1
    for link in Link:
        counters.bytes_loaded[link] += 1
    for tier in Tier:
        counters.spliced_pages[tier] += 1
    return counters


def looked_ahead() -> LookaheadCounters:
    counters = LookaheadCounters()
    counters.failed_moves["busy"] += 1
    return counters


def rows(prefix: str, samples: Any) -> list[tuple[str, tuple[str, ...]]]:
    return [(prefix + name, tuple(labels)) for name, labels, _ in samples]


def test_whatever_is_counted_is_in_the_table_with_its_labels() -> None:
    store = SimpleNamespace(stats=StoreStats)
    said = (
        rows("restore_", restored().counts(16))
        + rows("lookahead_", looked_ahead().counts(0))
        + rows("", metrics.store_samples(store))
    )  # type: ignore[arg-type]
    assert [row for row in said if row[0] not in METRICS or METRICS[row[0]].labels != row[1]] == []
    assert len(rows("", metrics.store_samples(store))) == len(fields(StoreStats))  # type: ignore[arg-type]


def test_tiers_and_links_are_named_device_host_and_storage_everywhere() -> None:
    said = [*restored().counts(16), *looked_ahead().counts(0)]
    tiers = {labels["tier"] for _, labels, _ in said if "tier" in labels}
    links = {labels["link"] for _, labels, _ in said if "link" in labels}
    assert tiers == {"device", "host", "storage", "remote", "none"}
    assert links == {link.value for link in Link}
    assert {name for link in links for name in link.split("-")} == tiers - {"none"}


def test_a_counter_grows_by_what_came_since_and_a_gauge_is_set() -> None:
    publisher, now = Publisher(), {"victims": 3.0, "sessions": 5.0}
    source = publisher.add(
        "lookahead_", lambda: [(name, {}, number) for name, number in now.items()], RANK
    )
    source.publish()
    now.update(victims=7.0, sessions=2.0)
    source.close()
    assert (value("lookahead_victims_total"), value("lookahead_sessions")) == (7.0, 2.0)


def test_what_a_second_server_part_counts_comes_on_top() -> None:
    publisher = Publisher()
    for _ in range(2):  # a store that was detached and attached again begins at 0
        publisher.add("", lambda: [("pages_read", {}, 4.0)], RANK).close()
    assert value("pages_read_total") == 8.0


def test_where_restorations_met_is_observed_once() -> None:
    publisher, met = Publisher(), [0.25, 0.5]

    def read() -> Iterator[Sample]:
        while met:
            yield "meeting_position", {}, met.pop()

    source = publisher.add("restore_", read, RANK)
    source.publish()
    source.close()
    assert (value("restore_meeting_position_count"), value("restore_meeting_position_sum")) == (
        2.0,
        0.75,
    )


def test_one_thread_publishes_for_all_and_ends_with_the_last() -> None:
    publisher = Publisher()
    before = threading.active_count()
    sources = [publisher.add("lookahead_", list, RANK), publisher.add("restore_", list, RANK)]
    assert threading.active_count() == before + 1
    for source in (*sources, *sources):
        source.close()
    assert threading.active_count() == before


def test_figures_that_cannot_be_read_cost_themselves_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = Publisher()
    broken = publisher.add("restore_", lambda: [("no_such_metric", {}, 1.0)], RANK)
    well = publisher.add("lookahead_", lambda: [("drift", {}, 1.0)], RANK)
    broken.close()
    well.close()
    assert value("lookahead_drift_total") == 1.0
    assert "not published any more" in caplog.text


def test_every_name_in_the_table_says_what_it_is() -> None:
    assert [metric.name for metric in METRICS.values() if not metric.doc] == []
    assert [name for name, metric in METRICS.items() if metric.kind is Kind.HISTOGRAM] == [
        "restore_meeting_position"
    ]
