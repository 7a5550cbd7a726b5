"""Several restorations at once, simulated: the batches, link and rules of the same bench on a server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.lab.experiment.batches.draw import BatchOptions, lengths_of
from sgl_kvtier.lab.profile import read
from sgl_kvtier.lab.sim_batches import Bench

PROFILE = read("h100-llama8b")
OPTIONS = BatchOptions(PROFILE.name, 64, (4,), (8192, 16384, 24576, 32768), rounds=1)


def test_the_link_loads_the_mix_in_the_time_of_computing_it():
    bench = Bench(PROFILE, OPTIONS)
    nbytes = sum(OPTIONS.lengths) * PROFILE.kv_bytes_per_token
    # Chunks of 8,192, and the page behind the prefix.
    computing_s = sum(
        PROFILE.prefill_seconds([(min(8192, length + 64 - start), start)])
        for length in OPTIONS.lengths
        for start in range(0, length + 64, 8192)
    )
    assert nbytes / bench.link_bytes_per_s == pytest.approx(computing_s)


@pytest.mark.parametrize("apart_s", [0.0, 0.01])
def test_a_batch_is_the_servers_and_every_rule_restores_all_of_it(apart_s: float):
    bench = Bench(PROFILE, OPTIONS, apart_s)
    for rule in ("cake", "cacheflow", "kvtier", "by-arrival"):
        one = bench.batch(rule, 4, 1)
        assert one["lengths"] == lengths_of(OPTIONS, 4, 1)
        # Both ends are used, and neither alone is as fast.
        assert 0.1 < one["computed_share"] < 0.9
        computing_s = sum(OPTIONS.lengths) * PROFILE.kv_bytes_per_token / bench.link_bytes_per_s
        assert one["ttft_s"] < one["makespan_s"] < computing_s


def test_the_planners_order_is_worth_something_where_all_are_known_at_once():
    bench = Bench(PROFILE, OPTIONS)
    ours, by_arrival = (bench.batch(rule, 4, 1)["ttft_s"] for rule in ("kvtier", "by-arrival"))
    assert lengths_of(OPTIONS, 4, 1) != sorted(OPTIONS.lengths)
    assert ours < 0.9 * by_arrival


def test_the_command_prints_a_row_per_rule_and_writes_what_is_documented(tmp_path: Path, capsys):
    out = tmp_path / "out.json"
    command = ["sim", "batches", "--at-once", "2", "--lengths", "2k,4k", "--rounds", "2"]
    assert main([*command, "--rules", "cacheflow,kvtier", "--json", str(out)]) == 0
    assert "over kvtier" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert [(one["rule"], one["round"]) for one in result["batches"]] == [
        (rule, number) for number in (1, 2) for rule in ("cacheflow", "kvtier")
    ]
    text = (Path(__file__).parents[3] / "docs" / "manual" / "json.md").read_text("utf-8")
    section = text.split("\n## `kvtier.sim.batches/1`\n", 1)[1].split("\n## ", 1)[0]
    documented = set(re.findall(r"`([a-z_]+)`", section))
    assert set(result["batches"][0]) | set(result["setup"]) | {"setup", "batches"} == documented


def test_an_unknown_rule_is_refused_with_those_there_are(capsys):
    assert main(["sim", "batches", "--rules", "layers"]) == 1
    assert "cacheflow" in capsys.readouterr().err
