"""What a planner goes by where there is a choice: a class, and how to write your own.

    # my_rules.py, somewhere Python finds it
    from sgl_kvtier.policy.rules import Rules

    class ShortFirst(Rules):
        min_chunk_tokens = 64                                # other numbers: name them

        def load_order(self, waiting):                       # other decisions: override them
            return sorted(waiting, key=lambda one: one.compute_s)

    {"policy": {"rules": "my_rules:ShortFirst"}}             in kvtier.json

A server makes objects of the class, without arguments, when it starts. It refuses numbers of
another type and methods that take other arguments. All ranks must decide the same: no clock, no
randomness, no state that facts of one rank alone would change. What a method raises ends restoring
and prefetching until the server is started again, not the server. Numbers are attributes of the
class; `Rules(split_margin=0.1)` has another for one object, as tests and simulations use it.

More to learn from: sgl_kvtier/lab/rules.py has the rules of Cake, CacheFlow and TierKV.
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
    """One prefix that could be restored, with what each way is predicted to take: seconds from now,
    worked out when they are asked for.
    """

    @property
    def known(self) -> bool:
        """Whether the costs of computing and the links' bandwidths were measured."""

    @property
    def learns(self) -> bool:
        """Whether a load by the engine itself would measure what is not known."""

    @property
    def in_host(self) -> bool:
        """Whether all of it lies in host memory."""

    @property
    def shared(self) -> bool:
        """Whether some of it comes over a network that other servers use."""

    @property
    def crowded(self) -> bool:
        """Whether free device memory is too small for this request and the fresh ones."""

    @property
    def compute_s(self) -> float:
        """Computing all of it, less what its last chunk saves by taking the rest of the prompt."""

    @property
    def own_s(self) -> float:
        """The fixed overhead of a restoration, as measured in this server."""

    @property
    def load_s(self) -> float:
        """Loading all of it."""

    @property
    def both_s(self) -> float:
        """Computing its front while its back is loaded, up to the best meeting page."""

    @property
    def stalls_s(self) -> float:
        """Seconds that computing this front takes from requests that decode; 0 where none does."""


class Waiting(Protocol):
    """A request that is being restored and could be loaded for."""

    @property
    def rid(self) -> str:
        """The request's id."""

    @property
    def order(self) -> int:
        """The place of its offer among all offers: lower came earlier."""

    @property
    def compute_s(self) -> float:
        """Seconds that computing the rest of its prefix would take."""


class ToCome(Protocol):
    """A run to come: of a waiting request, or of a session that is expected back."""

    @property
    def owner(self) -> str:
        """Whose pages they are."""

    @property
    def steps(self) -> int:
        """Iterations before it; 0: it runs in this one."""

    @property
    def window_s(self) -> float:
        """Seconds those take."""


class Desk(Protocol):
    """One step of prefetching: what there is to know, and how to ask for pages."""

    lookahead: int
    """K, for reports."""

    @property
    def now(self) -> float:
        """Seconds of the planner's clock."""

    @property
    def iteration_s(self) -> float:
        """Seconds of one iteration, as of late."""

    def lacks(self, turn: ToCome) -> Sequence[tuple[Span, Tier | None]]:
        """Runs of its pages that are not in device memory, with each one's tier, if any."""

    def paused(self, turn: ToCome) -> bool:
        """Whether nothing is moved for it because a move has failed a moment ago."""

    def page_s(self, link: Link) -> float:
        """Seconds that one page takes over an idle link."""

    def judge(self, turn: ToCome, pages: int, transfer_s: float, window_s: float) -> None:
        """Notes a prediction: `pages` take `transfer_s` seconds, hidden within `window_s`."""

    def bring(self, turn: ToCome, pages: Span, source: Tier) -> None:
        """Moves as many of these pages to device memory as find room, from the first on."""


class Rules:
    """kvtier's own rules. A subclass overrides what it decides otherwise."""

    # --- restoring: numbers -----------------------------------------------------------------------

    balanced_chunks: bool = True
    """Chunks are cut so that compute and loads meet together, and loads that compute would reach
    first are cancelled. False: whole chunks, until the next page is taken by a load.
    """
    split_margin: float = 0.02
    """Computing and loading together must be predicted to save this share of the faster of the two:
    less is within the predictions' error.
    """
    split_gain_s: float = 0.005
    """And at least this many seconds: the cost of splitting itself."""
    queue_charge: float = 1.0
    """Extra weight of computing per request that waits: computing delays them all, while loading
    does not.
    """
    decode_charge: float = 0.0
    """Extra weight of computing per request that decodes: each stands still for a whole chunk. None
    here: `policy.max_stall_ms` bounds their gaps (docs/results/restore.md has both).
    """
    stall_worth: float = 0.35
    """While other requests decode, computing a front has to save this share of the seconds that it
    takes from them, compared with loading all.
    """
    overtaking: float = 2.0
    """Shorter requests overtake one that waits for this many times the predicted work that stood
    before it when it came, its own included. 0: requests run in the order of arrival. With less,
    sessions that compete for memory soon run in turn and push each other's pages out
    (docs/results/emulated-h100.md has 1, 2 and 3).
    """
    clearly: float = 0.8
    """A request goes before an earlier one when its urgency is below this share of that one's. With
    less between them the order would change with every page that lands, and pages read for one
    would leave for another's.
    """
    holding: float = 0.25
    """A request that would push pages out of host memory waits for a session that should return
    within this many times the request's own work: that runs first, from memory. 0: none waits. More
    pays where sessions return in a moment, and costs where they pause for seconds
    (docs/results/emulated-h100.md, docs/results/simulator.md).
    """
    beside: float = 0.25
    """While requests with clearly less work wait, the chunk of a prompt that restores nothing has
    this share of a step's tokens, and those requests have as much together. They wait for the whole
    step, and a quarter costs hardly more time per token. 0: the chunk takes all tokens, as SGLang's
    own.
    """
    min_chunk_tokens: int = 32
    """The smallest chunk worth its fixed cost while loads are in flight."""
    load_horizon_s: float = 0.3
    """Loads and prefetches cover this many seconds of a link's time: longer than most steps, and
    short enough that later ones are decided with newer facts.
    """
    load_patience: float = 2.0
    """A load may take this many times as long as its link is predicted to need for earlier loads
    and for itself, before `policy.load_deadline_s` more.
    """
    yields_to_fresh: bool = True
    """Requests that restore nothing are prefilled before one that can go on loading (Cake, section
    4), for `max_yields` steps in a row.
    """
    max_yields: int = 4
    """Steps in a row for which a restoration may yield so."""

    # --- prefetching: numbers ---------------------------------------------------------------------

    shares_links: bool = True
    """Pages are charged to links one after the other, and nothing is prefetched from a device that
    a restoration reads; False: as if each had the link to itself.
    """
    prefetch_margin: float = 0.25
    """Links are taken to be this share slower than measured, so that pages come in time."""
    scheduling_slack_s: float = 0.0001
    """How late a prefetched page may come (TierKV's delta)."""
    lookahead: int = -1
    """K: iterations ahead whose requests' pages are prefetched to device memory; 0 = none,
    -1 = from measured speeds.
    """
    lookahead_ssd: int = -1
    """Iterations ahead whose requests' pages are prefetched from storage to host memory; -1 = from
    measured speeds.
    """
    demote_after_s: float = 10.0
    """Pages of sessions expected back later than this get a copy in a lower tier early, so that
    they can leave at once.
    """

    tuned: tuple[str, ...] = ()
    """Numbers that may be changed in a running server, by the name kvtier.rules.NAME in POST
    /set_internal_state. `tune` is called with them.
    """

    def __init__(self, **numbers: object) -> None:
        """`numbers`: attributes with another value than the class's."""
        for name, value in numbers.items():
            if not hasattr(self, name):
                raise TypeError(f"{type(self).__name__} has no {name}")
            setattr(self, name, value)

    def tune(self, name: str, value: float) -> None:
        """Changes one of `tuned` in a running server. Raises ValueError to refuse the value."""
        old = getattr(self, name)
        if isinstance(old, int):
            if value != int(value):
                raise ValueError(f"{name} is a whole number, not {value}")
            value = type(old)(value)
        setattr(self, name, value)

    # --- restoring: decisions ---------------------------------------------------------------------

    def mode(self, ways: Ways) -> tuple[Mode, str]:
        """How to restore a prefix where `policy.restore` is auto, and why, in a few words.
        Computing it is no restoration, and has no fixed overhead.
        """
        if not ways.known:
            return Mode.BOTH, "not measured yet"  # it adapts by itself
        compute_s, load_s = ways.compute_s - ways.own_s, ways.load_s
        stalls_s = ways.stalls_s if load_s <= compute_s else 0.0
        if self.split_wins(ways.both_s, min(compute_s, load_s), stalls_s):
            return Mode.BOTH, "split is faster"
        if load_s <= compute_s:
            return Mode.LOAD, "loading is faster"
        return Mode.COMPUTE, "computing is faster"

    def why_declined(self, ways: Ways) -> str | None:
        """Why a prefix is left to an engine that can load by itself, where `policy.restore` is
        auto, or None.

        Such an engine copies pages from host memory in the step that admits the request, and reads
        the rest ahead into host memory. So where all pages are to be loaded anyway, it needs no
        device slots before the request's turn, and no step to splice pages in. Restoring has to
        beat loading, with its fixed overhead; computing everything is no
        alternative for pages that lie in host memory. Where the device is crowded, loads into it
        would only evict pages that are about to be used. What comes over a network is not left, nor
        where the device is crowded and computing is faster: other servers use it too, and an engine
        that loads does not begin to compute when it becomes slow.
        """
        if ways.crowded and not (ways.shared and ways.known and ways.compute_s < ways.load_s):
            return "no room"
        if not ways.known:
            return "host memory" if ways.in_host else "not measured yet" if ways.learns else None
        if ways.shared:
            return None
        load_s = ways.load_s
        if not ways.in_host and ways.compute_s < load_s:
            return None
        if self.split_wins(ways.both_s, load_s - ways.own_s, ways.stalls_s):
            return None
        return "host memory" if ways.in_host else "loading is faster"

    def split_wins(self, both_s: float, single_s: float, stalls_s: float = 0.0) -> bool:
        """Whether computing and loading together saves enough of what one resource alone takes.
        `stalls_s`: seconds of computing for which others stand still, and would not otherwise.
        """
        least_s = max(self.split_margin * single_s, self.split_gain_s, self.stall_worth * stalls_s)
        return both_s <= single_s - least_s

    def load_order(self, waiting: Sequence[Waiting]) -> Sequence[Waiting]:
        """Whom links load for first. Given in the order they run; who is left out gets no loads in
        this step.
        """
        return waiting

    def urgency(self, request: Waiter, work_s: float, waited_s: float) -> float:
        """What waiting requests are ordered by, the least first: a number above 0, by default the
        seconds until its prompt is there with links and compute to itself (`work_s`). `waited_s`:
        seconds since it came. Which requests may be overtaken, and for how long, is `overtaking`.
        """
        del request, waited_s
        return work_s

    def computed_share(self) -> float | None:
        """The share of a prefix that is computed, whatever happens, of an offer taken now; None: it
        is decided on the way. Asked where `policy.restore` is both.
        """
        return None

    # --- prefetching: decisions -------------------------------------------------------------------

    def prefetch(self, desk: Desk, turns: Sequence[ToCome]) -> bool:
        """Brings pages of the next turns, which are in the order of their windows; False: the
        planner does, by deadline.
        """
        del desk, turns
        return False


def rules_of(name: str) -> Rules:
    """The rules that `policy.rules` asks for. Raises ConfigError for a class that does not fit."""
    made: Rules = load_class("policy.rules", name, _unfit)() if name else Rules()
    return made


def tune(rules: Rules, name: str, value: float) -> str | None:
    """Changes a number of these rules in a running server. Why not, or None: they have none that
    may be changed so, or refuse the value.
    """
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
"""The methods, with how many arguments each is given."""


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
    """What an attribute must be that is another kind of thing than kvtier's own, or None."""
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
