"""Recorded runs of every scenario: the log, the result, and what is drawn from it.

`python tests/lab/recorded_runs.py` draws the kept results again, after tables or pages were changed on
purpose; with names of scenarios only those.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import html
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

KEPT = Path(__file__).parent.parent / "golden" / "scenarios"

_COMPUTED = ("--device", "cpu", "--model", "tiny-qwen3")
_PACED = ("--device", "paced:h100-llama8b")
_SESSIONS = (*("--trace", "generated:swe-mini"), *("--sessions", "3", "--turns", "2"))
_SMALL = (*_SESSIONS, "--divisor", "16")
_AT_ONCE = (*("compare", "restore", "--device", "cpu", "--models", "tiny-qwen3"), "--foreign", "99")
_REMOTE = (*("compare", "remote", "--model", "tiny-qwen3"), "--tokens", "256")

SCENARIOS: dict[str, tuple[str, ...]] = {
    "compare": ("compare", *_COMPUTED, *_SMALL, "--gap-scale", "0", "--rounds", "4"),
    "compare-quick": ("compare", "--quick", *_PACED, *_SESSIONS, "--pause", "0.01"),
    "restore": (*_AT_ONCE, "--lengths", "512,768", "--load-over-compute", "1/2,2", "--rounds", "2"),
    "restore-hole": (*_AT_ONCE, "--lengths", "512", "--load-over-compute", "1", "--hole", "first"),
    "at-once": (
        *(*_AT_ONCE, "--at-once", "2,3", "--lengths", "256,512"),
        *("--load-over-compute", "1,2", "--rounds", "2"),
    ),
    "sweep": (
        *("compare", *_COMPUTED, *_SMALL, "--gap-scale", "0", "--concurrency", "1,3"),
        *("--arms", "hicache-file,kvtier", "--servers", "together", "--rounds", "2"),
    ),
    "sweep-rate": (
        *("compare", *_COMPUTED, *_SMALL, "--gap-scale", "0", "--rate", "500,1000"),
        *("--arms", "recompute,kvtier", "--servers", "together", "--rounds", "1"),
    ),
    "sweep-paced": (
        *("compare", *_PACED, *_SMALL, "--gap-scale", "0", "--concurrency", "1,3"),
        *("--arms", "hicache-file,kvtier", "--servers", "together", "--rounds", "1"),
    ),
    "remote": (*_REMOTE, "--sessions", "2", "--rounds", "2"),
    "replay": ("replay", *_SMALL, "--gap-scale", "0"),
}
"""Words of each command. Of those without a log the result alone is kept."""

LOGGED = [name for name in SCENARIOS if name != "replay"]
REPORTED = ("compare", "restore", "at-once", "sweep", "remote")
"""Those that `kvtier report` draws again, one of each kind of result."""
OTHERWISE = ("command", "environment", "interrupted", "settings", "counters")
"""Keys of a result that say something of the run rather than of what was measured."""
_CONTINUED = "in the log before"
"""What a note has that is there where a run goes on."""


def read(name: str) -> dict[str, Any]:
    """What is kept of a scenario: the lines of its `log`, its `result`, and what is `drawn` of it."""
    found: dict[str, Any] = json.loads(gzip.decompress((KEPT / f"{name}.json.gz").read_bytes()))
    return found


def write(name: str, kept: dict[str, Any]) -> None:
    """Keeps it, the same bytes for the same content."""
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))


def measured(result: dict[str, Any]) -> dict[str, Any]:
    """What a result says of what was measured, as JSON has it."""
    kept = {key: value for key, value in result.items() if key not in OTHERWISE}
    found: dict[str, Any] = json.loads(json.dumps(kept))
    found["notes"] = [note for note in found.get("notes", ()) if _CONTINUED not in note]
    for cell in found.get("cells", ()):
        cell.pop("commands", None)  # of the server that was started last: its port
    return found


def drawn(result: dict[str, Any]) -> dict[str, str]:
    """Its tables as `kvtier report` prints them, and the text of its page."""
    from sgl_kvtier.console import print_table
    from sgl_kvtier.lab.experiment.scenarios import replay
    from sgl_kvtier.lab.pages.report import KINDS

    plain = {"kvtier.replay/1": lambda result: [replay._table(result)]}
    tables, page_of = KINDS.get(result["schema"]) or (plain[result["schema"]], None)
    out = io.StringIO()
    for table in tables(result):
        print_table(table, out)
        print(file=out)
    with undrawn():
        page = "" if page_of is None else text_of(page_of(result))
    return {"tables": out.getvalue(), "page": page}


def undrawn() -> AbstractContextManager[Any]:
    """Drawing takes seconds: of each plot there is the title with the names of its curves."""
    return patch("sgl_kvtier.lab.pages.plots.svg_text", lambda _, text: f"<p>{text}</p>")


def text_of(page: str) -> str:
    """What is read on a page, a line for each element."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    lines = (html.unescape(line).strip() for line in re.sub(r"<[^>]*>", "\n", body).splitlines())
    return "\n".join(filter(None, lines)) + "\n"


def filled(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """The result with figures that no log of a fake has, so that all columns have values."""
    result = copy.deepcopy(result)
    if name == "sweep":
        result["cells"][0]["arms"]["kvtier"]["throughput_tokens_per_s"] *= 0.1
    if name == "sweep-rate":
        result["arms"]["recompute"]["skipped"] = "there is no wheel"
    if name in ("restore", "at-once"):
        paced = {"overrun": 0.04, "overrun_p99": 0.2, "steps": 12, "load_wait_s": 0.5}
        paced |= {"checked_tokens": 4096, "mismatches": 0}
        result["pace"] = {"compute": paced, "kvtier": {**paced, "steps": 9}}
    return result


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """A log goes on whatever it was made with: another version, machine or build."""
    from sgl_kvtier.lab.experiment.log import Log

    check = Log._check
    Log._check = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Log._check = check  # type: ignore[method-assign]


if __name__ == "__main__":
    for scenario in sys.argv[1:] or SCENARIOS:
        again = read(scenario)
        write(scenario, {**again, "drawn": drawn(filled(scenario, again["result"]))})
