"""Measures, and writes the figures into docs/results/copies.md, its data and its line in the index.

`python -m sgl_kvtier.lab.copies.page docs/results`, on a quiet machine: a minute.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from sgl_kvtier.console.document import write_text
from sgl_kvtier.console.environment import environment

LAYERS, HEADS, PAGE, ROUNDS = (32, 80), (8, 1), 64, 200
COMMAND = "python -m sgl_kvtier.lab.copies.page docs/results"
_GRID = "loads"
_PER_LAYER, _ALL_LAYERS, _STAGED = "Launch per layer (µs)", "One launch (µs)", "Staged (µs)"
_COLUMNS = {
    "KV heads": "heads",
    "Layers": "layers",
    "Tokens": "tokens",
    "Host pages": "host_pages",
    _PER_LAYER: "per_layer_us",
    _ALL_LAYERS: "all_layers_us",
    _STAGED: "staged_us",
    "Ratio": "ratio",
}
_WAYS = (_PER_LAYER, _ALL_LAYERS, _STAGED)


def main(folder: Path) -> None:
    """Measures every row and writes the three files."""
    from sgl_kvtier.lab.copies import benchmark  # imports torch, Triton and SGLang

    rows = [
        {"heads": heads, **row}
        for heads in HEADS
        for row in benchmark.measured(LAYERS, heads, PAGE, ROUNDS)
    ]
    write(folder, rows, environment())


def write(folder: Path, rows: Sequence[dict[str, Any]], made_on: dict[str, Any]) -> None:
    """The page, its data and the index's line, from a run's rows and environment."""
    commit = str(made_on["git_commit"] or "unknown").removesuffix("-dirty")[:7]
    found = [[_rounded(row[key]) for key in _COLUMNS.values()] for row in rows]
    claims = _claims([dict(zip(_COLUMNS, row, strict=True)) for row in found])
    grid = {
        "about": f"Medians of {ROUNDS} rounds of 8 loads, ways in turn; pages of {PAGE} tokens.",
        "commit": commit,
        "command": COMMAND,
        "columns": list(_COLUMNS),
        "rows": found,
    }
    table = {
        "grids": [_GRID],
        "by": list(_COLUMNS)[:4],
        "columns": [{"shown": name} for name in _COLUMNS],
    }
    data = {"page": "copies.md", "grids": {_GRID: grid}, "tables": [table], "claims": claims}
    target = folder / "data" / "copies.json"
    write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", str(target))
    page, index = folder / "copies.md", folder / "README.md"
    text = _page(page.read_text("utf-8"), found, claims, _state(commit, made_on))
    write_text(text, str(page))
    lines = [
        _index(claims) if "(copies.md)" in line else line
        for line in index.read_text("utf-8").splitlines()
    ]
    write_text("\n".join(lines) + "\n", str(index))


def _claims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Layers, then of each number of layers the range of the staged and of the per-layer way."""
    claims: list[dict[str, Any]] = [
        {"shown": f"{number} layers", "grids": [_GRID], "column": "Layers", "how": how}
        for number, how in zip(LAYERS, ("min", "max"), strict=True)
    ]
    for way in _WAYS:
        for layers in LAYERS:
            values = [row[way] for row in rows if row["Layers"] == layers]
            claims.append(
                {
                    "shown": f"{min(values):,.0f} to {max(values):,.0f} µs",
                    "grids": [_GRID],
                    "column": way,
                    "where": {"Layers": layers},
                    "how": ["min", "max"],
                }
            )
    return claims


def _answer(claims: Sequence[dict[str, Any]]) -> str:
    few, many, per_few, per_many, one_few, one_many, staged_few, staged_many = (
        claim["shown"] for claim in claims
    )
    return (
        f"Through staging {staged_few} at {few} and {staged_many} at {many}. SGLang's launch per "
        f"layer takes {per_few} and {per_many}, its launch for all layers {one_few} and {one_many}."
    )


def _index(claims: Sequence[dict[str, Any]]) -> str:
    *_, per_many, _one_few, _one_many, _staged_few, staged_many = (
        claim["shown"] for claim in claims
    )
    return (
        "| How long does a load onto a card keep the interpreter? | "
        f"{staged_many} at {LAYERS[-1]} layers, SGLang's launch per layer {per_many} | "
        "[copies.md](copies.md) |"
    )


def _page(
    old: str, rows: Sequence[Sequence[Any]], claims: Sequence[dict[str, Any]], state: str
) -> str:
    """The page with another state, answer and table. The text around them is written by hand."""
    table = [
        "| " + " | ".join(_COLUMNS) + " |",
        "| ---: | ---: | ---: | :--- | ---: | ---: | ---: | ---: |",
        *("| " + " | ".join(map(_shown, row)) + " |" for row in rows),
    ]
    text = re.sub(r"^State measured:.*$", lambda _: state, old, count=1, flags=re.M)
    answer = f"**Answer.** {_answer(claims)}"
    text = re.sub(r"^\*\*Answer\.\*\*.*$", lambda _: answer, text, count=1, flags=re.M)
    lines = "".join(f"{line}\n" for line in table)
    return re.sub(r"(?:^\|.*\n)+", lambda _: lines, text, count=1, flags=re.M)


def _state(commit: str, made_on: dict[str, Any]) -> str:
    packages, cpu = made_on["packages"], made_on["cpu"]
    date = datetime.fromisoformat(made_on["date"])
    return (
        f"State measured: commit {commit}, {date:%-d %B %Y}. SGLang {packages['sglang']}, "
        f"torch {packages['torch']}, {cpu['usable']:g} CPU cores ({cpu['model']}); no card."
    )


def _rounded(value: Any) -> Any:
    return round(value, 1) if isinstance(value, float) else value


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
