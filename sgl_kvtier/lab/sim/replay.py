"""Runs written down decision by decision, and decided again: the same facts and views must give the
same plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO, TypeVar, cast

from sgl_kvtier.errors import TraceError
from sgl_kvtier.policy.decision_log import (
    Answer,
    Header,
    LinesDropped,
    PlannerFailed,
    Query,
    Reader,
    Record,
    decode_header,
    encode,
    encode_header,
)
from sgl_kvtier.policy.messages import (
    Consulted,
    Fact,
    Planner,
    PolicyChanged,
    Question,
    StepPlan,
    StepView,
)
from sgl_kvtier.policy.planner import make_planner

_A = TypeVar("_A")


MOST_LINE = 64 << 20
"""Characters of a log's line: a step of a server with thousands of requests has under a million."""


def log_lines(log: TextIO) -> Iterator[str]:
    """The lines of a log, one in memory at a time. Raises TraceError on one that is too long or not
    UTF-8, OSError.
    """
    number = 0
    while True:
        number += 1
        try:
            line = log.readline(MOST_LINE)
        except UnicodeDecodeError as error:
            raise TraceError(
                f"line {number} of the decision log is not UTF-8: {error.reason}"
            ) from error
        if not line:
            return
        if len(line) == MOST_LINE and not line.endswith("\n"):
            raise TraceError(
                f"line {number} of the decision log is longer than {MOST_LINE >> 20} MiB"
            )
        yield line


def whole_lines(log: TextIO) -> Iterator[str]:
    """The same without a last line that its writer had not ended."""
    return (line for line in log_lines(log) if line.strip() and line.endswith("\n"))


class Recording:
    """A planner that writes down what the one inside is given and answers. `write` takes one line
    without its break.
    """

    def __init__(self, inner: Planner, header: Header, write: Callable[[str], object]) -> None:
        self._inner = inner
        self._write = write
        write(encode_header(header))

    def observe(self, fact: Fact) -> None:
        """Writes the fact and passes it on."""
        self._write(encode(fact))
        self._inner.observe(fact)

    def query(self, question: Question[_A]) -> _A:
        """Writes the question and its answer."""
        answer = cast(Consulted, self._inner).query(question)
        self._write(encode(Query(question, cast(Answer, answer))))
        return answer

    def step(self, view: StepView) -> StepPlan:
        """Writes the view and the plan."""
        plan = self._inner.step(view)
        self._write(encode(view))
        self._write(encode(plan))
        return plan


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line that was decided otherwise. `at` is the fact or view before it, if any; None
    where the planner did not fail.
    """

    line: int
    at: Fact | StepView | None
    logged: StepPlan | Query | PlannerFailed | None
    planned: StepPlan | Query | PlannerFailed | None

    def __str__(self) -> str:
        logged, planned = (
            "no failure" if one is None else encode(one) for one in (self.logged, self.planned)
        )
        at = "at the beginning" if self.at is None else f"at {self.at.now:.6f} s"
        return (
            f"line {self.line}: {at} the log has\n  {logged}\nand the planner now decides\n  "
            f"{planned}"
        )


@dataclass(frozen=True, slots=True)
class Replayed:
    """Counts of a replay."""

    facts: int
    steps: int
    commands: int
    """Starts, loads, cancels, computes, moves and evictions in the logged plans."""
    difference: Difference | None
    changes: int = 0
    """Times the settings were changed."""
    failures: int = 0
    """Times the planner raised, in the log and again."""
    questions: int = 0
    """Times it was asked between two steps."""
    step_s: tuple[float, ...] = ()
    """Seconds of the thread's CPU time that each step took the planner here."""


def replay(lines: Iterable[str], make: Callable[[Header], Planner] | None = None) -> Replayed:
    """Feeds a log to a new planner and compares plan by plan, up to the first difference.

    `make` builds the planner (None: the one kvtier.json would give for the logged settings).
    A log that breaks off in the middle of a step is read up to there. Raises TraceError on a
    damaged log and on one with a hole.
    """
    run: _Run | None = None
    reader = Reader()
    for number, line in enumerate(lines, 1):
        if run is None:
            header = decode_header(line)
            try:
                run = _Run(
                    make(header)
                    if make
                    else make_planner(header.config, header.engine, header.profile)
                )
            except (KeyError, ValueError, ArithmeticError) as error:
                raise TraceError(
                    f"line 1: no planner can be made as it says: {error!r:.200}"
                ) from error
            continue
        difference = run.take(number, reader.decode(line))
        if difference is not None:
            return run.replayed(difference)
    if run is None:
        raise TraceError("the decision log is empty")
    return run.replayed(None)


class _Run:
    """A planner being fed, and what is expected of the next line."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._facts = self._steps = self._commands = self._changes = self._failures = (
            self._questions
        ) = 0
        self._step_s: list[float] = []
        self._at: Fact | StepView | None = None
        """The fact or view given last."""
        self._planned: StepPlan | None = None
        self._raised: PlannerFailed | None = None

    def take(self, number: int, record: Record) -> Difference | None:
        """One line; what it shows to be different. Raises TraceError where the log cannot be
        followed.
        """
        if isinstance(record, LinesDropped):
            raise TraceError(
                f"line {number}: {record.count} lines were dropped here while the log was written, "
                f"so what follows cannot be replayed; the {self._steps} plans before are identical"
            )
        if isinstance(record, PlannerFailed):
            return self._failed(number, record)
        if self._raised is not None and self._at is not None:
            return Difference(
                number, self._at, record if isinstance(record, StepPlan) else None, self._raised
            )
        if isinstance(record, StepPlan):
            return self._compare(number, record)
        if isinstance(record, Query):
            return self._ask(number, record)
        self._give(record)
        return None

    def replayed(self, difference: Difference | None) -> Replayed:
        """The counts so far."""
        return Replayed(
            self._facts,
            self._steps,
            self._commands,
            difference,
            self._changes,
            self._failures,
            self._questions,
            tuple(self._step_s),
        )

    def _give(self, record: Fact | StepView) -> None:
        self._at, self._planned = record, None
        # a planner's defect is what is being looked for: it has to fail in the log as well
        try:
            if isinstance(record, StepView):
                began = time.thread_time()
                self._planned = self.planner.step(record)
                self._step_s.append(time.thread_time() - began)
            else:
                self._facts += 1
                self._changes += isinstance(record, PolicyChanged)
                self.planner.observe(record)
        except Exception as error:
            self._raised = PlannerFailed(repr(error))

    def _compare(self, number: int, plan: StepPlan) -> Difference | None:
        if not isinstance(self._at, StepView) or self._planned is None:
            raise TraceError(f"line {number}: a plan without the view it answers")
        self._steps += 1
        self._commands += _commands(plan)
        planned, self._planned = self._planned, None
        return None if planned == plan else Difference(number, self._at, plan, planned)

    def _failed(self, number: int, record: PlannerFailed) -> Difference | None:
        if self._at is None:
            raise TraceError(f"line {number}: a failure without what made the planner fail")
        if self._raised is None:
            return Difference(number, self._at, record, self._planned)
        self._raised = None
        self._failures += 1
        return None

    def _ask(self, number: int, record: Query) -> Difference | None:
        query = getattr(self.planner, "query", None)
        if query is None:
            raise TraceError(
                f"line {number}: the planner was asked what this one has no way to answer"
            )
        self._questions += 1
        try:
            planned = Query(record.question, query(record.question))
        except Exception as error:
            return Difference(number, self._at, record, PlannerFailed(repr(error)))
        return None if planned == record else Difference(number, self._at, record, planned)


def _commands(plan: StepPlan) -> int:
    return sum(
        map(len, (plan.starts, plan.cancels, plan.loads, plan.computes, plan.evictions, plan.moves))
    )
