"""The memory limit of this process's container, from its control groups (version 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60
"""Version 1 reports a number near 2^63 if there is no limit."""


@dataclass(frozen=True)
class MemoryLimit:
    """A limit, and how much is still free below it; files in the page cache count as free."""

    limit_bytes: int
    free_bytes: int


def memory_limit(
    mounted: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> MemoryLimit | None:
    """The limit that leaves the least memory free, of this process's group and its parents; None if
    there is none. Never raises.
    """
    found = [
        limit for folder, names in _groups(mounted, _text(own)) if (limit := _limit(folder, *names))
    ]
    return min(found, key=lambda limit: limit.free_bytes, default=None)


_Names = tuple[tuple[str, ...], str, str]
"""Files with limits, the file with current usage, and the page cache's row of memory.stat."""
_VERSION_2: _Names = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_VERSION_1: _Names = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def _groups(mounted: Path, own: str) -> Iterator[tuple[Path, _Names]]:
    """The visible folders of this process's groups, each with the names of its files. In a
    container the mount point itself is often the container's group, and the path that the kernel
    reports lies outside.
    """
    for line in own.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            # If both versions are mounted, version 2 is next to the controllers of version 1.
            roots, names = (mounted, mounted / "unified"), _VERSION_2
        elif "memory" in controllers.split(","):
            roots, names = (mounted / "memory", mounted / controllers), _VERSION_1
        else:
            continue
        below = Path(path.lstrip("/"))
        if ".." in below.parts:
            below = Path()
        for root in roots:
            yield from ((root / part, names) for part in (below, *below.parents))
            if below == Path():
                yield root, names


def _limit(folder: Path, limits: tuple[str, ...], used: str, cached: str) -> MemoryLimit | None:
    texts = [_text(folder / name).strip() for name in limits]
    known = [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT]
    if not known:
        return None
    stat = dict(row.split()[:2] for row in _text(folder / "memory.stat").splitlines() if " " in row)
    in_use, given_back = _text(folder / used).strip(), stat.get(cached, "")
    taken = _number(in_use) - _number(given_back)
    return MemoryLimit(min(known), max(0, min(known) - max(0, taken)))


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
