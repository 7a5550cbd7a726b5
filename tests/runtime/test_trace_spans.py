"""A restoration's span in the trace that SGLang makes of its request."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import PAGE, engine_with


def restored(trace: Any, how: str) -> None:
    """Restores eight pages of a request with this trace: the last four are loaded and attached,
    or it is given up before.
    """
    engine, r, _ = engine_with()
    r.req = SimpleNamespace(time_stats=SimpleNamespace(trace_ctx=trace))
    if how == "met":
        r.spliced = {next(iter(r.sources))[1]: 4}
        engine.advance(r, 8 * PAGE)
    else:
        engine.abandon(r, how)


class Recorder:
    """Stands for the trace of a request."""

    def __init__(self, tracing: bool) -> None:
        self.tracing_enable = tracing
        self.slices: list[Any] = []

    def trace_slice(self, one: Any) -> None:
        self.slices.append(one)


def test_nothing_is_added_where_sglang_does_not_trace():
    trace = Recorder(False)
    restored(trace, "met")
    assert not trace.slices


@pytest.mark.parametrize(("how", "computed", "loaded"), [("met", 4, 4), ("aborted", 0, 0)])
def test_a_span_says_what_was_computed_and_loaded_and_how_it_ended(how, computed, loaded):
    pytest.importorskip("sglang", reason="needs SGLang")
    trace, before = Recorder(True), time.time_ns()
    restored(trace, how)
    (one,) = trace.slices
    assert one.slice_name == "kvtier.restore"
    assert one.start_time_ns <= one.end_time_ns and one.end_time_ns >= before
    found = dict(one.attrs)
    assert 0 <= found.pop("kvtier.seconds") < 60
    assert found == {
        "kvtier.pages": 8,
        "kvtier.computed_tokens": computed * PAGE,
        "kvtier.loaded_tokens": loaded * PAGE,
        "kvtier.ending": how,
    }


def test_a_trace_of_another_form_ends_no_restoration():
    restored(SimpleNamespace(tracing_enable=True), "met")


def test_the_span_lies_in_the_requests_own_trace(monkeypatch):
    """With SGLang's tracer and the SDK's exporter in memory."""
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs opentelemetry-sdk"
    )
    tracing = pytest.importorskip("sglang.srt.observability.trace", reason="needs SGLang")
    if not tracing.opentelemetry_imported:
        pytest.skip("SGLang's tracing needs opentelemetry-exporter-otlp-proto-grpc and -http")
    exporter = memory.InMemorySpanExporter()
    monkeypatch.setattr(tracing, "opentelemetry_initialized", False)
    monkeypatch.setattr(tracing, "get_otlp_span_exporter", lambda endpoint: exporter)
    tracing.process_tracing_init("nowhere:1", "test")
    tracing.trace_set_thread_info("Scheduler")
    trace = tracing.TraceReqContext("r")
    trace.trace_req_start()
    restored(trace, "met")
    trace.trace_req_finish()
    tracing.trace.get_tracer_provider().force_flush()
    spans = exporter.get_finished_spans()
    (ours,) = [one for one in spans if one.name == "kvtier.restore"]
    assert ours.attributes["kvtier.loaded_tokens"] == 4 * PAGE
    by_id = {one.context.span_id: one for one in spans}
    assert by_id[ours.parent.span_id].context.trace_id == ours.context.trace_id
    assert len({one.context.trace_id for one in spans}) == 1
