"""How well a paced device kept pace: one line of a file per step, and the figures made of them.
Copies over the link and loads of requests have lines of their own.

A step is over time where the program did not follow. `late_s` are the seconds of signing and
checking beyond the step itself. `gap_s` are the seconds the device then had nothing to do, although
the request it served last went on. Both are in none of a profile's times. A run that has more than
`MOST_OVERRUN` of its steps' time in them is not valid. Times in the file are as they passed, with
dilation.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

MOST_OVERRUN = 0.10
"""Time lost over time of all steps, from which on a run is invalid."""


class PaceLog:
    """The lines of one scheduler process. Any thread; steps are of the scheduler's."""

    def __init__(self, path: Path, most_bytes: int = 0) -> None:
        """A file that would have more than `most_bytes` goes on in a new one. It is kept as PATH.1,
        in place of the one before; 0: one file, however long.
        """
        self._path, self._most_bytes = path, most_bytes
        self._lock = threading.Lock()
        self._file = self._open()
        self._free_at = 0.0
        self._went_on: tuple[str, ...] = ()

    def step(
        self,
        *,
        kind: str,
        rids: Sequence[str],
        waiting: set[str],
        called: float,
        begin: float,
        end: float,
        returned: float,
        load_wait_s: float = 0.0,
        **more: Any,
    ) -> None:
        """A step called for at `called`, that occupies the device from `begin` to `end`, of which
        it waits `load_wait_s` for pages. The call ended at `returned`. A gap before it counts if it
        goes on with a request of the step before that did not wait for pages.
        """
        going_on = set(rids) & set(self._went_on) - waiting
        gap_s = max(called - self._free_at, 0.0) if going_on else 0.0
        late_s = max(returned - end, 0.0)
        self._free_at, self._went_on = max(end, returned), tuple(rids)
        row: dict[str, Any] = {
            "step": kind,
            "at": called,
            "seconds": end - begin - load_wait_s,
            "late_s": late_s,
            "gap_s": gap_s,
        }
        if kind == "prefill":  # whose prompt was computed when; a decode step would name all
            row |= {"begin": begin, "rids": list(rids)}
        self._write({**row, "requests": len(rids), "load_wait_s": load_wait_s, **more})

    def mismatch(self, at: float, what: str, rid: str, tier: str) -> None:
        """Wrong keys and values were found."""
        self._write({"mismatch": what, "at": at, "rid": rid, "tier": tier})

    def copied(self, to: str, begin: float, end: float, nbytes: int) -> None:
        """A copy between host and device, to_device or to_host, of bytes at hand."""
        self._write({"copy": to, "at": begin, "end": end, "bytes": nbytes})

    def loaded(self, link: str, rid: str, begin: float, end: float) -> None:
        """A request's pages came over a link (`types.Link`)."""
        self._write({"load": link, "at": begin, "end": end, "rid": rid})

    def _open(self) -> TextIO:
        # Of a user's store, which its server has not opened yet: as private as the store makes it.
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._path.open("a", buffering=1, encoding="utf-8")
        self._bytes = file.tell()
        if self._bytes and not self._ends_whole():
            # A server that was killed left a torn line; the next one is whole.
            self._bytes += file.write("\n")
        return file

    def _ends_whole(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def _write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row) + "\n"
        with self._lock:
            if self._most_bytes and self._bytes + len(line) > self._most_bytes:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._open()
            self._file.write(line)
            self._bytes += len(line)


class Reader:
    """The lines of a file as a device writes them. One thread; the file may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Those written since the last call; one that is not whole yet is left for the next."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                found = file.read()
        except FileNotFoundError:
            return []
        whole = found[: found.rfind(b"\n") + 1]
        self._at += len(whole)
        return _rows(whole.decode())


def read(path: Path) -> list[dict[str, Any]]:
    """The lines there are; a torn last one is left away."""
    try:
        return _rows(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []


def _rows(text: str) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def lost_seconds(steps: Iterable[Mapping[str, Any]]) -> float:
    """The time that these steps lost, with dilation."""
    return sum((row["late_s"] + row["gap_s"] for row in steps), 0.0)


def verdict(name: str, found: Mapping[str, Any]) -> list[str]:
    """A note where `figures` of what is called so are not valid."""
    if not found["steps"]:
        return [f"INVALID: {name}: the paced device wrote no step."]
    if found["valid"]:
        return []
    return [
        f"INVALID: {name} lost {found['overrun']:.0%} of its steps' time ({MOST_OVERRUN:.0%} are "
        f"allowed), {found['mismatches']} mismatches."
    ]


def figures(rows: Iterable[Mapping[str, Any]], dilation: float) -> dict[str, Any]:
    """Figures that are published of these lines. `overrun` are shares of a step's time: p50 and p99
    by step, and of all together. The scheduler's own processor time per step, that of our tick
    right before it, and mismatches, are beside. `tick_share` is the tick's over the time of all
    steps without dilation.
    """
    rows = list(rows)
    steps = [row for row in rows if "step" in row]
    wrong = [row["mismatch"] for row in rows if "mismatch" in row]
    lost = [row["late_s"] + row["gap_s"] for row in steps]
    times = [row["seconds"] for row in steps]
    busy_s = sum(times)
    shares = sorted(one / max(seconds, 1e-6) for one, seconds in zip(lost, times, strict=True))
    total = sum(lost) / busy_s if busy_s else None
    ticks = [1e3 * row["tick_s"] for row in steps if row.get("tick_s") is not None]
    return {
        "steps": len(steps),
        "busy_s": busy_s / dilation,
        "overrun_p50": _at(shares, 0.50),
        "overrun_p99": _at(shares, 0.99),
        "overrun": total,
        "overrun_by": {kind: _share(steps, kind) for kind in ("prefill", "decode")},
        "valid": None if total is None else total <= MOST_OVERRUN and not wrong,
        "scheduler_ms_per_step": _mean(row.get("scheduler_s") for row in steps),
        "tick_ms_per_step": _mean(row.get("tick_s") for row in steps),
        "tick_ms_p99": _at(sorted(ticks), 0.99),
        "tick_share": _ticks(steps, dilation),
        "checking_ms_per_step": _mean(row.get("checking_s") for row in steps),
        "load_wait_s": sum(row.get("load_wait_s", 0.0) for row in steps) / dilation,
        "checked_tokens": sum(row.get("checked", 0) for row in steps),
        "mismatches": len(wrong),
        "first_mismatches": wrong[:5],
    }


def _at(ascending: Sequence[float], share: float) -> float | None:
    return ascending[min(int(share * len(ascending)), len(ascending) - 1)] if ascending else None


def _share(steps: Sequence[Mapping[str, Any]], kind: str) -> float | None:
    mine = [row for row in steps if row["step"] == kind]
    busy_s = sum(row["seconds"] for row in mine)
    return sum(row["late_s"] + row["gap_s"] for row in mine) / busy_s if busy_s else None


def _ticks(steps: Sequence[Mapping[str, Any]], dilation: float) -> float | None:
    timed = [row for row in steps if row.get("tick_s") is not None]
    busy_s = sum(row["seconds"] for row in timed) / dilation
    return sum(row["tick_s"] for row in timed) / busy_s if busy_s else None


def _mean(seconds: Iterable[float | None]) -> float | None:
    known = [one * 1e3 for one in seconds if one is not None]
    return sum(known) / len(known) if known else None
