"""A read job made of two."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sgl_kvtier.store.base import ReadJob, ReadOutcome
from sgl_kvtier.store.io.jobs import seconds_to_wait


class TwoJobs:
    """A `ReadJob` whose pages are in two jobs. `places`: for each job, the indexes that its pages
    have here.

    Each job begins its own pages in the order of the call; both run at the same time.
    """

    def __init__(self, jobs: Sequence[ReadJob], places: Sequence[Sequence[int]]) -> None:
        self._parts = list(zip(jobs, places, strict=True))
        self._count = sum(map(len, places))

    @property
    def outcomes(self) -> list[ReadOutcome | None]:
        found: list[ReadOutcome | None] = [None] * self._count
        for job, places in self._parts:
            for place, outcome in zip(places, job.outcomes, strict=True):
                found[place] = outcome
        return found

    @property
    def in_flight(self) -> int:
        return sum(job.in_flight for job, _ in self._parts)

    @property
    def done(self) -> bool:
        return all(job.done for job, _ in self._parts)

    def drain(self) -> list[tuple[int, ReadOutcome]]:
        return [
            (places[index], outcome)
            for job, places in self._parts
            for index, outcome in job.drain()
        ]

    def wait(self, timeout_s: float | None = None) -> bool:
        timeout_s = seconds_to_wait(timeout_s)
        if timeout_s is None:
            return all(job.wait() for job, _ in self._parts)
        end = time.monotonic() + timeout_s
        return all(job.wait(max(0.0, end - time.monotonic())) for job, _ in self._parts)

    def cancel(self) -> None:
        for job, _ in self._parts:
            job.cancel()
