"""The accidents of a fuzz run and their times, decided by a seed, request by request.

Faults of the device (failed reads, flipped bits, stalls, lost pages) are settings of the store.
This module has the accidents that clients and operators make. Requests are given up, caches
flushed, ways of restoring and bandwidths changed, and the server is killed.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.stress.trouble import chance

KINDS = (
    "errors",
    "corrupt",
    "stall",
    "holes",
    "abort",
    "disconnect",
    "flush",
    "kill",
    "switch",
    "hint",
    "priority",
)
"""Kinds of accidents, in order. Failed reads and writes; flipped bits; reads that come after their
deadline; stored pages that are gone. Requests ended over HTTP, or by hanging up; caches emptied;
SIGKILL and restart. Ways of restoring and bandwidths changed; hints, true or not, to a server that
looks ahead. Requests of several priorities, by which SGLang orders them and takes back running
ones.
"""

PRIORITIES = (0, 0, 0, 5, 10)
"""Those of requests; each is drawn."""

MODES = ("both", "auto", "load", "both", "auto", "both")
"""Values that policy.restore is switched to: mostly ones that use both resources."""


class Fate(enum.Enum):
    """The fate of one request: nothing, an abort over HTTP, or its connection is closed."""

    ANSWERED = "answered"
    ABORTED = "aborted"
    DISCONNECTED = "disconnected"


@dataclass(frozen=True)
class Accident:
    """One request's fate, and the seconds from its sending to that fate."""

    fate: Fate
    after_s: float = 0.0


@dataclass(frozen=True)
class Chaos:
    """Which kinds of trouble there are, and how often. `give_up` is the share of requests that are
    given up.
    """

    kinds: tuple[str, ...] = KINDS
    seed: int = 0
    give_up: float = 0.2
    flush_every: int = 40
    switch_every: int = 7
    kill_every: int = 400
    longest_s: float = 1.5
    hint_every: int = 3
    start: tuple[str, float | None] | None = None
    """policy.restore and the bandwidth (gigabits per second; None: as it is) at the beginning;
    None: drawn.
    """

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise BenchError(
                f"--chaos: no kind named {', '.join(unknown)}. There are: none, {', '.join(KINDS)}"
            )

    def faults(self) -> dict[str, Any]:
        """The section `lab.faults` of the server's kvtier.json."""
        found: dict[str, Any] = {"seed": self.seed}
        if "errors" in self.kinds:
            found |= {"read_error_rate": 0.01, "write_error_rate": 0.01}
        if "corrupt" in self.kinds:
            found |= {"corrupt_rate": 0.01}
        if "stall" in self.kinds:
            found |= {"stall_ms": 400.0}
        if "holes" in self.kinds:
            found |= {"lose_rate": 0.01}
        return found

    def accident(self, number: int) -> Accident:
        """The accident of the run's request `number`."""
        rng = self._random("accident", number)
        fates = [
            fate
            for kind, fate in (("abort", Fate.ABORTED), ("disconnect", Fate.DISCONNECTED))
            if kind in self.kinds
        ]
        if not fates or rng.random() >= self.give_up:
            return Accident(Fate.ANSWERED)
        # Most moments within a restoration, some while it waits, some while it decodes.
        return Accident(
            rng.choice(fates),
            rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, self.longest_s))),
        )

    def flushes_before(self, number: int) -> bool:
        """Whether all caches but the store are emptied before request `number`."""
        return (
            "flush" in self.kinds
            and number > 0
            and self._random("flush", number).random() < 1 / self.flush_every
        )

    def kills_at(self, number: int) -> bool:
        """Whether the server is killed when request `number` is about to be sent, others being
        under way.
        """
        return "kill" in self.kinds and number > 0 and number % self.kill_every == 0

    def switch_at(self, number: int) -> tuple[str, float | None] | None:
        """The policy.restore and the bandwidth (gigabits per second) set before request `number`;
        None: no change.
        """
        rng = self._random("switch", number)
        if not number and self.start is not None:
            return self.start
        if number and ("switch" not in self.kinds or rng.random() >= 1 / self.switch_every):
            return None
        return rng.choice(MODES), 2.0 ** rng.uniform(-6, 2)

    def hint_at(self, number: int, sessions: int) -> tuple[int, dict[str, Any]] | None:
        """A session and what is said of it before request `number`; None: nothing."""
        rng = self._random("hint", number)
        if "hint" not in self.kinds or rng.random() >= 1 / self.hint_every:
            return None
        said: dict[str, Any] = rng.choice(
            (
                {"expected_delay_s": rng.choice((0.0, rng.uniform(0, 1), 600.0))},
                {"priority": rng.randrange(-3, 4)},
                {"ttl_s": rng.choice((0.0, 30.0))},
                {
                    "expected_delay_s": rng.uniform(0, 2),
                    "priority": 2,
                    "tool": rng.choice(("ls", "tests")),
                },
            )
        )
        return rng.randrange(sessions), said

    def priority_of(self, number: int) -> int | None:
        """The priority of request `number`; None: it is sent without one."""
        if "priority" not in self.kinds:
            return None
        return self._random("priority", number).choice(PRIORITIES)

    def pause_before(self, number: int) -> float:
        """Seconds a session waits before request `number`, where sessions are expected back."""
        return float(self._random("pause", number).choice((0.0, 0.2, 0.4, 0.4, 0.8)))

    def order(self, sessions: Sequence[Any], turn: int) -> list[Any]:
        """The sessions of pass `turn`, shuffled."""
        shuffled = list(sessions)
        self._random("order", turn).shuffle(shuffled)
        return shuffled

    def _random(self, what: str, number: int) -> random.Random:
        return chance(self.seed, what, number)


def parse_kinds(text: str, *, ahead: bool = False) -> tuple[str, ...]:
    """Kinds from a command line: names with commas, or `none`. `all` stands for all but priority,
    with which the server's queue would have no order of ours. Where the server looks `ahead`, it
    has no holes either: comparing its map looks all stored pages up, and would lose some.
    """
    usual = [kind for kind in KINDS[:-1] if not ahead or kind != "holes"]
    if text == "none":
        return ()
    words = [word.strip() for word in text.split(",") if word.strip()]
    named = [kind for word in words for kind in (usual if word == "all" else (word,))]
    return tuple(dict.fromkeys(named))
