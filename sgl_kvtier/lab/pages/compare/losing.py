"""Where kvtier does worse than another arm of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sgl_kvtier.console.table import Column, Table
from sgl_kvtier.lab.pages.compare.result import (
    METRICS,
    ORACLE,
    OURS,
    good_samples,
    grouped,
    later,
    later_times,
)
from sgl_kvtier.lab.pages.stats import percentile

_LATER = "TTFT of later turns,"
_QUANTILES = (("p50", 50), ("p90", 90), ("p99", 99))


def losing_cells(result: dict) -> tuple[Table, int]:
    """Every cell in which kvtier does worse than another arm, worst first, and the number of cells
    compared.

    Cells are each percentile of each metric and the throughput against each other arm. The median
    TTFT of each turn is compared with the arm that is best there. No margin for noise is taken off;
    "rounds lost" helps to judge.
    """
    others = [arm for arm in result["arms"] if arm not in (OURS, ORACLE)]
    cells: list[dict] = []
    if OURS in result["arms"]:
        for other in others:
            cells += _overall_cells(result, other)
        cells += _turn_cells(result, others)
    lost = sorted((cell for cell in cells if cell["ratio"] > 1), key=lambda cell: -cell["ratio"])
    columns = (
        Column("cell", "Measure"),
        Column("other", "Against"),
        Column("ours", OURS, decimals=1),
        Column("theirs", "other arm", decimals=1),
        Column("unit", "Unit"),
        Column("ratio", "Worse by", "factor", decimals=3),
        Column("rounds", "Rounds lost"),
    )
    return Table("", columns, lost), len(cells)


def _overall_cells(result: dict, other: str) -> list[dict]:
    ours, theirs = result["arms"][OURS], result["arms"][other]
    mine, others = good_samples(result, OURS), good_samples(result, other)
    found: list[tuple[str, str, tuple[Mapping, Mapping], tuple[list, list]]] = [
        (name, metric, (ours.get(metric, {}), theirs.get(metric, {})), (mine, others))
        for metric, name in METRICS.items()
    ]
    figures = (later_times(result, OURS), later_times(result, other))
    found.insert(1, (_LATER, "ttft_ms", figures, (later(mine), later(others))))
    cells = []
    for name, metric, (mine_of, theirs_of), samples in found:
        for label, q in _QUANTILES:
            rounds = _rounds_lost(*samples, metric, lambda values, q=q: percentile(values, q))  # type: ignore[misc]
            cells.append(
                _cell(
                    f"{name} {label}", other, mine_of.get(label), theirs_of.get(label), "ms", rounds
                )
            )
    a, b = (arm.get("throughput_tokens_per_s") for arm in (ours, theirs))
    cells.append(_cell("throughput", other, a, b, "tokens/s", None, more_is_better=True))
    return [cell for cell in cells if cell]


def _turn_cells(result: dict, others: Sequence[str]) -> list[dict]:
    turns = {arm: grouped(good_samples(result, arm), "turn", "ttft_ms") for arm in (OURS, *others)}
    cells = []
    for turn, values in turns[OURS].items():
        rivals = {arm: percentile(turns[arm][turn], 50) for arm in others if turn in turns[arm]}
        if not rivals:
            continue
        best = min(rivals, key=lambda arm: rivals[arm] or 0)
        mine, theirs = (
            [s for s in good_samples(result, a) if s.get("turn") == turn] for a in (OURS, best)
        )
        rounds = _rounds_lost(mine, theirs, "ttft_ms", lambda found: percentile(found, 50))
        cells.append(
            _cell(
                f"TTFT p50, turn {turn}", best, percentile(values, 50), rivals[best], "ms", rounds
            )
        )
    return [cell for cell in cells if cell]


def _cell(
    name: str,
    other: str,
    ours: float | None,
    theirs: float | None,
    unit: str,
    rounds: str | None,
    *,
    more_is_better: bool = False,
) -> dict:
    if not ours or not theirs:
        return {}
    ratio = theirs / ours if more_is_better else ours / theirs
    return {
        "cell": name, "other": other, "ours": ours, "theirs": theirs, "unit": unit, "ratio": ratio, "rounds": rounds
    }  # fmt: skip


def _rounds_lost(
    ours: Sequence[Mapping],
    theirs: Sequence[Mapping],
    metric: str,
    of: Callable[[list[float]], float | None],
) -> str | None:
    """ "2 of 3": rounds in which our figure is the larger one, of those in which both arms have
    one.
    """
    mine, other = grouped(ours, "round", metric), grouped(theirs, "round", metric)
    both = [number for number in mine if number in other]
    lost = sum((of(mine[number]) or 0) > (of(other[number]) or 0) for number in both)
    return f"{lost} of {len(both)}" if both else None
