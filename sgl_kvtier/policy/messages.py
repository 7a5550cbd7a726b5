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

Windows of attention, and states, do not follow the pages: to go on from the end an engine needs
those that stand there. They are the anchor, and come with the last `anchor_pages` pages. Until the
front is among these, landed pages can be attached up to the end only; so when a page is lost all
pages from the front up to it are computed, loaded or not, by planner and executor alike.

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
that moment. An executor gives the latter for a limited time only.
"""


@message
class RequestArrived:
    """A request is waiting."""

    rid: str
    """The request's id, in all messages."""
    now: float
    """Seconds of the executor's clock, in all messages."""
    prompt_tokens: int
    keys: tuple[PageKey, ...] = ()
    """Of its full prompt pages, in order."""
    session: str | None = None
    """The session whose turn it is; None: of no session."""


@message
class RequestFinished:
    """A request has left, finished or aborted. Its restoration, if any, is over; loads that have
    begun may still end.
    """

    rid: str
    now: float
    aborted: bool = False
    keys: tuple[PageKey, ...] = ()
    """Of the full pages of prompt and output, with which its session's next turn will begin; empty
    where unknown.
    """
    restoration_only: bool = False
    """The request goes on, without its restoration."""


@message
class RestoreOffered:
    """A restore candidate: a waiting request's pages [resident, pages) could be restored."""

    rid: str
    now: float
    prompt_tokens: int
    resident: int
    """Pages below this one are on the device already."""
    pages: int
    """The end of the prefix, in pages."""
    sources: tuple[tuple[Span, Tier], ...]
    """Disjoint ascending page spans with the tier of each. Pages of the prefix in none of them are
    holes: no tier has them, so they can only be computed.
    """
    anchor_pages: int = 0
    """Number of the last pages with which the anchor comes; 0: the model needs none."""
    anchor_bytes: int = 0
    """Its bytes, besides those of these pages."""

    @property
    def unbroken(self) -> int:
        """The end of the pages before the first hole: as far as an engine loads by itself."""
        end = self.resident
        for span, _ in self.sources:
            end = span.stop if span.start == end else end
        return end


@message
class TransferDone:
    """A transfer ended."""

    rid: str
    """The request of the Load; empty for a Move."""
    link: Link
    span: Span
    """Pages of the request's prompt, named by a Load; empty for a Move, whose pages a PagesPlaced
    names.
    """
    nbytes: int
    seconds: float
    """For which the link was busy with it, without queueing."""
    now: float


@message
class PagesLost:
    """Pages of a Load will not come: missing, corrupt, failed, late or cancelled. The front must
    compute them, unless they were not begun: then they are open again. Of a restoration with an
    anchor it must compute the pages before them too, until it is among the anchor's.
    """

    rid: str
    span: Span
    """Pages of the request's prompt."""
    reason: str
    """In a word, for reports; CANCELLED and NO_ROOM_YET: they were not begun."""
    now: float


@message
class ChunkStarted:
    """A prefill chunk of a request was launched. It may be less than a Compute granted, never
    more.
    """

    rid: str
    tokens: Span
    """Of its prompt."""
    now: float


@message
class ChunkDone:
    """That chunk has ended."""

    rid: str
    tokens: Span
    seconds: float
    """Of its forward."""
    now: float
    shared_tokens: int = 0
    """Other tokens in the same batch."""


@message
class StepDone:
    """One engine iteration ended."""

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
    """Pages are no longer in a tier, or a Move did not bring them there."""

    keys: tuple[PageKey, ...]
    tier: Tier
    now: float


@message
class PolicyChanged:
    """Other settings hold from now on. Restorations that have begun keep their mode."""

    config: PolicyConfig
    now: float


@message
class LookaheadEnded:
    """The executor looks ahead no more: it reports no requests, sessions and pages from now on, and
    moves none. What is known of them counts no more.
    """

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
    | LookaheadEnded
)

# --- the view: what could be done now -------------------------------------------------------------


@message
class StepView:
    """The state of the engine at the moment of decision. In a question about one request the token
    counts are of the requests before it in the queue.
    """

    now: float
    waiting: tuple[str, ...] = ()
    """Ids of waiting requests in the order they will run."""
    slot: str | None = None
    """The restoring request that holds the engine's one slot for chunked prefill; None: none."""
    slot_open: bool = True
    """Whether a restoring request may take the slot in this step."""
    prefill_tokens: int = 0
    """The most tokens of prefill in this step."""
    fresh_tokens: int = 0
    """Tokens to compute of waiting requests that restore nothing: those neither in memory nor
    loaded by the engine.
    """
    decoding: int = 0
    """Number of running requests, which stand still during a step with prefill."""
    free_pages: dict[Tier, int] = field(default_factory=dict)
    """Pages that may be claimed, evictable ones included, by tier: of the device, and of host
    memory where the executor stages loads there. Loads into a tier that is not in it have no limit.
    """
    empty_pages: dict[Tier, int] = field(default_factory=dict)
    """Those of them that hold nothing. For a tier that is not in it: `free_pages` less the
    evictable pages of the map.
    """
    owed_pages: int = 0
    """Device pages, besides `free_pages`, that the rest of running prompts will claim but has not
    yet; pages may have to be evicted for them.
    """
    wanted_tokens: int = 0
    """Tokens of waiting requests that restore nothing which will be on the device, and are not
    yet.
    """
    fresh: tuple[int, ...] = ()
    """The share of `fresh_tokens` of each request, in the order of `waiting`. The part of
    `fresh_tokens` that is not in it, all where it is empty, runs before all waiting requests.
    """


# --- the plan: what to do next --------------------------------------------------------------------


@message
class RestoreStart:
    """The answer to a RestoreOffered."""

    rid: str
    mode: Mode
    """COMPUTE: forget the offer. LOAD: keep the request waiting until its pages are in."""
    reason: str
    """In a few words, for reports."""


@message
class Load:
    """Read pages of a request into the device, highest page first."""

    rid: str
    span: Span
    """Pages of its prompt."""
    source: Tier
    link: Link
    deadline_s: float
    """Seconds from now after which the load is late."""


@message
class Cancel:
    """Cancel loads of these pages where they were not begun. Each page comes back as landed or as
    PagesLost(CANCELLED).
    """

    rid: str
    span: Span
    """Pages of the request's prompt."""


@message
class Compute:
    """Attach landed pages to a request's prefix, then prefill a chunk of it."""

    rid: str
    splice: Span
    """The landed pages to attach first; they begin at the request's front. Empty: none."""
    tokens: int | None
    """Size of the chunk: a multiple of the page size that never reaches into a page which a
    transfer has taken. 0: wait in this step. None: as the engine likes, nothing is left to restore.
    """


@message
class Move:
    """Copy pages one or two tiers up (prefetch) or down (demotion)."""

    keys: tuple[PageKey, ...]
    source: Tier
    target: Tier
    rid: str | None = None
    """The request they are for, where that is known."""


@message
class Evict:
    """Evict these pages' copies from a tier, as far as memory is needed."""

    keys: tuple[PageKey, ...]
    """The first one first."""
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
    that was dropped for a restoration, and again while the engine reads. Changes nothing.
    """

    offer: RestoreOffered
    """What would be offered."""
    view: StepView
    """The request is not among its fresh ones."""


@message
class Queued:
    """A waiting request whose prefix is left to the engine."""

    rid: str
    pages: int
    """Pages of host memory that it needs below the device: there, in flight, or stored."""
    unread: bool
    """Whether some of them are stored, and neither in host memory nor in flight."""


@message
class ReadsDue(Question[tuple[str, ...]]):
    """Which waiting requests have their stored pages read now? Changes nothing."""

    queue: tuple[Queued, ...]
    """In the order they run; it may end at the first that does not fit."""
    room: int
    """Pages of host memory for prefixes of waiting requests."""


@message
class Waiter:
    """A waiting request, and where its prompt lies: first on the device, then in host memory, then
    in storage.
    """

    rid: str
    prompt_tokens: int
    device_tokens: int = 0
    """Number of its first tokens that are on the device."""
    host_tokens: int = 0
    """Number of the tokens after those that are in host memory."""
    stored_tokens: int = 0
    """Number of the tokens after those that are in storage."""


@message
class RunOrder(Question[tuple[str, ...]]):
    """In which order should these requests run? The planner takes note of who came and who went."""

    waiting: tuple[Waiter, ...]
    """All waiting requests, in the order they came."""
    now: float


@message
class ChunkBeside(Question[int]):
    """How many tokens does this step's chunk of a long prompt that restores nothing compute, so
    that waiting requests with less work run in the same step? The answer is a multiple of the page,
    or all tokens that are left. While the chunk is shortened, other requests may prefill at most as
    many tokens as the chunk has, and one that would need the chunk's slot is passed over. Changes
    nothing.
    """

    done_tokens: int
    """Tokens of the prompt that are computed."""
    left_tokens: int
    """Tokens of it that are left to compute."""
    most: int
    """The most tokens of this chunk."""
    room: int
    """Device tokens that waiting requests may claim."""
    waiting: tuple[Waiter, ...]
    """The requests after it in the queue, in order."""


@message
class HeldBack(Question[bool]):
    """Should a request wait for a session that is about to return? It could be admitted, but pages
    would have to leave the device for it. The planner takes note of a request that waits.
    """

    request: Waiter
    host_empty: int
    """Pages of host memory that hold nothing."""
    now: float


@message
class SessionsWith(Question[tuple[str, ...]]):
    """Which sessions have this page in their prompts, abandoned ones included? Changes nothing."""

    key: PageKey


@message
class Hint:
    """A client's statement on its session. None: no statement on that."""

    expected_delay_s: float | None = None
    """When it will come back, in seconds from now if the session is idle, else from the end of its
    turn.
    """
    priority: int | None = None
    """Above 0 keeps its pages longer, each step as if it came back twice as soon; below 0 the other
    way round. It holds until the next one.
    """
    ttl_s: float | None = None
    """After this many seconds from now it will not come back; 0: it will not at all."""
    tool: str | None = None
    """The tool that its last turn called."""


@message
class HintAnswer:
    """The effect of a hint."""

    accepted: bool
    reason: str = ""
    """Why it was refused or changed; empty when it was taken as it was."""
    returns_at: float | None = None
    """When its session is expected, in seconds of the executor's clock; None: it is not."""


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
    """An attribute of the rules, one of those in `tuned`."""
    value: float


@message
class Tally:
    """The results of lookahead so far."""

    wasted_pages: int
    """Pages prefetched to the device that left it unused."""
    overlaps: dict[str, int]
    """Number of tests of whether a read is hidden behind compute, by result (`Overlaps.counts`)."""


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
