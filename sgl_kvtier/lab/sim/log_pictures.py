"""A decision log as one HTML page: which restorations there were, and the two pointers of some over
time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgl_kvtier.console import Column, Table
from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.pages import html as page
from sgl_kvtier.lab.pages.figure import plots_available
from sgl_kvtier.lab.pages.html import Section
from sgl_kvtier.lab.pages.timeline import Timeline, read_timelines, timeline_plot

SHOWN = 4
"""Restorations drawn when none is named."""
_LISTED = 200


def log_html(log: Iterable[str], name: str, rids: Sequence[str] = ()) -> str:
    """The page. Draws the named restorations, or the longest of those that computed and loaded.
    Raises TraceError when the log is damaged or a name is not in it.
    """
    found = read_timelines(log)
    for rid in rids:
        if not any(one.rid == rid for one in found):
            known = ", ".join(dict.fromkeys(one.rid for one in found[:20])) or "none"
            raise TraceError(
                f"{name} has no restoration of request {rid!r}. The first there are: {known}"
            )
    shown = [one for one in found if one.rid in rids] if rids else _longest(found)
    sections = [
        Section("restorations", "Restorations", page.table_html(timelines_table(found[:_LISTED]))),
        Section("pointers", "Two pointers over time", _plots(shown)),
    ]
    return page.page("Restorations over time", name, sections)


def timelines_table(found: Sequence[Timeline]) -> Table:
    """One row per restoration."""
    rows = [
        {
            "rid": one.rid,
            "tokens": one.stop - one.first,
            "mode": f"{one.mode} ({one.reason})" if one.mode else None,
            "computed": one.computed_tokens,
            "loaded": one.loaded_tokens,
            "lost": one.lost_tokens,
            "ms": 1e3 * one.seconds,
        }
        for one in found
    ]
    columns = (
        Column("rid", "Request"),
        Column("tokens", "To restore", "tokens"),
        Column("mode", "Mode"),
        Column("computed", "Computed", "tokens"),
        Column("loaded", "Loaded", "tokens"),
        Column("lost", "Lost", "tokens"),
        Column("ms", "Took", "ms", 1),
    )
    return Table(
        "", columns, rows, notes=("What a server notices once per step is told at that step.",)
    )


def _longest(found: Sequence[Timeline]) -> list[Timeline]:
    both = [one for one in found if one.computed_tokens and one.loaded_tokens]
    return sorted(both, key=lambda one: one.first - one.stop)[:SHOWN]


def _plots(shown: Sequence[Timeline]) -> str:
    if not shown:
        return page.paragraph_html("No request was computed and loaded at once.")
    if not plots_available():
        return page.no_plots_html()
    return page.plots_html(
        [
            page.figure_html(timeline_plot(one), f"Request {one.rid}, mode {one.mode}.")
            for one in shown
        ]
    )
