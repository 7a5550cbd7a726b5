"""What is published in /metrics: names, differences of what only grows, and the thread's life."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from test_restore_ends import engine_with

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.stress.server import run
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.runtime import metrics
from sgl_kvtier.runtime.ahead.counters import LookaheadCounters
from sgl_kvtier.runtime.ahead.engine import LookaheadEngine
from sgl_kvtier.runtime.hints.scheduler import count
from sgl_kvtier.runtime.metrics import METRICS, Publisher, Sample
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.scheduler.notes import RestoreNotes
from sgl_kvtier.runtime.sglang import states, windows
from sgl_kvtier.store.base import StoreStats
from sgl_kvtier.store.index.shares import Holding
from sgl_kvtier.store.tiered.store import TieredStats
from sgl_kvtier.types import Link, Tier

TIERED = TieredStats(StoreStats(), True, 1, 0, 0, 0, 0, 0, 0, 0)
RANK = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}


@pytest.fixture(autouse=True)
def own_instruments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is registered here is taken back; what other tests registered is put back afterwards."""
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
    for counter in (
        counters.declined, counters.ended, counters.lost_pages, counters.turn_reads, counters.audited_pages, counters.paused,
    ):  # fmt: skip
        counter["why"] += 1
    counters.meetings.append(0.5)
    for link in Link:
        counters.bytes_loaded[link] += 1
    for tier in Tier:
        counters.spliced_pages[tier] += 1
    return counters


def looked_ahead() -> LookaheadCounters:
    counters = LookaheadCounters()
    counters.failed_moves["busy"] += 1
    return counters


def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """What the sources of a server that does all there is say, by full names, with labels."""
    engine, _, _ = engine_with()
    engine.counters = restored()
    engine.proof.looks = True
    for counter in (engine.proof.pages, engine.proof.attaches):
        counter["equal"] += 1
    planner = SimpleNamespace(break_even_bytes_per_s=1e9)
    notes = RestoreNotes(PolicyConfig(), engine, planner, SimpleNamespace(reductions=1), None)
    ahead: Any = object.__new__(LookaheadEngine)
    ahead.planner = make_planner(
        PolicyConfig(restore="both", prefetch="on"), EngineShape(16, 4096, 256)
    )
    ahead.pages, ahead.counters, ahead._idle = ahead.planner.pages, looked_ahead(), {}
    ahead.context, ahead.facts = engine.context, SimpleNamespace(wasted=0)
    store: Any = SimpleNamespace(stats=StoreStats, tiered_stats=lambda: TIERED)
    tenants = partial(metrics.tenant_samples, lambda: [Holding("a", 1, 1, 1)])
    rank = SimpleNamespace(pp_rank=0, attn_tp_rank=0)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: rank)
    count(SimpleNamespace(metrics_reporter=SimpleNamespace(enable_metrics=True)), "accepted")
    (hints,) = metrics._instruments.values()
    sources = {
        "restore_": notes.samples(),
        "lookahead_": [*ahead.samples(), ("hints", dict.fromkeys(hints._labelnames, ""), 1)],
        "remote_": metrics.remote_samples(store),
        "tenant_": tenants(),
        "": [*metrics.store_samples(store), *metrics.feature_samples()],
    }
    return [
        (prefix + name, labels)
        for prefix, samples in sources.items()
        for name, labels, _ in samples
    ]


def test_the_table_has_whatever_is_counted_with_its_labels_and_no_row_that_nothing_counts(
    monkeypatch,
):
    found = {name: tuple(labels) for name, labels in said(monkeypatch)}
    assert found == {name: metric.labels for name, metric in METRICS.items()}


def test_tiers_and_links_are_named_device_host_and_storage_everywhere(monkeypatch):
    labels = [labels for _, labels in said(monkeypatch)]
    tiers = {one["tier"] for one in labels if "tier" in one}
    links = {one["link"] for one in labels if "link" in one}
    assert tiers == {"device", "host", "storage", "remote", "none"}
    assert links == {link.value for link in Link}
    assert {name for link in links for name in link.split("-")} == tiers - {"none"}


def test_a_counter_grows_by_what_came_since_and_a_gauge_is_set():
    publisher, now = Publisher(), {"victims": 3.0, "sessions": 5.0}
    source = publisher.add(
        "lookahead_", lambda: [(name, {}, number) for name, number in now.items()], RANK
    )
    source.publish()
    now.update(victims=7.0, sessions=2.0)
    source.close()
    assert (value("lookahead_victims_total"), value("lookahead_sessions")) == (7.0, 2.0)


def test_what_a_second_server_part_counts_comes_on_top():
    publisher = Publisher()
    for _ in range(2):  # a store that was detached and attached again begins at 0
        publisher.add("", lambda: [("pages_read", {}, 4.0)], RANK).close()
    assert value("pages_read_total") == 8.0


def test_where_restorations_met_is_observed_once():
    publisher, met = Publisher(), [0.25, 0.5]

    def read() -> Iterator[Sample]:
        while met:
            yield "meeting_position", {}, met.pop()

    source = publisher.add("restore_", read, RANK)
    source.publish()
    source.close()
    met = "restore_meeting_position"
    assert (value(f"{met}_count"), value(f"{met}_sum")) == (2.0, 0.75)


def test_one_thread_publishes_for_all_and_ends_with_the_last():
    publisher = Publisher()
    before = threading.active_count()
    sources = [publisher.add("lookahead_", list, RANK), publisher.add("restore_", list, RANK)]
    assert threading.active_count() == before + 1
    for source in (*sources, *sources):
        source.close()
    assert threading.active_count() == before


def test_figures_that_cannot_be_read_cost_themselves_alone(caplog):
    publisher = Publisher()
    broken = publisher.add("restore_", lambda: [("no_such_metric", {}, 1.0)], RANK)
    well = publisher.add("lookahead_", lambda: [("drift", {}, 1.0)], RANK)
    broken.close()
    well.close()
    assert value("lookahead_drift_total") == 1.0
    assert "not published any more" in caplog.text


def test_every_end_of_a_restoration_is_explained_and_judged():
    """The labels of restore_ended_total, in the operators' table and in the stress runs."""
    said = {f"{kind.one} lost" for kind in (states.States, windows.Windows)}
    for path in (Path(metrics.__file__).parent).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                how = node.args[-1]
                if node.func.attr in ("abandon", "abandon_all", "_close") and not isinstance(
                    how, ast.JoinedStr
                ):
                    words = (one for one in ast.walk(how) if isinstance(one, ast.Constant))
                    said |= {one.value for one in words if isinstance(one.value, str)}
    assert {"met", "differs", "by layers", "in the way"} < said
    assert said == set(run._ENDS)
    page = Path(metrics.__file__).parents[2] / "docs" / "manual" / "operate.md"
    table = (
        page.read_text().partition("`restore_ended_total{how}` | Meaning |")[2].partition("\n\n")[0]
    )
    assert {how for how in said if f"`{how}`" not in table} == set()
