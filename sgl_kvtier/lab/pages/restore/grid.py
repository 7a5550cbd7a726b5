"""A grid of restorations as tables and as one HTML page, made from its JSON result (schema
kvtier.restore/1, docs/manual/json.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sgl_kvtier.console.table import Column, Table, format_share, format_value
from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.compare.result import OURS
from sgl_kvtier.lab.pages.plots import Series, lines

SCHEMA = "kvtier.restore/1"


def restore_tables(result: dict) -> list[Table]:
    """The grid, the curve T_opt is taken from, and the fluctuation if it was measured."""
    tables = (
        [grid_table(result), detail_table(result), curve_table(result)]
        if result.get("cells")
        else []
    )
    tables += [pace_table(result)] if result.get("pace") else []
    tables += [fluctuation_table(result)] if result.get("fluctuation") else []
    return [html.marked(table, result) for table in tables]


def pace_table(result: dict) -> Table:
    """Per arm: how well the paced device kept pace until the first token, and what its checks found."""
    rows = [{"arm": arm, **figures} for arm, figures in result["pace"].items()]
    columns = (
        Column("arm", "Arm"),
        Column("overrun", "Time lost", format=format_share),
        Column("overrun_p99", "per step p99", format=format_share),
        Column("steps", "Steps"),
        Column("load_wait_s", "Waited for pages", "s", decimals=2),
        Column("checked_tokens", "Tokens checked"),
        Column("mismatches", "Wrong"),
    )
    return Table("Pace of the device until the first token", columns, rows)


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
    rows = [
        {**cell, "failed": sum(cell["errors"].values())} for cell in result["fluctuation"]["cells"]
    ]
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


def restore_page(result: dict) -> str:
    """The whole page; figures the result does not have are left out."""
    return cells_page(
        result,
        "Restoring a stored prompt",
        headline=statements(result),
        tables=restore_tables(result),
        figures=_figures(result),
        worse=losing(result),
    )


def cells_page(
    result: dict,
    title: str,
    *,
    headline: list[tuple[str, bool]],
    tables: list[Table],
    figures: Iterator[tuple[str, str]],
    worse: list[tuple[str, bool]],
) -> str:
    """A page of cells. `worse`: where ours is. `figures` are not asked for where there is no cell."""
    cells, settings = result.get("cells") or [], result.get("settings") or {}
    arms = html.definitions_html(result.get("arms") or {})
    return html.result_page(
        result,
        title + html.paced_mark(result),
        f"{len(cells)} cells",
        headline=html.statements_html(headline),
        tables=tables,
        figures=figures if cells else None,
        losing=html.statements_html(worse),
        configuration=f"<h3>Arms</h3>\n{arms}\n<h3>Settings</h3>\n{html.definitions_html(settings)}",
    )


def statements(result: dict) -> list[tuple[str, bool]]:
    """Sentences on the outcome; True marks what is wrong."""
    found: list[tuple[str, bool]] = []
    if result.get("cells"):
        best = max(result["cells"], key=lambda cell: cell["speedup_vs_best_single"] or 0)
        if best["speedup_vs_best_single"]:
            text = (
                f"Up to {best['speedup_vs_best_single']:.2f} times as fast as the better of computing and loading "
                f"({best['model']}, {best['length']:,} tokens, load over compute {best['load_over_compute']:g})."
            )
            found.append((text, False))
        summary = result["summary"]
        missed = [(f"Missed: {text}.", True) for text in summary["missed"]]
        found += missed or [("Every cell met its aims.", False)]
        every = "Every" if summary["equal_tokens"] else "Not every"
        text = f"{every} restored answer has the tokens of the computed one."
        found.append((text, not summary["equal_tokens"]))
    if result.get("fluctuation"):
        cells = result["fluctuation"]["cells"]
        over = [cell["over_fixed"] for cell in cells if cell.get("over_fixed") is not None]
        if over:
            text = f"Fluctuation: at most {max(over):.2f} times the best fixed split in hindsight, in {len(over)} of {len(cells)} traces."
            found.append((text, max(over) > result["fluctuation"]["aim"]))
    if result.get("interrupted"):
        found.append(("Interrupted: figures are from what had been measured.", True))
    return found


def losing(result: dict) -> list[tuple[str, bool]]:
    """Every cell in which one resource alone, or SGLang's own way, is faster."""
    found = []
    for cell in result.get("cells") or []:
        ours = cell["ttft_ms"].get(OURS)
        for arm, theirs in cell["ttft_ms"].items():
            if ours and theirs and ours > theirs:
                where = f"{cell['model']}, {cell['length']:,} tokens, load over compute {_ratio(cell['load_over_compute'])}"
                found.append((f"{where}: {OURS} {ours:.0f} ms, {arm} {theirs:.0f} ms.", True))
    return found or [(f"None: in no cell is another arm faster than {OURS}.", False)]


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
        rows.append(
            {
                **cell,
                "best_loaded": loaded,
                "spread": spread,
                "failed": sum(cell["errors"].values()),
            }
        )
    return rows


def _verdict(result: dict) -> Sequence[str]:
    summary = result["summary"]
    found = [
        f"Worst against the better of one resource: {format_value(summary['worst_speedup_vs_best_single'], 3)}. Share of T_opt for "
        f"ratios from 1/4 to 4: median {_percent(summary['median_bound_fraction'])}, worst {_percent(summary['worst_bound_fraction'])}; "
        f"of T_link: median {_percent(summary['median_link_bound_fraction'])}."
    ]
    if summary["errors"]:
        found.append(f"Requests that failed: {summary['errors']}.")
    return [*found, *(f"Missed: {text}" for text in summary["missed"])]


def _percent(value: float | None) -> str:
    return "–" if value is None else format_share(value)


def _figures(result: dict) -> Iterator[tuple[str, str]]:
    places = dict.fromkeys((cell["model"], cell["length"]) for cell in result["cells"])
    for model, length in places:
        cells = [one for one in result["cells"] if (one["model"], one["length"]) == (model, length)]
        x = [cell["load_over_compute"] for cell in cells]
        series = [_series(cells, arm) for arm in result["arms"]]
        series.append(Series("T_opt", x, [cell["bound_ms"] for cell in cells]))
        axis = "loading over computing"
        where = f"{model}, {length:,} tokens{html.paced_mark(result)}"
        title = f"Time to first token, {where}"
        yield (
            lines(series, title, axis, "TTFT (ms)", log_x=True, log_y=True),
            "Medians; the band is from the lowest to the highest round. T_opt is computed from the measured curve.",
        )
        keys = {
            "speedup over the better": "speedup_vs_best_single",
            "share of T_opt": "bound_fraction",
        }
        gains = [Series(name, x, [cell[key] for cell in cells]) for name, key in keys.items()]
        yield (
            lines(gains, f"Gain, {where}", axis, OURS, log_x=True),
            "Over the better of computing alone and loading alone, and the share of the best possible split.",
        )


def _series(cells: list[dict], arm: str) -> Series:
    x = [cell["load_over_compute"] for cell in cells]
    middle, low, high = (
        [cell[key].get(arm) for cell in cells] for key in ("ttft_ms", "ttft_ms_low", "ttft_ms_high")
    )
    return Series(arm, x, middle, low, high)
