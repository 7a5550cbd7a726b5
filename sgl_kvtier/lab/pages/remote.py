"""Two servers on one remote store as tables and one HTML page, made from the JSON result (schema
kvtier.compare.remote/1, docs/manual/json.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_kvtier.console.table import Column, Table, format_share
from sgl_kvtier.lab.pages import html
from sgl_kvtier.lab.pages.plots import Series, lines
from sgl_kvtier.sizes import format_bytes

SCHEMA = "kvtier.compare.remote/1"


def remote_tables(result: dict) -> list[Table]:
    """Time to first token of moved turns, per speed and arm; or what trouble costs."""
    if "trouble" in result:
        return trouble_tables(result)
    rows = [
        {
            "gbps": cell["gbps"] or "full",
            "load_over_compute": cell["load_over_compute"],
            "arm": arm,
            **figures,
            "times": (cell["ratios"].get(f"{arm}/kvtier-remote") or {}).get("median"),
            "share": figures["cached_tokens"]["total"] / figures["prompt_tokens"]
            if figures["prompt_tokens"]
            else None,
        }
        for cell in result["cells"]
        for arm, figures in cell["arms"].items()
        if figures["ttft_ms"]["n"] or figures["errors"]
    ]
    columns = (
        Column("gbps", "Link", "Gbit/s", decimals=3),
        Column("load_over_compute", "Load/compute", decimals=2),
        Column("arm", "Arm"),
        Column("ttft_ms.p50", "TTFT p50", "ms", decimals=0),
        Column("ttft_ms.p99", "p99", "ms", decimals=0),
        Column("times", "Ours is x faster", decimals=2),
        Column("share", "Not computed", format=format_share),
        Column("remote_bytes", "Remote", format=lambda n: format_bytes(int(float(str(n))))),
        Column("ttft_ms.n", "Turns"),
        Column("errors", "Errors"),
        Column("equal_tokens_fraction", "Equal output", format=format_share),
    )
    notes = (
        "Turns whose session was served by the other server before. Ours is x faster: the arm's time over "
        "that of kvtier-remote, the median over equal turns. Remote: bytes that kvtier read from there.",
        *result["summary"]["missed"],
    )
    table = Table("Moved turns", columns, rows, notes=notes)
    return [html.marked(table, result)] if rows else []


def trouble_tables(result: dict) -> list[Table]:
    """What a remote store adds in each state of its master, and to a start without one."""
    found = result["trouble"]
    rows: list[dict[str, Any]] = [
        {"state": f"master {state}" if state != "empty" else "store empty", **figures}
        for state, figures in found["states"].items()
    ]
    columns = (
        Column("state", "State"),
        Column("off.p50", "Off p50", "ms", decimals=1),
        Column("remote.p50", "Remote p50", "ms", decimals=1),
        Column("added_ms.paired_p50", "Added, paired", "ms", decimals=1),
        Column("added_ms.p50", "Added p50", "ms", decimals=1),
        Column("added_ms.p99", "Added p99", "ms", decimals=1),
        Column("first_ms", "First", "ms", decimals=1),
        Column("aim_ms.p50", "Aim p50", "ms", decimals=0),
        Column("aim_ms.p99", "p99", "ms", decimals=0),
        Column("remote.n", "Requests"),
        Column("errors", "Errors"),
        Column("unequal", "Unequal"),
    )
    start = found["start_s"]
    note = ""
    if start["added"] is not None:
        note = (
            f"Start without a master: {start['remote']:.2f} s, without a remote store {start['off']:.2f} s "
            f"(medians); {start['added']:+.2f} s, the aim is {start['aim']:g}."
        )
    return [Table("Time to first token in trouble", columns, rows, notes=(note,))]


def remote_page(result: dict) -> str:
    """The whole page."""
    said = [(text, True) for text in result["summary"]["missed"]]
    return html.result_page(
        result,
        "Two servers on one remote store",
        f"{', '.join(result['arms'])} · {len(result['cells'])} speeds",
        headline=html.statements_html(said or [("Every aim is reached.", False)]),
        tables=remote_tables(result),
        figures=_figures(result),
        losing=html.statements_html(losing(result)),
        configuration="\n".join(map(html.definitions_html, (result["settings"], result["arms"]))),
    )


def losing(result: dict) -> list[tuple[str, bool]]:
    """Every speed at which another arm that computes or shares has a shorter median."""
    found = []
    for cell in result["cells"]:
        ours = cell["arms"].get("kvtier-remote", {}).get("ttft_ms", {}).get("p50")
        for arm, figures in cell["arms"].items():
            theirs = figures["ttft_ms"]["p50"]
            if arm not in ("kvtier-remote", "oracle") and ours and theirs and theirs < ours:
                text = f"{_where(cell)}: kvtier-remote {ours:.0f} ms, {arm} {theirs:.0f} ms."
                found.append((text, True))
    return found or [("None: at no speed has another arm but the oracle a shorter median.", False)]


def _figures(result: dict) -> Iterator[tuple[str, str]]:
    cells = [cell for cell in result["cells"] if cell["gbps"]]
    cells.sort(key=lambda cell: cell["gbps"])
    x = [cell["gbps"] for cell in cells]
    curves = {
        arm: [cell["arms"][arm]["ttft_ms"]["p50"] for cell in cells] for arm in result["arms"]
    }
    series = [Series(arm, x, y) for arm, y in curves.items() if any(y)]
    if len(cells) > 1 and series:
        axes = ("Gbit/s between servers and store", "TTFT p50 (ms)")
        yield lines(series, "Moved turns by speed", *axes, log_x=True, log_y=True), "Medians."


def _where(cell: dict[str, Any]) -> str:
    return f"{cell['gbps']:.3g} Gbit/s" if cell["gbps"] else "full speed"
