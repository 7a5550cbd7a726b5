"""The decision log of a running server: a planner wrapper that records every input and output, and
the file they are written to.

The scheduler's thread only queues records; the file's own thread encodes and writes them. When the
queue is full, records are dropped and counted, and the file marks the place: a log cannot be
replayed past it. Files are 0600: they hold request ids, page counts and times, no tokens.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeVar

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.policy.decision_log import (
    NUMBERED,
    Header,
    LinesDropped,
    PlannerFailed,
    Query,
    Record,
    Writer,
    encode_header,
)
from sgl_kvtier.policy.messages import Consulted, Fact, Question, StepPlan, StepView

logger = logging.getLogger(__name__)

_A = TypeVar("_A")
MOST_QUEUED = 50_000
"""Most records waiting to be written: some tens of megabytes, seconds of the busiest server."""
_PERIOD_S = 0.2


class DecisionFile:
    """An open log. `write` never blocks on the disk; a failing disk ends only the log."""

    def __init__(self, path: Path, header: Header, *, most_queued: int = MOST_QUEUED) -> None:
        """Starts a new file; an old one is kept as PATH.old. Raises ConfigError if it cannot."""
        self._path = path
        self._most = most_queued
        self._queue: deque[Record] = deque()
        self._hole = 0
        self.dropped = 0
        """Records that were not written."""
        self._stopping = threading.Event()
        self._file: TextIO | None = _begin(path, encode_header(header, NUMBERED))
        self._lines = Writer()
        self._thread = threading.Thread(target=self._run, name="kvtier-decisions", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queues a record, or drops it when the queue is full. One thread calls this."""
        if len(self._queue) >= self._most or self._file is None:
            self._hole += 1
            self.dropped += 1
            return
        if self._hole:
            # After records queued before the gap, and before those after it.
            self._queue.append(LinesDropped(self._hole))
            self._hole = 0
        self._queue.append(record)

    def close(self) -> None:
        """Writes queued records and ends the thread. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            self._flush()
        if self._hole:
            self._queue.append(LinesDropped(self._hole))
        self._flush()
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        if self._file is None or not self._queue:
            return
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        try:
            for record in batch:
                self._file.write(self._lines.encode(record) + "\n")
            self._file.flush()
        except OSError as error:
            logger.error(
                "kvtier: the decision log %s is not written any more: %s. Free space, or name "
                "another file in policy.decision_log, and restart", self._path, error.strerror,
            )  # fmt: skip
            self.dropped += len(batch)
            self._file = None


class Recorded:
    """Wraps the planner and writes its inputs and outputs in order. Scheduler's thread."""

    def __init__(self, inner: Consulted, write: Callable[[Record], None]) -> None:
        self._inner = inner
        self._write = write

    def observe(self, fact: Fact) -> None:
        """Writes the fact and passes it on; if the planner raises, that is written too."""
        self._write(fact)
        try:
            self._inner.observe(fact)
        except Exception as error:
            self._write(PlannerFailed(repr(error)))
            raise

    def step(self, view: StepView) -> StepPlan:
        """Writes the view and the plan."""
        self._write(view)
        try:
            plan = self._inner.step(view)
        except Exception as error:
            self._write(PlannerFailed(repr(error)))
            raise
        self._write(plan)
        return plan

    def query(self, question: Question[_A]) -> _A:
        """Writes the question and its answer."""
        answer = self._inner.query(question)
        self._write(Query(question, answer))  # type: ignore[arg-type]
        return answer


def _begin(path: Path, header: str) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(path.with_name(path.name + ".old"))
        file = os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        )
        file.write(header + "\n")
        file.flush()
    except OSError as error:
        raise ConfigError(
            f"policy.decision_log = {str(path)!r} cannot be written: {error.strerror}. Name a file "
            "in a folder that the server may write to, or leave the setting empty"
        ) from error
    return file
