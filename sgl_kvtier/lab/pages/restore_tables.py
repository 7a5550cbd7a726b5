"""The tables of a restoration bench, made from its JSON result (schema kvtier.restore/1,
docs/manual/json.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvtier.console.table import Column, Table, format_share, format_value

OURS = "kvtier"


def restore_tables(result: dict) -> list[Table]:
    """The grid, the curve T_opt is taken from, and the fluctuation if it was measured."""
    tables = (
        [grid_table(result), detail_table(result), curve_table(result)]
        if result.get("cells")
        else []
    )
    return [*tables, fluctuation_table(result)] if result.get("fluctuation") else tables


def grid_table(result: dict) -> Table:
    """Per cell: time to first token of every arm, our speedups, and the shares of T_opt, T_link and
    T*.
    """
    # SGLang's own load is one of the two; our engine's is a third only where it was measured.
    single = (
        "vs best of compute, load, load_kvtier"
        if "load_kvtier" in result["arms"]
        else "vs better of compute, load"
    )
    columns = (
        *_place(),
        *(Column(f"ttft_ms.{arm}", arm, "ms", decimals=0) for arm in result["arms"]),
        Column("speedup_vs_load", "vs load", decimals=2),
        Column("speedup_vs_compute", "vs compute", decimals=2),
        Column("speedup_vs_best_single", single, decimals=2),
        Column("bound_fraction", "of T_opt", format=format_share),
        Column("link_bound_fraction", "of T_link", format=format_share),
        Column("tstar_fraction", "of T*", format=format_share),
        Column("equal_tokens_fraction", "Equal tokens", format=format_share),
        Column("failed", "Failed"),
    )
    note = "Speedups and shares are those of kvtier; above 1 it is faster."
    return Table(
        "Time to first token of a stored prompt",
        columns,
        _rows(result),
        notes=(note, *_verdict(result)),
    )


def detail_table(result: dict) -> Table:
    """Per cell: what kvtier loses to T_opt, where the pointers met, how steady and undisturbed the
    cell was.
    """
    columns = (
        *_place(),
        Column("read_gbps", "Bandwidth", "Gbit/s", decimals=3),
        Column("bound_ms", "T_opt", "ms", decimals=0),
        Column("link_bound_ms", "T_link", "ms", decimals=0),
        Column("above_bound_ms", "Above it", "ms", decimals=0),
        Column(f"loaded_tokens.{OURS}", "Loaded", "tokens"),
        Column("best_loaded", "In T_opt", "tokens"),
        Column("spread", "Lowest to highest", "ms"),
        Column(f"first_ttft_ms.{OURS}", "First after a change", "ms", decimals=0),
        Column(f"rounds.{OURS}", "Rounds"),
        Column("equal_logprobs_fraction", "Equal log-probs", format=format_share),
        Column("foreign_cores", "Others' cores", decimals=2),
        Column("slowness", "Machine slower by", decimals=2),
        Column("repeated", "Repeated"),
    )
    return Table("What the grid is made of", columns, _rows(result))


def curve_table(result: dict) -> Table:
    """Time to first token of the first n tokens, computed."""
    rows = [{**curve, **point} for curve in result["curves"] for point in curve["points"]]
    columns = (
        Column("model", "Model"),
        Column("length", "Prefix", "tokens"),
        Column("tokens", "Computed", "tokens"),
        Column("ttft_ms", "TTFT", "ms", decimals=0),
    )
    lengths = [
        f"{one['model']} {one['length']:,} tokens: {format_value(one['resident_ms'], 0)} ms with the prefix in device memory, "
        f"{format_value(one['request_ms'], 1)} ms a request without computing, balance at {one['balanced_gbps']:.3f} Gbit/s"
        for one in result["curves"]
    ]
    return Table("Computing the front", columns, rows, notes=tuple(lengths))


def fluctuation_table(result: dict) -> Table:
    """Per trace: time to first token of the arms, and the best fixed split in hindsight."""
    rows = [{**cell, "failed": _failed(cell)} for cell in result["fluctuation"]["cells"]]
    arms = list(dict.fromkeys(arm for row in rows for arm in row["ttft_ms"]))
    columns = (
        Column("model", "Model"),
        Column("length", "Prefix", "tokens"),
        Column("kind", "What fluctuates"),
        Column("trace", "Trace"),
        *(Column(f"ttft_ms.{arm}", arm, "ms", decimals=0) for arm in arms),
        Column("kvtier_beside_fixed_ms", "kvtier in turns with it", "ms", decimals=0),
        Column("fixed_ms", "Best fixed split", "ms", decimals=0),
        Column("over_fixed", "kvtier over it", decimals=3),
        Column("fixed_computed_share", "Computed by it", format=format_share),
        Column("hindsight_ms", "As predicted", "ms", decimals=0),
        Column("over_hindsight", "kvtier over that", decimals=3),
        Column(f"loaded_tokens.{OURS}", "Loaded", "tokens"),
        Column("equal_tokens_fraction", "Equal tokens", format=format_share),
        Column("failed", "Failed"),
    )
    return Table("Fluctuating bandwidth and compute", columns, rows)


def _place() -> tuple[Column, ...]:
    return (
        Column("model", "Model"),
        Column("length", "Prefix", "tokens"),
        Column("load_over_compute", "Load / compute", format=_ratio),
    )


def _ratio(value: object) -> str:
    number = float(value)  # type: ignore[arg-type]
    return f"1/{1 / number:g}" if 0 < number < 1 else f"{number:g}"


def _rows(result: dict) -> list[dict]:
    rows = []
    for cell in result["cells"]:
        split = cell["best_computed_tokens"]
        low, high = (cell[key].get(OURS) for key in ("ttft_ms_low", "ttft_ms_high"))
        spread = None if low is None else f"{low:,.0f} to {high:,.0f}"
        loaded = None if split is None else cell["length"] - split
        rows.append({**cell, "best_loaded": loaded, "spread": spread, "failed": _failed(cell)})
    return rows


def _failed(cell: dict) -> int | None:
    """Results of earlier versions do not say."""
    return sum(cell["errors"].values()) if "errors" in cell else None


def _verdict(result: dict) -> Sequence[str]:
    summary = result["summary"]
    found = [
        f"Worst against the better of one resource: {format_value(summary['worst_speedup_vs_best_single'], 3)}. Share of T_opt for "
        f"ratios from 1/4 to 4: median {_percent(summary['median_bound_fraction'])}, worst {_percent(summary['worst_bound_fraction'])}; "
        f"of T_link: median {_percent(summary.get('median_link_bound_fraction'))}."
    ]
    if summary.get("errors"):
        found.append(f"Requests that failed: {summary['errors']}.")
    return [*found, *(f"Missed: {text}" for text in summary["missed"])]


def _percent(value: float | None) -> str:
    return "–" if value is None else format_share(value)
