"""The common ground of all plots: size, type, colours, and clean SVG that can stand alone or inside
a page.

Needs matplotlib, the optional extra [bench]; it is imported only when something is drawn.
"""

from __future__ import annotations

import hashlib
import html
import importlib.util
import io
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.extras import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_IN = (4.8, 3.3)
"""Width and height in inches: 460 CSS pixels. So two fit beside each other and one fits a telephone
unscaled.
"""

INK, FAINT = "#1f2328", "#d8dbe0"

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), told apart under all common colour
# blindnesses.
_KNOWN = {
    "recompute": "#767676",
    "hicache": "#56B4E9",
    "hicache-file": "#0072B2",
    "kvtier-off": "#E69F00",
    "kvtier": "#D55E00",
}
_FREE = ("#009E73", "#CC79A7", "#000000", "#8C564B", "#117733", "#882255", "#44AA99")
_DASHES = {
    "recompute": (0, (1, 1.2)),
    "hicache": (0, (4, 1.6)),
    "hicache-file": (0, (5, 1.4, 1, 1.4)),
    "kvtier-off": (0, (1, 1.2, 4, 1.2)),
    "kvtier": "-",
}
_FREE_DASHES = ("-", (0, (4, 1.6)), (0, (5, 1.4, 1, 1.4)), (0, (1, 1.2)))

# One hue from dark to light for cached tokens, nearest tier darkest: the order survives grey print
# and colour blindness.
PARTS = {
    "device": ("#3f2a72", ""),
    "host": ("#8471b8", ""),
    "storage": ("#c9bfe6", ""),
    "computed": ("#f7f6f3", "////"),
}
"""Fill and hatching of the shares of a prompt."""


def plots_available() -> bool:
    """True when matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour per name: always the same for the arms of a comparison, free ones in order for the
    others.
    """
    free = iter(_FREE * 8)
    return {name: _KNOWN.get(name) or next(free) for name in names}


def dashes(names: Iterable[str]) -> dict[str, object]:
    """A line style per name, so that lines can be told apart without colours."""
    free = iter(_FREE_DASHES * 16)
    return {name: _DASHES.get(name) or next(free) for name in names}


def new_figure(height_in: float = SIZE_IN[1]) -> tuple[Figure, Axes]:
    """An empty plot; `add_heading` finishes it. Raises KVTierError when matplotlib is not
    installed.
    """
    if not plots_available():
        raise KVTierError(f"plots need matplotlib: {how_to_install('bench')}")
    # Imported here: matplotlib is optional, and slow to import for commands that draw nothing. No
    # pyplot, whose global state is not for threads.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE_IN[0], height_in), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    _styled(axes)
    return figure, axes


def _styled(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#8b929c")
    axes.grid(True, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8, length=3, color="#8b929c")


def new_panels(count: int) -> tuple[Figure, list[Axes]]:
    """Plots one above the other with a common x axis, otherwise as `new_figure`."""
    figure, axes = new_figure(height_in=1.0 + 1.05 * count)
    figure.delaxes(axes)
    found: list[Axes] = []
    for place in range(count):
        one = figure.add_subplot(count, 1, place + 1, sharex=found[0] if found else None)
        _styled(one)
        one.tick_params(labelbottom=place == count - 1)
        found.append(one)
    return figure, found


def add_heading(figure: Figure, axes: Axes, title: str) -> None:
    """Put the title and, below it, the legend above the plot, in as many rows as the names need."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        figure.suptitle(title, x=0.012, ha="left", fontsize=9.5, fontweight="bold", color=INK)
        return
    # The title is the legend's own, because the layout lets a legend and a figure's title overlap.
    legend = figure.legend(
        handles,
        labels,
        title=title,
        title_fontproperties={"size": 9.5, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=_columns([len(label) for label in labels]),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        handlelength=2.4,
        columnspacing=1.4,
        borderpad=0.1,
    )
    legend.get_title().set_color(INK)


def svg_text(figure: Figure, description: str) -> str:
    """The figure as one <svg> element: text as text, no metadata, ids that do not clash with
    another plot's.

    `description` is what a screen reader says.
    """
    import matplotlib  # heavy and optional, see new_figure

    stream = io.StringIO()
    salt = hashlib.sha256(description.encode("utf-8", "replace")).hexdigest()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return _clean(stream.getvalue(), "p" + salt[:8], description)


def _columns(lengths: list[int]) -> int:
    """The most legend columns that fit the width: 72 characters of 8-point text, of which a handle
    takes 7.
    """
    for columns in range(len(lengths), 1, -1):
        rows = -(-len(lengths) // columns)  # legends are filled column by column
        if sum(max(lengths[i : i + rows]) + 7 for i in range(0, len(lengths), rows)) <= 72:
            return columns
    return 1


def _clean(svg: str, prefix: str, description: str) -> str:
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace(
        "xlink:href", "href"
    )
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    label = html.escape(description, quote=True)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
