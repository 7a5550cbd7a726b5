"""All that is known of one request, in one record.

`Requests` has a `Tracked` for every waiting or running request that a module has noted something
of. Each field has one writer, which its docstring names; all other modules only read it. `forget`
is the only end of what belongs to one stay in the queue or the batch, and `sweep` finds requests
that left without a call. Scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from sgl_kvtier.runtime.sglang.types import Handle, Operation, Req
from sgl_kvtier.runtime.step.restoration import Restoration, Stored
from sgl_kvtier.types import PageKey


class Waits(Enum):
    """What a prefix that is not restored yet waits for."""

    SGLANG_READS = "SGLang reads it"
    """The planner rejected it. It is asked again when more device memory can be allocated."""
    READ_STOPS = "SGLang's read of it is being stopped"
    """It is offered to the planner again when that read has ended."""
    OLD_LOADS = "loads of its earlier restoration are in flight"
    """It is offered again when these have ended: their reports must not be taken for its own."""


@dataclass(frozen=True)
class Asking:
    """A request that has arrived or ended, with its `kv_hints`: `when` (the event, as named in
    `hints/actions.py`), the envelope of hints, its session, and its pages so far.
    """

    when: str
    envelope: Any
    session: str
    keys: Sequence[PageKey]


@dataclass
class Candidate:
    """A prefix that may be restored later."""

    waits: Waits
    handle: Handle
    operation: Operation | None = None
    """SGLang's read, with SGLANG_READS."""
    lowest_claimable: int = 0
    """The fewest device slots that could be allocated since the planner was last asked, in tokens;
    with SGLANG_READS.
    """
    stored: Stored | None = None
    """What storage has of the prompt, with READ_STOPS and OLD_LOADS; None: nothing."""
    req: Req | None = None
    """With OLD_LOADS."""
    since: float = 0.0
    """When the read was stopped, in seconds of `StepContext.moment`; with READ_STOPS."""
    ticks: int = 0
    """Ticks since then."""


class Look(NamedTuple):
    """A waiting request for which SGLang reads nothing: it may be offered in the next tick."""

    handle: Handle
    stored: Stored | None
    """Pages that storage has after a missing one; None: only its host pages are offered."""


@dataclass
class TurnRead:
    """The part of a waiting request's prompt that storage has, or may have."""

    end: int
    """Storage has or may have tokens up to here, counted from the prompt's start."""
    deferred: bool = False
    """SGLang's read was not begun: host memory has no room for these pages yet."""
    node: Any = None
    """The last node of the tree with pages that were read for it."""
    reads: int = 0
    """How often it was read again after its pages were lost."""


@dataclass
class Path:
    """Where the pages of a request or session are in the tree. `keys` are the names of all of them,
    and `tokens` what they are named by (`PageNames`). `node` is the last node of the path when it
    was noted, and may have been evicted since.
    """

    tokens: Any
    keys: tuple[PageKey, ...]
    extra_key: str | None
    cache_salt: str | None
    node: int | None = None


@dataclass
class Announced:
    """A request as the lookahead planner was told of it."""

    req: Req
    keys: tuple[PageKey, ...]
    """Names of its full pages."""
    session: str
    prompt_tokens: int
    scheduled: bool = False
    """Whether it has run."""
    restored: Restoration | None = None
    """Its latest restoration, also when that has ended."""
    node: int | None = None
    """The last node of the tree with its tokens."""
    kept: int = 0
    """How many of its tokens are in the tree."""
    path: Path | None = None
    """The place of its session's pages, until it runs."""


@dataclass(eq=False)
class Tracked:
    """One request. What a part has not noted is None, 0 or False."""

    rid: str
    arrived: int = 0
    """Its number in the order of arrival. `Queue`."""
    order_round: int = 0
    """The last ordering of the queue that it was in. `Queue`."""
    sglang_loads: int = 0
    """Leading tokens of its prompt that the planner has left to SGLang to load. `Views`."""
    turn_read: TurnRead | None = None
    """`TurnReads`."""
    look: Look | None = None
    """`Offers`."""
    candidate: Candidate | None = None
    """`Offers`."""
    restoration: Restoration | None = None
    """From its offer to the planner until all its pages are attached or computed.
    `RestoreEngine`.
    """
    prefix: tuple[Req, torch.Tensor] | None = None
    """The request, and device slots attached at its admission, in tokens, until SGLang builds its
    row. `RestoreEngine`.
    """
    announced: Announced | None = None
    """`LookaheadEngine`. A retracted request keeps it: it will run again as the same request."""
    missed: bool = False
    """The last sweep did not find it in the scheduler."""

    def __str__(self) -> str:
        """The whole record in one line, for developers."""
        said = [f"arrived as number {self.arrived}"] if self.arrived else []
        if self.sglang_loads:
            said.append(f"left to SGLang: its first {self.sglang_loads} tokens")
        if (read := self.turn_read) is not None:
            how = "its read is deferred" if read.deferred else f"read again {read.reads} times"
            said.append(f"storage has {read.end} tokens, {how}")
        if self.look is not None:
            said.append("offered in the next tick")
        if self.candidate is not None:
            said.append(f"candidate: {self.candidate.waits.value}")
        if (r := self.restoration) is not None:
            mode = "no answer yet" if r.mode is None else r.mode.value
            in_flight = sum(not load.ended for load in r.loads)
            said.append(
                f"restoration: {mode}, pages {r.resident} to {r.pages}, prefill cursor at "
                f"{r.front}, {in_flight} loads in flight, {'admitted' if r.admitted else 'waiting'}"
            )
        if (known := self.announced) is not None:
            ran = "has run" if known.scheduled else "has not run"
            said.append(f"session {known.session}, {len(known.keys)} pages named, {ran}")
        return f"request {self.rid}: {'; '.join(said) or 'nothing noted'}"


@dataclass
class Requests:
    """The records by request id, and those that a tick goes through."""

    records: dict[str, Tracked] = field(default_factory=dict)
    candidates: dict[str, Tracked] = field(default_factory=dict)
    """Those with `look` or `candidate`, in the order in which they got the first of them."""

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self.records.values())

    def record(self, rid: str) -> Tracked:
        """Its record, created if missing."""
        found = self.records.get(rid)
        if found is None:
            found = self.records[rid] = Tracked(rid)
        return found

    def get(self, rid: str) -> Tracked | None:
        """Its record, if there is one."""
        return self.records.get(rid)

    def announced(self, rid: str) -> Announced | None:
        """What the lookahead planner was told of the request."""
        found = self.records.get(rid)
        return None if found is None else found.announced

    def turn_read(self, rid: str) -> TurnRead | None:
        """What storage has of its prompt."""
        found = self.records.get(rid)
        return None if found is None else found.turn_read

    def restoration(self, rid: str) -> Restoration | None:
        """Its restoration that is in progress."""
        found = self.records.get(rid)
        return None if found is None else found.restoration

    def note_candidate(self, record: Tracked) -> None:
        """Must be called after `look` or `candidate` of a record was changed."""
        if record.look is not None or record.candidate is not None:
            self.candidates.setdefault(record.rid, record)
        else:
            self.candidates.pop(record.rid, None)

    def forget(self, rid: str) -> None:
        """The request was finished, aborted or retracted. Its restoration must have ended before. A
        `look` stays: it does nothing for a request that is not waiting.
        """
        found = self.records.get(rid)
        if found is None:
            return
        assert found.restoration is None, f"{rid} is forgotten while it is restored"
        found.arrived = found.order_round = found.sglang_loads = 0
        found.turn_read = found.candidate = None
        self.note_candidate(found)
        self._drop_empty(found)

    def drop_announced(self, rid: str) -> Announced | None:
        """Removes and returns what the lookahead planner was told of the request."""
        found = self.records.get(rid)
        if found is None:
            return None
        announced, found.announced = found.announced, None
        self._drop_empty(found)
        return announced

    def sweep(self, there: Set[str], gone: Callable[[str], None]) -> None:
        """Calls `gone` with each request that was missing from `there` in two sweeps, and drops
        it.
        """
        for rid, record in list(self.records.items()):
            if rid in there:
                record.missed = False
            elif record.missed:
                gone(rid)
                self.records.pop(rid, None)
                self.candidates.pop(rid, None)
            else:
                record.missed = True

    def _drop_empty(self, record: Tracked) -> None:
        """Removes a record in which nothing is noted any more."""
        parts = (record.turn_read, record.look, record.candidate, record.restoration)
        noted = record.arrived or record.sglang_loads or record.prefix is not None
        if record.announced is None and not noted and not any(parts):
            self.records.pop(record.rid, None)
