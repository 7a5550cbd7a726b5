"""Keeps the learned costs of a server's prefill, links and restorations for the next start.

    <store.path>/<identity>/restore-profile.json

There is one file per model fingerprint, replaced atomically. It names the conditions of its
measurement (device, threads, chunk, throttle); a server under other conditions ignores it and
learns again. Reading never raises: a missing, torn or foreign file counts as no profile.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sgl_kvtier.outside import is_number, is_whole, parse_json
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import (
    ChunkDone,
    Consulted,
    Fact,
    Question,
    StepPlan,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.store.disk.env import Env, create_file, read_file, unique_number
from sgl_kvtier.store.disk.namespace import PROFILE
from sgl_kvtier.types import Link

logger = logging.getLogger(__name__)

_A = TypeVar("_A")
NAME = PROFILE
SCHEMA = "kvtier.restore-profile/1"
_MOST_BYTES = 1 << 20
_MOST_SECONDS = 1e6
_LEAST_RATE, _MOST_RATE = 1.0, 1e15
"""Bytes per second of a link: lowest and highest plausible value."""
PERIOD_S = 5.0
"""Least seconds between two writes."""

LEAST_CHUNKS = 4
"""Prefill chunks that are timed before anything is kept: before that, the cost is a guess."""

_PREFILL = ("fixed_s", "per_token_s", "per_token_position_s")
_OWN = "own_s"


@dataclass(frozen=True)
class Profile:
    """A learned profile. `prefill`: coefficients of `PrefillCost`; `links`: bytes per second;
    `restore`: `own_s` of `FixedOverhead`, empty in files of earlier versions.
    """

    conditions: dict[str, Any]
    prefill: dict[str, float]
    links: dict[str, float]
    chunks: int
    """Prefill chunks it was learned from, in all runs; the last 70 or so have weight."""
    transfers: dict[str, int]
    """Transfers per link it was learned from, in all runs; the last ten or so have weight."""
    written: float = 0.0
    """Seconds since the epoch."""
    restore: dict[str, float] = field(default_factory=dict)


def read(path: Path) -> Profile | None:
    """The profile in a file, or None."""
    try:
        data = parse_json(read_file(Env(), str(path), _MOST_BYTES))
        if data.pop("schema") != SCHEMA:
            return None
        profile = Profile(**data)
        counts = [profile.chunks, *profile.transfers.values()]
        if not all(is_number(profile.prefill[name], 0, _MOST_SECONDS) for name in _PREFILL):
            return None
        if not all(is_number(rate, _LEAST_RATE, _MOST_RATE) for rate in profile.links.values()):
            return None
        if (
            not all(is_whole(n, 0) for n in counts)
            or not is_number(profile.written)
            or not isinstance(profile.conditions, dict)
        ):
            return None
        if not set(profile.restore) <= {_OWN} or not all(
            is_number(seconds, 0, _MOST_SECONDS) for seconds in profile.restore.values()
        ):
            return None
        if set(profile.prefill) != set(_PREFILL) or not set(profile.links) <= {
            link.value for link in Link
        }:
            return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return profile


def write(path: Path, profile: Profile) -> None:
    """Replaces the file. May raise OSError; the file is then unchanged."""
    temporary = path.with_name(f".{path.name}.{unique_number()}")
    try:
        fd = create_file(Env(), str(temporary), os.O_WRONLY)
        with os.fdopen(fd, "w") as file:
            file.write(json.dumps({"schema": SCHEMA, **asdict(profile)}, indent=2) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def fitting(profile: Profile | None, conditions: Mapping[str, Any]) -> Profile | None:
    """The profile, if it was measured under these conditions."""
    return profile if profile is not None and profile.conditions == conditions else None


def as_numbers(profile: Profile | None) -> list[float]:
    """A profile as numbers in a fixed order, 0 for missing ones, so that ranks can agree on it.
    `taken` is its inverse.
    """
    if profile is None:
        return [0.0] * (len(_PREFILL) + len(Link) + 2)
    return [
        1.0,
        *(profile.prefill[n] for n in _PREFILL),
        profile.restore.get(_OWN, -1.0),
        *(profile.links.get(link.value, 0.0) for link in Link),
    ]


def taken(numbers: list[float]) -> dict[str, Any] | None:
    """The planner's arguments from such numbers; None if there was no profile."""
    there, *rest = numbers
    if not there:
        return None
    own_s, *rates = rest[len(_PREFILL) :]
    links = zip(Link, rates, strict=True)
    return {
        "prefill": dict(zip(_PREFILL, rest, strict=False)),
        "links": {link.value: rate for link, rate in links if rate > 0},
        "restore": {_OWN: own_s} if own_s >= 0 else {},
    }


class Learning:
    """Wraps the planner and keeps its profile as it learns. Scheduler's thread, facts' clock."""

    def __init__(
        self,
        inner: Consulted,
        learned: Callable[[], dict[str, Any]],
        keeper: ProfileKeeper | None,
        known: Profile,
        shape: EngineShape,
    ) -> None:
        """`learned` returns the current profile; `known` is the one that the planner started with,
        including counts. Without a keeper nothing is kept: only one rank writes.
        """
        self._shape = shape
        self._inner = inner
        self._learned = learned
        self._keeper = keeper
        self._conditions = known.conditions
        self._chunks = known.chunks
        self._transfers = dict(known.transfers)
        self._keep_at = 0.0
        self.break_even_bytes_per_s: float | None = None
        """The bandwidth at which loading the first chunk of a prompt takes as long as computing it;
        None until chunks were timed. Later chunks take longer to compute, so loading them pays on
        slower links. Any thread may read it.
        """
        self._note_break_even()

    def _note_break_even(self) -> None:
        if self._chunks < LEAST_CHUNKS:
            return
        cost, shape = PrefillCost(**self._learned()["prefill"]), self._shape
        tokens = shape.chunk_tokens
        nbytes = tokens / shape.page_tokens * shape.page_bytes
        self.break_even_bytes_per_s = nbytes / cost.chunk_seconds(0, tokens)

    def observe(self, fact: Fact) -> None:
        """Passes the fact on; counts those that are learned from, and saves costs at intervals."""
        self._inner.observe(fact)
        if isinstance(fact, ChunkDone) and not fact.shared_tokens:
            self._chunks += 1
            self._note_break_even()
        elif isinstance(fact, TransferDone):
            self._transfers[fact.link.value] = self._transfers.get(fact.link.value, 0) + 1
        else:
            return
        if self._keeper is not None and self._chunks >= LEAST_CHUNKS and fact.now >= self._keep_at:
            self._keep_at = fact.now + PERIOD_S
            self._keeper.keep(
                Profile(
                    self._conditions,
                    **self._learned(),
                    chunks=self._chunks,
                    transfers=dict(self._transfers),
                )
            )

    def step(self, view: StepView) -> StepPlan:
        """The inner planner's plan."""
        return self._inner.step(view)

    def query(self, question: Question[_A]) -> _A:
        """The inner planner's answer."""
        return self._inner.query(question)

    def stop_keeping(self) -> None:
        """Nothing learned from now on is kept."""
        self.close()
        self._keeper = None

    def close(self) -> None:
        """Writes pending changes. Idempotent."""
        if self._keeper is not None:
            self._keeper.close()


class ProfileKeeper:
    """Writes the latest profile in a thread, at most every few seconds. `keep` never blocks."""

    def __init__(self, path: Path, *, period_s: float = PERIOD_S) -> None:
        self._path = path
        self._period_s = period_s
        self._latest: Profile | None = None
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-profile", daemon=True)
        self._thread.start()

    def keep(self, profile: Profile) -> None:
        """Queues the profile, replacing an older one that is not written yet."""
        self._latest = profile
        self._changed.set()

    def close(self) -> None:
        """Writes a pending profile and ends the thread. Idempotent."""
        self._closing.set()
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._changed.wait()
            self._changed.clear()
            latest, self._latest = self._latest, None
            if latest is not None:
                self._write(latest)
                self._closing.wait(self._period_s)
        if self._latest is not None:
            self._write(self._latest)

    def _write(self, profile: Profile) -> None:
        try:
            write(self._path, Profile(**{**asdict(profile), "written": time.time()}))
        except OSError as error:
            # The folder was purged or the disk is full: the next start learns again.
            logger.warning(
                "kvtier: what was learned cannot be kept in %s: %s", self._path, error.strerror
            )
