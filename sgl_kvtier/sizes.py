"""Byte sizes as people write and read them. KiB, MiB, GiB are powers of 1024; KB, MB, GB of 1000. Standard library only."""

from __future__ import annotations

import re

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b?|b)?\s*$", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str | int) -> int:
    """Bytes from 4096, "4096", "64KiB", "1.5 GB". Raises ValueError on anything else."""
    if isinstance(text, bool):
        raise ValueError(f"not a size: {text!r}")
    if isinstance(text, int):
        return text
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    unit = (match[2] or "").lower()
    base = 1024 if "i" in unit else 1000
    return int(float(match[1]) * base ** _POWERS[unit.rstrip("b").rstrip("i")])


def format_bytes(value: object) -> str:
    """A number of bytes in powers of 1024: 1536 -> "1.5 KiB"."""
    nbytes = float(value)  # type: ignore[arg-type]
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"
