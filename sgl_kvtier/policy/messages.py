"""The protocol between a planner and its executor: the planner receives facts and a view of each
scheduler step, and returns a plan; between two steps it answers questions.

A planner receives facts (`observe(fact)`) and decides (`step(view) -> StepPlan`), both on one
thread and once per scheduler step. Between two steps it answers questions (`query(question) ->
answer`). The executor is `runtime/` (SGLang) or `lab/sim/` (virtual time). It carries out the plan,
reports what happened, and decides nothing itself. Everything that passes between them is a
`message`, which is never changed after it is made. Seconds are floats of the executor's clock. With
several ranks, facts and views may only hold values on which all ranks agree.

A restoration covers pages [0, pages) of one request's prompt. Pages [0, resident) are on the device
already, the others are in lower tiers. Compute takes pages from the start (the prefill cursor),
transfers take them from the end (the load cursor). Each page is either computed or loaded, never
both.

Sliding attention windows and the states of linear layers exist only at the end of a prefix. They
are its anchor, without which prefill cannot continue after the prefix, and they are loaded with the
last `anchor_pages` pages. Until the prefill cursor is inside those pages, loaded pages can be
attached only if everything up to the end is loaded. So when a page is lost, planner and executor
both compute all pages from the prefill cursor up to it, including pages that were loaded.

    RestoreOffered ─▶ RestoreStart ─▶ Load…  ─▶ TransferDone, PagesLost
                                   └▶ Compute… ─▶ ChunkStarted, ChunkDone
                                      until the prefill cursor has reached `pages`
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
        """A dataclass that is frozen for the type checker only. A step makes many messages, and
        frozen dataclasses take four times as long to construct.
        """
        return dataclass(slots=True, unsafe_hash=True)(cls)


class Mode(enum.Enum):
    """How a prefix gets onto the device."""

    COMPUTE = "compute"
    LOAD = "load"
    BOTH = "both"
    LAYERS = "layers"
    """As COMPUTE, while the executor loads upper layers; the forward pass skips the layers that are
    loaded when it reaches them. An executor that cannot do this computes everything.
    """

    @property
    def restores(self) -> bool:
        """Whether the planner plans loads and chunks for it. If not, it drops the candidate."""
        return self in (Mode.LOAD, Mode.BOTH)


# --- facts: what happened -------------------------------------------------------------------------


CANCELLED, NO_ROOM_YET = "cancelled", "no room yet"
"""Reasons of a PagesLost whose transfer never started, so that the pages can still be loaded or
computed: a Cancel, or no free memory (an executor gives this for a limited time only).
"""


@message
class RequestArrived:
    """A request entered the waiting queue."""

    rid: str
    """The request's id. All messages use this name for it."""
    now: float
    """Time in seconds of the executor's clock. All messages use this name for it."""
    prompt_tokens: int
    keys: tuple[PageKey, ...] = ()
    """Keys of the full pages of its prompt, in order."""
    session: str | None = None
    """The session of which this request is a turn; None if it belongs to no session."""


@message
class RequestFinished:
    """A request finished or was aborted, which ends its restoration. Its loads may still end."""

    rid: str
    now: float
    aborted: bool = False
    keys: tuple[PageKey, ...] = ()
    """Keys of the full pages of prompt and output, with which its session's next turn will begin;
    empty: unknown.
    """
    restoration_only: bool = False
    """Only its restoration is over; the request continues."""


@message
class RestoreOffered:
    """A restore candidate: a waiting request's pages [resident, pages) could be restored."""

    rid: str
    now: float
    prompt_tokens: int
    resident: int
    """Pages [0, resident) are on the device already."""
    pages: int
    """The end of the prefix, in pages."""
    sources: tuple[tuple[Span, Tier], ...]
    """Disjoint page spans in ascending order, each with the tier that holds it. Pages of the prefix
    outside these spans are holes: no tier holds them, so they have to be computed.
    """
    anchor_pages: int = 0
    """The anchor is loaded with this many of the last pages; 0 if the model needs no anchor."""
    anchor_bytes: int = 0
    """Bytes of the anchor, not including those of the pages."""

    @property
    def unbroken(self) -> int:
        """The end of the pages before the first hole. The engine's own loading stops here."""
        end = self.resident
        for span, _ in self.sources:
            end = span.stop if span.start == end else end
        return end


@message
class TransferDone:
    """A transfer ended."""

    rid: str
    """The request that the Load named; empty if the transfer was a Move."""
    link: Link
    span: Span
    """Pages of the request's prompt; empty for a Move, whose pages a PagesPlaced names."""
    nbytes: int
    seconds: float
    """Time for which the link was busy with this transfer, without queueing."""
    now: float


@message
class PagesLost:
    """Pages of a Load will not arrive: they are missing, corrupt, failed, late or cancelled. They
    have to be computed, unless their transfer never started (see `reason`): then they may be loaded
    again. If the restoration has an anchor and the prefill cursor has not reached its pages, all
    pages before the lost ones have to be computed too.
    """

    rid: str
    span: Span
    """Pages of the request's prompt."""
    reason: str
    """One word, for reports. CANCELLED and NO_ROOM_YET mean that the transfer never started."""
    now: float


@message
class ChunkStarted:
    """A prefill chunk was launched, of at most as many tokens as the Compute command allowed."""

    rid: str
    tokens: Span
    """The token positions of its prompt that the chunk computes."""
    now: float


@message
class ChunkDone:
    """A launched prefill chunk has ended."""

    rid: str
    tokens: Span
    seconds: float
    """Duration of its forward pass."""
    now: float
    shared_tokens: int = 0
    """Number of tokens of other requests in the same batch."""


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
    """The policy settings were changed. Restorations that have begun keep their mode."""

    config: PolicyConfig
    now: float


@message
class LookaheadEnded:
    """The executor ends lookahead: from now on it reports no requests, sessions or pages, and moves
    no pages. The planner discards what it knows of them.
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
    """The state of the engine when a step is decided. In a question about one request, the token
    counts include only the requests before it in the queue.
    """

    now: float
    waiting: tuple[str, ...] = ()
    """Ids of waiting requests in the order in which they will run."""
    slot: str | None = None
    """The restoring request in the engine's only slot for chunked prefill; None if none is."""
    slot_open: bool = True
    """Whether a restoring request may take the slot in this step."""
    prefill_tokens: int = 0
    """Upper bound of prefill tokens in this step."""
    fresh_tokens: int = 0
    """Tokens that waiting requests without a restoration have to compute: tokens that are neither
    in memory nor loaded by the engine. Called fresh prefill in this package.
    """
    decoding: int = 0
    """Number of decoding requests, with data-parallel attention those of all replicas. They produce
    no token, or a late one, during a step with prefill.
    """
    free_pages: dict[Tier, int] = field(default_factory=dict)
    """Pages that can be allocated, evictable pages included, by tier: of the device, and of host
    memory if the executor stages loads there. Loads into a tier that is not listed have no limit.
    """
    empty_pages: dict[Tier, int] = field(default_factory=dict)
    """The pages among `free_pages` that hold no data. Default for a tier that is not listed:
    `free_pages` minus the evictable pages that the planner's map knows.
    """
    owed_pages: int = 0
    """Device pages that prompts already being prefilled will still allocate. `free_pages` does not
    include them, and pages may have to be evicted for them.
    """
    wanted_tokens: int = 0
    """Tokens for which waiting requests without a restoration still need device memory."""
    fresh: tuple[int, ...] = ()
    """How many of the `fresh_tokens` each request has, in the order of `waiting`. Fresh tokens
    beyond this sum run before all waiting requests; if this is empty, that is all of them.
    """
    mixes: bool = False
    """Whether requests that decode would produce a token in a step with prefill."""
    mixed: bool = False
    """Whether they did in the last step, and it had prefill."""


# --- the plan: what to do next --------------------------------------------------------------------


@message
class RestoreStart:
    """The planner's decision on a RestoreOffered."""

    rid: str
    mode: Mode
    """COMPUTE: rejected. LOAD: the request keeps waiting until its pages are loaded."""
    reason: str
    """A few words, for reports."""


@message
class Load:
    """Load pages of a request to the device, the highest page first."""

    rid: str
    span: Span
    """Pages of the request's prompt."""
    source: Tier
    link: Link
    deadline_s: float
    """Seconds from now after which the load is late."""


@message
class Cancel:
    """Cancel the loads of these pages that have not started. For each page the executor reports
    either TransferDone or PagesLost(CANCELLED).
    """

    rid: str
    span: Span
    """Pages of the request's prompt."""


@message
class Compute:
    """Attach loaded pages to a request's prefix, then prefill a chunk of it."""

    rid: str
    splice: Span
    """The loaded pages to attach first. They begin at the prefill cursor; empty if there are none.
    """
    tokens: int | None
    """Size of the chunk: a multiple of the page size that never extends into a loaded or loading
    page. 0: compute nothing in this step. None: the engine chooses, since nothing is left to
    restore.
    """


@message
class Move:
    """Copy pages up by one or two tiers (prefetch) or down (demotion)."""

    keys: tuple[PageKey, ...]
    source: Tier
    target: Tier
    rid: str | None = None
    """The request that needs them, if known."""


@message
class Evict:
    """Evict the copies of these pages from a tier, as many as memory is needed for."""

    keys: tuple[PageKey, ...]
    """In order of eviction."""
    tier: Tier


@message
class StepPlan:
    """The commands of one step, each tuple in order of execution. An empty plan is always safe."""

    starts: tuple[RestoreStart, ...] = ()
    cancels: tuple[Cancel, ...] = ()
    loads: tuple[Load, ...] = ()
    computes: tuple[Compute, ...] = ()
    evictions: tuple[Evict, ...] = ()
    moves: tuple[Move, ...] = ()


# --- questions: asked between two steps -----------------------------------------------------------

_A = TypeVar("_A")


class Question(Generic[_A]):
    """A question for `query`. The type parameter is the type of its answer."""

    __slots__ = ()


@message
class LeftToEngine(Question[str | None]):
    """Why should the engine load this prefix itself, instead of a restoration? None: restore it.
    The executor asks before it offers a candidate, because the engine does not resume a read of its
    own that was dropped for a restoration, and again while the engine reads. Changes nothing.
    """

    offer: RestoreOffered
    """The restore candidate."""
    view: StepView
    """The state of the engine. Its fresh tokens do not include this request's."""


@message
class Queued:
    """A waiting request whose prefix the engine loads itself."""

    rid: str
    pages: int
    """Host pages that its prefix needs: pages in host memory, in flight to it, or stored."""
    unread: bool
    """Whether some of these pages are only in storage, neither in host memory nor in flight."""


@message
class ReadsDue(Question[tuple[str, ...]]):
    """Which waiting requests' stored pages should be read into host memory now? Changes nothing."""

    queue: tuple[Queued, ...]
    """In the order they run. It may end at the first request that does not fit."""
    room: int
    """Host pages available for prefixes of waiting requests."""


@message
class Waiter:
    """A waiting request, and where its prompt is: the first tokens on the device, the next ones in
    host memory, the next ones in storage. The rest has to be computed.
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
    """In which order should these requests run? The planner records arrivals and departures."""

    waiting: tuple[Waiter, ...]
    """All waiting requests, in the order of arrival."""
    now: float


@message
class ChunkBeside(Question[int]):
    """How many tokens should this step's chunk of a long prompt without a restoration compute, so
    that waiting requests with less work can run in the same step? The answer is a multiple of the
    page size, or all remaining tokens. While the chunk is shortened, other requests together may
    prefill at most as many tokens as the chunk has, and a request that would itself need the
    chunked-prefill slot is skipped. Changes nothing.
    """

    done_tokens: int
    """Tokens of the prompt that are computed already."""
    left_tokens: int
    """Tokens of the prompt that are still to be computed."""
    most: int
    """Upper bound of the chunk, in tokens."""
    room: int
    """Device tokens that waiting requests can allocate."""
    waiting: tuple[Waiter, ...]
    """The requests after it in the queue, in order."""


@message
class HeldBack(Question[bool]):
    """Should this request wait for a session that will return soon? The request could be admitted,
    but pages would have to be evicted for it. The planner records that the request waits.
    """

    request: Waiter
    host_empty: int
    """Host pages that hold no data."""
    now: float


@message
class SessionsWith(Question[tuple[str, ...]]):
    """Which sessions, abandoned ones included, have this page in their prompts? Changes nothing."""

    key: PageKey


@message
class Hint:
    """What a client says about its session. None: it says nothing about that field."""

    expected_delay_s: float | None = None
    """When the session's next turn will arrive, in seconds: from now if the session is idle,
    otherwise from the end of its current turn.
    """
    priority: int | None = None
    """Above 0: its pages are kept longer. Each step of 1 counts as if the session returned in half
    the time, each step below 0 as if in twice the time. It holds until another hint changes it.
    """
    ttl_s: float | None = None
    """It will not return later than this many seconds from now; 0: not at all."""
    tool: str | None = None
    """The tool that its last turn called."""


@message
class HintAnswer:
    """The effect of a hint."""

    accepted: bool
    reason: str = ""
    """Why the hint was refused or changed; empty if it was accepted unchanged."""
    returns_at: float | None = None
    """When the session is expected, in seconds of the executor's clock; None if it is not expected.
    """


@message
class Hinted(Question[HintAnswer]):
    """A client's hint. The planner applies it and answers with its effect."""

    session: str
    hint: Hint
    now: float


@message
class RulesTuned(Question[str | None]):
    """Changes a number of the rules in a running server. Answer: None, or why it is refused."""

    name: str
    """An attribute of the rules, one of those in `tuned`."""
    value: float


@message
class Tally:
    """The results of lookahead so far."""

    wasted_pages: int
    """Pages that were prefetched to the device and evicted unused."""
    overlaps: dict[str, int]
    """Predictions whether a transfer is hidden behind compute, by outcome (`Overlaps.counts`)."""


class Planner(Protocol):
    """The interface of kvtier's planner and of the baselines it is compared with. It never blocks,
    and never raises on facts about unknown ids.
    """

    def observe(self, fact: Fact) -> None:
        """Records a fact."""

    def step(self, view: StepView) -> StepPlan:
        """Decides a step. Pages reserved here stay reserved until a fact ends the command."""


class Consulted(Planner, Protocol):
    """A planner that also answers questions between two steps, as a server needs it."""

    def query(self, question: Question[_A]) -> _A:
        """Answers a question. Only Hinted, RulesTuned, RunOrder and HeldBack change state."""
