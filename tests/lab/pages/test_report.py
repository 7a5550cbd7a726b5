"""`kvtier report`: a result drawn again is what its command drew."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import pytest
import recorded_runs

from sgl_kvtier.cli import main
from sgl_kvtier.console import to_json
from sgl_kvtier.lab.pages.report import read_result

DATA = Path(__file__).parents[3] / "docs" / "results" / "data"


@pytest.mark.parametrize("name", recorded_runs.REPORTED)
def test_a_result_that_is_drawn_again_has_the_tables_and_the_page_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pytest.importorskip("matplotlib", reason="the plots need the extra [bench]")
    kept = recorded_runs.read(name)
    source, page = tmp_path / "out.json", tmp_path / "page.html"
    source.write_text(json.dumps(recorded_runs.filled(name, kept["result"])))
    with recorded_runs.undrawn():
        assert main(["report", str(source), "--html", str(page)]) == 0
    assert recorded_runs.text_of(page.read_text()) == kept["drawn"]["page"]
    assert kept["drawn"]["tables"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("buy milk", "is not JSON"),
        ("[1]", "no result that can be drawn"),
        ('{"schema": "kvtier.stat/1"}', "no result that can be drawn"),
        ('{"schema": "kvtier.restore/1", "cells": [{}]}', "not a whole kvtier.restore/1 result"),
    ],
)
def test_another_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    assert main(["report", str(path)]) == 1
    found = capsys.readouterr().err
    assert said in found and len(found.splitlines()) == 1


GRIDS = {
    "page": "some.md",
    "plot": {"title": "Faster", "x": "Load / compute", "y": "times", "by": ["Model"]},
    "grids": {
        "small": {
            "columns": ["Model", "Load / compute", "times"],
            "rows": [["a", "1/4", 1.2], ["a", "1", 1.9], ["b", "1", 2.5]],
            "command": "kvtier compare restore --lengths 2k",
            "commit": "abc",
        }
    },
}


def test_data_of_a_results_page_are_shown_with_their_commands_and_the_plot_they_describe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, page, plot = (tmp_path / name for name in ("data.json", "page.html", "plot.svg"))
    source.write_text(json.dumps(GRIDS))
    assert main(["report", str(source), "--html", str(page), "--svg", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "small" in shown
    assert "1/4" in shown and "2.50" in shown and "--lengths 2k" in shown
    drawn = plot.read_text()
    assert drawn.startswith("<svg") and all(text in drawn for text in ("Faster", ">a<", ">b<"))
    assert "Faster" in page.read_text() and "2.50" in page.read_text()


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("For operators.\n\n# Is `kvtier` faster?\n\n# Another\n", "Is kvtier faster?"),
        ("No heading.\n", f"Figures of docs/results/{GRIDS['page']}"),
        (None, f"Figures of docs/results/{GRIDS['page']}"),
    ],
)
def test_the_title_of_a_results_pages_data_is_the_heading_of_that_page(
    page: str | None, title: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    source, drawn = tmp_path / "data" / "some.json", tmp_path / "page.html"
    source.write_text(json.dumps(GRIDS))
    if page is not None:
        (tmp_path / "some.md").write_text(page)
    assert main(["report", str(source), "--html", str(drawn)]) == 0
    assert f"<title>{title}</title>" in drawn.read_text()


def test_a_plot_without_a_second_axis_names_the_rows_beside_a_line_at_1(tmp_path: Path) -> None:
    spec = {"title": "Over stock", "x": "times", "by": ["Model", "Load / compute"]}
    source, plot = tmp_path / "data.json", tmp_path / "plot.svg"
    source.write_text(json.dumps({**GRIDS, "plot": {**spec, "where": {"Model": "a"}}}))
    assert main(["report", str(source), "--svg", str(plot)]) == 0
    drawn = plot.read_text()
    assert all(text in drawn for text in ("Over stock", ">a, 1/4<", ">a, 1<"))
    assert ">b, 1<" not in drawn


def test_data_without_a_plot_are_drawn_without_one_and_asking_for_one_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "data.json"
    plain = {name: GRIDS[name] for name in ("page", "grids")}
    source.write_text(json.dumps(plain))
    assert main(["report", str(source)]) == 0
    assert main(["report", str(source), "--svg", str(tmp_path / "plot.svg")]) == 1
    assert "describes no plot" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("*.json")))
def test_the_data_of_every_results_page_can_be_shown(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(DATA / name)]) == 0
    grids = json.loads((DATA / name).read_text())["grids"]
    shown = capsys.readouterr().out.splitlines()
    assert set(grids) <= set(shown)


RAW = DATA.parent / "raw"


def test_the_published_rows_of_the_proof_follow_from_their_raw_result() -> None:
    result = read_result(RAW / "emulated-h100-proof.json.gz")
    grid = json.loads((DATA / "emulated-h100.json").read_text())["grids"]["proof"]
    rows = [dict(zip(grid["columns"], row, strict=True)) for row in grid["rows"]]
    published = {row["policy.proof"]: row for row in rows if row["load"] == "long"}
    for arm, proof in (("kvtier", "auto"), ("kvtier-unproven", "off")):
        samples = [one for one in result["samples"] if one["arm"] == arm]
        later = [one["ttft_ms"] for one in samples if one["turn"] > 1]
        row = published[proof]
        assert row["follow-up turns"] == len(later)
        assert row["mean TTFT of these, ms"] == pytest.approx(fmean(later), abs=0.06)
        everything = fmean(one["ttft_ms"] for one in samples)
        assert row["mean TTFT, all turns, ms"] == pytest.approx(everything, abs=0.06)
        assert row["answers equal"] == sum(one["equal"] for one in samples) == len(samples)


@pytest.mark.parametrize(
    ("grid", "raw"),
    [
        ("returning, SSD of 1.5 GB/s", "emulated-h100-returning-ssd-1.5"),
        ("mixed, SSD of 3 GB/s", "emulated-h100-mixed-ssd-3"),
        ("mixed, 0.6 a second", "emulated-h100-mixed-060"),
        ("mixed, 1.14 a second", "emulated-h100-mixed-114"),
        ("mixed, 0.36 a second", "emulated-h100-mixed-036"),
        ("counted, Llama 3.3 70B", "emulated-h100-counted-70b"),
        ("counted, short sessions", "emulated-h100-counted-short"),
        ("returning, 256 sessions", "emulated-h100-counted-256"),
        ("returning, one long session at a time", "emulated-h100-returning-long"),
        ("returning, SSD of 12 GB/s", "emulated-h100-returning-ssd-12"),
        ("ablation, returning", "emulated-h100-ablation-returning"),
        ("ablation, returning, SSD of 3 GB/s", "emulated-h100-ablation-ssd-3"),
        ("ablation, returning, other rates", "emulated-h100-ablation-rates"),
        ("ablation, returning, DeepSeek V3", "emulated-h100-ablation-mla"),
        ("ablation, returning, short sessions", "emulated-h100-ablation-returning-short"),
        ("ablation, returning, Llama 3.3 70B", "emulated-h100-ablation-70b"),
        ("returning, other backends", "emulated-h100-other-backends"),
        ("returning, other backends, five sessions", "emulated-h100-other-backends-short"),
        ("returning, recomputed", "emulated-h100-returning-recompute"),
        ("restart", "emulated-h100-restart"),
        ("ablation, ordered at once", "emulated-h100-ablation-short-2"),
        ("ablation, other bounds on being overtaken", "emulated-h100-overtaking"),
        ("ablation, waiting for sessions", "emulated-h100-holding"),
        ("ablation, all at once", "emulated-h100-ablation-short-3"),
        ("ablation, long sessions", "emulated-h100-long-lpm"),
        ("ablation, 2 s pauses", "emulated-h100-ablation-pauses"),
    ],
)
def test_the_published_rows_of_a_grid_follow_from_their_raw_result(grid: str, raw: str) -> None:
    result = read_result(RAW / f"{raw}.json.gz")
    found = json.loads((DATA / "emulated-h100.json").read_text())["grids"][grid]
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    assert sum(row["requests"] for row in rows) == len(result["samples"])
    several = len({one.get("rate") for one in result["samples"]}) > 1
    for row in rows:
        rate = row["Load"].partition(" ")[0]
        samples = [
            one
            for one in result["samples"]
            if one["arm"] == row["Arm"] and (not several or rate == f"{one['rate']}")
        ]
        assert row["requests"] == len(samples)
        assert row["answers equal"] == sum(one["equal"] is True for one in samples)
        assert not any(one["equal"] is False for one in samples)
        ttft_ms = fmean(one["ttft_ms"] for one in samples)
        assert row["mean TTFT, ms"] == pytest.approx(ttft_ms, abs=0.06)
        whole_ms = fmean(one["e2e_ms"] for one in samples)
        assert row.get("mean request, ms", whole_ms) == pytest.approx(whole_ms, abs=0.06)
        stored = sum(one["cached"]["storage"] for one in samples)
        prompts = sum(one["prompt_tokens"] for one in samples)
        assert row["from storage (%)"] == round(100 * stored / prompts)


def test_what_operators_ask_follows_from_the_report_of_its_tests() -> None:
    with gzip.open(RAW / "operating.xml.gz") as file:
        cases = ElementTree.parse(file).getroot().iter("testcase")
        said = [
            (case.get("name"), one.get("name"), json.loads(one.get("value", "")))
            for case in cases
            for one in case.iter("property")
        ]
    grids = json.loads((DATA / "operating.json").read_text())["grids"]
    explained = [
        (test, told["advice"]["cause"], told["prompts"]["computed"], told["prompts"]["storage"])
        for test, kind, told in said
        if kind == "explained"
    ]
    for _, *row, test in grids["causes"]["rows"]:
        assert (test, *row) in explained
    hints = [told for _, kind, told in said if kind == "hints"]
    results = [f"hints_total {result}" for result in ("accepted", "clipped", "refused")]
    keys = ["envelopes", "answered", *results]
    assert grids["hints"]["rows"] == [[told[key] for key in keys] for told in hints]
    kept = [
        [told["tier"], *told["retained and not"]] for _, kind, told in said if kind == "retained"
    ]
    assert grids["retained"]["rows"] == kept
    (lives,) = [told for _, kind, told in said if kind == "lives after the first"]
    rows = zip((2, 3), lives["asked"], lives["tokens from storage"], strict=True)
    assert grids["pod"]["rows"] == [list(row) for row in rows]


@pytest.mark.parametrize("raw", ["harness", "harness-sglang"])
def test_the_published_rows_of_other_clients_follow_from_their_raw_results(raw: str) -> None:
    result = read_result(RAW / f"{raw}.json.gz")
    page = (DATA.parent / "emulated-h100.md").read_text(encoding="utf-8")
    rows = result["harness"]["agreement"]
    assert all(row["ratio"] == pytest.approx(row["harness"] / row["own"]) for row in rows)
    for arm, figures in result["arms"].items():
        for client in ("harness", "own"):
            shown = [f"{row[client]:,.1f}" for row in rows if row["arm"] == arm]
            assert f"| {arm} | {' | '.join(shown)} |" in page
        ttft_ms = [one["ttft_ms"] for one in result["samples"] if one["arm"] == arm]
        assert len(ttft_ms) == figures["requests"]
        (mean,) = [
            row["harness"] for row in rows if (row["arm"], row["figure"]) == (arm, "ttft_ms.mean")
        ]
        assert mean == pytest.approx(fmean(ttft_ms))


@pytest.mark.parametrize("name", sorted(path.name for path in RAW.glob("*.json.gz")))
def test_every_raw_result_can_be_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(RAW / name)]) == 0
    shown = capsys.readouterr().out
    assert "first token" in shown or "TTFT" in shown


def test_a_compressed_result_that_is_cut_short_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = gzip.compress(b'{"schema": "kvtier.compare/1"}' * 100)
    for name, text in (("cut.json.gz", whole[:20]), ("plain.json.gz", b"{}")):
        (tmp_path / name).write_bytes(text)
        assert main(["report", str(tmp_path / name)]) == 1
        found = capsys.readouterr().err
        assert "is not compressed by gzip" in found and len(found.splitlines()) == 1


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "/nowhere/out.json"]) == 1
    assert "cannot read /nowhere/out.json" in capsys.readouterr().err


def test_the_page_goes_to_standard_output_and_the_tables_beside_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    compare_result: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take seconds
    path = tmp_path / "out.json"
    path.write_text(to_json(compare_result))
    assert json.loads(path.read_text())["schema"] == "kvtier.compare/1"
    assert main(["report", str(path), "--html", "-"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("<!DOCTYPE html>")
    assert "Time to first token" in shown.err
