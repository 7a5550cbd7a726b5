"""Random requests in trouble against a recipe's server: `scripts/recipes --fuzz N NAME`.

The trouble and the judge are those of `kvtier bench restore-fuzz`: requests that are given up, caches
that are emptied, a store that fails, stalls, loses pages and flips bits. What each prompt is
answered with is known (`paced.signatures`), and the device compares every row that a prefill reads.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import gauntlet
import torch

from sgl_kvtier.lab.experiment.arms import Setup
from sgl_kvtier.lab.outside.server import Launch
from sgl_kvtier.lab.paced.signatures import chain_of, mix
from sgl_kvtier.lab.stress.server.chaos import Chaos
from sgl_kvtier.lab.stress.server.log import MUST_BE_ZERO, Answer, FuzzLog, counts, prompt_name
from sgl_kvtier.lab.stress.server.run import Asked, FuzzOptions, FuzzRun
from sgl_kvtier.lab.stress.server.server import FuzzServer

_SESSIONS, _TURNS, _SYSTEM, _FIRST, _TURN, _ANSWER = 16, 4, 1000, (500, 3500), (100, 600), 8
"""Sessions that begin with the same tokens; the least and most tokens of their turns. Together they
are more than device and host hold.
"""
_FAULTS = ("errors", "corrupt", "stall", "holes")
_GIVEN_UP = ("abort", "disconnect", "flush")
_ZERO = tuple(name for name in MUST_BE_ZERO if name != "unequal_logprobs")
"""Log-probs of a device that computes nothing are not compared."""
_DEADLINE_S = 60.0 * gauntlet.DILATION


class _RecipesServer(FuzzServer):
    """A recipe's server, forked."""

    def __init__(self, launch: Launch, folder: Path, log: FuzzLog) -> None:
        self._given = launch
        setup = Setup("", "", f"paced:{gauntlet.PROFILE}", gauntlet.PAGE, gauntlet.CHUNK)
        super().__init__("fuzz", setup, folder, log, {})
        self.admin_key = gauntlet.ADMIN_KEY

    def prepared(self, arm: str, setup: Setup) -> Launch:
        del arm, setup
        return self._given

    def start(self) -> None:
        self._server = gauntlet.Forked("fuzz", self._launch, self._folder, port=self._port)
        self._server.start()
        self._server.wait_until_healthy(gauntlet.START_S)


def run(
    recipe: gauntlet.Recipe, dropped: dict[str, str], folder: Path, requests: int, seed: int
) -> dict[str, Any]:
    """Fuzzes one recipe's server: what was tried, and what must be 0 (`must_be_zero`)."""
    folder.mkdir(parents=True)
    env = gauntlet.environment(recipe, folder)
    settings = json.loads((folder / "kvtier.json").read_text())
    settings["lab"]["faults"] = Chaos(_FAULTS, seed).faults()
    settings["lab"]["faults"]["stall_ms"] *= gauntlet.DILATION
    (folder / "kvtier.json").write_text(json.dumps(settings))
    words = gauntlet.arguments(recipe, dropped, folder)
    launch, page = Launch(tuple(words), env), int(words[words.index("--page-size") + 1])
    log, sessions = FuzzLog(), _sessions(seed)
    for asked in (one for session in sessions for one in session):
        answer = Answer(expected(asked.ids, asked.outputs), ())
        log.add("reference", (asked.name, answer))
    server = _RecipesServer(launch, folder, log)
    try:
        server.start()
        # A server that falls back keeps the mode that it has, and takes no word on sessions.
        reason = gauntlet.refusal(folder / "server.log")
        restores = "SGLang's own way" not in reason
        ahead = restores and "not looking ahead" not in reason
        chaos = Chaos(
            (*_FAULTS, *_GIVEN_UP, *(["switch"] * restores), *(["hint"] * ahead)),
            seed,
            start=None if restores else ("off", None),
        )
        options = FuzzOptions(
            f"{seed}", chaos, requests=requests, deadline_s=_DEADLINE_S,
            page_tokens=page, dilation=gauntlet.DILATION, ahead=ahead,
            gbps_scale=settings["lab"]["throttle"]["read_gbps"],
        )  # fmt: skip
        asyncio.run(FuzzRun(options, server, sessions, log).run())
    finally:
        server.stop()
    rows = gauntlet.rows_checked(folder)
    return {
        "name": recipe.name, "shape": recipe.shape, "requests_asked": requests, "seed": seed,
        "commit": gauntlet.commit(), "rows": rows, "reason": reason, "findings": log.findings,
        **counts(log),
        "wrong_answers": [
            {
                "number": one.number, "fate": one.fate, "complete": one.complete,
                "tokens": one.tokens, "expected": log.references[one.prompt].tokens,
            }
            for one in log.attempts
            if (verdict := log.verdict(one)) is not None and not verdict[0]
        ],
    }  # fmt: skip


def is_sound(found: dict[str, Any]) -> bool:
    """Whether something was compared, and all is 0 that must be."""
    shown = found["compared"] > 0 and _rows(found, "checked") > 0
    return shown and not any(found[name] for name in _ZERO) and not _rows(found, "wrong")


def _sessions(seed: int) -> list[list[Asked]]:
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(16, 250), k=count)

    system, sessions = tokens(_SYSTEM), []
    for place in range(_SESSIONS):
        ids, turns = [*system, *tokens(rng.randint(*_FIRST))], list[Asked]()
        for _ in range(_TURNS):
            turns.append(Asked(tuple(ids), _ANSWER, prompt_name(ids, _ANSWER), place))
            ids = [*ids, *expected(ids, _ANSWER), *tokens(rng.randint(*_TURN))]
        sessions.append(turns)
    return sessions


def expected(prompt: tuple[int, ...] | list[int], count: int) -> tuple[int, ...]:
    """The tokens that the device answers to a prompt where all rows are right
    (`recipe_device.device`): what is before the first token does not count.
    """
    chain = chain_of(torch.tensor(prompt))
    first, last, found = chain[0], chain[-1:], list[int]()
    for place in range(len(prompt), len(prompt) + count):
        token = (mix(last - first) & 0x7FFFFFFF) % 240 + 16
        found.append(int(token))
        last = chain_of(token, place, last)
    return tuple(found)


def _rows(found: dict[str, Any], what: str) -> int:
    return sum(kind[what] for kind in found["rows"].values())


def table(rows: list[dict[str, Any]]) -> str:
    """Results as a table in markdown."""
    heads = (
        "Recipe", "requests", "from storage", "restorations met", "given up", "emptied",
        "rows wrong of checked", "answers wrong of compared", "leaks", "drifts, crashes, hangs, failed",
    )  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "| :--- " + "| ---: " * (len(heads) - 1) + "|"]
    for one in rows:
        words = (
            one["name"],
            one["requests"],
            one["restored_from_storage"],
            one["restorations"].get("met", 0),
            one["aborted"] + one["disconnected"],
            one["events"].get("flush", 0),
            f"{_rows(one, 'wrong')} of {_rows(one, 'checked'):,}",
            f"{one['unequal_tokens']} of {one['compared']}",
            one["leaks"],
            sum(one[name] for name in ("drifts", "crashes", "hangs", "failed", "mismatches")),
        )
        lines.append("| " + " | ".join(map(str, words)) + " |")
    return "\n".join(lines)
