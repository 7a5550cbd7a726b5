"""A restoration bench as one HTML page, made from its JSON result (schema kvtier.restore/1,
docs/manual/json.md).
"""

from __future__ import annotations

import shlex

from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.figure import plots_available
from sgl_kvtier.lab.pages.html import Section
from sgl_kvtier.lab.pages.plots import Series, lines
from sgl_kvtier.lab.pages.restore_tables import OURS, restore_tables

BOUND = "T_opt"


def restore_html(result: dict) -> str:
    """The whole page; figures the result does not have are left out."""
    environment = result.get("environment") or {}
    sections = [
        Section("headline", "Headline", html.statements_html(statements(result))),
        Section(
            "tables",
            "Tables",
            "\n".join(html.table_html(table) for table in restore_tables(result)),
        ),
        Section("plots", "Plots", _plots(result)),
        Section("settings", "Settings and notes", _settings(result)),
        Section("environment", "Environment", html.definitions_html(environment)),
        Section(
            "repeat",
            "How to repeat",
            html.code_html(shlex.join(map(str, result.get("command") or []))),
        ),
    ]
    date = (
        str(environment.get("date", "date not recorded"))
        .replace("T", " ")
        .replace("+00:00", " UTC")
    )
    return html.page(
        "Restoring a stored prompt", f"{len(result.get('cells') or [])} cells · {date}", sections
    )


def statements(result: dict) -> list[tuple[str, bool]]:
    """What came out, in sentences; True marks what is wrong."""
    found: list[tuple[str, bool]] = []
    if result.get("cells"):
        best = max(result["cells"], key=lambda cell: cell["speedup_vs_best_single"] or 0)
        if best["speedup_vs_best_single"]:
            found.append(
                (
                    f"Up to {best['speedup_vs_best_single']:.2f} times as fast as the better of computing and loading "
                    f"({best['model']}, {best['length']:,} tokens, load over compute {best['load_over_compute']:g}).",
                    False,
                )
            )
        summary = result["summary"]
        found += [(f"Missed: {text}.", True) for text in summary["missed"]] or [
            ("Every cell met its aims.", False)
        ]
        found.append(("Every restored answer has the tokens of the computed one.", False) if summary["equal_tokens"] else
                     ("Not every restored answer has the tokens of the computed one.", True))  # fmt: skip
    if result.get("fluctuation"):
        cells = result["fluctuation"]["cells"]
        over = [cell["over_fixed"] for cell in cells if cell.get("over_fixed") is not None]
        if over:
            text = f"Fluctuation: at most {max(over):.2f} times the best fixed split in hindsight"
            found.append(
                (
                    f"{text}, in {len(over)} of {len(cells)} traces.",
                    max(over) > result["fluctuation"]["aim"],
                )
            )
    if result.get("interrupted"):
        found.append(("Interrupted: figures are from what had been measured.", True))
    return found


def _plots(result: dict) -> str:
    if not plots_available():
        return html.no_plots_html()
    places = list(
        dict.fromkeys((cell["model"], cell["length"]) for cell in result.get("cells") or [])
    )
    figures = [figure for model, length in places for figure in _of_length(result, model, length)]
    return html.plots_html(figures) if figures else html.paragraph_html("There is nothing to plot.")


def _of_length(result: dict, model: str, length: int) -> list[str]:
    cells = [cell for cell in result["cells"] if (cell["model"], cell["length"]) == (model, length)]
    x = [cell["load_over_compute"] for cell in cells]
    series = [_series(cells, arm) for arm in result["arms"]]
    series.append(Series(BOUND, x, [cell["bound_ms"] for cell in cells]))
    where = f"{model}, {length:,} tokens"
    first = lines(
        series,
        f"Time to first token, {where}",
        "loading over computing",
        "TTFT (ms)",
        log_x=True,
        log_y=True,
    )
    gains = [
        Series("speedup over the better", x, [cell["speedup_vs_best_single"] for cell in cells]),
        Series("share of T_opt", x, [cell["bound_fraction"] for cell in cells]),
    ]
    second = lines(gains, f"Gain, {where}", "loading over computing", f"{OURS}", log_x=True)
    return [
        html.figure_html(
            first,
            "Medians; the band is from the lowest to the highest round. T_opt is computed from the measured curve.",
        ),
        html.figure_html(
            second,
            "Over the better of computing alone and loading alone, and the share of the best possible split.",
        ),
    ]


def _series(cells: list[dict], arm: str) -> Series:
    x = [cell["load_over_compute"] for cell in cells]
    middle, low, high = (
        [cell[key].get(arm) for cell in cells] for key in ("ttft_ms", "ttft_ms_low", "ttft_ms_high")
    )
    return Series(arm, x, middle, low, high)


def _settings(result: dict) -> str:
    arms = html.definitions_html(result.get("arms") or {})
    notes = "".join(html.paragraph_html(note) for note in result.get("notes") or [])
    return f"<h3>Arms</h3>\n{arms}\n<h3>Settings</h3>\n{html.definitions_html(result.get('settings') or {})}\n<h3>Notes</h3>\n{notes}"
