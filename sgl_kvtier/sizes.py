"""Byte sizes as people write and read them. KiB, MiB, GiB are powers of 1024; KB, MB, GB of
1000.
"""

from __future__ import annotations

import re

from sgl_kvtier.outside import is_whole, shown

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([kmgt]i?b?|b)?\s*$", re.IGNORECASE)
_LONGEST = 40
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str | float) -> int:
    """Bytes from 4096, 4e9, "4096", "4e9", "64KiB", "1.5 GB". Raises ValueError on all else."""
    nbytes: object = int(text) if isinstance(text, float) and text.is_integer() else text
    if isinstance(text, str):
        # The pattern takes time that grows with the square of a text's length.
        match = _SIZE.match(text) if len(text) <= _LONGEST else None
        unit = (match[2] or "").lower() if match else ""
        base = 1024 if "i" in unit else 1000
        nbytes = (
            int(float(match[1]) * base ** _POWERS[unit.rstrip("b").rstrip("i")]) if match else None
        )
    if not is_whole(nbytes):
        raise ValueError(f"not a size: {shown(text)}")
    return nbytes


def format_bytes(value: object) -> str:
    """A number of bytes in powers of 1024: 1536 -> "1.5 KiB"."""
    nbytes = float(value)  # type: ignore[arg-type]
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"
