"""What a comparison says, in one sentence: what is wrong with it first, and no winner where rounds
are too few or say both.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from sgl_kvtier.lab.pages.compare.result import (
    BASELINE,
    ORACLE,
    OURS,
    STOCK,
    is_torn,
    later_times,
    paced,
    seconds,
)
from sgl_kvtier.lab.pages.html import reference_of

LEAST_ROUNDS = 4
"""Paired rounds below which nothing is said about which arm is faster."""
_NO_RIVALS = (OURS, "kvtier-restore", "kvtier-off", ORACLE)
_COUNTS = ("no paired round", "one round", "two rounds", "three rounds")


class Verdict(enum.Enum):
    """What paired rounds say about a ratio: too few of them, its quartiles on both sides of 1, or
    both on one.
    """

    TOO_FEW = enum.auto()
    NO_DIFFERENCE = enum.auto()
    LESS = enum.auto()
    MORE = enum.auto()


def verdict(ratio: Mapping[str, Any]) -> Verdict:
    """What a ratio of `ratios` says."""
    low, high = ratio.get("p25"), ratio.get("p75")
    if low is None or high is None or (ratio.get("n") or 0) < LEAST_ROUNDS:
        return Verdict.TOO_FEW
    if low <= 1 <= high:
        return Verdict.NO_DIFFERENCE
    return Verdict.LESS if high < 1 else Verdict.MORE


def sentence(result: dict) -> tuple[str, bool]:
    """The sentence; True where something is wrong, or kvtier is slower than another arm."""
    if lost := _lost_pace(result):
        return lost, True
    wrong = [text for text in (_unequal(result), _failures(result)) if text]
    said, is_slower = _compared(result)
    return " ".join([*wrong, said]), bool(wrong) or is_slower


def _lost_pace(result: dict) -> str | None:
    device = paced(result)
    if device is None:
        return None
    lost = []
    for name, arm in result["arms"].items():
        pace = arm.get("pace") or {}
        if pace.get("valid") is True or not arm.get("requests") or is_torn(arm):
            continue
        if pace.get("mismatches"):
            lost.append(f"{name} ({pace['mismatches']} wrong keys and values)")
        elif pace.get("overrun") is not None:
            lost.append(f"{name} ({pace['overrun']:.0%} of its steps' time lost)")
        else:
            lost.append(f"{name} (it wrote no step)")
    if not lost:
        return None
    what = ", ".join(lost)
    return f"INVALID: the paced device did not keep pace in {what}: nothing can be said."


def _unequal(result: dict) -> str | None:
    unequal = []
    for name, arm in result["arms"].items():
        share, compared = arm.get("equal_tokens_fraction"), arm.get("compared_requests") or 0
        repeats = name == BASELINE and "compared_with" not in result
        if repeats or share is None or share >= 1:
            continue
        unequal.append(f"{name} {compared - round(share * compared):,} of {compared:,}")
    if not unequal:
        return None
    first = reference_of(result)
    return f"UNEQUAL ANSWERS: other tokens than {first}'s first ones: {', '.join(unequal)}."


def _failures(result: dict) -> str | None:
    failed = [
        f"{name} {arm['errors']:,} of {arm.get('requests') or 0:,} requests"
        for name, arm in result["arms"].items()
        if arm.get("errors")
    ]
    return f"FAILED: {', '.join(failed)}." if failed else None


def _compared(result: dict) -> tuple[str, bool]:
    means = {arm: later_times(result, arm).get("mean") for arm in result["arms"]}
    device = paced(result)
    known = {
        arm: ms
        for arm, ms in means.items()
        if ms is not None and not (device is not None and is_torn(result["arms"][arm]))
    }
    where = "" if device is None else f" on paced {device['profile']}"
    others = [arm for arm in known if arm not in _NO_RIVALS]
    if OURS not in known or not others:
        times = ", ".join(f"{arm} {seconds(ms)}" for arm, ms in known.items())
        what = f"first token of later turns after {times}" if known else "no later turn measured"
        return f"Nothing to compare{where}: {_joined(what, _equality(result))}.", False
    rival = STOCK if STOCK in others else min(others, key=lambda arm: known[arm])
    ratios = result.get("ratios") or {}
    text, is_slower = _against(result, rival, where, ratios.get(f"{OURS}/{rival}") or {})
    faster = [
        f"{arm} is faster still, {seconds(known[arm])}"
        for arm in others
        if arm != rival and _of_later(ratios.get(f"{OURS}/{arm}") or {}) is Verdict.MORE
    ]
    return "; ".join([text, *faster]) + ".", is_slower or bool(faster)


def _against(result: dict, rival: str, where: str, ratio: Mapping[str, Any]) -> tuple[str, bool]:
    """The sentence without its end, and whether kvtier is slower than the rival."""
    time, rate = (ratio.get(name) or {} for name in ("ttft_later_ms_mean", _RATE))
    ours, theirs = (
        _mean(time.get(side), later_times(result, arm).get("mean"))
        for side, arm in (("a", OURS), ("b", rival))
    )
    found, equal = verdict(time), _equality(result)
    behind, is_less = _throughput(rate)
    if found in (Verdict.TOO_FEW, Verdict.NO_DIFFERENCE):
        both = f"{seconds(ours, theirs)} and {seconds(theirs, ours)}"
        start = f"{OURS} and {rival}{where}: first token of later turns after {both}"
        if found is Verdict.NO_DIFFERENCE:
            return _joined(start, "no difference beyond the noise", behind, equal), is_less
        why = f"{_COUNTS[min(time.get('n') or 0, LEAST_ROUNDS - 1)]}: too few to tell"
        return _joined(_joined(start, _rates(result, rival)), why, equal, by="; "), False
    is_slower = found is Verdict.MORE
    subject = f"{OURS}{where}{' is slower' if is_slower else ''}"
    both = f"{seconds(ours, theirs)} instead of {seconds(theirs, ours).split()[0]} ({rival})"
    text = _joined(f"{subject}: first token of later turns after {both}", behind, equal)
    return text, is_slower or is_less


def _joined(*parts: str, by: str = ", ") -> str:
    return by.join(filter(None, parts))


def _rates(result: dict, rival: str) -> str:
    ours, theirs = (result["arms"][arm].get(_RATE) for arm in (OURS, rival))
    return "" if None in (ours, theirs) else f"{ours:,.1f} and {theirs:,.1f} output tokens/s"


_RATE = "throughput_tokens_per_s"


def _throughput(ratio: Mapping[str, Any]) -> tuple[str, bool]:
    """What is said about throughput, and whether it is less."""
    found = verdict(ratio)
    if found is Verdict.TOO_FEW:
        return "", False
    if found is Verdict.NO_DIFFERENCE:
        return "throughput equal within the noise", False
    times = ratio["median"]
    return f"{times:.{1 if times >= 2 else 2}f} times the throughput", found is Verdict.LESS


def _of_later(ratio: Mapping[str, Any]) -> Verdict:
    return verdict(ratio.get("ttft_later_ms_mean") or {})


def _equality(result: dict) -> str:
    """The end of the sentence; nothing where it began with unequal answers."""
    compared = [
        arm for arm in result["arms"].values() if arm.get("equal_tokens_fraction") is not None
    ]
    if not compared:
        return "answers not compared"
    if _unequal(result):
        return ""
    count = sum(arm.get("compared_requests") or 0 for arm in compared)
    return f"all {count:,} answers equal"


def _mean(paired: float | None, overall: float | None) -> float:
    found = overall if paired is None else paired
    assert found is not None, "only arms with later turns are compared"
    return found
