"""The plots of a comparison, each with its caption."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sgl_kvtier.lab.pages.compare.result import (
    TIERS,
    good_samples,
    grouped,
    later,
    paced,
    prompt_parts,
)
from sgl_kvtier.lab.pages.plots import (
    Bar,
    Panel,
    Series,
    cdf,
    lines,
    panels,
    stacked_bars,
    timeline,
)
from sgl_kvtier.lab.pages.stats import percentile

QUEUED, LOADING, WAITING, COMPUTING, DECODING, GAP, FAILED = (
    "queued",
    "loading",
    "queued or loading",
    "computing",
    "decoding",
    "tool gap",
    "failed",
)
_FILLS = {
    QUEUED: "#f0b95b",
    LOADING: "#6a51a3",
    WAITING: "#cdb7a0",
    COMPUTING: "#1f6f5c",
    DECODING: "#9ccfb8",
    GAP: "#e7e9ed",
    FAILED: "#a1260d",
}
_TIMES = "TTFT (ms)"
_SECONDS = "seconds since the round began"
_MEGA, _GIGA = 1e6, 1e9
_RATES = {
    "storage read": "read_bytes",
    "storage written": "written_bytes",
    "host to device": "to_device_bytes",
    "device to host": "to_host_bytes",
}


def has_samples(result: dict) -> bool:
    """Whether a request of some arm ended without an error."""
    return any(good_samples(result, arm) for arm in result["arms"])


def figures(result: dict) -> Iterator[tuple[str, str]]:
    """All plots that the result has the data of, what matters most first."""
    yield first_token_cdf(result, "rounds")
    title = "Time to first token by turn"
    caption = "Median of each turn of the sessions; the band holds the middle half of the requests."
    yield lines(_series(result), title, "turn", _TIMES, whole_x=True), caption
    # Shares, because an arm may have fewer rounds than another.
    bars = {arm: _percents(prompt_parts(result, arm)) for arm in result["arms"]}
    caption = (
        f"Of the prompt tokens of an arm's requests: served from {', '.join(TIERS)}, or computed."
    )
    axis = "share of prompt tokens (%)"
    yield stacked_bars(bars, "Where the prompts' tokens came from", axis), caption
    yield from _over_time(result)


def _percents(parts: Mapping[str, float | None]) -> dict[str, float | None]:
    total = sum(value or 0 for value in parts.values())
    return {
        name: None if value is None or not total else 100 * value / total
        for name, value in parts.items()
    }


def first_token_cdf(result: dict, over: str) -> tuple[str, str]:
    """The distribution of times to first token of later turns, as a plot and its caption; `over`
    says of what. Of all turns where there are no later ones.
    """
    samples = {arm: [s.get("ttft_ms") for s in _shown(result, arm)] for arm in result["arms"]}
    title, requests = _of_later(result)
    caption = (
        f"Share of {requests}, over all {over}, whose first token came within the time. Further "
        "left is better."
    )
    return cdf(samples, title, f"{_TIMES}, logarithmic"), caption


def _has_later(result: dict) -> bool:
    return any(later(good_samples(result, arm)) for arm in result["arms"])


def _shown(result: dict, arm: str) -> list[dict]:
    samples = good_samples(result, arm)
    return later(samples) if _has_later(result) else samples


def _of_later(result: dict) -> tuple[str, str]:
    """A title, and what it is of in words."""
    if _has_later(result):
        return "Time to first token of later turns", "the requests after a session's first"
    return "Time to first token, all requests", "all requests"


def _series(result: dict) -> list[Series]:
    series = []
    for arm in result["arms"]:
        groups = grouped(good_samples(result, arm), "turn", "ttft_ms")
        low, middle, high = (
            [percentile(values, q) for values in groups.values()] for q in (25, 50, 75)
        )
        series.append(Series(arm, list(groups), middle, low, high))
    return series


def _over_time(result: dict) -> Iterator[tuple[str, str]]:
    """The first complete round of each arm over time; nothing for a result that has none."""
    found = {one["arm"]: one for one in result.get("timeline") or []}
    shown = {arm: found.get(arm) or {} for arm in result["arms"]}
    readings = {arm: one.get("tiers") or [] for arm, one in shown.items()}
    tiers = [
        Panel(f"{tier}\n(tokens)", [_level(arm, readings[arm], tier) for arm in shown])
        for tier in TIERS
    ]
    tiers = [panel for panel in tiers if any(one.y for one in panel.series)]
    if tiers:
        caption = (
            "First complete round of each arm. Device: cached or in use; host has copies of what "
            "is on the device."
        )
        yield panels(tiers, "Tokens in each tier", _SECONDS), caption
    rates, unit = _rates(result, readings)
    if rates:
        title = f"Traffic of storage, and between host and device ({unit})"
        yield panels(rates, title, _SECONDS, steps=True), _traffic(result)
    until = max(
        (r["end_s"] for one in shown.values() for r in one.get("requests") or ()), default=0
    )
    for arm, one in shown.items():
        if one.get("requests"):
            title = f"Sessions over time: {arm}, round {one['round']}"
            bars = session_bars(one["requests"], _numbers(shown))
            drawn = timeline(bars, _FILLS, title, _SECONDS, "session", until=until)
            untold = any(bar.kind == WAITING for bar in bars)
            yield drawn, f"{_GANTT} {_UNTOLD if untold else _TOLD}"


_GANTT = (
    "One row per session. Until its first token a request is computed, loaded or queued, what comes "
    "first of these. The same time scale in all arms."
)
_TOLD = "Loading: pages of this request are read from storage or copied to the device."
_UNTOLD = (
    "Queued or loading: this server counts what it loads, and does not say when. Queued alone: "
    "nothing was loaded for the request."
)


def session_bars(requests: Sequence[Mapping[str, Any]], lanes: Mapping[str, str]) -> list[Bar]:
    """What each session of a round did when, in the order of `lanes`, their rows by name."""
    bars: list[Bar] = []
    ended: dict[str, float] = {}
    for one in sorted(
        requests, key=lambda one: (list(lanes).index(str(one["session"])), one["begin_s"])
    ):
        name, begin, end = str(one["session"]), one["begin_s"], one["end_s"]
        lane = lanes[name]
        if begin > ended.get(name, begin):
            bars.append(Bar(lane, ended[name], begin, GAP))
        ended[name] = end
        first = one.get("first_s")
        if first is None:
            bars.append(Bar(lane, begin, end, FAILED))
            continue
        at = begin
        for start, stop in one.get("computing_s") or ():
            start, stop = max(start, at), min(stop, first)
            if stop > start:
                bars += [*_waiting(lane, at, start, one), Bar(lane, start, stop, COMPUTING)]
                at = stop
        bars += [*_waiting(lane, at, first, one), Bar(lane, first, end, DECODING)]
    return [bar for bar in bars if bar.stop > bar.start]


def _waiting(lane: str, begin: float, end: float, one: Mapping[str, Any]) -> Iterator[Bar]:
    """What a request did from `begin` to `end`, in which its prompt was not computed."""
    loads = one.get("loading_s")
    if loads is None:
        yield Bar(lane, begin, end, WAITING)
        return
    at = begin
    for start, stop in loads:
        start, stop = max(start, at), min(stop, end)
        if stop > start:
            yield from (Bar(lane, at, start, QUEUED), Bar(lane, start, stop, LOADING))
            at = stop
    yield Bar(lane, at, end, QUEUED)


def _numbers(shown: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Sessions by the order in which they began in the first arm that has them: "1", "2" ..."""
    names = dict.fromkeys(
        str(r["session"])
        for one in shown.values()
        for r in sorted(one.get("requests") or (), key=lambda r: r["begin_s"])
    )
    return {name: str(number) for number, name in enumerate(names, 1)}


def _level(arm: str, readings: Sequence[Mapping[str, Any]], tier: str) -> Series:
    known = [one for one in readings if one.get(tier) is not None]
    return Series(arm, [one["t_s"] for one in known], [one[tier] for one in known])


def _rates(
    result: dict, readings: Mapping[str, Sequence[Mapping[str, Any]]]
) -> tuple[list[Panel], str]:
    """Bytes per second that storage read and wrote and that were copied between host and device, and
    their unit.
    """
    scale = (paced(result) or {}).get("bytes_scale") or 1.0
    found = {
        what: [_rate(arm, readings[arm], name, scale) for arm in readings]
        for what, name in _RATES.items()
    }
    most = max((y or 0 for series in found.values() for one in series for y in one.y), default=0)
    unit, size = ("GB/s", _GIGA) if most >= 2 * _GIGA else ("MB/s", _MEGA)
    return [
        Panel(f"{what}\n({unit})", [_divided(one, size) for one in series])
        for what, series in found.items()
        if any(one.y for one in series)
    ], unit


def _rate(arm: str, readings: Sequence[Mapping[str, Any]], name: str, scale: float) -> Series:
    known = [one for one in readings if one.get(name) is not None]
    pairs = [(a, b) for a, b in itertools.pairwise(known) if b["t_s"] > a["t_s"]]
    return Series(
        arm,
        [b["t_s"] for _, b in pairs],
        [scale * (b[name] - a[name]) / (b["t_s"] - a["t_s"]) for a, b in pairs],
    )


def _divided(one: Series, size: float) -> Series:
    return Series(one.name, one.x, [None if y is None else y / size for y in one.y])


def _traffic(result: dict) -> str:
    device = paced(result)
    caption = "First complete round of each arm, between two readings of the server's counters."
    if device is None:
        return caption
    caption += " Copies between host and device: by the paced device's clock."
    return f"{caption} Bytes of the model: those moved here times {device['bytes_scale']:g}."
