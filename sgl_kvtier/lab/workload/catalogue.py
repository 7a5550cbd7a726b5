"""Which traces there are: the public sets known by name, and the folder they are looked for in."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sgl_kvtier.errors import TraceError
from sgl_kvtier.outside import shown

SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")
DOCUMENT_SUFFIXES = (".json", ".json.gz")
"""Of files that may be traces and may be anything else."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a trace comes from: the repository that published it, its licence, and what it
    holds.
    """

    source: str
    licence: str
    about: str = ""


@cache
def known_traces() -> dict[str, Origin]:
    """The public trace sets by name (a file's name up to its first dot), from traces.json."""
    table = json.loads(Path(__file__).with_name("traces.json").read_text("utf-8"))
    return {t["name"]: Origin(t["source"], t["licence"], t["about"]) for t in table["traces"]}


def origin_of(path: Path) -> Origin:
    """The origin of a known trace by its file's name; for any other file its name, and no
    licence.
    """
    return known_traces().get(name_of(path), Origin(path.name, ""))


def name_of(path: Path) -> str:
    """A trace's short name: its file's name up to the first dot."""
    return path.name.split(".")[0]


VARIABLE = "KVTIER_TRACES"
"""The environment variable that names the folder with traces."""
FOLDER_HELP = f"folder with traces (default ${VARIABLE}, or ~/.cache/kvtier/traces)"


def cache_folder(name: str) -> Path:
    """A folder of ours for what can be had again: `$XDG_CACHE_HOME/kvtier/NAME`, by default below
    `~/.cache`.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvtier" / name


def default_folder() -> Path:
    """Where traces are looked for unless a folder is given. It need not be there."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else cache_folder("traces")


def trace_files(folder: Path | None = None) -> dict[str, Path]:
    """The trace files in `folder` (None: the default one) by short name. Raises TraceError if a
    given one is no folder.
    """
    place = default_folder() if folder is None else folder
    if not place.is_dir():
        if folder is None and not os.environ.get(VARIABLE):
            return {}
        given = f"{VARIABLE} = {shown(str(place))}" if folder is None else shown(str(place))
        raise TraceError(f"{given} is not a folder; give the one that holds the trace files")
    found: dict[str, Path] = {}
    for path in sorted(place.iterdir()):
        if path.is_file() and path.name.endswith((*SUFFIXES, *DOCUMENT_SUFFIXES)):
            found.setdefault(name_of(path), path)
    return found


def find_trace(source: str, folder: Path | None = None) -> Path:
    """The file meant by `source`: a path, a short name, or the beginning of just one. Raises
    TraceError saying what there is.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    files, where = trace_files(folder), folder or default_folder()
    matches = [source] if source in files else [name for name in files if name.startswith(source)]
    if len(matches) == 1:
        return files[matches[0]]
    if matches:
        raise TraceError(f"{source!r} could be any of {', '.join(matches)}; give more of the name")
    lines = [name for name, path in files.items() if path.name.endswith(SUFFIXES)]
    there = (
        f"Traces found: {', '.join(lines)}"
        if lines
        else f"No traces were found in {where}; name their folder in {VARIABLE}"
    )
    raise TraceError(
        f"no trace {source!r}: neither a file nor a trace's name. {there}. "
        "Without any trace, generated:swe-mini makes sessions by the published statistics"
    )
