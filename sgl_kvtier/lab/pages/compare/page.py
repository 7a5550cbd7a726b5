"""A comparison as one HTML page, made from its JSON result (kvtier.compare/1): results first,
settings last.
"""

from __future__ import annotations

from collections.abc import Mapping

from sgl_kvtier.console.table import Column, Table
from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.compare.figures import figures, has_samples
from sgl_kvtier.lab.pages.compare.result import LATER, METRICS, ORACLE, OURS, paced, plural
from sgl_kvtier.lab.pages.compare.sentence import sentence
from sgl_kvtier.lab.pages.compare.tables import detail_tables, main_tables
from sgl_kvtier.lab.pages.figure import colours
from sgl_kvtier.lab.pages.listing import Measure, worse


def compare_page(result: dict) -> str:
    """The whole page. Figures that the result does not have are left out or shown as missing, never
    as zero.

    Without matplotlib the page has everything but the plots, and a line that says how to get them.
    """
    subtitle = f"{', '.join(result['arms'])} · {plural(result.get('rounds'), 'round')}"
    device = paced(result)
    how = "" if device is None else f" (paced {device['profile']}, not computed)"
    tables = [
        html.table_html(table, colours(result["arms"]), OURS) for table in main_tables(result)
    ]
    return html.result_page(
        result,
        "Comparison of KV-cache tiers" + how,
        subtitle,
        headline="\n".join([html.lead_html(*sentence(result)), *_early_ends(result), *tables]),
        tables=detail_tables(result),
        figures=figures(result) if has_samples(result) else None,
        losing=_losing(result),
        configuration=_configuration(result),
    )


def _early_ends(result: dict) -> list[str]:
    """Arms that failed, and an interrupted run."""
    found = [
        f"{name} failed: {arm['failure'].splitlines()[0]}"
        for name, arm in result["arms"].items()
        if arm.get("failure")
    ]
    if result.get("interrupted"):
        found.append("Interrupted: figures are from what had been measured.")
    return [html.statements_html([(text, True) for text in found])] if found else []


def _configuration(result: dict) -> str:
    workload = dict(result.get("workload") or {})
    rows = workload.pop("rows", None)
    body = f"<h3>Workload</h3>\n{html.definitions_html(workload)}"
    if isinstance(rows, list) and rows and all(isinstance(row, Mapping) for row in rows):
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = [Column(name, name.replace("_", " ").capitalize()) for name in names]
        body += html.table_html(Table("What is replayed", columns, rows))
    elif rows not in (None, []):
        body += html.definitions_html({"rows": rows})
    settings = html.definitions_html(result.get("settings") or {})
    return f"{body}\n<details>\n<summary>Settings</summary>\n{settings}\n</details>"


_COMPARED = (
    *(
        Measure(f"{name} {q}", f"{metric}.{q}")
        for metric, name in {**METRICS, LATER: "TTFT of later turns"}.items()
        for q in ("p50", "p90", "p99")
    ),
    Measure("output tokens/s", "throughput_tokens_per_s", ""),
)


def _losing(result: dict) -> str:
    """What another arm does better, in the percentiles of every time and the throughput."""
    said = worse([result], lambda _: "", _COMPARED, OURS, bounds=[ORACLE])
    return html.statements_html(said)
