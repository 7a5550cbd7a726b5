"""The rules by which a planner decides where there is a choice, as a class, and how to write your
own.

    # my_rules.py, in a folder on Python's module path
    from sgl_kvtier.policy.rules import Rules

    class ShortFirst(Rules):
        min_chunk_tokens = 64                                # another number: set the attribute

        def load_order(self, waiting):                       # another decision: override a method
            return sorted(waiting, key=lambda one: one.compute_s)

    {"policy": {"rules": "my_rules:ShortFirst"}}             in kvtier.json

When a server starts, it makes an object of the class, without arguments. It refuses attributes of
another type and methods with other parameters. All ranks must decide the same: use no clock, no
randomness, and no state that changes with facts of one rank only. An exception in a method ends
restoration and prefetching until the server is restarted, but not the server. Numbers are
attributes of the class. `Rules(split_margin=0.1)` changes one for a single object, as tests and
simulations do.

More examples: sgl_kvtier/lab/rules.py has the rules of Cake, CacheFlow and TierKV.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import isfunction, signature
from typing import Protocol

from sgl_kvtier.named_class import lacking_method, load_class
from sgl_kvtier.outside import is_number, is_whole, refusal, shown
from sgl_kvtier.policy.messages import Mode, Waiter
from sgl_kvtier.types import Link, Span, Tier


class Ways(Protocol):
    """Predictions about one prefix that could be restored: how long each way takes, in seconds from
    now. They are computed when they are read.
    """

    @property
    def known(self) -> bool:
        """Whether the cost of prefill and the bandwidth of the links were measured."""

    @property
    def learns(self) -> bool:
        """Whether the engine, by loading it itself, would measure what is not known."""

    @property
    def in_host(self) -> bool:
        """Whether all of it is in host memory."""

    @property
    def shared(self) -> bool:
        """Whether some of it is loaded over a network that other servers use."""

    @property
    def crowded(self) -> bool:
        """Whether free device memory is too small for this request and those before it."""

    @property
    def compute_s(self) -> float:
        """Seconds to compute all of it, minus what its last chunk saves by including the suffix."""

    @property
    def own_s(self) -> float:
        """The fixed overhead of a restoration, as measured in this server."""

    @property
    def load_s(self) -> float:
        """Seconds to load all of it."""

    @property
    def both_s(self) -> float:
        """Seconds until it is there with its first pages computed and the others loaded."""

    @property
    def compute_stalls_s(self) -> float:
        """Seconds that decoding requests lose while all of it is computed, added up over them."""

    @property
    def both_stalls_s(self) -> float:
        """The same for computing the first pages alone."""


class Waiting(Protocol):
    """A request that is being restored and has pages to load."""

    @property
    def rid(self) -> str:
        """The request's id."""

    @property
    def order(self) -> int:
        """Sequence number of its restore candidate: lower came earlier."""

    @property
    def compute_s(self) -> float:
        """Seconds to compute the rest of its prefix."""


class ToCome(Protocol):
    """A future run: of a waiting request, or of a session that is expected to return."""

    @property
    def owner(self) -> str:
        """Name of the owner of the pages."""

    @property
    def steps(self) -> int:
        """Number of iterations before it; 0: it runs in this one."""

    @property
    def window_s(self) -> float:
        """Seconds that these iterations take."""


class Desk(Protocol):
    """One step of prefetching, as rules see it: its state, and the call that prefetches pages."""

    lookahead: int
    """K, for reports: how many iterations ahead pages are prefetched."""

    @property
    def now(self) -> float:
        """Seconds of the planner's clock."""

    @property
    def iteration_s(self) -> float:
        """Recent duration of one iteration, in seconds."""

    def lacks(self, turn: ToCome) -> Sequence[tuple[Span, Tier | None]]:
        """Spans of its pages that are not on the device, each with the nearest tier that holds it;
        None: in flight to host memory.
        """

    def paused(self, turn: ToCome) -> bool:
        """Whether nothing is moved for it at present because a recent move failed."""

    def page_s(self, link: Link) -> float:
        """Seconds that one page takes over an idle link."""

    def judge(self, turn: ToCome, pages: int, transfer_s: float, window_s: float) -> None:
        """Records a prediction: moving `pages` takes `transfer_s`, hidden if within `window_s`."""

    def bring(self, turn: ToCome, pages: Span, source: Tier) -> None:
        """Prefetches these pages to the device, from the first on, as many as fit."""


class Rules:
    """kvtier's rules. A subclass overrides what it decides differently."""

    # --- restoring: numbers -----------------------------------------------------------------------

    balanced_chunks: bool = True
    """Chunks are cut so that compute and loads finish together, and loads that compute would reach
    first are cancelled. False: chunks have full size, up to the next loaded or loading page.
    """
    split_margin: float = 0.02
    """Computing and loading together must be predicted to save at least this share of the faster of
    the two. A smaller gain is within the error of the prediction.
    """
    split_gain_s: float = 0.005
    """It must also save at least this many seconds, the cost of splitting itself."""
    queue_charge: float = 1.0
    """Extra weight of a second of compute per waiting request: it delays them, loading does not."""
    stall_weight: float = 0.35
    """The weight of a second for which one decoding request stops, against a second of time to
    first token: how a prefix is restored is chosen by the sum of both. With 0 a restoration slows
    running requests down by more than its own request gains (docs/results/simulator.md).
    """
    overtaking: float = 2.0
    """How long shorter requests can overtake a waiting request, as a multiple of the predicted work
    before it when it arrived, its own included. 0: requests run in the order of arrival. With a
    smaller value, sessions that compete for memory soon run one after the other and evict each
    other's pages (docs/results/emulated-h100.md compares 1, 2 and 3).
    """
    clearly: float = 0.8
    """A request goes before an earlier one if its urgency is below this share of the earlier one's.
    Without that margin the order would change with every page that is loaded, and pages read for
    one request would be evicted for another.
    """
    holding: float = 0.25
    """A request that would evict pages from host memory waits for a session that is expected within
    this many times the request's own work, so that the session runs first, from memory. 0: no
    request waits. A larger value helps if sessions return at once, and costs if they pause for
    seconds (docs/results/emulated-h100.md, docs/results/simulator.md).
    """
    beside: float = 0.25
    """While requests with clearly less work wait, the chunk of a prompt without a restoration has
    this share of a step's tokens, and those requests together get as many. All wait for the whole
    step, and a quarter costs hardly more time per token. 0: the chunk uses all tokens.
    """
    min_chunk_tokens: int = 32
    """The smallest chunk that is worth its fixed cost while loads are in flight."""
    load_horizon_s: float = 0.3
    """Loads and prefetches cover this many seconds of a link's time: longer than most steps, but
    short enough that later ones are decided on newer facts.
    """
    load_patience: float = 2.0
    """A load is late after this many times the predicted time of earlier loads on its link and of
    its own, plus `policy.load_deadline_s`.
    """
    yields_to_fresh: bool = True
    """Requests without a restoration are prefilled before a restoration that still has loads in
    flight (Cake, section 4), for at most `max_yields` steps in a row.
    """
    max_yields: int = 4
    """Number of steps in a row in which a restoration yields to them."""

    # --- prefetching: numbers ---------------------------------------------------------------------

    shares_links: bool = True
    """Transfers share a link, one after the other, and nothing is prefetched from a device that a
    restoration reads. False: each transfer is planned as if it had the link to itself.
    """
    prefetch_margin: float = 0.25
    """Links are assumed to be slower than measured by this share, so that pages arrive in time."""
    scheduling_slack_s: float = 0.0001
    """Seconds by which a prefetched page may be late (TierKV's delta)."""
    lookahead: int = -1
    """K: pages of requests that run within this many iterations are prefetched to the device. 0:
    none. -1: derived from measured speeds.
    """
    lookahead_ssd: int = -1
    """The same for prefetches from storage to host memory. -1: derived from measured speeds."""
    demote_after_s: float = 10.0
    """Pages of sessions that are expected after this many seconds are copied to a lower tier early,
    so that they can be evicted at once.
    """

    tuned: tuple[str, ...] = ()
    """Numbers that can be changed in a running server, under the name kvtier.rules.NAME in POST
    /set_internal_state, which calls `tune`.
    """

    def __init__(self, **numbers: object) -> None:
        """`numbers`: attributes whose values differ from the class's."""
        for name, value in numbers.items():
            if not hasattr(self, name):
                raise TypeError(f"{type(self).__name__} has no {name}")
            setattr(self, name, value)

    def tune(self, name: str, value: float) -> None:
        """Changes a number of `tuned` in a running server. Raises ValueError to refuse a value."""
        old = getattr(self, name)
        if isinstance(old, int):
            if value != int(value):
                raise ValueError(f"{name} is a whole number, not {value}")
            value = type(old)(value)
        setattr(self, name, value)

    # --- restoring: decisions ---------------------------------------------------------------------

    def mode(self, ways: Ways) -> tuple[Mode, str]:
        """How to restore a prefix if `policy.restore` is auto, and why, in a few words: the way
        that costs least (`cost_s`). Computing it is no restoration and has no fixed overhead.
        """
        if not ways.known:
            return Mode.BOTH, "not measured yet"  # the meeting page adapts to what is measured
        load_s = ways.load_s
        compute_s = self.cost_s(ways.compute_s - ways.own_s, ways.compute_stalls_s)
        both_s = self.cost_s(ways.both_s, ways.both_stalls_s)
        if self.split_wins(both_s, min(compute_s, load_s)):
            return Mode.BOTH, "split is faster"
        if load_s <= compute_s:
            return Mode.LOAD, "loading is faster"
        return Mode.COMPUTE, "computing is faster"

    def why_declined(self, ways: Ways) -> str | None:
        """Why the engine should load a prefix itself if `policy.restore` is auto, or None: it stays
        a restore candidate.

        SGLang copies pages from host memory in the step that admits the request, and before that it
        reads stored pages into host memory. If all pages are to be loaded anyway, SGLang therefore
        needs no device slots before the request's turn and no step to attach pages. Restoring has
        to gain more than its fixed overhead and more than requests that decode lose. For pages in
        host memory, computing everything is no alternative. If the device is crowded, loading into
        it would only evict pages that are about to be used.

        A prefix that is loaded over a network, which other servers use too, stays a candidate,
        since SGLang would not switch to computing if the network became slow. On a crowded device
        it does so only if computing is faster.
        """
        if ways.crowded and not (ways.shared and ways.known):
            return "no room"
        if not ways.known:
            return "host memory" if ways.in_host else "not measured yet" if ways.learns else None
        load_s = ways.load_s
        computes = self.cost_s(ways.compute_s, ways.compute_stalls_s) < load_s
        if ways.crowded and not computes:
            return "no room"
        if ways.shared or (computes and not ways.in_host):
            return None
        both_s = self.cost_s(ways.both_s, ways.both_stalls_s)
        if self.split_wins(both_s, load_s - ways.own_s):
            return None
        return "host memory" if ways.in_host else "loading is faster"

    def split_wins(self, both_s: float, single_s: float) -> bool:
        """Whether computing and loading together saves enough compared with one of them alone."""
        return both_s <= single_s - max(self.split_margin * single_s, self.split_gain_s)

    def cost_s(self, ttft_s: float, stalls_s: float) -> float:
        """What rules compare: seconds until a prefix is there, and the seconds for which decoding
        requests stop meanwhile, added up over them and weighted.
        """
        return ttft_s + self.stall_weight * stalls_s

    def load_order(self, waiting: Sequence[Waiting]) -> Sequence[Waiting]:
        """The order in which links load for requests, given in the order in which these run. A
        request that is omitted gets no loads in this step.
        """
        return waiting

    def urgency(self, request: Waiter, work_s: float, waited_s: float) -> float:
        """The key by which waiting requests are ordered, smallest first: a number above 0. By
        default it is `work_s`, the seconds until the prompt is computed if it has links and compute
        to itself. `waited_s`: seconds since its arrival. `overtaking` bounds the effect.
        """
        del request, waited_s
        return work_s

    def computed_share(self) -> float | None:
        """The share of a prefix that is always computed, for a candidate that is restored now;
        None: each step decides. Used if `policy.restore` is both.
        """
        return None

    # --- prefetching: decisions -------------------------------------------------------------------

    def prefetch(self, desk: Desk, turns: Sequence[ToCome]) -> bool:
        """Prefetches pages for the next runs, given in order of their windows. False: the planner
        does it instead, by deadline.
        """
        del desk, turns
        return False


def rules_of(name: str) -> Rules:
    """The rules that `policy.rules` names. Raises ConfigError if the class does not fit."""
    made: Rules = load_class("policy.rules", name, _unfit)() if name else Rules()
    return made


def tune(rules: Rules, name: str, value: float) -> str | None:
    """Changes a number of these rules in a running server. Returns None, or why it is refused."""
    if name not in rules.tuned:
        return (
            f"{type(rules).__name__} has no {shown(name)} that can be changed in a running server"
        )
    try:
        rules.tune(name, value)
    except ValueError as error:
        return str(error)
    return None


_ASKED = {
    name: len(signature(method).parameters) - len(("self",))
    for name, method in vars(Rules).items()
    if isfunction(method) and not name.startswith("_")
}
"""The methods of Rules, each with its number of arguments."""


def _unfit(made: object) -> str | None:
    if not isinstance(made, Rules):
        return f"{type(made).__name__} is no subclass of sgl_kvtier.policy.rules.Rules"
    for name, own in vars(Rules).items():
        wrong = None if name.startswith("_") else _wrong_kind(own, getattr(made, name))
        if wrong is not None:
            return refusal(f"{type(made).__name__}.{name}", getattr(made, name), wrong)
    for name in made.tuned if type(made).tune is Rules.tune else ():
        if not is_number(getattr(made, name, None)):
            return f"{type(made).__name__}.tuned names {shown(name)}, which is no number of it"
    return lacking_method(made, _ASKED, Rules)


def _wrong_kind(own: object, value: object) -> str | None:
    """What kind of value an attribute needs instead, or None if it fits."""
    if isinstance(own, bool):
        return None if isinstance(value, bool) else "True or False"
    if isinstance(own, int):
        return None if is_whole(value) else "a whole number"
    if isinstance(own, float):
        return None if is_number(value) else "a finite number"
    if isinstance(own, tuple):
        named = isinstance(value, tuple) and all(isinstance(name, str) for name in value)
        return None if named else "a tuple of names"
    return None
