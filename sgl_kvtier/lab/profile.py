"""Profiles: the time of a model's prefill and decode steps on an accelerator, as data with its
source.

A file has seconds by (tokens, prefix) of one request's prefill and by (batch, context) of a decode
step, measured operator by operator. Between points times are bilinear; beyond them they go on as
between the last two. Each number type of keys and values has its own tables.
`scripts/make-profiles` writes the files.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from sgl_kvtier.errors import BenchError

_FOLDER = files("sgl_kvtier.lab") / "profiles"
BF16, FP8 = "bfloat16", "fp8_e4m3"
"""Number types of keys and values."""


@dataclass(frozen=True)
class Table:
    """Seconds over two axes, both ascending."""

    rows: tuple[float, ...]
    columns: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, row: float, column: float) -> float:
        """Seconds there."""
        i, u = _place(self.rows, row)
        j, v = _place(self.columns, column)
        low, high = self.seconds[i], self.seconds[i + 1]
        left, right = low[j] + (high[j] - low[j]) * u, low[j + 1] + (high[j + 1] - low[j + 1]) * u
        return left + (right - left) * v


def _place(axis: Sequence[float], value: float) -> tuple[int, float]:
    """The cell of an axis that a value lies in, and how far in it; over 1 behind the last."""
    cell = min(max(bisect.bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return cell, max((value - axis[cell]) / (axis[cell + 1] - axis[cell]), 0.0)


@dataclass(frozen=True)
class Profile:
    """One model on an accelerator, or on several as one. Bytes and links are those of all of it."""

    name: str
    source: dict[str, str]
    layers: int
    kind: str
    """The cache of a layer for each token: `mha` keys and values, `mla` a latent."""
    kv_bytes_per_token: int
    to_device_gbytes_per_s: float
    to_host_gbytes_per_s: float
    prefill: Table
    decode: Table
    kv_dtype: str = BF16

    def prefill_seconds(self, spans: Sequence[tuple[int, int]]) -> float:
        """Seconds of one batch of (tokens, prefix), one pair per request.

        The batch counts as one request of all their tokens. Each is then corrected for attending to
        its own prefix instead of to the tokens before it in the batch. Never less than the longest
        alone.
        """
        before, alone = 0, 0.0
        seconds = self.prefill.at(sum(tokens for tokens, _ in spans), 0)
        for tokens, prefix in spans:
            own = self.prefill.at(tokens, prefix)
            seconds += own - self.prefill.at(tokens, before)
            before += tokens
            alone = max(alone, own)
        return max(seconds, alone)

    def decode_seconds(self, contexts: Sequence[int]) -> float:
        """One step of requests with these contexts, in tokens."""
        return self.decode.at(len(contexts), sum(contexts) / len(contexts))

    def mixed_seconds(self, spans: Sequence[tuple[int, int]], requests: int, context: int) -> float:
        """One step of prefill, as (tokens, prefix), and of requests that decode with a `context` of
        so many tokens in all. Decoding tokens count as tokens of the prefill, and what their
        contexts add is that of a decode step.
        """
        if not requests:
            return self.prefill_seconds(spans)
        mean = context / requests
        if not spans:
            return self.decode.at(requests, mean)
        contexts_s = self.decode.at(requests, mean) - self.decode.at(requests, 0)
        return self.prefill_seconds([*spans, (requests, 0)]) + max(contexts_s, 0.0)


def names() -> list[str]:
    """The profiles there are."""
    return sorted(
        file.name.removesuffix(".json") for file in _FOLDER.iterdir() if file.name.endswith(".json")
    )


def document(name: str) -> dict[str, Any]:
    """A profile's file as it is. Raises BenchError, with the names there are."""
    if name not in names():
        raise BenchError(f"no profile named {name!r}. There are: {', '.join(names())}")
    found: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def read(name: str, kv_dtype: str = BF16) -> Profile:
    """A profile by its name, with keys and values of one type. Raises BenchError, with the names
    there are.
    """
    found = document(name)
    if kv_dtype != BF16:
        own = found[kv_dtype]
        found |= own | {"source": found["source"] | {"model": own["model"]}}

    def table(part: str, rows: str, columns: str) -> Table:
        data = found[part]
        seconds = tuple(tuple(row) for row in data["seconds"])
        return Table(tuple(data[rows]), tuple(data[columns]), seconds)

    return Profile(
        name=name,
        source=found["source"],
        layers=found["layers"],
        kind=found["kind"],
        kv_bytes_per_token=found["kv_bytes_per_token"],
        to_device_gbytes_per_s=found["to_device_gbytes_per_s"],
        to_host_gbytes_per_s=found["to_host_gbytes_per_s"],
        prefill=table("prefill", "tokens", "prefix"),
        decode=table("decode", "batch", "context"),
        kv_dtype=kv_dtype,
    )
