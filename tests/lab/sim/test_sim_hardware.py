"""What steps cost: the times of paced profiles where there is one, else assumed shares of peaks."""

from __future__ import annotations

import dataclasses

import pytest

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab import profile
from sgl_kvtier.lab.papers.cacheflow import Place, rig
from sgl_kvtier.lab.profile import Profile, Table
from sgl_kvtier.lab.sim.experiment import Machine, run_policy
from sgl_kvtier.lab.sim.hardware import (
    Batch,
    MeasuredCost,
    assumed_step_cost,
    known_hardware,
    load_hardware,
    load_model,
    planner_profile,
    step_cost,
)
from sgl_kvtier.lab.sim.policies import AHEAD
from sgl_kvtier.lab.sim.requests import SimRequest
from sgl_kvtier.lab.sim.run import engine_shape
from sgl_kvtier.types import Link, Span

PAIRS = [
    (name, model, measured)
    for name in known_hardware()
    for model, measured in load_hardware(name).measured.items()
]


def _chunk(tokens: int, prefix: int) -> Batch:
    return Batch((Span(prefix, prefix + tokens),))


def test_every_paced_profile_is_of_one_machine_and_model_here():
    assert sorted(measured for _, _, measured in PAIRS) == profile.names()


@pytest.mark.parametrize(("hardware", "model", "measured"), PAIRS)
def test_steps_take_what_the_paced_profile_says_at_every_point(hardware, model, measured):
    found = profile.document(measured)
    cost = step_cost(load_hardware(hardware), load_model(model))
    prefill, decode = found["prefill"], found["decode"]
    for tokens, row in zip(prefill["tokens"], prefill["seconds"], strict=True):
        ours = [cost.seconds(_chunk(tokens, prefix)) for prefix in prefill["prefix"]]
        assert ours == pytest.approx(row, rel=1e-12)
    for batch, row in zip(decode["batch"], decode["seconds"], strict=True):
        ours = [cost.seconds(Batch((), batch, batch * context)) for context in decode["context"]]
        assert ours == pytest.approx(row, rel=1e-12)


@pytest.mark.parametrize(("hardware", "model", "measured"), PAIRS)
def test_a_model_and_its_links_are_those_of_the_paced_profile(hardware, model, measured):
    found, shape = profile.read(measured), load_model(model)
    assert (shape.layers, shape.kv_bytes_per_token) == (found.layers, found.kv_bytes_per_token)
    machine, _, _ = Machine(hardware, model, device_bytes=1 << 30).parts()
    rates = [machine.pipes[name].bytes_per_s for name in ("h2d", "d2h")]
    assert rates == [found.to_device_gbytes_per_s * 1e9, found.to_host_gbytes_per_s * 1e9]


def _slower(name: str) -> Profile:
    found = _READ(name)
    table = found.prefill
    rows = tuple(tuple(2 * seconds for seconds in row) for row in table.seconds)
    return dataclasses.replace(found, prefill=Table(table.rows, table.columns, rows))


_READ = profile.read


def test_another_profile_changes_a_run_and_what_its_planner_is_told(monkeypatch):
    machine, request = Machine(), SimRequest("r", 0.0, 4096, 1)
    hardware, model, spec = machine.parts()
    shape, found = engine_shape(spec, model), {}
    for name, read in (("as it is", _READ), ("slower", _slower)):
        monkeypatch.setattr(profile, "read", read)
        ttft_s = run_policy("recompute", machine, [request], AHEAD).requests[0].ttft_s
        told = planner_profile(hardware, step_cost(hardware, model), shape)["prefill"]
        found[name] = (ttft_s, told["per_token_s"], told["per_token_position_s"])
    # The learner's first guess weighs little, and is the same for both.
    doubled = [2 * value for value in found["as it is"]]
    assert found["slower"] == pytest.approx(doubled, rel=1e-3)
    table = _READ("h100-llama8b").prefill
    assert found["as it is"][0] == pytest.approx(table.at(2048, 0) + table.at(2048, 2048))


@pytest.mark.parametrize(("hardware", "model", "measured"), PAIRS)
def test_the_planner_is_told_about_what_whole_chunks_take(hardware, model, measured):
    machine, shape, spec = Machine(hardware, model, device_bytes=1 << 30).parts()
    cost = step_cost(machine, shape)
    told = planner_profile(machine, cost, engine_shape(spec, shape))
    prefill = told["prefill"]
    for start in (0, 8192, 32768):
        pairs = 2048 * (start + 1024)
        ours = (
            prefill["fixed_s"]
            + 2048 * prefill["per_token_s"]
            + pairs * prefill["per_token_position_s"]
        )
        assert ours == pytest.approx(profile.read(measured).prefill.at(2048, start), rel=0.16)
    link = told["links"][Link.HOST_TO_DEVICE.value]
    assert link == profile.read(measured).to_device_gbytes_per_s * 1e9


def test_a_step_with_both_takes_longer_than_its_prefill_and_less_than_two_steps():
    cost = MeasuredCost(profile.read("h100-llama8b"))
    chunk, decodes = (Span(4096, 6144),), (8, 8 * 16384)
    both = cost.seconds(Batch(chunk, *decodes))
    apart = cost.seconds(Batch(chunk)) + cost.seconds(Batch((), *decodes))
    assert cost.seconds(Batch(chunk)) < both < apart


def test_requests_of_one_step_cost_what_a_paced_device_takes_for_them():
    found = profile.read("h100-llama8b")
    batch = Batch((Span(8192, 9000), Span(0, 700)))
    assert MeasuredCost(found).seconds(batch) == found.prefill_seconds([(808, 8192), (700, 0)])


def test_a_model_without_measured_times_has_assumed_ones_or_is_refused():
    h100, qwen = load_hardware("H100"), load_model("Qwen3-8B")
    assert step_cost(h100, qwen) == assumed_step_cost(h100, qwen)
    with pytest.raises(ConfigError, match="Measured there: Qwen3-32B"):
        step_cost(load_hardware("2xH100"), qwen)


def test_cacheflows_tables_have_assumed_times_where_there_are_measured_ones():
    h100, model = load_hardware("H100"), load_model("Qwen3-30B-A3B")
    assert model.name in h100.measured
    assert rig(Place("H100", model.name, 10.0)).cost == assumed_step_cost(h100, model)
