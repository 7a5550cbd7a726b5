"""What is particular to each kind of result in cells (schemas: docs/manual/json.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sgl_kvtier.console.table import Column, format_share, format_value
from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.ablation import ABLATION
from sgl_kvtier.lab.pages.cells import Kind, Plot, curves, grouped, over
from sgl_kvtier.lab.pages.compare.figures import first_token_cdf
from sgl_kvtier.lab.pages.compare.result import ORACLE, OURS, STOCK, skipped_arms
from sgl_kvtier.lab.pages.listing import ARM, Listing, Measure, Row, Statement, arm_rows, ms, share
from sgl_kvtier.lab.pages.plots import Series, lines
from sgl_kvtier.sizes import format_bytes

_TTFT = {q: Measure(f"TTFT {q}", f"ttft_ms.{q}") for q in ("p50", "p90", "p99")}


# compare at rising load

_LOADS = {"concurrency": "at a time", "rate": "a second"}
_SWEPT = (
    *(_TTFT["p50"], _TTFT["p99"], Measure("output tokens/s", "throughput_tokens_per_s", "")),
    Measure("requests/s in time", "goodput_requests_per_s", "", 2),
)


def load_of(result: dict) -> str:
    """What changes from cell to cell: concurrency or rate."""
    return next(name for name in _LOADS if name in result["cells"][0])


def _load(cell: Row) -> str:
    return next(f"{name} {cell[name]:g}" for name in _LOADS if name in cell)


def _sweep_columns(result: dict) -> Sequence[Column]:
    return (
        Column(load_of(result), "Sessions", _LOADS[load_of(result)], format="{:g}".format),
        *(ARM, ms("ttft_ms.p50", "TTFT p50"), ms("ttft_ms.p99", "TTFT p99")),
        ms("ttft_later_ms.p50", "later p50"),
        Column("throughput_tokens_per_s", "Output", "tokens/s", decimals=1),
        Column("goodput_requests_per_s", "In time", "requests/s", decimals=2),
        Column("errors", "Errors"),
    )


def _sweep_notes(result: dict) -> list[str]:
    bound = result["settings"]["ttft_bound_ms"]
    about = f"In time: requests whose first token came within {bound:g} ms. Later: without each session's first."
    return [about, *skipped_arms(result)]


def _sustained(result: dict) -> Iterator[Row]:
    for arm, figures in result["arms"].items():
        loads = {f"{one['ttft_p95_ms']:g}": one["load"] for one in figures.get("sustained") or []}
        if loads:
            yield {"arm": arm, "loads": loads}


def _sustained_columns(result: dict) -> Sequence[Column]:
    first = next(_sustained(result))
    what = _LOADS[load_of(result)]
    return (
        ARM,
        *(
            Column(f"loads.{bound}", f"TTFT p95 within {bound} ms", what, format="{:g}".format)
            for bound in first["loads"]
        ),
    )


_SUSTAINED = (
    "The largest of the loads measured at which, and below which, no request failed and the 95th percentile of "
    "the TTFT is within the bound; nothing where the smallest is too much."
)


def _over_stock(result: dict) -> Iterator[Statement]:
    for cell in result["cells"]:
        mine, theirs = (cell["arms"].get(arm) for arm in (OURS, STOCK))
        pairs = [(one.label, one.of(mine), one.of(theirs)) for one in _SWEPT]
        said = [f"{label} {a / b:.2f} times" for label, a, b in pairs if a is not None and b]
        if said:
            yield f"{_load(cell)}, {OURS} over {STOCK}: {', '.join(said)}.", False


def pareto(result: dict, quantile: str) -> str:
    """Throughput against a quantile of the time to first token: a line for each arm, a point for
    each load. Further right and further down is better.
    """
    shown = {"concurrency": "×{:g}", "rate": "{:g}/s"}[load_of(result)]
    series = []
    for arm in result["arms"]:
        rows = [row for row in arm_rows(result) if row["arm"] == arm]
        rows = [row for row in rows if row.get("throughput_tokens_per_s") is not None]
        x = [row["throughput_tokens_per_s"] for row in rows]
        y = [row["ttft_ms"].get(quantile) for row in rows]
        labels = [shown.format(row[load_of(result)]) for row in rows]
        series += [Series(arm, x, y, labels=labels)] if rows else []
    title = f"Throughput and time to first token, {quantile}"
    axes = ("output tokens per second", f"TTFT {quantile} (ms), logarithmic")
    return lines(series, title, *axes, log_y=True)


def _sweep_plots(result: dict) -> Iterator[Plot]:
    what = f"sessions {_LOADS[load_of(result)]}"
    caption = f"A point for each load, labelled with its {what}. Further right and further down is better."
    yield pareto(result, "p50"), caption
    yield pareto(result, "p99"), caption
    yield first_token_cdf(result, "loads and rounds")


SWEEP = Kind(
    "kvtier.sweep/1",
    "Throughput and time to first token",
    _load,
    [
        Listing("Throughput and time to first token", _sweep_columns, notes=_sweep_notes),
        Listing("Sessions sustained", _sustained_columns, _sustained, [_SUSTAINED]),
    ],
    _SWEPT,
    _sweep_plots,
    _over_stock,
)


# compare remote

_REMOTE = "kvtier-remote"


def _turns(result: dict) -> Iterator[Row]:
    for row in arm_rows(result):
        if row["ttft_ms"]["n"] or row["errors"]:
            prompt, ratio = row["prompt_tokens"], row["ratios"].get(f"{row['arm']}/{_REMOTE}")
            yield {
                **row,
                "gbps": row["gbps"] or "full",
                "times": (ratio or {}).get("median"),
                "share": row["cached_tokens"]["total"] / prompt if prompt else None,
            }


def _link(cell: Row) -> str:
    return f"{cell['gbps']:.3g} Gbit/s" if cell["gbps"] else "full speed"


def _remote_plots(result: dict) -> Iterable[Plot]:
    limited = sorted((c for c in result["cells"] if c["gbps"]), key=lambda cell: cell["gbps"])
    axis = ("gbps", "Gbit/s between servers and store")
    return over({**result, "cells": limited}, _TTFT["p50"], axis, log_x=True, log_y=True)


REMOTE = Kind(
    "kvtier.compare.remote/1",
    "Two servers on one remote store",
    _link,
    [
        Listing(
            "Moved turns",
            (
                Column("gbps", "Link", "Gbit/s", decimals=3),
                Column("load_over_compute", "Load/compute", decimals=2),
                *(ARM, ms("ttft_ms.p50", "TTFT p50", 0), ms("ttft_ms.p99", "p99", 0)),
                Column("times", "Ours is x faster", decimals=2),
                share("share", "Not computed"),
                Column("remote_bytes", "Remote", format=lambda n: format_bytes(int(float(str(n))))),
                *(Column("ttft_ms.n", "Turns"), Column("errors", "Errors")),
                share("equal_tokens_fraction", "Equal output"),
            ),
            _turns,
            [
                "Turns whose session was served by the other server before. Ours is x faster: the configuration's time over "
                f"that of {_REMOTE}, the median over equal turns. Remote: bytes that kvtier read from there."
            ],
        )
    ],
    [Measure("TTFT p50", "ttft_ms.p50", decimals=0)],
    _remote_plots,
    ours=_REMOTE,
    bounds=[ORACLE],
)

# compare restore


def _ratio(value: object) -> str:
    number = float(value)  # type: ignore[arg-type]
    return f"1/{1 / number:g}" if 0 < number < 1 else f"{number:g}"


_GRID_PLACE = (
    Column("model", "Model"),
    Column("length", "Prefix", "tokens"),
    Column("load_over_compute", "Load / compute", format=_ratio),
)


def _prefix(cell: Row) -> str:
    ratio = _ratio(cell["load_over_compute"])
    return f"{cell['model']}, {cell['length']:,} tokens, load over compute {ratio}"


def _grid(result: dict) -> Iterator[Row]:
    for cell in result["cells"]:
        split = cell["best_computed_tokens"]
        low, high = (cell[key].get(OURS) for key in ("ttft_ms_low", "ttft_ms_high"))
        yield {
            **cell,
            "best_loaded": None if split is None else cell["length"] - split,
            "spread": None if low is None else f"{low:,.0f} to {high:,.0f}",
            "failed": sum(cell["errors"].values()),
        }


def _grid_columns(result: dict) -> Sequence[Column]:
    # SGLang's own load is one of the two; our engine's is a third only where it was measured.
    single = "vs better of compute, load"
    if "load_kvtier" in result["arms"]:
        single = "vs best of compute, load, load_kvtier"
    return (
        *_GRID_PLACE,
        *(ms(f"ttft_ms.{arm}", arm, 0) for arm in result["arms"]),
        Column("speedup_vs_load", "vs load", decimals=2),
        Column("speedup_vs_compute", "vs compute", decimals=2),
        Column("speedup_vs_best_single", single, decimals=2),
        share("bound_fraction", "of T_opt"),
        share("equal_tokens_fraction", "Equal tokens"),
        Column("failed", "Failed"),
    )


def _grid_notes(result: dict) -> list[str]:
    summary = result["summary"]
    worst = format_value(summary["worst_speedup_vs_best_single"], 3)
    median, least = (
        "–" if value is None else format_share(value)
        for value in (summary["median_bound_fraction"], summary["worst_bound_fraction"])
    )
    failed = f"Requests that failed: {summary['errors']}."
    return [
        f"Speedups and shares are those of {OURS}; above 1 it is faster.",
        f"Worst against the better of one resource: {worst}. Share of T_opt for ratios from 1/4 to 4: "
        f"median {median}, worst {least}.",
        *([failed] if summary["errors"] else []),
    ]


def _curve_notes(result: dict) -> list[str]:
    return [
        f"{one['model']} {one['length']:,} tokens: {format_value(one['resident_ms'], 0)} ms with the prefix in device memory, "
        f"{format_value(one['request_ms'], 1)} ms a request without computing, balance at {one['balanced_gbps']:.3f} Gbit/s"
        for one in result["curves"]
    ]


def _best(result: dict) -> Iterator[Statement]:
    best = max(result["cells"], key=lambda cell: cell["speedup_vs_best_single"] or 0)
    if times := best["speedup_vs_best_single"]:
        what = f"Up to {times:.2f} times as fast as the better of computing and loading"
        yield f"{what} ({_prefix(best)}).", False


def _grid_plots(result: dict) -> Iterator[Plot]:
    ratio, axis = "load_over_compute", "loading over computing"
    for (model, length), cells in grouped(result, "model", "length").items():
        x = [cell[ratio] for cell in cells]
        series = curves(cells, result["arms"], ratio, "ttft_ms", ["ttft_ms_low", "ttft_ms_high"])
        series.append(Series("T_opt", x, [cell["bound_ms"] for cell in cells]))
        where = f"{model}, {length:,} tokens{html.paced_mark(result)}"
        title = f"Time to first token, {where}"
        caption = "Medians; the band is from the lowest to the highest round. T_opt is computed from the measured curve."
        yield lines(series, title, axis, "TTFT (ms)", log_x=True, log_y=True), caption
        keys = {
            "speedup over the better": "speedup_vs_best_single",
            "share of T_opt": "bound_fraction",
        }
        gains = [Series(name, x, [cell[key] for cell in cells]) for name, key in keys.items()]
        caption = "Over the better of computing alone and loading alone, and the share of the best possible split."
        yield lines(gains, f"Gain, {where}", axis, OURS, log_x=True), caption


GRID = Kind(
    "kvtier.restore/1",
    "Restoring a stored prompt",
    _prefix,
    [
        Listing("Time to first token of a stored prompt", _grid_columns, _grid, _grid_notes),
        Listing(
            "What the grid is made of",
            (
                *_GRID_PLACE,
                Column("read_gbps", "Bandwidth", "Gbit/s", decimals=3),
                ms("bound_ms", "T_opt", 0),
                Column(f"loaded_tokens.{OURS}", "Loaded", "tokens"),
                Column("best_loaded", "In T_opt", "tokens"),
                Column("spread", "Lowest to highest", "ms"),
                ms(f"first_ttft_ms.{OURS}", "First after a change", 0),
                Column(f"rounds.{OURS}", "Rounds"),
                share("equal_logprobs_fraction", "Equal log-probs"),
                Column("foreign_cores", "Others' cores", decimals=2),
                Column("slowness", "Machine slower by", decimals=2),
                Column("repeated", "Repeated"),
            ),
            _grid,
        ),
        Listing(
            "Computing the front",
            (*_GRID_PLACE[:2], Column("tokens", "Computed", "tokens"), ms("ttft_ms", "TTFT", 0)),
            lambda result: [
                {**one, **point} for one in result["curves"] for point in one["points"]
            ],
            _curve_notes,
        ),
    ],
    [Measure("TTFT", "ttft_ms", decimals=0)],
    _grid_plots,
    _best,
)


# compare restore --at-once

_BATCH_PLACE = (
    Column("at_once", "At once"),
    Column("load_over_compute", "Load / compute", decimals=2),
)
_BATCHES = (
    Measure("mean TTFT", "ttft_ms.mean", decimals=0),
    Measure("makespan", "makespan_s", "s", 2),
    Measure("largest gap between tokens", "token_gap_ms.max", decimals=0),
)


def _batch(cell: Row) -> str:
    ratio = cell["load_over_compute"]
    return f"{cell['at_once']} at once" + ("" if ratio == 1 else f", load/compute {ratio:g}")


_BATCH_COLUMNS = (
    *(*_BATCH_PLACE, ARM, ms("ttft_ms.mean", "TTFT mean", 0)),
    *(ms("ttft_ms.p50", "p50", 0), ms("ttft_ms.p99", "p99", 0)),
    Column("makespan_s", "Makespan", "s", decimals=2),
    Column("computed_tokens", "Computed", "tokens"),
    share("link_busy_fraction", "Link busy"),
    share("compute_busy_fraction", "Compute busy"),
    ms("token_gap_ms.p99", "Gap p99", 0),
    ms("token_gap_ms.max", "Gap largest", 0),
    share("equal_tokens_fraction", "Equal tokens"),
    Column("errors", "Failed"),
)


def _batch_plots(result: dict) -> Iterator[Plot]:
    for measure in _BATCHES:
        yield from over(
            result,
            measure,
            ("at_once", "restorations at once"),
            by=["model", "load_over_compute"],
            where=lambda cell: f"{cell['model']}, load over compute {cell['load_over_compute']:g}",
            whole_x=True,
        )


BATCHES = Kind(
    "kvtier.restore.batches/1",
    "Several restorations at once",
    _batch,
    [
        Listing("Several restorations at once", _BATCH_COLUMNS),
        Listing(
            f"{OURS} over the others, round by round",
            (
                *_BATCH_PLACE,
                Column("arm", "Over"),
                Column("ttft_ms_mean.median", "TTFT mean", decimals=3),
                Column("ttft_ms_mean.p25", "p25", decimals=3),
                Column("ttft_ms_mean.p75", "p75", decimals=3),
                Column("makespan_s.median", "Makespan", decimals=3),
                Column("makespan_s.n", "Rounds"),
            ),
            lambda result: [
                {**cell, "arm": name.removeprefix(f"{OURS}/"), **found}
                for cell in result["cells"]
                for name, found in cell["ratios"].items()
            ],
        ),
        Listing(
            "What the planner answered",
            (*_BATCH_PLACE, ARM, Column("answer", "Answer"), Column("count", "Prefixes")),
            lambda result: [
                {**row, "answer": answer, "count": int(count)}
                for row in arm_rows(result)
                for answer, count in sorted(row["answers"].items())
            ],
        ),
    ],
    _BATCHES,
    _batch_plots,
)

KINDS = {kind.schema: kind for kind in (SWEEP, REMOTE, GRID, BATCHES, ABLATION)}
"""By the schema of the result."""
