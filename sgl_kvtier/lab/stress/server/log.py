"""The outcomes of a fuzz run's requests and servers, in memory and in a file of JSON lines. Later
runs add to that file.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sgl_kvtier.lab.experiment.log import Log
from sgl_kvtier.lab.experiment.restore.cells import LOGPROB_TOLERANCE, difference
from sgl_kvtier.lab.outside.client import ABORTED
from sgl_kvtier.lab.stress.server.chaos import Fate
from sgl_kvtier.lab.stress.server.judge import WRONG, Answer, Floor, Verdict, judge
from sgl_kvtier.lab.stress.trouble import Finding

_LEAK = re.compile(
    r"memory leak detected|\bleak(ed|s)?\b|invariant|double free|refcount", re.IGNORECASE
)
_CRASH = re.compile(
    r"Traceback \(most recent call last\)|Scheduler hit an exception|Segmentation fault"
    r"|Fatal Python error"
)
_REFUTED = re.compile(r"restoration is not right on this device")
_FREEZE = re.compile(r"post-warmup freeze_gc failed\n(?:(?!\[\d{4}-).*\n)*")
"""SGLang 0.5.23 says it with --skip-server-warmup, since it asks itself before it listens."""


@dataclass(frozen=True)
class Attempt:
    """One request of a fuzz run. `killed`: the server was killed under it; `hung`: it had not ended
    when it should have.
    """

    run: str
    number: int
    prompt: str
    prompt_tokens: int
    mode: str
    fate: str
    seconds: float
    host_tokens: int = 0
    storage_tokens: int = 0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    complete: bool = False
    killed: bool = False
    hung: bool = False
    error: str | None = None

    @property
    def restored(self) -> bool:
        """Part of its prompt came from a lower tier."""
        return self.host_tokens + self.storage_tokens > 0

    @property
    def failure(self) -> str | None:
        """Why it had no answer although no server was killed. None for one that had, that was given
        up, or that hung.
        """
        if self.killed or self.hung:
            return None
        if self.error is None:
            return "an answer without tokens" if self.complete and not self.tokens else None
        # Of a request that is given up the abort that was asked for is the only error there may be.
        given_up = self.fate == Fate.ABORTED.value and self.error.startswith(ABORTED)
        return None if given_up else self.error


class FuzzLog(Log):
    """References by prompt, attempts, and what the servers' logs and pools showed. Runs with other
    trouble and loads may add to it.
    """

    kinds: ClassVar = {
        "reference": tuple[str, Answer],
        "attempt": Attempt,
        "event": str,
        "ends": dict,
        "ahead": dict,
        "audited": dict,
        "floor": Floor,
        "finding": str,
        "checked": int,
    }

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self.references: dict[str, Answer] = {}
        self.attempts: list[Attempt] = []
        self.events: Counter[str] = Counter()
        self.findings: list[str] = []
        self.ends: Counter[str] = Counter()
        """How restorations ended, by the servers' own counters."""
        self.knows_ends = False
        """Whether a server has said how they ended: it does when it is ended in order."""
        self.ahead: Counter[str] = Counter()
        """Counts of servers that looked ahead."""
        self.audited: Counter[str] = Counter()
        """Loaded pages that were compared with the store's, by what came of it."""
        self.checked_tokens = 0
        """Tokens whose keys and values a paced device compared."""
        self.floor: Floor | None = None
        """The noise floor of stock's own answers, where they differ."""

    def take(self, kind: str, record: Any) -> None:
        """Adds a record: of an event one more of its kind, of counts their growth."""
        if kind == "reference":
            self.references[record[0]] = record[1]
        elif kind == "attempt":
            self.attempts.append(record)
        elif kind == "finding":
            self.findings.append(record)
        elif kind == "event":
            self.events[record] += 1
        elif kind == "checked":
            self.checked_tokens += record
        elif kind == "floor":
            self.floor = record
        else:
            self.knows_ends = self.knows_ends or kind == "ends"
            {"ends": self.ends, "ahead": self.ahead, "audited": self.audited}[kind].update(record)

    def keep(self, attempt: Attempt) -> None:
        """Adds a request."""
        self.add("attempt", attempt)

    def note(self, event: str) -> None:
        """Counts something that was done to the server."""
        self.add("event", event)

    def find(self, kind: Finding, text: str) -> None:
        """Adds something a server must not do."""
        self.add("finding", f"{kind.label}: {text}")

    def verdict(self, attempt: Attempt) -> tuple[bool, bool] | None:
        """Whether an attempt's tokens, and its log-probs, are those of its reference. Those of an
        aborted attempt have to be the reference's beginning. None where there is nothing to
        compare.
        """
        wanted = self.references.get(attempt.prompt)
        if wanted is None or not attempt.tokens:
            return None
        count = len(attempt.tokens)
        if self.floor is not None:
            return self._against_the_floor(attempt, wanted, self.floor)
        if attempt.complete and count != len(wanted.tokens):
            return False, False
        # What was given up may have come without log-probs; a whole answer has as many as the one
        # it is compared with.
        there = len(wanted.logprobs) if attempt.complete else len(attempt.logprobs)
        apart = difference(attempt.logprobs, wanted.logprobs[:there])
        close = not there if apart is None else apart <= LOGPROB_TOLERANCE
        # SGLang does not cut a speculated answer at its limit when the request is given up.
        return attempt.tokens[: len(wanted.tokens)] == wanted.tokens[:count], close

    @staticmethod
    def _against_the_floor(
        attempt: Attempt, wanted: Answer, floor: Floor
    ) -> tuple[bool, bool] | None:
        count = len(attempt.tokens)
        if attempt.complete and count != len(wanted.tokens):
            return False, False
        if len(attempt.logprobs) < count and not attempt.complete:
            return None  # given up before its log-probs came
        found = judge(
            Answer(wanted.tokens[:count], wanted.logprobs[:count], wanted.margins[:count]),
            Answer(attempt.tokens, attempt.logprobs[:count]),
            floor,
        )
        tokens = found is not Verdict.OTHER_TOKENS and found is not Verdict.INCOMPLETE
        return tokens, found not in WRONG


def prompt_name(ids: Sequence[int], output_tokens: int) -> str:
    """A short name for a prompt and the length of its answer."""
    text = ",".join(map(str, ids)) + f";{output_tokens}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def counts(log: FuzzLog) -> dict[str, Any]:
    """The figures of a fuzz run: what was tried, and what must be 0."""
    verdicts = [(one, log.verdict(one)) for one in log.attempts]
    compared = [(one, equal) for one, equal in verdicts if equal is not None]
    unequal = [one for one, equal in compared if not equal[0]]
    failures = [why for one in log.attempts if (why := one.failure) is not None]
    found = Counter(text.partition(":")[0] for text in log.findings)
    return {
        "requests": len(log.attempts),
        "completed": sum(one.complete for one in log.attempts),
        "restored": sum(one.restored for one in log.attempts),
        "restored_from_storage": sum(one.storage_tokens > 0 for one in log.attempts),
        "restorations": dict(sorted(log.ends.items())),
        "ahead": dict(sorted(log.ahead.items())),
        "restored_by_mode": dict(
            sorted(Counter(one.mode for one in log.attempts if one.restored).items())
        ),
        "aborted": sum(one.fate == Fate.ABORTED.value for one in log.attempts),
        "disconnected": sum(one.fate == Fate.DISCONNECTED.value for one in log.attempts),
        "under_a_kill": sum(one.killed for one in log.attempts),
        "events": dict(sorted(log.events.items())),
        "compared": len(compared),
        "checked_tokens": log.checked_tokens,
        "audited_pages": dict(sorted(log.audited.items())),
        "hangs": sum(one.hung for one in log.attempts),
        **{name: found[kind.label] for name, kind in _FINDINGS.items()},
        "unequal_tokens": len(unequal),
        "unequal_logprobs": sum(not equal[1] for _, equal in compared),
        "failed": len(failures),
        "error_messages": sorted(set(failures))[:10],
        "unequal": [
            {"run": one.run, "number": one.number, "prompt": one.prompt, "mode": one.mode}
            for one in unequal
        ][:20],
    }


_FINDINGS = {
    "leaks": Finding.LEAK,
    "drifts": Finding.DRIFT,
    "crashes": Finding.CRASH,
    "mismatches": Finding.MISMATCH,
    "scenes": Finding.SCENE,
}
MUST_BE_ZERO = ("hangs", *_FINDINGS, "unequal_tokens", "unequal_logprobs", "failed")


def suspicious(text: str) -> list[tuple[Finding, str]]:
    """Lines of a server's log that speak of lost memory, of an uncaught exception, or of a restored
    page that its proof found wrong.
    """
    found = []
    for line in _FREEZE.sub("", text).splitlines():
        said = line.strip()[:300]
        if _REFUTED.search(line):
            found.append((Finding.MISMATCH, said))
        elif _CRASH.search(line):
            found.append((Finding.CRASH, said))
        elif _LEAK.search(line) and "server_args" not in line.lower():
            found.append((Finding.LEAK, said))
    return found
