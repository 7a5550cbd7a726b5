"""How near restoring from both ends comes to the best split: `scripts/recipes --speed NAME`.

A prefix of 16,384 tokens is stored. It is then restored by loading alone and from both ends, with
a store that needs a quarter of the time that computing takes, as long, and four times as long. The
best split (`restore.bound`) is made of times measured in the same run: computing, loading, and what
a request takes whose prefix is in device memory. Without lookahead, and without the proof of
restored pages, which compares all of the first ones.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import gauntlet

from sgl_kvtier.lab.experiment.restore.bound import ComputeCurve, curve_points, optimal
from sgl_kvtier.lab.outside.server import Launch

PREFIX, ROUNDS, RATIOS = 16384, 3, (0.25, 1.0, 4.0)
"""Tokens; flushes and measurements of each; load time over compute time."""
EVICTING = 3
"""Other prompts, for servers that store what leaves the device."""
_REST = 40
"""Tokens of the prompt behind its last whole page."""


class _Timed:
    """A running server whose answers of one token are timed."""

    def __init__(self, asked: gauntlet.Asked, seed: int) -> None:
        self.asked = asked
        self._random = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(16, 250), k=tokens)

    def seconds(self, ids: list[int]) -> float:
        """Time to first token, in the device's time."""
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        began = time.monotonic()
        self.asked.call("POST", "/generate", {"input_ids": ids, "sampling_params": sampling})
        return (time.monotonic() - began) / gauntlet.DILATION

    def use(self, mode: str, gbps: float) -> None:
        """The next requests restore in this mode, from a store that reads so fast."""
        self.asked.call("POST", "/kvtier/settings", {"policy": {"restore": mode}})
        state = {"server_args": {"kvtier.throttle.read_gbps": gbps}}
        self.asked.call("POST", "/set_internal_state", state)

    def restored(self, ids: list[int], mode: str, gbps: float) -> tuple[float, int, int]:
        """Median seconds after a flush; tokens and bytes that were loaded for all of them."""
        self.use(mode, gbps)
        before, found = self._loaded(), []
        for number in range(ROUNDS + 1):
            self.asked.flush()
            seconds = self.seconds(ids)
            if number:  # the first one learns how fast the store is
                found.append(seconds)
        time.sleep(1.2)  # counters are published twice a second
        tokens, nbytes = (now - then for now, then in zip(self._loaded(), before, strict=True))
        return statistics.median(found), tokens, nbytes

    def _loaded(self) -> tuple[int, int]:
        tokens = self.asked.metric("kvtier:restore_loaded_tokens_total", 'tier="storage"')
        return tokens, self.asked.metric("kvtier:restore_loaded_bytes_total")


def run(recipe: gauntlet.Recipe, dropped: dict[str, str], folder: Path) -> dict[str, Any]:
    """One recipe's row: of each ratio the times, the best split and our share of it."""
    folder.mkdir(parents=True)
    env = gauntlet.environment(recipe, folder)
    config = json.loads((folder / "kvtier.json").read_text())
    config["policy"] |= {"prefetch": "off", "eviction": "lru", "proof": "off"}
    (folder / "kvtier.json").write_text(json.dumps(config))
    gbps = config["lab"]["throttle"]["read_gbps"]
    words = gauntlet.arguments(recipe, dropped, folder)
    cells: list[dict[str, Any]] = []
    server = gauntlet.Forked(recipe.name, Launch(tuple(words), env), folder)
    with server:
        server.wait_until_healthy(gauntlet.START_S)
        timed = _Timed(gauntlet.Asked(server), 0)
        page_s = min(timed.seconds(timed.prompt(gauntlet.PAGE)) for _ in range(3))
        points = curve_points(PREFIX, gauntlet.CHUNK, 4)
        curve = ComputeCurve({n: timed.seconds(timed.prompt(n)) for n in points}, page_s)
        ids = timed.prompt(PREFIX + _REST)
        computing_s = timed.seconds(ids)
        resident_s = min(timed.seconds(ids) for _ in range(3))
        for _ in range(EVICTING if gauntlet.writes_late(recipe) else 0):
            timed.seconds(timed.prompt(PREFIX))
        # What a token takes in the store: of the first load, at the speed that the server has now.
        first_s, _, _ = timed.restored(ids, "load", gbps)
        gbps *= max(first_s - resident_s, 1e-3) / (computing_s - resident_s)
        for ratio in RATIOS:
            loading_s, _, _ = timed.restored(ids, "load", gbps / ratio)
            both_s, tokens, nbytes = timed.restored(ids, "both", gbps / ratio)
            best = optimal(PREFIX, gauntlet.PAGE, curve, loading_s, resident_s)
            cells.append(
                {
                    "ratio": ratio, "computing_ms": computing_s * 1e3,
                    "loading_ms": loading_s * 1e3, "both_ms": both_s * 1e3,
                    "best_ms": best.seconds * 1e3, "share": best.seconds / both_s,
                    "loaded_tokens": tokens, "loaded_bytes": nbytes,
                }
            )  # fmt: skip
        server.raise_if_ended("while it was measured")
    return {
        "name": recipe.name, "shape": recipe.shape, "commit": gauntlet.commit(), "cells": cells,
        "reason": gauntlet.refusal(folder / "server.log"),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Results as a table in markdown."""
    heads = (
        "Recipe", "load time / compute time", "computing (ms)", "loading (ms)", "both ends (ms)",
        "best split (ms)", "share of the best split",
    )  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "| :--- " + "| ---: " * (len(heads) - 1) + "|"]
    for row in rows:
        for cell in row["cells"]:
            times = [
                f"{cell[name]:.0f}" for name in ("computing_ms", "loading_ms", "both_ms", "best_ms")
            ]
            words = (row["name"], f"{cell['ratio']:g}", *times, f"{cell['share']:.2f}")
            lines.append("| " + " | ".join(words) + " |")
    return "\n".join(lines)
