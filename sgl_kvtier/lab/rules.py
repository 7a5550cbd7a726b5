"""Rules of the papers, and variations of kvtier's own, as classes. They are for simulations, and
for servers that are started with them to measure what a rule is worth.

    {"policy": {"rules": "sgl_kvtier.lab.rules:Cake"}}               in a server's kvtier.json
    make_planner(config, engine, profile, Cake())                    in a simulation

    Cake, CacheFlow, TierKV         as published; the first two say what of it they leave out
    LongestFirst, ShortestFirst     kvtier's, with another order of requests to load for
    ByArrival                       kvtier's, requests computed in the order they came
    Eager                           kvtier's, for whom only the time to first token counts
    NeverRestores, NeverHolds       every prefix left to the engine; and none waits for sessions
    ByLayers                        lower layers of a whole prefix computed, upper ones loaded
    SmallestHeld, LeastBudget       orders of the queue: Bidaw's, and Cascade's
    Unbounded                       kvtier's order, without its bound on being overtaken
    InTurn                          one of `IN_TURN` at a time, changed in the running server
    FixedSplit                      a share of every prefix is computed, whatever happens
    LFU                             eviction: TierKV's Frequency
    QuickDemotion                   eviction: LRU, pages of one request before those of several
    KeptWhileExpected               eviction: LRU, what a session is expected to use last
"""

from __future__ import annotations

import math
from collections.abc import Iterable, KeysView, Mapping, Sequence

from sgl_kvtier.outside import refusal
from sgl_kvtier.policy.ahead.budget import hops
from sgl_kvtier.policy.messages import Mode, Waiter
from sgl_kvtier.policy.pages.owners import UNOWNED, Owners
from sgl_kvtier.policy.rules import Desk, Rules, ToCome, Waiting, Ways
from sgl_kvtier.types import Tier


class Cake(Rules):
    """Cake's (section 4): computed and loaded at once always, in whole chunks, loads in the order
    of arrival. Its adaptive mode is left out: there a step's tokens go first to requests that
    decode, then to prompts that restore nothing. Here chunks are as large as the server's, and
    requests that decode wait for them.
    """

    balanced_chunks = False
    overtaking = 0.0

    def mode(self, ways: Ways) -> tuple[Mode, str]:
        """Both."""
        del ways
        return Mode.BOTH, "rule"

    def why_declined(self, ways: Ways) -> str | None:
        """None is left."""
        del ways
        return None


class LongestFirst(Rules):
    """kvtier's, loading first for whom computing would take longest."""

    def load_order(self, waiting: Sequence[Waiting]) -> Sequence[Waiting]:
        """The longest computing time first."""
        return sorted(waiting, key=lambda one: (-one.compute_s, one.order))


class ShortestFirst(Rules):
    """kvtier's, loading first for whom computing would take least."""

    def load_order(self, waiting: Sequence[Waiting]) -> Sequence[Waiting]:
        """The shortest computing time first."""
        return sorted(waiting, key=lambda one: (one.compute_s, one.order))


class CacheFlow(Cake, LongestFirst):
    """CacheFlow's: Cake's, with I/O for the longest remaining restoration first. It splits every
    prefix by tokens. The layer axis is left out, and with it the choice between the two by length:
    in a server it is `ByLayers` for all prefixes, in simulations `papers/cacheflow.py`. So are
    stages that restore by themselves.
    """


class ByArrival(Rules):
    """kvtier's, with requests computed in the order they came."""

    overtaking = 0.0


class Unbounded(Rules):
    """kvtier's, where a request may be overtaken by any shorter one, for as long as it waits."""

    overtaking = 1e9


class SmallestHeld(Unbounded):
    """The order of Bidaw (FAST 2026): requests whose KV is in memory before those that need
    storage, and among each the one with the least KV first.
    """

    clearly = 1.0

    def urgency(self, request: Waiter, work_s: float, waited_s: float) -> float:
        """Its tokens; with a part in storage more than any that are in memory."""
        del work_s, waited_s
        return request.prompt_tokens + (1e9 if request.stored_tokens else 0)


class LeastBudget(Unbounded):
    """The order of Cascade (arXiv 2608.06557): the least budget first, which is the bound of the
    time to first token less what it has waited and what it will take.
    """

    clearly = 1.0
    bound_s: float = 5.0

    def urgency(self, request: Waiter, work_s: float, waited_s: float) -> float:
        """The budget, on a scale above 0."""
        del request
        return math.exp(min(self.bound_s - waited_s - work_s, 600.0))


class Eager(Rules):
    """kvtier's, for whom only the time to first token of the restored request counts, whatever
    running requests lose.
    """

    stall_weight = 0.0


class NeverRestores(Rules):
    """kvtier's, with every prefix left to the engine, which loads it: its reads are in the order of
    the queue all the same.
    """

    def why_declined(self, ways: Ways) -> str | None:
        """All are left."""
        del ways
        return "rule"


class NeverHolds(NeverRestores):
    """The same, and no request waits for a session that should return in a moment."""

    holding = 0.0


class ByLayers(Rules):
    """CacheFlow's layer axis (section 3.1), for every prefix: lower layers are computed for all its
    tokens while upper ones are loaded, from the top down. For servers with `lab.layer_parts`;
    others, and simulated ones, compute.
    """

    def mode(self, ways: Ways) -> tuple[Mode, str]:
        """By layers."""
        del ways
        return Mode.LAYERS, "rule"

    def why_declined(self, ways: Ways) -> str | None:
        """None is left."""
        del ways
        return None


IN_TURN: Mapping[str, type[Rules]] = {
    "kvtier": Rules,
    "cake": Cake,
    "cacheflow": CacheFlow,
    "by-arrival": ByArrival,
    "layers": ByLayers,
}
"""Rules of restoring that a server may have in turn, by the name of their arm."""


class InTurn(Rules):
    """One of `IN_TURN` at a time, so that all are measured in one process: kvtier.rules.place in
    the running server is its place there. Change it while nothing is restored.
    """

    tuned = ("place",)

    def __init__(self) -> None:
        super().__init__()
        self.tune("place", 0)

    def tune(self, name: str, value: float) -> None:
        """Another one decides from now on."""
        if value not in range(len(IN_TURN)):
            raise ValueError(
                refusal(f"rules.{name}", value, f"0 to {len(IN_TURN) - 1}: {', '.join(IN_TURN)}")
            )
        self._now = list(IN_TURN.values())[int(value)]()
        for number, own in vars(Rules).items():
            if isinstance(own, int | float):
                setattr(self, number, getattr(self._now, number))

    def mode(self, ways: Ways) -> tuple[Mode, str]:
        """As the present one decides; the others too."""
        return self._now.mode(ways)

    def why_declined(self, ways: Ways) -> str | None:
        return self._now.why_declined(ways)

    def load_order(self, waiting: Sequence[Waiting]) -> Sequence[Waiting]:
        return self._now.load_order(waiting)


class TierKV(Rules):
    """TierKV's Algorithm 1: requests of the next K iterations, each page tested by itself against
    the whole window. Blocks of one run differ in nothing, so a run is one test. Free pages are the
    hardware's, so this rule has to respect them too.
    """

    shares_links = False
    lookahead = 1
    lookahead_ssd = 1

    def prefetch(self, desk: Desk, turns: Sequence[ToCome]) -> bool:
        """Eq. 1 for every run of pages, Eq. 2 for what one of them takes."""
        near = max(1, self.lookahead)
        far = max(near, self.lookahead_ssd)
        desk.lookahead = near
        for turn in turns:
            for span, tier in desk.lacks(turn):
                within = near if tier is Tier.HOST else far
                if tier is None or turn.steps > within or desk.paused(turn):
                    continue
                transfer_s = sum(map(desk.page_s, hops(tier)))
                window_s = within * desk.iteration_s + self.scheduling_slack_s
                desk.judge(turn, len(span), transfer_s, window_s)
                if transfer_s <= window_s:
                    desk.bring(turn, span, tier)
        return True


class FixedSplit(Rules):
    """A share of every prefix is computed while the rest is loaded. It is fixed beforehand, to
    measure what deciding on the way is worth. It is -1, which is kvtier's own, until it is changed
    in the running server: kvtier.rules.share. In force where policy.restore is both.
    """

    tuned = ("share",)
    share: float

    def __init__(self, share: float = -1.0) -> None:
        super().__init__()
        self.tune("share", share)

    def tune(self, name: str, value: float) -> None:
        """Another share, from 0 to 1, or -1, from the next offer on."""
        if not (0 <= value <= 1 or value == -1):
            raise ValueError(refusal(f"rules.{name}", value, "a number from 0 to 1, or -1"))
        self.share = float(value)
        # All loads are known beforehand, and asked for at once; by the time they are read the link
        # may be another one.
        self.load_horizon_s = 1e6 if value >= 0 else Rules.load_horizon_s
        self.load_patience = 32.0 if value >= 0 else Rules.load_patience

    def computed_share(self) -> float | None:
        """The share, if there is one."""
        return self.share if self.share >= 0 else None


class LFU:
    """Least often used first, least recently used among equals: the papers' Frequency baseline.
    Counts do not age.
    """

    first, last = 1, 65535
    """Shelves of a page that comes in, and of pages used most."""

    def entered(self, group: int) -> int:
        """The first shelf."""
        del group
        return self.first

    def used(self, shelf: int, group: int) -> int:
        """One use more."""
        del group
        return min(shelf + 1, self.last)

    def regrouped(self, shelf: int, group: int) -> int:
        """The same shelf."""
        del group
        return shelf

    def order(self, shelves: KeysView[int], owners: Owners) -> Iterable[tuple[int, float]]:
        """Shelves from the least used on."""
        del owners
        return ((shelf, math.inf) for shelf in sorted(shelves))


class QuickDemotion(LFU):
    """LRU with quick demotion (arXiv 2609.28870): pages that one request has used go before those
    that later ones used as well. A request uses what it computes when it ends, and what it finds
    when it starts too.
    """

    first, last = 0, 2


class KeptWhileExpected:
    """What Continuum (arXiv 2511.02230) does with a lifetime, by kvtier's expectations: pages of
    sessions that are expected back stay until the session is given up; others go before, the least
    recently used first. Of those that stay, the one expected soonest goes first: it has been
    waited for longest.
    """

    def entered(self, group: int) -> int:
        """A shelf for each group of owners."""
        return group

    def used(self, shelf: int, group: int) -> int:
        """The same."""
        del shelf
        return group

    def regrouped(self, shelf: int, group: int) -> int:
        """That of its new owners."""
        del shelf
        return group

    def order(self, shelves: KeysView[int], owners: Owners) -> Iterable[tuple[int, float]]:
        """Pages that nobody is expected to use, then the others."""
        if UNOWNED in shelves:
            yield UNOWNED, math.inf
        kept = []
        for group, turn in owners.farthest_first():
            if group in shelves and turn == math.inf:
                yield group, turn
            elif group in shelves:
                kept.append((group, turn))
        yield from reversed(kept)
