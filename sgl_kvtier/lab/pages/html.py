"""One self-contained HTML page: it fetches nothing, runs nothing, and escapes every text from
outside.

The page's own policy forbids the browser all requests and scripts, so that a mistake here shows and
does not leak.
"""

from __future__ import annotations

import dataclasses
import html as stdlib_html
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sgl_kvtier.console.table import MISSING, Table, format_share, format_value, is_missing
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.lab.pages.figure import colours, plots_available
from sgl_kvtier.sizes import format_bytes

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

_LONGEST_NAME, _LONGEST_WORD = 28, 16
"""Characters up to which a row's first cell, and its others, are kept on one line."""


@dataclass(frozen=True)
class Section:
    """A part of a page: `anchor` for the table of contents, a title, and its content as HTML."""

    anchor: str
    title: str
    body: str


def escape(text: object) -> str:
    """The text for HTML, also inside quotes; bytes of a path that are no UTF-8 become question
    marks.
    """
    return stdlib_html.escape(str(text).encode("utf-8", "replace").decode("utf-8"), quote=True)


def page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """A whole document with a table of contents. The sections' bodies must be HTML already; all
    else is escaped.
    """
    css = resources.files("sgl_kvtier.lab.pages").joinpath("page.css").read_text(encoding="utf-8")
    contents = "".join(
        f'<li><a href="#{escape(s.anchor)}">{escape(s.title)}</a></li>' for s in sections
    )
    parts = "\n".join(
        f'<section id="{escape(s.anchor)}">\n<h2>{escape(s.title)}</h2>\n{s.body}\n</section>'
        for s in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{escape(subtitle)}</p>
</header>
<nav aria-label="Contents"><ol>{contents}</ol></nav>
<main>
{parts}
</main>
</body>
</html>
"""


def result_page(
    result: dict[str, Any],
    title: str,
    subtitle: str,
    *,
    headline: str,
    tables: Sequence[Table],
    figures: Iterable[tuple[str, str]] | None,
    losing: str,
    configuration: str,
) -> str:
    """The page of an experiment: its outcome, its plots and tables, where ours is worse, its
    settings, and how to repeat it.

    `figures` are plots with their captions; None where no request ended without an error.
    """
    environment = result.get("environment") or {}
    date = str(environment.get("date", "date not recorded"))
    date = date.replace("T", " ").replace("+00:00", " UTC")
    colour = colours(result["arms"])
    notes = "".join(map(paragraph_html, result.get("notes") or []))
    command = code_html(shlex.join(map(str, result.get("command") or [])))
    again = "The same command on a quiet machine of the same kind. All figures of this page are in the command's --json output."
    sections = [
        Section("headline", "Headline", headline),
        Section("plots", "Plots", _plots(figures)),
        Section("tables", "Tables", "\n".join(table_html(one, colour, "kvtier") for one in tables)),
        Section("losing-cells", "Losing cells", losing),
        Section("configuration", "Configuration", f"{configuration}\n<h3>Notes</h3>\n{notes}"),
        Section("environment", "Environment", definitions_html(environment)),
        Section("repeat", "How to repeat", command + paragraph_html(again)),
    ]
    return page(title, f"{subtitle} · {date}", sections)


def paced_mark(result: Mapping[str, Any]) -> str:
    """What stands behind every title of a result of a paced device; "" where all was computed."""
    device = (result.get("device") or {}).get("paced")
    return "" if device is None else f" (paced {device['profile']}, not computed)"


def marked(table: Table, result: Mapping[str, Any]) -> Table:
    """The table with that behind its title."""
    return dataclasses.replace(table, title=table.title + paced_mark(result))


def reference_of(result: Mapping[str, Any]) -> str:
    """The arm whose first answers the others were compared with: recompute, or else the first. Where
    `compared_with` says recompute, its answers are known without the arm.
    """
    arms = result["arms"]
    known = result.get("compared_with") or ("recompute" if "recompute" in arms else None)
    return known or next(iter(arms))


def equality(result: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Whether all arms' answers are those of the reference; True with what is wrong."""
    first = reference_of(result)
    shares = {
        name: share
        for name, arm in result["arms"].items()
        if name != "recompute" and (share := arm.get("equal_tokens_fraction")) is not None
    }
    unequal = [f"{name} {format_share(share)}" for name, share in shares.items() if share < 1]
    if unequal:
        return f"Not all outputs equal those of {first}. Equal: {', '.join(unequal)}.", True
    if shares:
        return f"Every compared output has the same tokens as {first}'s, in all arms.", False
    return None


def table_html(table: Table, swatches: Mapping[str, str] | None = None, emphasise: str = "") -> str:
    """The table with its title and notes. `swatches` puts a colour before a first cell; `emphasise`
    names a row.
    """
    numeric = [table.is_numeric(column) for column in table.columns]
    heads = "".join(
        f"<th{_number(n)}>{escape(c.title)}"
        + (f'<span class="unit">{escape(c.unit)}</span>' if c.unit else "")
        + "</th>"
        for c, n in zip(table.columns, numeric, strict=True)
    )
    rows = []
    for cells in table.cells():
        marked = ' class="ours"' if emphasise and cells and cells[0] == emphasise else ""
        first = swatch((swatches or {}).get(cells[0])) if cells else ""
        body = [
            _cell(cell, n, first if i == 0 else None)
            for i, (cell, n) in enumerate(zip(cells, numeric, strict=True))
        ]
        rows.append(f"<tr{marked}>{''.join(body)}</tr>")
    title = f"<h3>{escape(table.title)}</h3>\n" if table.title else ""
    notes = "".join(f'\n<p class="note">{escape(note)}</p>' for note in table.notes)
    lines = "\n".join(rows)
    return f'{title}<div class="scroll"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>{notes}'


def figure_html(svg: str, caption: str) -> str:
    """A plot on its own light card, with a caption."""
    return f'<figure>\n<div class="plot">{svg}</div>\n<figcaption>{escape(caption)}</figcaption>\n</figure>'


def _plots(figures: Iterable[tuple[str, str]] | None) -> str:
    if figures is None:
        return paragraph_html("There are no samples to plot: no request ended without an error.")
    if not plots_available():
        return no_plots_html()
    return plots_html(figure_html(svg, caption) for svg, caption in figures)


def plots_html(figures: Iterable[str]) -> str:
    """Figures side by side where there is room."""
    return '<div class="plots">\n' + "\n".join(figures) + "\n</div>"


def no_plots_html() -> str:
    """The line that stands where plots would be, when matplotlib is not installed."""
    return (
        '<p class="missing-plots">The plots need matplotlib, which is not installed here. Install it with '
        f"<code>{escape(how_to_install('bench'))}</code> and run the command again.</p>"
    )


def definitions_html(values: Mapping[str, object]) -> str:
    """Names and values as a list; nested objects become dotted names."""
    items = "\n".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in flatten(values)
    )
    return f"<dl>\n{items}\n</dl>"


def statements_html(statements: Sequence[tuple[str, bool]]) -> str:
    """Sentences one below the other; those with True are problems and stand out."""
    items = "".join(f"<li{_bad(is_bad)}>{escape(text)}</li>" for text, is_bad in statements)
    return f'<ul class="statements">{items}</ul>'


def lead_html(text: str, is_bad: bool) -> str:
    """The sentence that a page begins with; one that is bad stands out."""
    return f'<p class="lead{" bad" if is_bad else ""}">{escape(text)}</p>'


def paragraph_html(text: str) -> str:
    """A paragraph."""
    return f"<p>{escape(text)}</p>"


def code_html(text: str) -> str:
    """A command or other text in a fixed-width font."""
    return f"<pre>{escape(text)}</pre>"


def swatch(colour: str | None) -> str:
    """A small square in a colour, or nothing."""
    return f'<span class="swatch" style="background:{escape(colour)}"></span>' if colour else ""


def flatten(values: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Names and texts of a nested object: {"cpu": {"count": 2}} gives ("cpu.count", "2")."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            pairs += flatten(value, path + ".")
        else:
            is_size = name.endswith("_bytes") and isinstance(value, (int, float))
            text = format_bytes(value) if is_size else _text(value)
            pairs.append(
                ((path.removesuffix("_bytes") if is_size else path).replace("_", " "), text)
            )
    return pairs


def _text(value: object) -> str:
    if isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and not value):
        return MISSING
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, str) and item.startswith("-") for item in value):
            return shlex.join(str(item) for item in value)  # a command line's options
        return ", ".join(
            "; ".join(text for _, text in flatten(item))
            if isinstance(item, Mapping)
            else _text(item)
            for item in value
        )
    return MISSING if is_missing(value) or value == "" else format_value(value)


def _cell(text: str, is_number: bool, before: str | None) -> str:
    """One cell; `before` is HTML in front of a row's first cell, and None for the others."""
    is_name = len(text) <= (_LONGEST_WORD if before is None else _LONGEST_NAME)
    wanted = {"number": is_number, "missing": text == MISSING, "name": is_name}
    classes = " ".join(name for name, is_wanted in wanted.items() if is_wanted)
    attribute = f' class="{classes}"' if classes else ""
    return f"<td{attribute}>{before or ''}{escape(text)}</td>"


def _number(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _bad(is_bad: bool) -> str:
    return ' class="bad"' if is_bad else ""
