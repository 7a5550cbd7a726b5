"""The protocol between a planner and its executor: facts in, a view in, a plan out, and questions
between two steps.

A planner takes facts (`observe(fact)`) and decides (`step(view) -> StepPlan`), both on one thread
and once per scheduler step. Between two steps it answers questions (`query(question) -> answer`).
The executor is `runtime/` (SGLang) or `lab/sim/` (virtual time); it carries out a plan and reports,
and never chooses. Everything is a `message`, which is never changed once it is made. Seconds are
floats of the executor's clock. With several ranks, only values all ranks agree on may be put into a
fact or a view.

A restoration covers pages [0, pages) of one request: [0, resident) are on the device already, the
rest lies in lower tiers. Compute takes pages from the front, transfers take them from the back;
every page is taken by one of them exactly once.

    RestoreOffered ─▶ RestoreStart ─▶ Load…  ─▶ TransferDone, PagesLost
                                   └▶ Compute… ─▶ ChunkStarted, ChunkDone
                                      until the front has reached `pages`
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.types import Link, PageKey, Span, Tier

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    _T = TypeVar("_T")

    @dataclass_transform(frozen_default=True, field_specifiers=(field,))
    def message(cls: type[_T]) -> type[_T]: ...

else:

    def message(cls):
        """A dataclass that is frozen for the type checker alone: a step makes many, and freezing
        makes each four times as slow.
        """
        return dataclass(slots=True, unsafe_hash=True)(cls)


class Mode(enum.Enum):
    """How a prefix is made resident."""

    COMPUTE = "compute"
    LOAD = "load"
    BOTH = "both"
    LAYERS = "layers"
    """Computed as with COMPUTE, while the executor loads upper layers: those that are there when
    the forward gets to them are not computed. One that cannot computes all.
    """

    @property
    def restores(self) -> bool:
        """Whether the planner has loads and chunks for it; otherwise it forgets the offer."""
        return self in (Mode.LOAD, Mode.BOTH)


# --- facts: what happened -------------------------------------------------------------------------


CANCELLED, NO_ROOM_YET = "cancelled", "no room yet"
"""Reasons for pages that were not begun, and may be loaded or computed: a Cancel, or no memory at
that moment. An executor says the latter for a limited time only.
"""


@message
class RequestArrived:
    """A request is waiting. `keys` name its full prompt pages in order; `session` groups the turns
    of one client.
    """

    rid: str
    now: float
    prompt_tokens: int
    keys: tuple[PageKey, ...] = ()
    session: str | None = None


@message
class RequestFinished:
    """A request has left, finished or aborted. Its restoration, if any, is over; loads that have
    begun may still end. `keys` name the full pages of prompt and output, with which its session's
    next turn will begin; empty where unknown. `restoration_only`: the request goes on, without its
    restoration.
    """

    rid: str
    now: float
    aborted: bool = False
    keys: tuple[PageKey, ...] = ()
    restoration_only: bool = False


@message
class RestoreOffered:
    """A waiting request's pages [resident, pages) could be restored. `sources` are disjoint
    ascending page spans with the tier of each. Pages of that range in none of them are holes: no
    tier has them, so they can only be computed.
    """

    rid: str
    now: float
    prompt_tokens: int
    resident: int
    pages: int
    sources: tuple[tuple[Span, Tier], ...]

    @property
    def unbroken(self) -> int:
        """The end of the pages before the first hole: as far as an engine loads by itself."""
        end = self.resident
        for span, _ in self.sources:
            end = span.stop if span.start == end else end
        return end


@message
class TransferDone:
    """A transfer ended. `span` are pages of `rid`'s prompt that a Load named (no name and empty for
    a Move, whose pages PagesPlaced names). `seconds` is the time the link was busy with it, without
    queueing.
    """

    rid: str
    link: Link
    span: Span
    nbytes: int
    seconds: float
    now: float


@message
class PagesLost:
    """Pages of a Load will not come: missing, corrupt, failed, late or cancelled. The front must
    compute them, except those that were not begun (CANCELLED, NO_ROOM_YET), which are open again.
    """

    rid: str
    span: Span
    reason: str
    now: float


@message
class ChunkStarted:
    """Prefill of tokens [start, stop) of a request was launched. It may be less than a Compute
    granted, never more.
    """

    rid: str
    tokens: Span
    now: float


@message
class ChunkDone:
    """That prefill has ended; `seconds` is its forward time, `shared_tokens` the other tokens in
    the same batch.
    """

    rid: str
    tokens: Span
    seconds: float
    now: float
    shared_tokens: int = 0


@message
class StepDone:
    """One engine iteration ended: its time in seconds and its number of tokens of each kind."""

    seconds: float
    prefill_tokens: int
    decode_tokens: int
    now: float


@message
class PagesPlaced:
    """Pages are resident in a tier from now on."""

    keys: tuple[PageKey, ...]
    tier: Tier
    now: float


@message
class PagesDropped:
    """Pages are no longer in a tier."""

    keys: tuple[PageKey, ...]
    tier: Tier
    now: float


@message
class PolicyChanged:
    """Other settings hold from now on. Restorations that have begun keep their mode."""

    config: PolicyConfig
    now: float


Fact: TypeAlias = (
    RequestArrived
    | RequestFinished
    | RestoreOffered
    | TransferDone
    | PagesLost
    | ChunkStarted
    | ChunkDone
    | StepDone
    | PagesPlaced
    | PagesDropped
    | PolicyChanged
)

# --- the view: what could be done now -------------------------------------------------------------


@message
class StepView:
    """The state at the moment of decision.

    `waiting` are the ids of waiting requests in the order they will run. `slot` is the restoring
    request that holds the engine's one slot for chunked prefill, or None when it is free;
    `slot_open` says whether a restoring request may take it in this step. `prefill_tokens` bounds
    this step's prefill. Of waiting requests that restore nothing, `fresh_tokens` will be computed:
    they are neither in memory nor loaded by the engine. `fresh` has each one's share of them in the
    order of `waiting`; where it is empty, and with what is not in it, they come first.
    `wanted_tokens` will be on the device, and are not yet. In a question about one request both
    count those before it in the queue.
    `decoding` counts running requests, which stand still during a step with prefill.

    `free_pages` may be claimed, per tier: destinations of loads come from the device and, where the
    executor stages in host memory, from host memory. `empty_pages` are those of them that hold
    nothing; for a tier not named there, they are `free_pages` less the evictable pages of the map.
    `owed_pages` of the device are not in `free_pages`: the rest of running prompts will claim them
    but has not yet, and pages may have to be evicted for them.
    """

    now: float
    waiting: tuple[str, ...] = ()
    slot: str | None = None
    slot_open: bool = True
    prefill_tokens: int = 0
    fresh_tokens: int = 0
    decoding: int = 0
    free_pages: dict[Tier, int] = field(default_factory=dict)
    empty_pages: dict[Tier, int] = field(default_factory=dict)
    owed_pages: int = 0
    wanted_tokens: int = 0
    fresh: tuple[int, ...] = ()


# --- the plan: what to do next --------------------------------------------------------------------


@message
class RestoreStart:
    """The answer to a RestoreOffered. COMPUTE: forget the offer. LOAD: keep the request waiting
    until its pages are in.
    """

    rid: str
    mode: Mode
    reason: str


@message
class Load:
    """Read pages `span` of `rid` into the device over `link`, highest page first. Late after
    `deadline_s` seconds from now.
    """

    rid: str
    span: Span
    source: Tier
    link: Link
    deadline_s: float


@message
class Cancel:
    """Cancel loads of these pages where they were not begun. Each page comes back as landed or as
    PagesLost(CANCELLED).
    """

    rid: str
    span: Span


@message
class Compute:
    """The request in the slot first makes the landed pages `splice` part of its prefix (its front
    is `splice.start`), then prefills `tokens`. 0 waits in this step; None leaves the size to the
    engine (nothing more to restore). Until then it is a multiple of the page size and never reaches
    into a page that a transfer has taken.
    """

    rid: str
    splice: Span
    tokens: int | None


@message
class Move:
    """Copy pages one or two tiers up (prefetch) or down (demotion), for request `rid` where that is
    known.
    """

    keys: tuple[PageKey, ...]
    source: Tier
    target: Tier
    rid: str | None = None


@message
class Evict:
    """Evict these pages' copies from a tier, in this order, as far as room is needed."""

    keys: tuple[PageKey, ...]
    tier: Tier


@message
class StepPlan:
    """Commands of one step, each tuple in the order to carry out. An empty plan is always safe."""

    starts: tuple[RestoreStart, ...] = ()
    cancels: tuple[Cancel, ...] = ()
    loads: tuple[Load, ...] = ()
    computes: tuple[Compute, ...] = ()
    evictions: tuple[Evict, ...] = ()
    moves: tuple[Move, ...] = ()


# --- questions: asked between two steps -----------------------------------------------------------

_A = TypeVar("_A")


class Question(Generic[_A]):
    """A question for `query`. The type in brackets is its answer's."""

    __slots__ = ()


@message
class LeftToEngine(Question[str | None]):
    """Why is this prefix better left to an engine that can load by itself? None: it is not. To be
    asked before a restoration is offered, since the engine does not resume its own read of a prefix
    that was dropped for a restoration, and again while the engine reads. In the view the request is
    not among the fresh ones. Changes nothing.
    """

    offer: RestoreOffered
    view: StepView


@message
class Queued:
    """A waiting request whose prefix is left to the engine. `pages` is the host memory it takes
    below the device: there, on their way, or stored. `unread`: some are stored and neither there
    nor on their way.
    """

    rid: str
    pages: int
    unread: bool


@message
class ReadsDue(Question[tuple[str, ...]]):
    """Which waiting requests have their stored pages read now into `room` pages of host memory?
    `queue` has requests whose prefixes are left to the engine, in the order they run; it may end at
    the first that does not fit. Changes nothing.
    """

    queue: tuple[Queued, ...]
    room: int


@message
class Waiter:
    """A waiting request. Of its `prompt_tokens`, the first `device_tokens` lie on the device, those
    behind them in host memory, and those behind in storage.
    """

    rid: str
    prompt_tokens: int
    device_tokens: int = 0
    host_tokens: int = 0
    stored_tokens: int = 0


@message
class RunOrder(Question[tuple[str, ...]]):
    """In which order should these requests run? `waiting` are all that wait, in the order they
    came. The planner takes note of who came and who went.
    """

    waiting: tuple[Waiter, ...]
    now: float


@message
class ChunkBeside(Question[int]):
    """How many tokens of a prompt that restores nothing are computed in this step's chunk, which
    has `most`? `left_tokens` of it are left behind `done_tokens`. `waiting` are the requests behind
    it in their order, which may take `room` tokens of the device. The answer is a multiple of the
    page, or all that are left. Beside a chunk that it makes shorter others compute as many tokens
    at most, and one that needs the chunk's slot does not keep those behind it waiting. Changes
    nothing.
    """

    done_tokens: int
    left_tokens: int
    most: int
    room: int
    waiting: tuple[Waiter, ...]


@message
class HeldBack(Question[bool]):
    """Does a request that could be admitted, for which pages would have to leave the device, wait
    for a session that is about to return? Of host memory `host_empty` pages hold nothing. The
    planner takes note of requests that it holds back.
    """

    request: Waiter
    host_empty: int
    now: float


@message
class SessionsWith(Question[tuple[str, ...]]):
    """Which sessions have this page in their prompts, abandoned ones included? Changes nothing."""

    key: PageKey


@message
class Hint:
    """A client's statement on its session. None: no statement on that.

    `expected_delay_s` counts from now if the session is idle, else from the end of its turn;
    `ttl_s` counts from now. `priority` > 0 keeps its pages longer, each step as if it came back
    twice as soon; < 0 the other way round; it holds until the next one. `ttl_s` 0: it will not come
    back.
    """

    expected_delay_s: float | None = None
    priority: int | None = None
    ttl_s: float | None = None
    tool: str | None = None


@message
class HintAnswer:
    """The effect of a hint. `reason` says why it was refused or changed; empty when it was taken as
    it was. `returns_at`: when its session is expected, None where it is not.
    """

    accepted: bool
    reason: str = ""
    returns_at: float | None = None


@message
class Hinted(Question[HintAnswer]):
    """A client's hint. The planner takes note of it and answers with its effect."""

    session: str
    hint: Hint
    now: float


@message
class RulesTuned(Question[str | None]):
    """Another number for the rules in a running server. The planner takes it and answers None, or
    why it is refused.
    """

    name: str
    value: float


@message
class Tally:
    """The results of lookahead so far: pages that were moved up in vain, and tests of whether a
    read overlaps with computing, by result.
    """

    wasted_pages: int
    overlaps: dict[str, int]


class Planner(Protocol):
    """The interface of ours and of the baselines it is compared with. Never blocks, never raises on
    facts about unknown ids.
    """

    def observe(self, fact: Fact) -> None:
        """Takes note of a fact."""

    def step(self, view: StepView) -> StepPlan:
        """Decides a step. Claims made here hold until a fact ends them."""


class Consulted(Planner, Protocol):
    """A planner that also answers questions between two steps, as a server needs it."""

    def query(self, question: Question[_A]) -> _A:
        """Answers a question. A Hinted, a RulesTuned, a RunOrder and a HeldBack are taken note
        of; the others change nothing.
        """
