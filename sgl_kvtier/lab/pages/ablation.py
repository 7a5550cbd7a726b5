"""The result of `kvtier compare --ablation` (kvtier.ablation/1): which mechanism has which share of
what kvtier gains over SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy

from sgl_kvtier.console.table import Column, Table
from sgl_kvtier.lab.pages.cells import Kind
from sgl_kvtier.lab.pages.compare.figures import first_token_cdf
from sgl_kvtier.lab.pages.compare.result import OURS, seconds
from sgl_kvtier.lab.pages.listing import ARM, Listing, Measure, Row, Statement, arm_rows, ms, share

BEST = "sglang-best"
PATCHED = "sglang-patched"
CHAIN: Mapping[str, str] = {
    "sglang": BEST,
    "store": "store",
    "reads": "reads",
    "queue": "queue",
    "hold": "hold",
    "restore": "restore",
    "lookahead": OURS,
}
"""The arm that has a mechanism and all before it."""
WITHOUT: Mapping[str, str] = {
    "restore": "kvtier-without-restore",
    "lookahead": "kvtier-without-lookahead",
    "queue": "kvtier-without-queue",
    "mixed": "kvtier-without-mixed-chunk",
}
"""The arm that has all mechanisms but one; the last one is without SGLang's --enable-mixed-chunk."""
SAME: Mapping[str, str] = {WITHOUT["lookahead"]: CHAIN["restore"]}
"""Arms with the settings of another one, measured once."""

_RESAMPLED = 2000
_LOW, _HIGH = 2.5, 97.5
"""Percentiles of a mean over rounds drawn again: its interval."""


def shares(rows: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    """What each mechanism takes off the mean time to first token of all turns, in ms, and as a share
    of what all of them take off SGLang's where that is above 0, with intervals. `rows` are requests
    of complete rounds; of mechanisms without an arm of their own the next one has the gain.
    """
    rounds, names = _rounds_of_all(rows, arms), list(CHAIN)
    there = [(name, _means(rows, arm, rounds)) for name, arm in CHAIN.items() if arm in arms]
    measured = [(name, means) for name, means in there if means is not None]
    if len(measured) < 2:
        return {}
    gains = measured[0][1] - measured[-1][1]
    gained = _interval(gains)["low"]
    # Of a gain that may be none there are no shares.
    whole = gains if gained is not None and gained > 0 else numpy.full_like(gains, numpy.nan)
    found = {}
    for (before, first), (name, second) in pairwise(measured):
        off = first - second
        key = " + ".join(names[names.index(before) + 1 : names.index(name) + 1])
        found[key] = {"ms": _interval(off), "share": _interval(off / whole)}
    return found


def without(
    rows: Sequence[Mapping[str, Any]], arms: Sequence[str], figure: str = "ttft_ms"
) -> dict[str, Any]:
    """How many times as long the mean time to first token of all turns, or another figure of theirs,
    is without one mechanism, and with SGLang's best flags, with intervals.
    """
    rounds = _rounds_of_all(rows, arms)
    ours = _means(rows, OURS, rounds, figure)
    found = {}
    for name, arm in {"all": BEST, **WITHOUT}.items():
        other = _means(rows, SAME.get(arm, arm), rounds, figure)
        if ours is not None and other is not None:
            found[name] = _interval(other / ours)
    return found


def _rounds_of_all(rows: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> list[Any]:
    """The rounds that every measured arm has: they make pairs."""
    by_arm = {arm: {row["round"] for row in rows if row["arm"] == arm} for arm in arms}
    known = [rounds for rounds in by_arm.values() if rounds]
    return sorted(set.intersection(*known)) if known else []


def _means(
    rows: Sequence[Mapping[str, Any]], arm: str, rounds: Sequence[Any], figure: str = "ttft_ms"
) -> numpy.ndarray | None:
    """The mean of a figure of an arm's requests, first as measured, then over rounds drawn again:
    the same ones for all arms. Requests of one round wait for each other, so a round is drawn whole.
    None without a request.
    """
    sums, counts = numpy.zeros(len(rounds)), numpy.zeros(len(rounds))
    for row in rows:
        if row["arm"] == arm and row["round"] in rounds and row[figure] is not None:
            place = rounds.index(row["round"])
            sums[place] += row[figure]
            counts[place] += 1
    if not counts.all() or not len(rounds):
        return None
    drawn = numpy.random.default_rng(0).integers(len(rounds), size=(_RESAMPLED, len(rounds)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return numpy.concatenate([[sums.sum() / counts.sum()], means])


def _interval(values: numpy.ndarray) -> dict[str, float | None]:
    """The value as measured, and its interval; None where it is not a number."""
    drawn = values[1:][numpy.isfinite(values[1:])]
    if not numpy.isfinite(values[0]) or not len(drawn):
        return {"value": None, "low": None, "high": None}
    low, high = numpy.percentile(drawn, [_LOW, _HIGH])
    return {"value": float(values[0]), "low": float(low), "high": float(high)}


def _by_mechanism(key: str, result: dict) -> Iterator[Row]:
    for load in result["cells"]:
        for name, found in load[key].items():
            yield {"load": load["name"], "mechanism": name, **found}


def _without(result: dict) -> Iterator[Row]:
    for row in _by_mechanism("without", result):
        (load,) = (one for one in result["cells"] if one["name"] == row["load"])
        # Earlier results have none of whole requests.
        yield {**row, "e2e": load.get("without_e2e", {}).get(row["mechanism"], {})}


def _tried(result: dict) -> Iterator[Row]:
    for load in result["cells"]:
        for one in load["tried"]:
            flags = " ".join(word.removeprefix("--") for word in one["arguments"])
            yield {"load": load["name"], **one, "flags": flags, "best": "best" * one["best"]}


def _said(result: dict) -> Iterator[Statement]:
    for load in result["cells"]:
        mine, theirs = (
            ((load["arms"].get(arm) or {}).get("ttft_ms") or {}).get("mean") for arm in (OURS, BEST)
        )
        times = load["without"].get("all")
        if mine is None or theirs is None or times is None:
            continue
        text = (
            f"{load['name']}: first token of all turns after {seconds(mine, theirs)} instead of {seconds(theirs, mine)}, "
            f"SGLang's best is {times['value']:.2f} times as long ({times['low']:.2f} to {times['high']:.2f})."
        )
        yield text, times["value"] < 1


_LOAD = Column("name", "Load")
_NAMED = (Column("load", "Load"), Column("mechanism", "Mechanism"))
_ALIKE = (
    "One mechanism more in each row. Interval: 95 % of 2,000 draws of the rounds, the same ones for all configurations: it "
    "says how this load repeats, not what another one gives. A difference whose interval holds 0 is none that shows."
)


class _Loads(Kind):
    """Its cells are called loads."""

    def tables(self, result: dict) -> list[Table]:
        return super().tables(_view(result))

    def page(self, result: dict) -> str:
        return super().page(_view(result))


def _view(result: dict) -> dict:
    arms = {arm: load["arms"][arm] for load in result["loads"] for arm in load["arms"]}
    return {**result, "cells": result["loads"], "arms": arms}


ABLATION = _Loads(
    "kvtier.ablation/1",
    "What each mechanism is worth",
    lambda load: load["name"],
    [
        Listing(
            "Each mechanism's share of the gain in mean TTFT, all turns",
            (
                *_NAMED,
                *(
                    ms(f"ms.{name}", title, 0)
                    for name, title in (("value", "Gain"), ("low", "from"))
                ),
                ms("ms.high", "to", 0),
                share("share.value", "Share"),
                *(
                    share(f"share.{name}", title)
                    for name, title in (("low", "from"), ("high", "to"))
                ),
            ),
            partial(_by_mechanism, "share"),
            [_ALIKE],
        ),
        Listing(
            "Without one mechanism: means of all turns over kvtier's",
            (
                *_NAMED,
                *(
                    Column(f"{part}{name}", title, "times", decimals=2)
                    for part, first in (("", "TTFT"), ("e2e.", "E2E"))
                    for name, title in (("value", first), ("low", "from"), ("high", "to"))
                ),
            ),
            _without,
            [
                "all: SGLang with its best flags. E2E: whole requests. Above 1 the mechanism shortens the wait."
            ],
        ),
        Listing(
            "Configurations",
            (
                *(_LOAD, ARM),
                *(ms(f"ttft_ms.{q}", f"TTFT {q}", 0) for q in ("mean", "p50", "p90", "p99")),
                ms("ttft_later_ms.mean", "later mean", 0),
                ms("ttft_later_ms.p99", "p99", 0),
                ms("ttft_first_ms.mean", "first mean", 0),
                ms("e2e_ms.mean", "E2E mean", 0),
                ms("longest_wait_ms", "Longest", 0),
                ms("gap_ms.p99", "Gap p99", 0),
                Column("tokens_per_s", "Output", "tokens/s", decimals=1),
                share("computed_fraction", "Computed"),
                Column("restorations", "Restored", decimals=0),
                Column("ssd_read_gb_per_mtok", "SSD read", "GB/Mtok", decimals=0),
                Column("ssd_written_gb_per_mtok", "written", "GB/Mtok", decimals=0),
                Column("errors", "Errors"),
            ),
            arm_rows,
            [
                "First: a session's first turn, later: the others. GB/Mtok: per million prompt tokens."
            ],
        ),
        Listing(
            "SGLang's flags that were tried, a round each",
            (
                Column("load", "Load"),
                Column("flags", "Flags"),
                ms("ttft_ms.mean", "TTFT mean", 0),
                Column("tokens_per_s", "Output", "tokens/s", decimals=1),
                Column("best", "Compared"),
            ),
            _tried,
        ),
    ],
    (
        *(Measure(f"TTFT {q}", f"ttft_ms.{q}") for q in ("mean", "p99")),
        Measure("gap p99", "gap_ms.p99"),
        Measure("output tokens/s", "tokens_per_s", ""),
    ),
    lambda result: [(first_token_cdf(result, "loads and rounds"))],
    _said,
)
