"""What a paper's agreement proves stands beside it: the null model, and how much was fitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.lab.papers.cacheflow.cells import null
from sgl_kvtier.lab.papers.cake import command as cake
from sgl_kvtier.lab.papers.cake.fit import fitted_pairs
from sgl_kvtier.lab.sim.cells import NULL, Cell, agreement, split_null
from sgl_kvtier.lab.sim_command import PAPERS, paper_tables


def test_the_null_model_is_the_harmonic_mean_of_the_printed_baselines() -> None:
    cells = [cell for cell in cake.null_model() if not cell.fitted]
    by_pair = {(c.table, c.row, c.column): c for c in cells}
    one = next(c for c in cells if c.column.endswith("over I/O"))
    other = by_pair[one.table, one.row, one.column.replace("over I/O", "over compute")]
    assert one.published and other.published
    # Loading takes `a` times Cake's time, computing `b` times: T* is ab/(a+b) of it.
    star = one.published * other.published / (one.published + other.published)
    assert one.ours == pytest.approx(one.published / star, abs=1e-4)
    assert other.ours == pytest.approx(other.published / star, abs=1e-4)


def test_over_the_slower_baseline_the_null_model_gains_more() -> None:
    seconds = {"vLLM": [2.0], "LMCache": [4.0]}
    assert null("none", "row", seconds, "vLLM").ours == 1.5
    assert null("none", "row", seconds, "LMCache").ours == 3.0


def test_cells_of_the_null_model_are_kept_apart_from_those_of_planners() -> None:
    cells = [
        Cell("t", "r", "c", 1.0, 1.0),
        Cell("t", "r", "c", 1.0, 2.0, reading=NULL),
        Cell("t", "r", "c", 1.0, 2.0, reading=f"printed 1 to 2; {NULL}"),
    ]
    planned, without = split_null(cells)
    assert (len(planned), len(without)) == (1, 2)
    assert agreement(planned)["within_15_percent"] == 1


@pytest.mark.parametrize("paper", PAPERS)
def test_every_paper_says_how_much_was_fitted(paper: str) -> None:
    _, fitted = paper_tables(paper)
    assert 0 <= fitted.parameters <= fitted.numbers


def test_cakes_fitted_numbers_are_the_pairs_that_the_fit_uses() -> None:
    assert cake.FITTED.numbers == len(fitted_pairs())


def test_the_command_prints_and_writes_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cake.json"
    command = ["sim", "paper", "cake", "--table", "4", "--table", "null", "--json", str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "null model (ratios alone, no planner): " in said
    assert "Fitted: 16 quantities to 19 printed numbers." in said
    result = json.loads(out.read_text())
    assert result["fitted"] == {"parameters": 16, "numbers": 19}
    assert result["null_model"]["predicted"] > 250
    assert result["agreement"]["predicted"] == 14
