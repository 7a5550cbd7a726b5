"""Plots from plain numbers, as SVG text: lines, cumulative distributions, stacked bars,
timelines.

Missing values (None, NaN) are gaps. Every function returns one <svg> element for a
page. It raises KVTierError when matplotlib (the extra [bench]) is not installed. Colours and dashes
go by name and are the same in every plot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_kvtier.lab.pages.figure import (
    FAINT,
    INK,
    PARTS,
    add_heading,
    colours,
    dashes,
    new_figure,
    new_panels,
    svg_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EMPHASISED = "kvtier"

_MOST_LANES_IN = 4.5
"""Inches that the rows of a timeline have at most."""
_MOST_STEPS = 1000
"""Steps of a distribution that are drawn; more would only make the file large."""


@dataclass(frozen=True)
class Series:
    """One named curve. `low` and `high`, if given, are a band around it (or whiskers), as long as
    `y`. `labels` stand beside its points.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Bar:
    """One bar of a timeline: `kind` has its colour from `start` to `stop` in the row called `lane`."""

    lane: str
    start: float
    stop: float
    kind: str


@dataclass(frozen=True)
class Panel:
    """One of several plots with a common x axis: what its y axis is, and its curves."""

    y_label: str
    series: Sequence[Series]


def lines(
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    whole_x: bool = False,
) -> str:
    """Curves, each with a band where it has one. `whole_x` keeps the ticks on whole numbers (turns,
    chunks).
    """
    figure, axes = new_figure()
    names = [one.name for one in series]
    colour, dash = colours(names), dashes(names)
    for index, one in enumerate(series):
        if one.low and one.high:
            band = (_floats(one.low), _floats(one.high))
            axes.fill_between(one.x, *band, color=colour[one.name], alpha=0.13, linewidth=0)
        axes.plot(
            one.x,
            _floats(one.y),
            label=_safe(one.name),
            color=colour[one.name],
            linestyle=dash[one.name],
            linewidth=_weight(one.name),
            # A curve of few points shows them, and a single point would be invisible without.
            marker="o" if len(one.x) <= 12 else None,
            markersize=3,
        )
        _point_labels(axes, one, colour[one.name], -10 if index % 2 else 4)
    _label(axes, x_label, y_label)
    _scale(axes, log_x=log_x, log_y=log_y)
    if whole_x:
        _whole_ticks(axes, [x for one in series for x in one.x])
    add_heading(figure, axes, _safe(title))
    return svg_text(figure, f"{title}: {', '.join(names)}")


def panels(rows: Sequence[Panel], title: str, x_label: str, *, steps: bool = False) -> str:
    """Curves over one x axis, in plots one above the other. With `steps` a value holds from the x
    before its own.
    """
    figure, axes = new_panels(len(rows))
    from matplotlib import ticker  # heavy and optional, see figure.new_figure

    every = list(dict.fromkeys(one.name for row in rows for one in row.series))
    names = [name for name in every if any(o.y for r in rows for o in r.series if o.name == name)]
    colour, dash = colours(every), dashes(every)
    for name in names:  # one legend, also of curves that the first panel does not have
        axes[0].plot([], [], label=_safe(name), color=colour[name], linestyle=dash[name])
    for row, place in zip(rows, axes, strict=True):
        for one in row.series:
            place.plot(
                one.x,
                _floats(one.y),
                color=colour[one.name],
                linestyle=dash[one.name],
                linewidth=_weight(one.name),
                drawstyle="steps-pre" if steps else "default",
            )
        _label(place, "", row.y_label)
        _scale(place, log_x=False, log_y=False)
        place.yaxis.set_major_locator(ticker.MaxNLocator(4))
    _label(axes[-1], x_label, rows[-1].y_label)
    axes[-1].set_xlim(left=0)
    figure.align_ylabels(axes)
    add_heading(figure, axes[0], _safe(title))
    return svg_text(figure, f"{title}: {', '.join(names)}")


def cdf(samples: Mapping[str, Sequence[float | None]], title: str, x_label: str) -> str:
    """Cumulative distributions: the share of samples at or below x, one stepped curve per name."""
    figure, axes = new_figure()
    colour, dash = colours(samples), dashes(samples)
    for name, values in samples.items():
        present = sorted(v for v in _floats(values) if math.isfinite(v) and v > 0)
        if not present:
            continue
        kept = _thinned(len(present))
        shares = [100 * (i + 1) / len(present) for i in kept]
        axes.step(
            [present[0], *(present[i] for i in kept)],
            [0, *shares],
            where="post",
            label=_safe(name),
            color=colour[name],
            linestyle=dash[name],
            linewidth=_weight(name),
        )
    axes.set_ylim(0, 101)
    _label(axes, x_label, "share of requests (%)")
    _scale(axes, log_x=True, log_y=False)
    add_heading(figure, axes, _safe(title))
    return svg_text(figure, f"{title}: {', '.join(samples)}")


def stacked_bars(bars: Mapping[str, Mapping[str, float | None]], title: str, x_label: str) -> str:
    """One horizontal bar per name, made of parts. A part of 7 % or more of the longest bar carries
    its share.
    """
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    longest = max((sum(_number(v) for v in bar.values()) for bar in bars.values()), default=0)
    figure, axes = new_figure(height_in=1.35 + 0.42 * max(len(bars), 1))
    fills = _part_fills(parts)
    names = list(bars)
    left = [0.0] * len(names)
    for part in parts:
        fill, hatch = fills[part]
        widths = [_number(bars[name].get(part)) for name in names]
        axes.barh(
            range(len(names)), widths, left=left, height=0.62, label=_safe(part), color=fill, hatch=hatch,
            edgecolor="#c4beb2" if hatch else "white", linewidth=0.5,
        )  # fmt: skip
        for row, (start, width) in enumerate(zip(left, widths, strict=True)):
            total = sum(_number(v) for v in bars[names[row]].values())
            if longest and width >= 0.07 * longest:
                _share(axes, start + width / 2, row, width / total, fill, hatched=bool(hatch))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(names)), [_safe(name) for name in names])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, longest * 1.02 or 1)
    _label(axes, x_label, "")
    _thousands(axes.xaxis)
    add_heading(figure, axes, _safe(title))
    return svg_text(figure, f"{title}: {', '.join(names)}")


def ratios(rows: Sequence[Series], title: str, x_label: str) -> str:
    """One row per name: its `x` as points, each with a whisker from `low` to `high` where it has
    them, and a line at 1. `y` is not used.
    """
    figure, axes = new_figure(height_in=1.2 + 0.24 * max(len(rows), 1))
    colour = colours([_EMPHASISED])[_EMPHASISED]
    axes.axvline(1, color=FAINT, linewidth=1.2)
    for place, row in enumerate(rows):
        if row.low and row.high:
            places = [place] * len(row.x)
            axes.hlines(places, _floats(row.low), _floats(row.high), color=colour, alpha=0.55)
        axes.plot(
            row.x, [place] * len(row.x), linestyle="none", marker="o", markersize=4.5, color=colour
        )
    axes.set_yticks(range(len(rows)), [_safe(row.name) for row in rows])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(left=0)
    _label(axes, x_label, "")
    _thousands(axes.xaxis)
    add_heading(figure, axes, _safe(title))
    return svg_text(figure, f"{title}: {', '.join(row.name for row in rows)}")


def timeline(
    bars: Sequence[Bar],
    fills: Mapping[str, str],
    title: str,
    x_label: str,
    y_label: str = "",
    *,
    until: float | None = None,
) -> str:
    """Bars over time: one row per `Bar.lane` in the order of first appearance, each kind in the
    colour that `fills` has for it, in its order. The x axis ends at `until`.
    """
    lanes = list(dict.fromkeys(bar.lane for bar in bars))
    kinds = [kind for kind in fills if any(bar.kind == kind for bar in bars)]
    figure, axes = new_figure(height_in=1.35 + min(0.34 * max(len(lanes), 1), _MOST_LANES_IN))
    for kind in kinds:
        mine = [bar for bar in bars if bar.kind == kind]
        axes.barh(
            [lanes.index(bar.lane) for bar in mine],
            [bar.stop - bar.start for bar in mine],
            left=[bar.start for bar in mine],
            height=0.66, color=fills[kind], label=_safe(kind), linewidth=0,
        )  # fmt: skip
    axes.set_yticks(range(len(lanes)), [_safe(lane) for lane in lanes])
    axes.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    axes.set_xlim(0, until)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    _label(axes, x_label, y_label)
    add_heading(figure, axes, _safe(title))
    return svg_text(figure, f"{title}: {', '.join(kinds)}")


def _point_labels(axes: Axes, one: Series, colour: str, up: int) -> None:
    for text, x, y in zip(one.labels, one.x, _floats(one.y), strict=False):
        if math.isfinite(y):
            axes.annotate(
                _safe(text), (x, y), (4, up), textcoords="offset points", fontsize=7, color=colour
            )


def _floats(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _thinned(count: int) -> list[int]:
    """Positions to draw of `count` sorted samples: all of a thousand, evenly chosen ones with both
    ends of more.
    """
    if count <= _MOST_STEPS:
        return list(range(count))
    return [round(i * (count - 1) / (_MOST_STEPS - 1)) for i in range(_MOST_STEPS)]


def _number(value: float | None) -> float:
    return float(value) if value is not None and math.isfinite(value) else 0.0


def _safe(text: str) -> str:
    """The text with what matplotlib would read as mathematics, or as a hidden legend entry, made
    harmless.
    """
    text = text.replace("$", r"\$")
    return "\u200b" + text if text.startswith("_") else text


def _weight(name: str) -> float:
    return 2.0 if name == _EMPHASISED else 1.5


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label, fontsize=8.5, color=INK)
    axes.set_ylabel(y_label, fontsize=8.5, color=INK)


def _scale(axes: Axes, *, log_x: bool, log_y: bool) -> None:
    for wanted, set_scale, axis in (
        (log_x, axes.set_xscale, axes.xaxis),
        (log_y, axes.set_yscale, axes.yaxis),
    ):
        if wanted:
            set_scale("log")
            _plain_log_ticks(axis)
        else:
            _thousands(axis)
    if not log_y:
        axes.set_ylim(bottom=0)


def _plain_log_ticks(axis: object) -> None:
    """1, 2, 5, 10, 20 ... instead of powers of ten; fewer when the range is wide."""
    from matplotlib import ticker  # heavy and optional, see figure.new_figure

    low, high = sorted(axis.get_view_interval())  # type: ignore[attr-defined]
    decades = math.log10(high / low) if low > 0 else 1
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if decades < 2.6 else (1,)))  # type: ignore[attr-defined]
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))  # type: ignore[attr-defined]
    axis.set_minor_formatter(ticker.NullFormatter())  # type: ignore[attr-defined]


def _thousands(axis: object) -> None:
    from matplotlib import ticker  # heavy and optional, see figure.new_figure

    # Full numbers such as 1,200,000 run into each other.
    largest = max(map(abs, axis.get_view_interval()))  # type: ignore[attr-defined]
    step, suffix = (1e6, "M") if largest >= 2e6 else (1e3, "k") if largest >= 2e4 else (1, "")
    axis.set_major_formatter(  # type: ignore[attr-defined]
        ticker.FuncFormatter(lambda value, _: f"{value / step:,.10g}{suffix if value else ''}")
    )
    axis.set_major_locator(ticker.MaxNLocator(6))  # type: ignore[attr-defined]


def _whole_ticks(axes: Axes, positions: Sequence[float]) -> None:
    from matplotlib import ticker  # heavy and optional, see figure.new_figure

    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    if positions and min(positions) == max(positions):
        axes.set_xticks([positions[0]])


def _part_fills(parts: Sequence[str]) -> dict[str, tuple[str, str]]:
    free = colours([part for part in parts if part not in PARTS])
    return {part: PARTS.get(part) or (free[part], "") for part in parts}


def _share(axes: Axes, x: float, row: int, share: float, fill: str, *, hatched: bool) -> None:
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    ink = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else INK
    box = {"facecolor": fill, "edgecolor": FAINT, "linewidth": 0, "pad": 1.2} if hatched else None
    text = "> 99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"
    axes.text(x, row, text, ha="center", va="center", fontsize=7.5, color=ink, bbox=box)
