"""How large rooms may become: `scripts/house` counts, and READMEs say why one is larger."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sgl_kvtier"
MOST = {"files": 9, "floors": 3}
REASON = re.compile(
    r"^- (?:this room|`([\w/]+)/`), (?:(\d+) files)?(?:, )?(?:(\d+) floors)?: \w.{19,}",
    re.MULTILINE,
)


@lru_cache
def rooms() -> dict[str, dict[str, int]]:
    """Files and floors of every room, by its folder. The package itself has the layers that
    CONTRIBUTING.md names.
    """
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "house", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["room"].replace(".", "/"): row for row in json.loads(done.stdout)["rooms"]}
    del found[PACKAGE.name]
    return {room: {name: row[name] for name in MOST} for room, row in found.items()}


def reasons() -> dict[str, dict[str, int]]:
    """What READMEs say that a room has at most, by its folder."""
    found = {}
    for readme in PACKAGE.rglob("README.md"):
        for inside, files, floors in REASON.findall(readme.read_text()):
            said = {"files": int(files or 0), "floors": int(floors or 0)}
            found[str((readme.parent / inside).relative_to(PACKAGE))] = said
    return found


def test_a_room_of_more_than_nine_files_or_three_floors_has_a_reason_in_a_readme() -> None:
    said = reasons()
    larger = [
        f"{room}: {count} {name}"
        for room, counts in rooms().items()
        for name, count in counts.items()
        if count > max(MOST[name], said.get(room, {}).get(name, 0))
    ]
    assert larger == [], (
        "make it smaller, or give its README a line: - `room/`, 10 files, 4 floors: reason"
    )


def test_a_reason_whose_room_has_become_smaller_is_taken_away() -> None:
    found = rooms()
    stale = [
        f"{room}: {count} {name}"
        for room, counts in reasons().items()
        for name, count in counts.items()
        if count and found.get(room, {}).get(name, 0) <= MOST[name]
    ]
    assert stale == []
